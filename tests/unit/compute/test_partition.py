"""Partitions of compiled layers: gradients are right, with dropout too, and a recompute skips the last product."""

import logging

import pytest
import torch
from torch.nn import functional

from megatrain.compute.partition import backend


@pytest.fixture(autouse=True)
def _disable_caches(caplog):
    """Graphs in PyTorch's disk cache are not partitioned again."""
    torch._dynamo.reset()
    caplog.set_level(logging.DEBUG, "megatrain.compute.partition")
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def weights():
    generator = torch.Generator().manual_seed(0)
    shapes = {"norm": (8,), "up": (8, 12), "gate": (8, 12), "down": (12, 8)}
    return {n: torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for n, s in shapes.items()}


def normed(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def mlp(x, w, dropout=0.0):
    hidden = normed(x, w["norm"])
    hidden = functional.silu(hidden @ w["gate"]) * (hidden @ w["up"])
    return x + functional.dropout(hidden, dropout) @ w["down"]


def ends_in_a_norm(x, w):
    return normed(mlp(x, w), w["norm"])


def ends_in_dropout(x, w):
    return functional.dropout(mlp(x, w), 0.3)


def left_out(caplog):
    return [record.getMessage() for record in caplog.records if "leaves out" in record.getMessage()]


def compiled(function):
    """The function compiled as a layer, or as its recompute. Each call starts from seed 0."""
    recomputing = False
    call = torch.compile(function, backend=backend(function.__code__, lambda: recomputing, recomputes=True))

    def run(x, w, recompute=False):
        nonlocal recomputing
        recomputing = recompute
        torch.manual_seed(0)
        return call(x, w)

    return run


def with_dropout(x, w):
    return mlp(x, w, dropout=0.4)


@pytest.mark.parametrize("function", [with_dropout, ends_in_dropout], ids=lambda f: f.__name__)
def test_gradients_with_dropout_match_finite_differences(function):
    """Along a random direction of input and weights, for the graphs of the forward and of the recompute."""
    run, w = compiled(function), weights()
    x = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    generator = torch.Generator().manual_seed(2)
    inputs = {"x": x, **w}
    direction = {n: torch.randn(t.shape, dtype=t.dtype, generator=generator) for n, t in inputs.items()}

    def value(step):
        moved = {n: (t + step * direction[n]).detach().requires_grad_() for n, t in inputs.items()}
        return run(moved.pop("x"), moved).square().sum().item()

    expected = (value(1e-5) - value(-1e-5)) / 2e-5
    grad_output = 2 * run(x, w).detach()
    for recompute in (False, True):
        grads = torch.autograd.grad(run(x, w, recompute), [*inputs.values()], grad_output)
        actual = sum((g * d).sum().item() for g, d in zip(grads, direction.values(), strict=True))
        assert actual == pytest.approx(expected, rel=1e-6)


def test_a_recompute_leaves_out_the_last_product(caplog):
    run, w = compiled(mlp), weights()
    x = torch.randn(6, 8, dtype=torch.float64).requires_grad_()
    result, again = run(x, w), run(x, w, recompute=True)
    assert len(left_out(caplog)) == 1
    assert again.shape == result.shape
    assert again.stride() == result.stride()
    assert not torch.equal(result, again)
    grad_output = torch.ones_like(result)
    both = [torch.autograd.grad(each, [x, *w.values()], grad_output) for each in (result, again)]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("function", [ends_in_a_norm, ends_in_dropout], ids=lambda f: f.__name__)
def test_products_that_the_backward_needs_are_recomputed(function, caplog):
    """The norm's backward needs the product, and a dropout mask drawn after it could be fused with it."""
    run, w = compiled(function), weights()
    x = torch.randn(6, 8, dtype=torch.float64).requires_grad_()
    assert torch.equal(run(x, w), run(x, w, recompute=True))
    assert not left_out(caplog)


def test_a_graph_before_a_graph_break_is_recomputed_in_full(caplog):
    """The output of the first graph is the input of the second."""

    def in_two_parts(x, w):
        x = mlp(x, w)
        torch._dynamo.graph_break()
        return mlp(x, w)

    run, w = compiled(in_two_parts), weights()
    x = torch.randn(6, 8, dtype=torch.float64).requires_grad_()
    assert torch.equal(run(x, w), run(x, w, recompute=True))
    assert not left_out(caplog)


def test_grouped_products_do_not_split_a_graph(monkeypatch):
    """Not even if dynamo does not know the operation, as in some versions."""
    rules = torch._dynamo.trace_rules
    for listed in rules.torch_name_rule_map:
        monkeypatch.delitem(listed, "torch._grouped_mm", raising=False)
    rules.get_torch_obj_rule_map.cache_clear()
    x, weight = torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(3, 16, 16, dtype=torch.bfloat16)
    ends = torch.tensor([2, 2, 8], dtype=torch.int32)

    def experts(x, weight):
        return functional.grouped_mm(x.sin(), weight, offs=ends).cos()

    backend(experts.__code__, lambda: False, recomputes=True)
    try:
        call = torch.compile(experts, backend="eager", fullgraph=True)
        assert torch.equal(call(x, weight), experts(x, weight))
    finally:
        rules.get_torch_obj_rule_map.cache_clear()
