"""Every model class in the tables of transformers that is not listed by hand, made tiny from its defaults.

Architectures in zoo.py, wider.py and vision.py are tested elsewhere. Models that cannot be built from their default
configuration, or that need more than tokens and labels, are skipped. All others must match plain PyTorch or be refused
by name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
from transformers.models.auto import modeling_auto as tables

from . import generic, vision, wider, zoo
from .generic import NotPlain, NotTiny
from .measure import measure

LISTED_CAUSAL = {name for name, entry in zoo.ZOO.items() if not entry.encoder_decoder} | wider.model_types(
    *wider.CAUSAL_KINDS
)


def unlisted(table: dict[str, Any], listed: set[str]) -> tuple[str, ...]:
    return tuple(name for name in table if name not in listed)


CAUSAL = unlisted(tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, LISTED_CAUSAL)
OTHERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "seq2seq": (
        AutoModelForSeq2SeqLM,
        unlisted(
            tables.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
            {"t5", "bart"} | wider.model_types(wider.ENCODER_DECODER),
        ),
    ),
    "masked": (
        AutoModelForMaskedLM,
        unlisted(tables.MODEL_FOR_MASKED_LM_MAPPING_NAMES, wider.model_types(wider.ENCODER) - {"albert"}),
    ),
    "image": (
        AutoModelForImageTextToText,
        unlisted(tables.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, set(vision.ALL)),
    ),
}
AT_LEAST = 0.8
"""The share of these causal LMs that must be compared. Otherwise an error in `generic` would skip them unnoticed."""

compared: set[str] = set()
skipped: set[str] = set()


def inputs_of(table: str) -> dict[str, torch.Tensor]:
    inputs = generic.batch()
    if table == "seq2seq":
        inputs["labels"] = inputs["labels"][:, :14].flip(1)
    return inputs


def tiny(name: str, inputs: dict[str, torch.Tensor], auto: Any) -> Any:
    try:
        return generic.runnable(generic.config_classes([name])[name], inputs, auto)
    except (NotTiny, NotPlain) as reason:
        skipped.add(name)
        pytest.skip(f"{name} {str(reason).splitlines()[0][:80]}")


@pytest.mark.parametrize("name", CAUSAL)
def test_causal(name: str):
    inputs = inputs_of("causal")
    measure(tiny(name, inputs, AutoModelForCausalLM), [inputs]).check()
    compared.add(name)


def test_most_causal_models_were_compared():
    if compared | skipped != set(CAUSAL):
        pytest.skip("needs the whole walk")
    assert len(compared) >= AT_LEAST * len(CAUSAL), sorted(skipped)


@pytest.mark.slow
@pytest.mark.parametrize(("table", "name"), [(table, name) for table, (_, names) in OTHERS.items() for name in names])
def test_other_tables(table: str, name: str):
    """Encoder-decoders, encoders, and vision-language models on text only."""
    inputs = inputs_of(table)
    measure(tiny(name, inputs, OTHERS[table][0]), [inputs]).check()
