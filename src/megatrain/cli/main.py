"""The entry point: registers the commands, and prints MegaTrain's own errors as one sentence.

A command imports what it needs when it runs, so `megatrain --help` does not wait for torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from megatrain._version import __version__
from megatrain.cli.doctor import doctor
from megatrain.cli.plan import plan
from megatrain.cli.probe import probe
from megatrain.cli.trace import trace
from megatrain.errors import MegaTrainError, NotEnoughMemory, SettingsError

FAILED, WRONG_USAGE, REFUSED = 1, 2, 3
"""Exit codes. An argument that cannot be used is wrong usage; what does not fit in memory is refused."""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MegaTrainError as error:
            typer.echo(f"megatrain: {error}", err=True)
            refused, misused = isinstance(error, NotEnoughMemory), isinstance(error, SettingsError)
            raise typer.Exit(REFUSED if refused else WRONG_USAGE if misused else FAILED) from error


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes leave long options no room in a narrow terminal
)
for command in (plan, probe, doctor, trace):
    app.command()(command)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"megatrain {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train language models larger than the GPU by streaming their layers through it."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps.")] = 400,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")] = None,
    precision: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Keep the trained model in this directory.")] = None,
) -> None:
    """Train a small random Llama beside plain PyTorch and compare the losses."""
    from megatrain.cli.demo import run_demo

    verdict = run_demo(steps=steps, device=device, precision=precision, out=out)
    if verdict is not None:
        typer.echo(f"megatrain demo: {verdict}", err=True)
        raise typer.Exit(1)


def main() -> None:
    app()
