"""`megatrain plan`: where every byte of a training run would live and how long a step would take, without a GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from typer import Option

from megatrain.errors import MegaTrainError, NotEnoughMemory

Text = str | None
Number = int | None
Switch = bool | None
Gigabytes = float | None
OTHERS = ("model", "machine", "device", "largest", "tokens", "as_json")
"""Parameters of the command that are not options of `megatrain.plan`."""
MODEL_HELP = "A directory with a config.json, a config.json, or a model's name."
MACHINE_HELP = "A name such as rtx4090-64gb, or a file of `megatrain probe --json`; else this machine."


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    machine: Annotated[Text, Option(help=MACHINE_HELP)] = None,
    batch: Annotated[Number, Option(help="Sequences in a micro-batch (default: 1).")] = None,
    length: Annotated[Number, Option(help="Tokens in a sequence (default: 2048).")] = None,
    accumulation: Annotated[Number, Option(help="Micro-batches in a step (default: 1).")] = None,
    max_vram_gb: Annotated[Gigabytes, Option(help="Most GPU memory to use, in GiB.")] = None,
    max_ram_gb: Annotated[Gigabytes, Option(help="Most host memory to use, in GiB.")] = None,
    optimizer_compression: Annotated[Text, Option(help="Moments in bf16, 8bit or 4bit; else fp32.")] = None,
    precision: Annotated[Text, Option(help="bf16, fp32 or bf16-sr; else what the config says.")] = None,
    optimizer: Annotated[Text, Option(help="adamw, lion or sgd (default: adamw).")] = None,
    compile: Annotated[Switch, Option(help="Compile the layers (default: on a GPU).")] = None,
    clipping: Annotated[Switch, Option(help="Clip the gradient norm (default).")] = None,
    padded: Annotated[Switch, Option(help="Sequences differ in length (default: no).")] = None,
    together: Annotated[Switch, Option(help="Micro-batches may share one fetch of a layer (default).")] = None,
    evaluation: Annotated[Number, Option(help="Tokens in an evaluation batch (default: 0).")] = None,
    predictions: Annotated[Switch, Option(help="An evaluation reads its logits (default).")] = None,
    head_chunk: Annotated[Number, Option(help="Tokens whose logits exist at once; 0: all of them.")] = None,
    offload_dir: Annotated[list[str] | None, Option(help="Directory for state beyond RAM; may repeat.")] = None,
    device: Annotated[Text, Option(help="cpu or cuda:N of this machine; else the GPU if there is one.")] = None,
    largest: Annotated[Text, Option(help="batch or context: plan for the largest that fits.")] = None,
    tokens: Annotated[float, Option(min=1, help="Tokens that the training time is given for.")] = 1e9,
    as_json: Annotated[bool, Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Plan a training run of MODEL: what is kept where, and how long a step takes. Weights are never loaded.

    Exits with 3 if it does not fit, and says what would make it fit.
    """
    options = {name: value for name, value in locals().items() if name not in OTHERS and value not in (None, [])}
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

    # Before the config is read: an unknown name costs no wait.
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
        message = str(error).strip().splitlines()[0]
        raise MegaTrainError(f"a package that {model!r} needs is missing: {message}") from error


def _described(refusal: NotEnoughMemory) -> dict[str, Any]:
    """A refusal as JSON. One that is not the planner's has only its sentence."""
    from megatrain.planner import Refusal

    if not isinstance(refusal, Refusal):
        return {"message": str(refusal)}
    suggestions = [asdict(suggestion) for suggestion in refusal.suggestions]
    numbers = {"tier": refusal.tier, "shortfall_gb": refusal.shortfall_gb}
    return {"message": str(refusal), **numbers, "suggestions": suggestions}
