"""Other threads run the model while one trains it. All results are those of running alone."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.small import batch, llama, same, snapshot
from tests.tiny import Stack, engine_of, gradients, inputs
from torch import nn

import megatrain as mt
from megatrain.errors import UnsupportedCall
from megatrain.store.parameter import StoreTensor
from megatrain.store.slab import Slab
from megatrain.stream.fetch import Lease

LANES = ["sync", "threads"]
STEPS = 4


@contextmanager
def in_another_thread(work: Callable[[], Any]) -> Iterator[list[Any]]:
    """Repeat `work` in a second thread, at least once, and yield its results. Its error is raised at the end."""
    results: list[Any] = []
    errors: list[BaseException] = []
    stop, started = threading.Event(), threading.Event()

    def body() -> None:
        try:
            while not stop.is_set():
                results.append(work())
                started.set()
        except BaseException as error:
            errors.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=body)
    thread.start()
    try:
        started.wait(300)
        yield results
    finally:
        stop.set()
        thread.join(300)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def train(model: Any, engine: mt.Engine, how: str = "plain") -> list[float]:
    optimizer = engine.optimizer(lr=1e-2, max_grad_norm=None if how == "final" else 1.0)
    losses = []

    def task(number: int) -> None:
        loss = model(**batch(seed=number)).loss
        loss.backward()
        losses.append(loss.item())

    for step in range(STEPS):
        if how == "window":
            engine.window([lambda: task(2 * step), lambda: task(2 * step + 1)])  # noqa: B023
        elif how == "final":
            with optimizer.final_backward():
                task(step)
        else:
            task(step)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def evaluate(model: Any, kind: str) -> Any:
    ids = batch(seed=77)["input_ids"]
    if kind == "generate":
        return model.generate(ids[:, :3], max_new_tokens=3, do_sample=False)
    with torch.set_grad_enabled(kind == "with gradients"):
        return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("how", ["plain", "window", "final"])
@pytest.mark.parametrize("kind", ["generate", "without gradients", "with gradients"])
def test_training_is_unchanged_by_inference_in_another_thread(lanes: str, how: str, kind: str, tmp_path: Any) -> None:
    runs = []
    for evaluated in (False, True):
        model = llama(num_hidden_layers=2).train()
        with mt.Engine(model, device="cpu", debug=mt.Debug(lanes=lanes, slots=2)) as engine:
            if evaluated:
                with in_another_thread(lambda: evaluate(model, kind)):  # noqa: B023
                    losses = train(model, engine, how)
            else:
                losses = train(model, engine, how)
            assert all(isinstance(parameter, StoreTensor) for parameter in model.parameters())
            runs.append((losses, snapshot(model)))
            if evaluated:
                model.save_pretrained(tmp_path)
        released = engine.release()
        assert all(type(parameter) is nn.Parameter for parameter in released.parameters())
    assert runs[1][0] == runs[0][0]
    assert same(runs[1][1], runs[0][1])
    assert same(snapshot(type(model).from_pretrained(tmp_path)), runs[0][1])


@pytest.mark.parametrize("policy", ["store", "offload"])
def test_training_with_other_policies_is_unchanged(policy: str) -> None:
    runs = []
    for evaluated in (False, True):
        model = llama(num_hidden_layers=2).train()
        with mt.Engine(model, device="cpu", debug=mt.Debug(lanes="threads", slots=2), policy=policy) as engine:
            if evaluated:
                with in_another_thread(lambda: evaluate(model, "with gradients")):  # noqa: B023
                    losses = train(model, engine)
            else:
                losses = train(model, engine)
            runs.append((losses, snapshot(model)))
    assert runs[1][0] == runs[0][0]
    assert same(runs[1][1], runs[0][1])


@pytest.mark.parametrize("resident", [(), ("*",)])
def test_inference_during_training_is_right(resident: tuple[str, ...]) -> None:
    """With a learning rate of zero the weights stay, so every result must be the same."""
    model = llama(num_hidden_layers=2).train()
    settings: dict[str, Any] = {"resident": resident} if resident else {}
    with mt.Engine(model, device="cpu", debug=mt.Debug(lanes="threads", slots=2), **settings) as engine:
        alone = evaluate(model, "without gradients")
        optimizer = engine.optimizer(lr=0.0, weight_decay=0.0)
        with in_another_thread(lambda: evaluate(model, "without gradients")) as results:
            for seed in range(STEPS):
                model(**batch(seed=seed)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    assert results
    assert all(torch.equal(result, alone) for result in results)


@pytest.mark.parametrize("lanes", LANES)
def test_two_threads_train_at_once(lanes: str) -> None:
    """Their gradients are added, as in PyTorch. An FP32 sum of two does not depend on their order."""
    model = Stack()
    plain = copy.deepcopy(model)
    for seed in (0, 1):
        plain(inputs(seed)).square().mean().backward()
    with engine_of(model, lanes=lanes) as engine:
        for _ in range(5):
            gate = threading.Barrier(2)

            def work(seed: int) -> None:
                gate.wait()  # noqa: B023
                model(inputs(seed)).square().mean().backward()

            threads = [threading.Thread(target=work, args=(seed,)) for seed in (0, 1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad.clone(), theirs.grad)
            engine._step.zero_grad()


def test_two_threads_add_to_a_parameter_outside_all_blocks() -> None:
    """Autograd adds to the parameter's field, and the store takes the gradient from there, one thread at a time."""
    model, times = Stack(), 300
    errors: list[BaseException] = []
    with engine_of(model):

        def work() -> None:
            try:
                for _ in range(times):
                    model.gain.sum().backward()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert torch.equal(model.gain.grad.clone(), torch.full_like(model.gain, 2 * times))


