"""What a model reads on the host comes from host memory, and is what it would read from the device.

The meta device stands in for a GPU. Its tensors have no values, so reading one is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.host_copies import HostCopies, paused

LENGTH = 8
SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "use_cache": False}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 16},
    "gpt2": {},
    "opt": {"word_embed_proj_dim": 32},
}
FULL = torch.ones(2, LENGTH, dtype=torch.long)
LEFT = FULL.clone()
LEFT[0, :3] = 0
SQUARE = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
BATCHES: dict[str, dict[str, Tensor]] = {
    "without a mask": {},
    "full": {"attention_mask": FULL},
    "padded left": {"attention_mask": LEFT},
    "padded right": {"attention_mask": LEFT.flip(1)},
    "boolean": {"attention_mask": LEFT.bool()},
    "packed": {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]] * 2)},
    "not packed": {"position_ids": torch.arange(LENGTH).repeat(2, 1)},
    "made by the user": {"attention_mask": SQUARE},
}


def model(kind: str, device: str, attention: str) -> Any:
    config = AutoConfig.for_model(kind, **(SHAPE | HEADS | TOKENS | MODELS[kind]))
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def on_meta(copies: HostCopies, *tensors: Tensor) -> list[Tensor]:
    moved = [tensor.to("meta") for tensor in tensors]
    for each, tensor in zip(moved, tensors, strict=True):
        copies.add(each, tensor)
    return moved


def given(model: Any, batch: dict[str, Tensor]) -> list[Any]:
    """What the layers of a model are called with: shapes and dtypes, and None for a mask that is not needed."""
    seen: list[Any] = []

    def note(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        values = [*args, *(kwargs[name] for name in sorted(kwargs))]
        seen.append([(each.shape, each.dtype) if isinstance(each, Tensor) else each is None for each in values])

    for module in model.modules():
        if type(module).__name__.endswith(("DecoderLayer", "Block")):
            module.register_forward_pre_hook(note, with_kwargs=True)
    model(**batch)
    assert len(seen) == 2
    return seen


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("batch", BATCHES)
def test_a_model_decides_the_same_without_reading_the_device(kind: str, batch: str) -> None:
    if kind == "opt" and batch == "made by the user":
        return  # it takes masks of one number per token
    inputs = {"input_ids": torch.ones(2, LENGTH, dtype=torch.long)} | BATCHES[batch]
    for attention in ["eager"] if kind == "gemma2" else ["sdpa", "eager"]:
        expected = given(model(kind, "cpu", attention), inputs)
        copies = HostCopies()
        moved = dict(zip(inputs, on_meta(copies, *inputs.values()), strict=True))
        with copies:
            assert given(model(kind, "meta", attention), moved) == expected


@pytest.mark.parametrize("batch", ["without a mask", "full", "packed"])
def test_transformers_reads_the_device_without_copies(batch: str) -> None:
    """If this fails, transformers no longer waits, and host_copies.py has no use."""
    inputs = {"input_ids": torch.ones(2, LENGTH, dtype=torch.long)} | BATCHES[batch]
    with pytest.raises(RuntimeError, match="meta tensors"):
        model("llama", "meta", "sdpa")(**{name: tensor.to("meta") for name, tensor in inputs.items()})


OPERATIONS: list[Callable[[Tensor], Tensor]] = [
    lambda t: (t[:, 1:] + 1).cumsum(-1).sum() == 44,
    lambda t: (t.to(torch.bool) & ~(t == 0)).all(),
    lambda t: torch.arange(3, device=t.device).unsqueeze(0).expand(2, -1)[1, 2] - 1,
    lambda t: torch.ones(2, LENGTH, device=t.device).bool().any(),
    lambda t: torch.nn.functional.pad(t, (0, 2))[0, t[1, 5:6]],
    lambda t: torch.stack([t, torch.zeros_like(t)]).view(-1)[3],
    lambda t: t.masked_fill(t != 0, 7)[1, 0],
    lambda t: t.to(t.device, torch.int32)[0, 1:][3],
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_values_that_follow_from_the_batch_are_known(operation: Callable[[Tensor], Tensor]) -> None:
    copies = HostCopies()
    (moved,) = on_meta(copies, LEFT)
    with copies:
        found, expected = operation(moved), operation(LEFT)
        assert found.is_meta
        assert found.item() == int(found) == expected.item()
        assert bool(found) == bool(expected)
        assert (1 in moved[:, 1:], 2 in moved) == (True, False)


UNKNOWN: list[Callable[[Tensor], Tensor]] = [
    lambda t: t + torch.empty(2, LENGTH, dtype=torch.long, device="meta"),
    lambda t: torch.randint(0, 9, t.shape, device="meta"),
    lambda t: t.float().sum(),
    lambda t: t.add_(1),
    lambda t: torch.add(t, 1, out=torch.empty_like(t)),
    lambda t: [t[:, 1:].zero_(), t.bool()][1],
    lambda t: t[torch.full((2,), 1, device="meta")],
]


@pytest.mark.parametrize("operation", UNKNOWN)
def test_other_values_are_read_from_the_device(operation: Callable[[Tensor], Tensor]) -> None:
    copies = HostCopies()
    (moved,) = on_meta(copies, FULL)
    with copies, pytest.raises(RuntimeError, match="meta tensors"):
        operation(moved).sum().item()


def test_a_value_from_before_a_write_stays_known() -> None:
    copies = HostCopies()
    (moved,) = on_meta(copies, FULL)
    with copies:
        before = moved == 1
        moved.zero_()
        assert before.all()
        with pytest.raises(RuntimeError, match="meta tensors"):
            bool(moved.any())


def test_a_default_device_does_not_apply_to_copies() -> None:
    copies = HostCopies()
    with torch.device("meta"), copies:
        assert torch.arange(3).sum().item() == 3


def test_copies_can_be_paused() -> None:
    copies = HostCopies()
    (moved,) = on_meta(copies, FULL)
    with paused(), copies:
        with paused(), pytest.raises(RuntimeError, match="meta tensors"):
            bool(moved.all())
        assert moved.all()


def test_copies_that_an_interrupt_has_left_are_not_left_again() -> None:
    outer = HostCopies()
    with outer:
        with HostCopies():
            torch.overrides._pop_mode()
        assert torch.overrides._get_current_function_mode() is outer
    assert torch.overrides._get_current_function_mode() is None


def test_a_copy_lives_as_long_as_its_tensor() -> None:
    copies = HostCopies()
    (moved,) = on_meta(copies, FULL)
    assert len(copies._copies) == 1
    del moved
    assert len(copies._copies) == 0
