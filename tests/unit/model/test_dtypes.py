"""Engine and planner use the same rule for a parameter's dtype in the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests import small

import megatrain as mt
from megatrain.model.dtypes import has_low_bits, natural_precision, store_dtype
from megatrain.model.shapes import describe


def fp32_norms_in_bf16() -> Any:
    model = small.llama().bfloat16()
    for layer in model.model.layers:
        layer.input_layernorm.float()
    return model


def kept_by_transformers() -> Any:
    model = small.llama()
    model._keep_in_fp32_modules_strict = {"norm"}
    return model


def kept_but_cast_by_the_user() -> Any:
    model = kept_by_transformers().bfloat16()
    model.model.layers[1].float()
    return model


def with_frozen_parts() -> Any:
    model = small.llama().half()
    model.model.layers[0].mlp.double().requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(False)
    return model


MODELS = [small.llama, fp32_norms_in_bf16, kept_by_transformers, kept_but_cast_by_the_user, with_frozen_parts]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-sr", None])
@pytest.mark.parametrize("build", MODELS)
def test_the_planner_counts_what_the_engine_allocates(build: Callable[[], Any], precision: str | None) -> None:
    model = build()
    shape = describe(model)
    engine = mt.Engine(model, device="cpu", precision=precision)
    assert engine.precision == (precision or shape.precision)
    itemsize = store_dtype(engine.precision).itemsize
    counted: Counter[Any] = Counter()
    for block in shape.blocks:
        for slab in block.slabs:
            counted[block.name, slab.itemsize or itemsize, slab.trains] += slab.parameters
    allocated: Counter[Any] = Counter()
    for slab in engine.slabs:
        elements = sum(segment.numel for segment in slab.layout.segments)
        allocated[slab.name, slab.layout.dtype.itemsize, slab.trains] += elements
    assert allocated == counted


def test_the_default_precision_is_that_of_most_parameters() -> None:
    assert describe(fp32_norms_in_bf16()).precision == natural_precision(torch.bfloat16) == "bf16"
    assert natural_precision(torch.float16) == "bf16"
    assert natural_precision(torch.float32) == "fp32"


def test_masters_are_restored_in_fp32_where_the_low_half_is_zero() -> None:
    """Otherwise a second engine would save these parameters in BF16 and the others in FP32."""
    model = small.llama()
    mt.Engine(model, device="cpu", precision="bf16").close()
    second = mt.Engine(model, device="cpu")
    assert {tensor.dtype for tensor in second.host_state_dict().values()} == {torch.float32}
    second.release()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert small.same(small.snapshot(model), small.snapshot(small.llama()))


def test_low_bits_are_found_by_dtype_or_by_a_sample() -> None:
    values = torch.randn(300, 70, generator=torch.Generator().manual_seed(0))
    values[:100] = 0.0
    assert has_low_bits(values)
    assert has_low_bits(values.half())
    assert has_low_bits(torch.nn.Parameter(values.to("meta"), requires_grad=False))
    for exact in (values.bfloat16(), values.bfloat16().float(), values.to("meta", torch.bfloat16), torch.zeros(0)):
        assert not has_low_bits(exact)


@pytest.mark.parametrize("width", [16, 256])
def test_the_sample_has_values_of_all_columns(width: int) -> None:
    """Padding may fill one column with values that BF16 has."""
    values = torch.randn(4096, width, generator=torch.Generator().manual_seed(0))
    for exact in (0, width - 1):
        padded = values.clone()
        padded[:, exact] = 1.0
        assert has_low_bits(padded)
        assert has_low_bits(padded.T)
        assert not has_low_bits(padded.bfloat16().float().T)