def test_a_backward_from_outside_an_open_window_is_refused() -> None:
    model = Stack()
    plain = copy.deepcopy(model)
    refused: list[BaseException] = []
    with engine_of(model) as engine:

        def outside() -> None:
            try:
                model(inputs(5)).square().mean().backward()
            except UnsupportedCall as error:
                refused.append(error)

        def task(seed: int) -> None:
            loss = model(inputs(seed)).square().mean()
            if seed == 0:
                thread = threading.Thread(target=outside)
                thread.start()
                thread.join()
            loss.backward()

        engine.window([lambda: task(0), lambda: task(1)])
        for seed in (0, 1):
            plain(inputs(seed)).square().mean().backward()
        assert "from a thread outside the window" in str(refused[0])
        found = gradients(model)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)


class KeepsWeights(nn.Module):
    """Keeps references to its weights during its forward, as LSTM does."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rnn(x[None])[0][0]


def test_a_module_that_keeps_references_to_its_weights() -> None:
    model = Stack(layer=KeepsWeights)
    plain = copy.deepcopy(model)
    plain(inputs(0)).square().mean().backward()

    def run_forward() -> None:
        with torch.no_grad():
            model(inputs(3))

    with engine_of(model) as engine, in_another_thread(run_forward):
        for _ in range(10):
            model(inputs(0)).square().mean().backward()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad.clone(), theirs.grad)
            engine._step.zero_grad()


def test_a_failed_lane_raises_in_the_training_thread() -> None:
    model = Stack()
    with engine_of(model, lanes="threads") as engine:
        optimizer = engine.optimizer(lr=0.1)
        model(inputs(0)).square().mean().backward()
        engine._lanes["update"].submit(lambda: 1 / 0, label="broken").lane  # noqa: B018
        engine.quiesce()
        with in_another_thread(lambda: model(inputs(1)).detach()):
            pass
        with pytest.raises(mt.errors.LaneFailed, match="broken"):
            optimizer.step()


class Dropping(nn.Module):
    """Homogeneous of degree one in its scale, whatever is dropped, so gradients can be checked without a reference."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for _ in range(10):
            x = x + torch.dropout(x, 0.5, train=True) * 0.1
        return x


@pytest.mark.parametrize("where", ["inside blocks", "outside"])
def test_random_numbers_drawn_by_another_thread(where: str) -> None:
    """A recompute with other dropout masks than its forward would give a wrong gradient."""
    torch.manual_seed(0)
    model = Stack(layer=Dropping)

    def draw() -> None:
        with torch.no_grad():
            model(inputs(1)) if where == "inside blocks" else torch.rand(8)

    checked = 0
    with engine_of(model) as engine, in_another_thread(draw):
        for seed in range(20):
            loss = model(inputs(seed)).square().sum()
            refused = False
            try:
                loss.backward()
            except UnsupportedCall as error:
                refused = "another thread drew random numbers" in str(error)
                if not refused:
                    raise
            if not refused:
                checked += 1
                for layer in model.layers:
                    along: Any = (layer.scale.grad.clone() * layer.scale.detach().clone()).sum()
                    torch.testing.assert_close(along, 2 * loss.detach(), rtol=1e-4, atol=1e-4)
            engine._step.zero_grad()
    if where == "inside blocks":
        # Both threads are known after the first step, and graphs are kept from then on.
        assert checked >= 10


def test_the_only_thread_is_not_an_evaluation_thread() -> None:
    """An evaluation thread waits for the device after every resident block. Before the first step there is none."""
    model = Stack()
    with engine_of(model, resident=("*",)) as engine, torch.no_grad():
        model(inputs(0))
        assert not engine._step._calls.evaluating()


def test_an_evaluation_that_never_started_is_not_counted() -> None:
    """Ctrl-C arrives while an evaluation thread waits for the lock. A negative count would block the next step."""
    model = Stack()
    with engine_of(model, resident=("*",)) as engine:
        fetcher = engine._step.fetcher
        lock, fetcher.lock = fetcher.lock, InterruptedLock(fetcher.lock)
        with pytest.raises(KeyboardInterrupt):
            fetcher.acquire(Lease(), engine.slabs, evaluating=True)
        fetcher.lock = lock
        with fetcher.lock:
            fetcher.wait_for_evaluations()
        assert not fetcher._evaluations


class InterruptedLock:
    """A lock whose first user is interrupted while waiting."""

    def __init__(self, lock: Any) -> None:
        self._lock, self._first = lock, True

    def __enter__(self) -> None:
        first, self._first = self._first, False
        if first:
            raise KeyboardInterrupt
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_an_evaluation_while_a_checkpoint_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """What it fetches may be the old weights. They must not count as current once the new ones are there."""
    model = Stack()
    load = Slab._load

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            return model(inputs(0))

    def slowly(slab: Slab, *args: Any) -> None:
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()
        load(slab, *args)

    with engine_of(model, held_weights=("*",)) as engine:
        saved = evaluate().clone()
        engine.save(tmp_path / "saved")
        optimizer = engine.optimizer(lr=0.5)
        model(inputs(0)).sum().backward()
        optimizer.step()
        assert not torch.equal(evaluate(), saved)
        monkeypatch.setattr(Slab, "_load", slowly)
        engine.load(tmp_path / "saved")
        assert torch.equal(evaluate(), saved)
