"""`megatrain trace`: the timeline of a recorded run, for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def trace(
    run: Annotated[Path, typer.Argument(help="A run's output directory, or its run.jsonl.")],
    out: Annotated[Path | None, typer.Option(help="Where to write it; else trace.json beside run.jsonl.")] = None,
) -> None:
    """Write the timeline of a run: steps, lanes, loss, tokens/s and memory. Open it at https://ui.perfetto.dev."""
    from megatrain import files
    from megatrain.errors import MegaTrainError, SettingsError
    from megatrain.telemetry.record import FILE
    from megatrain.telemetry.trace import of_run

    record = run / FILE if run.is_dir() else run
    target = out or record.with_name("trace.json")
    if target.resolve() == record.resolve():
        raise SettingsError(f"--out {target} is the record itself; name another file.")
    try:
        text = of_run(record)
    except OSError as error:
        raise MegaTrainError(
            f"{record} cannot be read ({error.strerror}); name a run's output directory or its {FILE}."
        ) from error
    try:
        files.write(target, text)
    except OSError as error:
        raise MegaTrainError(f"{target} cannot be written: {error.strerror}.") from error
    typer.echo(f"{target}: open it at https://ui.perfetto.dev")
