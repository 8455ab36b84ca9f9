"""Write docs/architectures.md: every architecture that can be built, trained by the engine and by plain PyTorch.

python -m tests.parity.table
"""

from __future__ import annotations

import datetime
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatrain.errors import MegaTrainError

from . import generic, vision, wider, zoo
from .compare import GRADIENT, WEIGHT, Batch
from .generic import NotPlain, NotTiny
from .measure import Parity, measure
from .test_every_architecture import CAUSAL, OTHERS, inputs_of

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"

HEAD = """# Architectures

After this page you know which architectures were trained beside plain PyTorch, and how far the two runs differ.

Each line is a run: a tiny model with random weights, trained by the engine and by plain PyTorch from the same weights
on the same batches, in FP32 on the CPU. `python -m tests.parity.table` writes this page.

Last run: {date}, transformers {transformers}, torch {torch}. {passed} models of {names} architectures agree with plain
PyTorch, {failed} differ, {refused} refused.

- **Blocks**: layers that stream + other modules that stream (embeddings, norms, head).
- **Loss**: relative difference in the first step.
- **Gradient**: ‖Δg‖/‖g‖ of the parameter where it is largest; at most {gradient:.0e}. The same parameters must have
  gradients in both runs, and no weight may differ by more than {weight:.0e} after the last step of AdamW.
- 0 means the same bits.
"""

COLUMNS = "| Architecture | Kind | Blocks | Characteristics | Loss | Gradient |\n|---|---|---|---|---|---|"
SHORT = "| Architecture | Table | Blocks | Loss | Gradient |\n|---|---|---|---|---|"


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    kind: str
    traits: Sequence[str] = ()
    parity: Parity | None = None
    problem: str = ""
    """Why the runs differ or could not be compared."""

    refused: bool = False

    @property
    def agrees(self) -> bool:
        return self.parity is not None and not self.problem

    def numbers(self) -> list[str]:
        assert self.parity is not None
        layers = len(self.parity.layers)
        blocks = f"{layers} + {self.parity.blocks - layers}" if layers else "one"
        return [blocks, _short(self.parity.loss), _short(self.parity.gradient)]


def run(name: str, kind: str, traits: Sequence[str], build: Callable[[], PreTrainedModel], batches: list[Batch]) -> Row:
    """Train one architecture with the engine and with plain PyTorch."""
    try:
        model = build()
        traits = sorted({*traits, *traits_of(model)})
        parity = measure(model, batches)
    except (NotTiny, NotPlain) as reason:
        return Row(name=name, kind=kind, problem=_first_line(reason))
    except MegaTrainError as refusal:
        return Row(name=name, kind=kind, problem=f"{type(refusal).__name__}: {_first_line(refusal)}", refused=True)
    seeds_itself = name in wider.WIDER and wider.WIDER[name].seeds_itself
    try:
        parity.check(rng=not seeds_itself)
    except AssertionError as difference:
        return Row(name=name, kind=kind, traits=traits, parity=parity, problem=_first_line(difference))
    return Row(name=name, kind=kind, traits=traits, parity=parity)


