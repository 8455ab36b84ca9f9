"""Runs that must be equal are compared as runs, bitwise: losses, gradients, every role of every slab.

Each run accumulates micro-batches, clips, has two parameter groups, and has parameters without gradient in some steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity import zoo
from tests.tiny import differences, engine_of, gradients, roles
from torch import nn

import megatrain as mt
from megatrain.store.split import join

FAMILIES = {
    "llama": {"attention_dropout": 0.1},
    "gemma2": {"attention_dropout": 0.1},
    "qwen3_moe": {"output_router_logits": True, "router_aux_loss_coef": 0.1, "attention_dropout": 0.1},
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "zamba2": {"attention_dropout": 0.1},
}
"""Plain; tied with windows and soft caps; experts with an auxiliary loss; tied with biases; shared layers."""

STEPS = 4
LENGTH = 10
MAX_NORM = 0.5


class Run:
    """A model with engine, optimizer and schedule, and a record of what they produced."""

    def __init__(
        self,
        family: str,
        precision: str = "fp32",
        *,
        reading: bool = False,
        windows: tuple[int, ...] = (),
        **settings: Any,
    ) -> None:
        self.family = family
        self.windows = windows
        self.reading = reading
        self.model = zoo.build(family, **FAMILIES[family])
        self.engine = engine_of(self.model, precision=precision, **settings)
        flat = [p for p in self.model.parameters() if p.ndim < 2]
        rest = [p for p in self.model.parameters() if p.ndim >= 2]
        self.optimizer = self.engine.optimizer(
            [{"params": rest, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0, "lr": 3e-3}],
            lr=1e-2,
            max_grad_norm=MAX_NORM,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1 + step))
        self.seen: list[Any] = []

    def steps(self, numbers: Iterable[int]) -> Run:
        for step in numbers:
            layers = layers_of(self.model)
            layers[1].requires_grad_(step != 1)
            self.backward([functools.partial(self.micro_batch, step, micro) for micro in range(3)])
            self.seen.append(gradients(self.model))
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            if self.reading:
                [p + 0 for p in self.model.state_dict().values()]
                self.optimizer.state_dict()
            self.seen.append(self.optimizer.grad_norm)
            assert self.optimizer.grad_norm > MAX_NORM, "the gradient must be clipped"
        return self

    def backward(self, tasks: list[Callable[[], torch.Tensor]]) -> None:
        """Run micro-batches one after the other, or in windows of the given sizes."""
        if not self.windows:
            self.seen += [task() for task in tasks]
            return
        for size in self.windows:
            self.seen += self.engine.window(tasks[:size], full_step=size == 3)
            tasks = tasks[size:]

    def micro_batch(self, step: int, micro: int) -> torch.Tensor:
        torch.manual_seed(100 * step + micro)
        loss = self.model(**zoo.batch(self.family, 3 * step + micro, length=LENGTH)).loss
        (loss / 3).backward()
        if self.reading:
            gradients(self.model)
            self.engine.grad_norm()
        return loss.detach()

    def result(self) -> list[Any]:
        """Everything recorded, with the final state. Closes the engine."""
        self.seen.append(roles(self.engine))
        self.engine.close()
        return self.seen


def layers_of(model: nn.Module) -> nn.ModuleList:
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


def run(family: str, **settings: Any) -> list[Any]:
    return Run(family, **settings).steps(range(STEPS)).result()


@pytest.fixture(scope="module")
def reference() -> Any:
    known: dict[Any, list[Any]] = {}

    def of(family: str, precision: str = "fp32") -> list[Any]:
        torch.set_num_threads(1)
        if (family, precision) not in known:
            known[family, precision] = run(family, precision=precision)
        return known[family, precision]

    return of


def assert_equal(left: list[Any], right: list[Any]) -> None:
    found = differences(left, right)
    assert found == [], f"{len(found)} differences, the first at {found[0]}"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_run_covers_skips_clipping_and_updates(family: str, reference: Any):
    """A parameter has no gradient in one step, weights change, no step is skipped; else the tests below prove
    little.
    """
    seen = reference(family)
    without = [sum(g is None for g in entry.values()) for entry in seen if isinstance(entry, dict)][:STEPS]
    assert without[1] > without[0]
    steps = {count for key, counts in seen[-1].items() if key.endswith("steps") for count in counts}
    assert {STEPS - 1, STEPS} <= steps
    losses = [float(entry) for entry in seen if isinstance(entry, torch.Tensor)]
    assert len(set(losses)) == len(losses)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_equal_runs_are_bitwise_equal(family: str, reference: Any):
    assert_equal(run(family), reference(family))


@pytest.mark.parametrize("slots", [1, 2, 5, 20])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "zamba2"])
def test_weight_slots(family: str, slots: int, reference: Any):
    """The default is 3."""
    assert_equal(run(family, slots=slots), reference(family))


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_weight_slots_in_bf16(slots: int, reference: Any):
    assert_equal(run("llama", precision="bf16", slots=slots), reference("llama", "bf16"))


@pytest.mark.parametrize("grad_slots", [1, 3])
@pytest.mark.parametrize(("family", "precision"), [("llama", "fp32"), ("gpt2", "bf16"), ("qwen3_moe", "fp32")])
def test_gradient_slots(family: str, precision: str, grad_slots: int, reference: Any):
    """The default is 2."""
    assert_equal(run(family, precision=precision, grad_slots=grad_slots), reference(family, precision))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_lanes(family: str, precision: str, reference: Any):
    """The default on the CPU is "sync"."""
    assert_equal(run(family, precision=precision, lanes="threads"), reference(family, precision))


class OnTwoThreads(Run):
    """Forward and backward run on one thread, norms and updates on two. PyTorch's own matrix products may round
    differently with another number of threads, as they do in FP32 on AVX2.
    """

    def micro_batch(self, step: int, micro: int) -> torch.Tensor:
        torch.set_num_threads(1)
        try:
            return super().micro_batch(step, micro)
        finally:
            torch.set_num_threads(2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_thread_count(precision: str, reference: Any):
    found = OnTwoThreads("llama", precision).steps(range(STEPS)).result()
    assert_equal(found, reference("llama", precision))


@pytest.mark.parametrize("lanes", ["sync", "threads"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_resumed(family: str, precision: str, lanes: str, reference: Any, tmp_path: Path):
    """N + N steps = 2N steps; the second half has only the directory of the first."""
    half = STEPS // 2
    first = Run(family, precision, lanes=lanes).steps(range(half))
    first.engine.save(tmp_path, first.optimizer)
    schedule = first.schedule.state_dict()
    before = roles(first.engine)
    first.engine.close()

    second = Run(family, precision, lanes=lanes)
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.zero_()
    second.engine.load(tmp_path, second.optimizer)
    second.schedule.load_state_dict(schedule)
    assert_equal([roles(second.engine)], [before])
    second.steps(range(half, STEPS))
    assert_equal(first.seen + second.result(), reference(family, precision))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "zamba2"])
def test_reading_changes_nothing(family: str, precision: str, reference: Any):
    """Gradients and norms are read between micro-batches, parameters and state dicts after steps."""
    looked = Run(family, precision, reading=True).steps(range(STEPS))
    assert_equal(looked.result(), reference(family, precision))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("windows", [(3,), (2, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe", "zamba2"])
def test_windows(family: str, windows: tuple[int, ...], precision: str, reference: Any):
    """Micro-batches in windows give the bits of running one after the other."""
    lanes = "threads" if windows == (2, 1) else "sync"
    run = Run(family, precision, windows=windows, lanes=lanes).steps(range(STEPS))
    assert_equal(run.result(), reference(family, precision))


def masters(engine: mt.Engine) -> list[torch.Tensor]:
    return [slab.weight if slab.residual is None else join(slab.weight, slab.residual) for slab in engine.slabs]


@pytest.mark.parametrize("lanes", ["sync", "threads"])
def test_master_weights_are_exact_after_loading(lanes: str, tmp_path: Path):
    """An FP32 model trained in BF16: the low halves of the masters exist from the start, and are restored."""
    original = zoo.build("llama").state_dict()
    first = Run("llama", "bf16", lanes=lanes)
    for name, parameter in first.model.named_parameters():
        segment = parameter.slab.layout.segments[parameter.segment]
        master = join(parameter.slab.weight, parameter.slab.residual)[segment.offset : segment.end]
        assert torch.equal(master.view(segment.shape), original[name]), name
    first.steps(range(2))
    first.engine.save(tmp_path, first.optimizer)
    second = Run("llama", "bf16", lanes=lanes)
    second.engine.load(tmp_path, second.optimizer)
    assert_equal([masters(second.engine)], [masters(first.engine)])
    assert any(slab.residual.any() for slab in second.engine.slabs)
    first.engine.close()
    second.engine.close()
