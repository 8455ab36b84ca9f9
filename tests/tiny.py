"""Models with almost no arithmetic. Their results show which weights were read and which gradients were added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import megatrain as mt
from megatrain.settings import DEBUG

WIDTH = 8


class Layer(nn.Module):
    """A scale and a shift: a wrong or late weight changes every element."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))
        self.shift = nn.Parameter(torch.randn(width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x * self.scale + self.shift)


class Stack(nn.Module):
    """Layers in sequence, after a module that is not a layer; the model itself owns one parameter."""

    def __init__(self, depth: int = 3, layer: type[nn.Module] = Layer, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(depth))

    def forward(self, x: Tensor, skip: Sequence[int] = ()) -> Tensor:
        x = self.entry(x.to(self.gain.dtype))
        for index, layer in enumerate(self.layers):
            if index not in skip:
                x = layer(x)
        return x * self.gain


def inputs(seed: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def engine_of(model: nn.Module, **settings: Any) -> mt.Engine:
    """An engine on the CPU. Fields of `Debug` are passed like other settings."""
    debug = {name: settings.pop(name) for name in DEBUG if name in settings}
    return mt.Engine(model, **{"device": "cpu", **settings, **({"debug": mt.Debug(**debug)} if debug else {})})


def backward(model: nn.Module, seed: int, **options: Any) -> None:
    model(inputs(seed), **options).square().mean().backward()


def started(max_grad_norm: float | None = None, **settings: Any) -> tuple[Any, mt.Engine, Any]:
    """A model, its engine and its optimizer after the first step. Later updates can start in the backward."""
    model = Stack()
    engine = engine_of(model, **settings)
    optimizer = engine.optimizer(lr=0.1, max_grad_norm=max_grad_norm)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    engine.synchronize()
    return model, engine, optimizer


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad + 0 for name, p in model.named_parameters()}


def roles(engine: mt.Engine) -> dict[str, Any]:
    """Every role of every slab and the step counts, after all submitted work is done."""
    engine.synchronize()
    found: dict[str, Any] = {}
    for slab in engine.slabs:
        found[f"{slab.index}/weight"] = slab.weight_buffer.read(0, slab.layout.nbytes).view(slab.layout.dtype).clone()
        # Also of states on disk.
        states = [buffer.read(0, buffer.nbytes).clone() for buffer in slab.state_buffers()]
        found[f"{slab.index}/residual"] = None if slab.residual is None else states.pop(0).view(torch.int16)
        found |= {f"{slab.index}/{role}": state for role, state in zip(slab.moments, states, strict=True)}
        found[f"{slab.index}/steps"] = list(slab.steps)
    return found


def differences(left: Any, right: Any, where: str = "") -> list[str]:
    """Paths at which two nested results are not bitwise equal."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return [] if same_bits(left, right) else [where]
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        if list(left) != list(right):
            return [f"{where}: {list(left)} and {list(right)}"]
        return [d for key in left for d in differences(left[key], right[key], f"{where}.{key}")]
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if len(left) != len(right):
            return [f"{where}: {len(left)} and {len(right)} entries"]
        return [d for i, (a, b) in enumerate(zip(left, right, strict=True)) for d in differences(a, b, f"{where}[{i}]")]
    return [] if left == right else [where]


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Bitwise equality: unlike with `torch.equal`, 0.0 differs from -0.0, and a NaN equals itself."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))