def traits_of(model: PreTrainedModel) -> set[str]:
    """Traits that are visible in the names of parameters and buffers."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    patterns = {
        "attention_bias": r"\b(k|key|q|query|qkv|Wqkv|c_attn|query_key_value)(_proj|_lin)?\.bias$",
        "qk_norm": r"\b(q|k|query|key)_(layer)?norm",
        "moe": r"\.experts?\b",
        "shared_expert": r"shared_(experts?|mlp)",
    }
    collected = {trait for trait, pattern in patterns.items() if any(re.search(pattern, name) for name in names)}
    if any(name.endswith("e_score_correction_bias") for name, _ in model.named_buffers()):
        collected.add("router_bias")
    head = model.get_output_embeddings()
    if head is not None and getattr(head, "weight", None) is getattr(model.get_input_embeddings(), "weight", model):
        collected.add("tied")
    return collected


def by_hand() -> Iterator[Row]:
    for name, entry in zoo.ZOO.items():
        batches = [window[0] for window in zoo.windows(name, 2)]
        yield run(name, _kind(entry), sorted(entry.traits), lambda name=name: zoo.build(name), batches)
    for name in filter(wider.present, wider.ALL):
        known = wider.WIDER[name]
        yield run(name, known.kind, known.traits, lambda name=name: wider.build(name), wider.batches(name))
    for name, sight in vision.VISION.items():
        batch = vision.batch(name)
        yield run(name, "vision-language", sight.traits, lambda name=name: vision.build(name), [batch, batch])


def from_defaults() -> Iterator[Row]:
    """The other models of transformers' tables, built from default configurations."""
    for table, (auto, names) in {"causal": (AutoModelForCausalLM, CAUSAL), **OTHERS}.items():
        for name, kind in generic.config_classes(names).items():
            inputs = inputs_of(table)
            yield run(
                name,
                table,
                (),
                lambda kind=kind, inputs=inputs, auto=auto: generic.runnable(kind, inputs, auto),
                [inputs],
            )


def page(listed: list[Row], unlisted: list[Row]) -> str:
    rows = listed + unlisted
    head = HEAD.format(
        date=datetime.date.today().isoformat(),
        transformers=transformers.__version__,
        torch=torch.__version__.split("+")[0],
        passed=sum(row.agrees for row in rows),
        names=len({row.name for row in rows if row.agrees}),
        refused=sum(row.refused for row in rows),
        failed=sum(row.parity is not None and not row.agrees for row in rows),
        gradient=GRADIENT,
        weight=WEIGHT,
    )
    parts = [head, "## Built by hand\n", COLUMNS]
    for row in sorted(filter(lambda row: row.agrees, listed), key=lambda row: (row.kind, row.name)):
        blocks, loss, gradient = row.numbers()
        traits = ", ".join(trait.replace("_", " ") for trait in row.traits)
        parts.append(f"| {row.name} | {row.kind} | {blocks} | {traits} | {loss} | {gradient} |")
    parts += ["\nCharacteristics:\n", *_legend()]
    parts += [
        "\n## Built from default configurations\n",
        "The other model classes that transformers lists, made small by setting the size fields of their default "
        "configs (`tests/parity/generic.py`). Vision-language models get text only here.\n",
        SHORT,
    ]
    for row in filter(lambda row: row.agrees, unlisted):
        parts.append(f"| {row.name} | {row.kind} | {' | '.join(row.numbers())} |")
    differ = [f"- {row.name} ({row.kind}): {row.problem}" for row in rows if row.parity is not None and row.problem]
    refused = [f"- {row.name} ({row.kind}): {row.problem}" for row in rows if row.refused]
    unknown = [row for row in rows if row.parity is None and not row.refused]
    parts += ["\n## Refused\n", *(refused or ["None."]), "\n## Different\n", *(differ or ["None."])]
    parts += [
        "\n## Not compared\n",
        "These could not be made small from their defaults, or do not run in plain PyTorch with only tokens and "
        "labels:\n",
        ", ".join(f"{row.name} ({row.kind})" for row in unknown) + ".",
    ]
    return "\n".join(parts) + "\n"


def _legend() -> list[str]:
    words = wider.TRAITS | vision.TRAITS
    return [f"- {trait.replace('_', ' ')}: {words[trait]}" for trait in sorted(words)]


def _kind(entry: zoo.Entry) -> str:
    if entry.encoder_decoder:
        return wider.ENCODER_DECODER
    if "state_space" not in entry.traits:
        return wider.CAUSAL
    return wider.HYBRID if "layers_differ" in entry.traits else wider.STATE_SPACE


def _short(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def collect(rows: Iterator[Row]) -> list[Row]:
    collected = []
    for row in rows:
        collected.append(row)
        state = "agrees" if row.agrees else "refused" if row.refused else row.problem
        print(f"{row.kind:16} {row.name:28} {state}", file=sys.stderr)
    return collected


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(collect(by_hand()), collect(from_defaults())))


if __name__ == "__main__":
    main()
