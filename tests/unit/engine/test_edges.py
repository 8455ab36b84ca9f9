"""Edge cases of an engine: user-made optimizers, errors that close it, a second GPU, a second optimizer."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests import small
from tests.tiny import Stack, engine_of, inputs
from torch import nn

import megatrain as mt
from megatrain.model.shapes import describe
from megatrain.store.ram import HostMemory
from megatrain.stream.lanes import ThreadLanes


def test_max_grad_norm_of_the_trainer_applies_to_a_user_made_optimizer(tmp_path: Any, announced: Any) -> None:

    def run(own: bool) -> Any:
        model = small.llama()
        engine = mt.Engine(model, device="cpu")
        optimizers = (engine.optimizer(kind="sgd", lr=1.0), None) if own else (None, None)
        args = small.arguments(
            tmp_path, max_grad_norm=1e-6, learning_rate=1.0, optim="sgd", weight_decay=0.0, max_steps=2,
            lr_scheduler_type="constant",
        )  # fmt: skip
        before = small.snapshot(model)
        mt.Trainer(model=model, args=args, train_dataset=small.rows(), optimizers=optimizers).train()
        return small.furthest(before, small.snapshot(model))

    assert run(False) < 1e-5
    announced.clear()
    assert run(True) < 1e-5
    assert any("max_grad_norm" in line for line in announced.messages)


def test_a_second_engine_attaches_after_an_error_closed_the_first() -> None:
    model = Stack()
    with pytest.raises(KeyboardInterrupt), engine_of(model, lanes=ThreadLanes()) as engine:  # noqa: PT012
        optimizer = engine.optimizer(lr=0.1)
        model(inputs(0)).square().mean().backward()
        optimizer.step()
        raise KeyboardInterrupt
    again = engine_of(model, lanes=ThreadLanes())
    model(inputs(1)).square().mean().backward()
    again.close()


def test_pinned_memory_is_released_after_an_error(monkeypatch: Any) -> None:
    unpinned: list[bool] = []
    monkeypatch.setattr(HostMemory, "unpin", lambda _: unpinned.append(True))
    with pytest.raises(RuntimeError), engine_of(Stack()):  # noqa: PT012
        assert not unpinned
        raise RuntimeError
    assert unpinned


def test_marks_use_the_stream_of_the_engines_device(monkeypatch: Any) -> None:
    """With Engine(device="cuda:1") while cuda:0 is current, marks must not be recorded on cuda:0's stream."""
    from megatrain.stream import cuda

    events: list[Any] = []

    class Event:
        def __init__(self, **_: Any) -> None: ...
        def record(self, stream: Any = None) -> None:
            events.append(("record", stream))

    class Stream:
        cuda_stream = 0

        def __init__(self, device: Any) -> None:
            self.device = device

        def wait_event(self, event: Any) -> None:
            events.append(("wait", self))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(cuda, "current_stream", Stream)
    lanes = cuda.CudaLanes.__new__(cuda.CudaLanes)
    lanes.device = torch.device("cuda", 1)  # type: ignore[attr-defined]
    mark = lanes.mark()
    mark.order_stream()
    assert all(stream is not None and stream.device is not None for _, stream in events), events


def test_a_model_that_is_mostly_frozen_keeps_its_dtypes_in_a_second_engine() -> None:
    """A closed engine returns masters as FP32. Among BF16 weights these must not look like FP32 on purpose."""
    model = Stack().bfloat16()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "layers.1.scale")
    dtypes = []
    for _ in range(2):
        engine = engine_of(model)
        optimizer = engine.optimizer(lr=0.1)
        model(inputs(0)).square().mean().backward()
        optimizer.step()
        engine.close()
        dtypes.append({slab.layout.dtype for slab in engine.slabs})
    assert dtypes == [{torch.bfloat16}] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plans_for_a_second_engine_count_residuals_of_frozen_weights(dtype: torch.dtype) -> None:
    """Where they are in a store, their dtype is that of the weights."""
    model = small.llama().to(dtype).requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)

    def low_bits() -> list[bool]:
        return [slab.low_bits for block in describe(model).blocks for slab in block.slabs]

    before = low_bits()
    assert any(before) == (dtype == torch.float32)
    with engine_of(model, precision="bf16"):
        assert low_bits() == before
    assert low_bits() == before


