"""`megatrain plan`: where every byte of a training run would live and how long a step would take, without a GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from megatrain.errors import MegaTrainError, NotEnoughMemory

OPTIONS = (
    "batch", "length", "accumulation", "max_vram_gb", "max_ram_gb", "optimizer_compression", "precision", "optimizer",
    "compile", "clipping", "padded", "together", "evaluation", "predictions", "head_chunk", "offload_dir",
)  # fmt: skip
"""What is passed on to `megatrain.plan`, if it was given."""
Text = str | None
Number = int | None
Switch = bool | None


def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A directory with a config.json, a config.json, or a model's name.")
    ],
    machine: Annotated[
        Text,
        typer.Option(help="A name such as rtx4090-64gb, or a file of `megatrain probe --json`; else this machine."),
    ] = None,
    batch: Annotated[Number, typer.Option(help="Sequences in a micro-batch (default: 1).")] = None,
    length: Annotated[Number, typer.Option(help="Tokens in a sequence (default: 2048).")] = None,
    accumulation: Annotated[Number, typer.Option(help="Micro-batches in a step (default: 1).")] = None,
    max_vram_gb: Annotated[float | None, typer.Option(help="Most GPU memory to use, in GiB.")] = None,
    max_ram_gb: Annotated[float | None, typer.Option(help="Most host memory to use, in GiB.")] = None,
    optimizer_compression: Annotated[Text, typer.Option(help="Moments in bf16, 8bit or 4bit; else fp32.")] = None,
    precision: Annotated[Text, typer.Option(help="bf16, fp32 or bf16-sr; else what the config says.")] = None,
    optimizer: Annotated[Text, typer.Option(help="adamw, lion or sgd (default: adamw).")] = None,
    compile: Annotated[Switch, typer.Option("--compile/--no-compile", help="Compile the layers (default: no).")] = None,
    clipping: Annotated[
        Switch, typer.Option("--clipping/--no-clipping", help="Clip the gradient norm (default).")
    ] = None,
    padded: Annotated[
        Switch, typer.Option("--padded/--no-padded", help="Sequences differ in length (default: no).")
    ] = None,
    together: Annotated[
        Switch, typer.Option("--together/--no-together", help="Micro-batches may share one fetch of a layer (default).")
    ] = None,
    evaluation: Annotated[Number, typer.Option(help="Tokens in a batch of an evaluation (default: 0).")] = None,
    predictions: Annotated[
        Switch, typer.Option("--predictions/--no-predictions", help="An evaluation looks at its logits (default).")
    ] = None,
    head_chunk: Annotated[Number, typer.Option(help="Tokens whose logits exist at once; 0: all of them.")] = None,
    offload_dir: Annotated[list[str] | None, typer.Option(help="Directory for state beyond RAM; may repeat.")] = None,
    device: Annotated[Text, typer.Option(help="cpu or cuda:N of this machine; else the GPU if there is one.")] = None,
    largest: Annotated[Text, typer.Option(help="batch or context: plan for the largest that fits.")] = None,
    tokens: Annotated[float, typer.Option(min=1, help="Tokens that the training time is given for.")] = 1e9,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Plan a training run of MODEL: what is kept where, and how long a step takes. Weights are never loaded.

    Exits with 3 if it does not fit, and says what would make it fit.
    """
    options = {name: value for name, value in locals().items() if name in OPTIONS and value not in (None, [])}
    if largest not in (None, "batch", "context"):
        raise typer.BadParameter(f"{largest!r} is neither batch nor context.", param_hint="--largest")
    try:
        made = _plan(model, machine, device, largest, options)
    except NotEnoughMemory as refusal:
        if as_json:
            typer.echo(json.dumps({"refused": _described(refusal)}, indent=2))
        raise
    typer.echo(made.to_json() if as_json else made.table(tokens), nl=not as_json)


def _plan(model: str, machine: str | None, device: str | None, largest: str | None, options: dict[str, Any]) -> Any:
    from megatrain.engine import planning
    from megatrain.hardware.machine import Machine

    # Before the config is read: a name that is not there costs no wait.
    if machine is not None:
        where = Machine.load(machine)
    else:
        where = planning.probe(device=device, offload_dir=options.get("offload_dir"))
    try:
        if largest is None:
            return planning.plan(model, machine=where, **options)
        find = planning.largest_batch if largest == "batch" else planning.largest_context
        return find(model, where, **options).plan
    except ImportError as error:
        raise MegaTrainError(
            f"a package that {model!r} needs is missing: {str(error).strip().splitlines()[0]}"
        ) from error


def _described(refusal: NotEnoughMemory) -> dict[str, Any]:
    """A refusal as JSON; of one that is not the planner's there is only the sentence."""
    from megatrain.planner import Refusal

    found: dict[str, Any] = {"message": str(refusal)}
    if isinstance(refusal, Refusal):
        suggestions = [asdict(suggestion) for suggestion in refusal.suggestions]
        found |= {"tier": refusal.tier, "shortfall_gb": refusal.shortfall_gb, "suggestions": suggestions}
    return found
