"""A recompute uses the random numbers and autocast state of its forward and leaves the caller's unchanged."""

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from tests.tiny import WIDTH, Layer, Stack, engine_of, gradients, inputs, same_bits
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.compute.replay import AmbientState
from megatrain.generators import Generators
from megatrain.process import sdpa_state

CPU = torch.device("cpu")


def test_random_numbers_are_replayed():
    torch.manual_seed(3)
    before = Generators.capture(CPU)
    first = torch.rand(5)
    torch.rand(7)
    with AmbientState.capture(CPU).replayed(before):
        assert torch.equal(torch.rand(5), first)
    with AmbientState.capture(CPU).replayed(before):
        assert torch.equal(torch.rand(5), first)


def test_the_callers_generator_is_unchanged():
    before = Generators.capture(CPU)
    torch.manual_seed(9)
    present = torch.get_rng_state()
    with AmbientState.capture(CPU).replayed(before):
        torch.rand(100)
    assert torch.equal(torch.get_rng_state(), present)


def test_the_callers_generator_is_unchanged_after_an_exception():
    before = Generators.capture(CPU)
    torch.manual_seed(9)
    present = torch.get_rng_state()

    def draw_and_raise():
        with AmbientState.capture(CPU).replayed(before):
            torch.rand(100)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        draw_and_raise()
    assert torch.equal(torch.get_rng_state(), present)
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_is_replayed():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = AmbientState.capture(CPU)
    outside = AmbientState.capture(CPU)
    left, right = torch.randn(4, 4), torch.randn(4, 4)
    with inside.replayed(None):
        assert (left @ right).dtype == torch.bfloat16
    assert (left @ right).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16), outside.replayed(None):
        assert (left @ right).dtype == torch.float32


def test_autocast_dtype_and_cache_are_replayed():
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        ambient = AmbientState.capture(CPU)
    with ambient.replayed(Generators.capture(CPU)):
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled()


class Dropping(Layer):
    """Uses dropout. The mask changes the gradient, so a wrong mask is detected."""

    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_dropout_in_a_model(micro_batches):
    plain = Stack(layer=Dropping)
    model = copy.deepcopy(plain)
    with engine_of(model):
        states = []
        for each in (plain, model):
            torch.manual_seed(5)
            for seed in range(micro_batches):
                each(inputs(seed)).square().sum().backward()
            states.append(torch.get_rng_state())
        assert torch.equal(*states)
        for name, expected in gradients(plain).items():
            torch.testing.assert_close(gradients(model)[name], expected, rtol=1e-6, atol=1e-6)


def test_random_numbers_drawn_between_forward_and_backward():
    plain = Stack(layer=Dropping)
    model = copy.deepcopy(plain)
    with engine_of(model):
        draws = []
        for each in (plain, model):
            torch.manual_seed(5)
            loss = each(inputs(0)).square().sum()
            torch.rand(3)
            torch.manual_seed(77)
            loss.backward()
            draws.append(torch.rand(3))
        assert torch.equal(*draws)
        for name, expected in gradients(plain).items():
            torch.testing.assert_close(gradients(model)[name], expected, rtol=1e-6, atol=1e-6)


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


def test_autocast_around_the_forward_only():
    plain = Stack(layer=Mixing)
    model = copy.deepcopy(plain)
    full = copy.deepcopy(plain)
    with engine_of(model):
        for each in (plain, model):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = each(inputs(0))
            out.float().square().sum().backward()
        full(inputs(0)).square().sum().backward()
        for name, expected in gradients(plain).items():
            assert same_bits(gradients(model)[name], expected), name
        assert not torch.equal(plain.entry.weight.grad, full.entry.weight.grad)


def test_autocast_does_not_reuse_the_cast_of_another_layer():
    """Autocast caches casts by tensor object. Layers that share a slot must not share a cast."""
    plain = Stack(depth=6, layer=Mixing)
    model = copy.deepcopy(plain)
    with engine_of(model, slots=1), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(inputs(0)), plain(inputs(0)))
        with torch.no_grad():
            assert torch.equal(model(inputs(1)), plain(inputs(1)))


@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_autocast_keeps_no_casts_of_the_weights_of_other_blocks(policy):
    """It would keep them until it is left: all weights at once, and as often in a window as it has micro-batches."""
    casts: list[weakref.ref[torch.Tensor]] = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function is torch.ops.aten._to_copy.default and result.shape == (WIDTH, WIDTH):
                casts.append(weakref.ref(result))
            return result

    model = Stack(layer=Mixing)
    with engine_of(model, policy=policy), Casts(), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(inputs(0)).float().square().sum()
        assert len(casts) == 7
        assert [cast() for cast in casts] == [None] * 7
        loss.backward()
        assert len(casts) > 7
        assert not any(cast() is not None for cast in casts)


class Attends(nn.Module):
    """Attention over four heads. Its backends differ in bits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 64, 64) / 8)

    def forward(self, x):
        heads = [(x @ weight).view(*x.shape[:2], 4, 16).transpose(1, 2) for weight in self.weight]
        return x + F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(x.shape)


class AttentionStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attends() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def attention_gradients(backend, **settings):
    """Gradients of a model whose forward runs in `sdpa_kernel(backend)` and whose backward runs outside."""
    model = AttentionStack()
    x = torch.randn(2, 96, 64, generator=torch.Generator().manual_seed(1))
    engine = engine_of(model, **settings) if settings else None
    with sdpa_kernel(backend):
        loss = model(x).square().mean()
    before = sdpa_state()
    loss.backward()
    assert sdpa_state() == before
    made = gradients(model)
    if engine is not None:
        engine.close()
    return made


@pytest.mark.parametrize("policy", ["recompute", "offload", "store"])
def test_a_recompute_uses_the_attention_backend_of_its_forward(policy):
    plain = attention_gradients(SDPBackend.MATH)
    other = attention_gradients(SDPBackend.FLASH_ATTENTION)
    assert any(not torch.equal(plain[name], other[name]) for name in plain), "the backends differ in bits"
    streamed = attention_gradients(SDPBackend.MATH, policy=policy)
    assert all(torch.equal(streamed[name], plain[name]) for name in plain)