def test_a_second_optimizer_drops_the_state_of_the_first() -> None:
    """Otherwise the first optimizer's moments would take memory and be saved in each checkpoint."""
    model = Stack()
    engine = engine_of(model)
    engine.optimizer(kind="sgd")
    optimizer = engine.optimizer(kind="adamw")
    model(inputs(0)).square().mean().backward()
    optimizer.step()
    assert set(optimizer.state_dict()["state"][0]) <= {"step", "exp_avg", "exp_avg_sq", "residual"}


def test_rounding_a_loaded_state_dict_is_announced(announced: Any) -> None:
    model = small.llama(hidden_size=64, intermediate_size=128)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(**small.batch(2)).loss.backward()
    theirs.step()
    theirs.zero_grad()
    engine = engine_of(model, optimizer_compression="8bit")
    optimizer = engine.optimizer(lr=1e-2)
    announced.clear()
    optimizer.load_state_dict(theirs.state_dict())
    assert any("rounded to 8bit" in line for line in announced.messages), announced.messages


# ---- direct calls of parts of a model


def test_direct_calls_of_an_inner_module_do_not_leak_memory() -> None:
    """A loss on hidden states calls the inner module and never the model."""
    model, plain = small.llama(), small.llama()
    engine = mt.Engine(model, device="cpu")
    optimizer = engine.optimizer(lr=1e-3)
    usage = []
    for step in range(4):
        for seed in range(3):
            ids = small.batch(seed=seed)["input_ids"]
            for each in (model, plain):
                each.model(input_ids=ids).last_hidden_state.square().mean().backward()
        if step == 0:
            for (name, ours), theirs in zip(model.model.named_parameters(), plain.model.parameters(), strict=True):
                assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8), name
        optimizer.step()
        optimizer.zero_grad()
        usage.append((engine._memory.allocated_bytes, max(len(slab.grad.parts) for slab in engine.slabs)))
    assert usage == [(usage[0][0], 1)] * 4


def test_a_forward_without_backward_does_not_leak_a_gradient_part() -> None:
    model = small.llama()
    engine = mt.Engine(model, device="cpu")
    optimizer = engine.optimizer(lr=1e-3)
    for _ in range(5):
        model.model(input_ids=small.batch()["input_ids"])
        model(**small.batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert max(len(slab.grad.parts) for slab in engine.slabs) == 1


def test_another_thread_can_call_a_part_of_the_model() -> None:
    """Autograd's thread does so when the recompute of a block calls another block."""
    model, failures = small.llama(), []
    engine = mt.Engine(model, device="cpu")
    optimizer = engine.optimizer(lr=1e-3)

    def call() -> None:
        try:
            model.model(input_ids=small.batch()["input_ids"]).last_hidden_state.sum().backward()
        except BaseException as error:
            failures.append(error)

    for _ in range(3):
        loss = model(**small.batch()).loss
        worker = threading.Thread(target=call)
        worker.start()
        worker.join()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not failures
    assert max(len(slab.grad.parts) for slab in engine.slabs) == 1


class Calling(nn.Module):
    """A layer that calls a module owned by its parent, as hybrid models with shared attention do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.own, self.inner = nn.Linear(16, 16), [inner]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner[0](torch.tanh(self.own(x)))


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Calling(self.shared) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("in_autograd_thread", [False, True], ids=["one-thread", "autograd-thread"])
def test_a_shared_block_has_one_gradient_part_per_call_in_any_backward_thread(in_autograd_thread: bool) -> None:
    """On a GPU, autograd runs the backward and its recomputes in a thread of its own."""
    torch.manual_seed(0)
    model = Sharing()
    plain = copy.deepcopy(model)
    engine = mt.Engine(model, device="cpu")
    optimizer = engine.optimizer(lr=1e-3)
    with ThreadPoolExecutor(1) as pool:
        for step in range(2):
            for seed in range(4):
                x = torch.randn(2, 16, generator=torch.Generator().manual_seed(seed))
                loss = model(x).square().mean()
                pool.submit(loss.backward).result() if in_autograd_thread else loss.backward()
                plain(x).square().mean().backward()
            if step == 0:
                assert torch.allclose(model.shared.weight.grad, plain.shared.weight.grad, rtol=1e-5, atol=1e-7)
            assert {slab.name: len(slab.grad.parts) for slab in engine.slabs}["shared"] == 2
            optimizer.step()
            optimizer.zero_grad()
