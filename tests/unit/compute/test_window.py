"""A window runs micro-batches in threads, one at a time and in order, each with its own random numbers."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from tests.tiny import Layer, Stack, differences, engine_of, gradients, inputs, roles


class Dropping(Layer):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.3, self.training)


def micro_batch(model, seed):
    def run():
        loss = model(inputs(seed)).square().mean()
        loss.backward()
        return loss.detach()

    return run


def tasks(model, *seeds):
    return [micro_batch(model, seed) for seed in seeds]


@pytest.fixture(params=["sync", "threads"])
def lanes(request):
    return request.param


def test_results_in_order_and_gradients_of_plain_accumulation(lanes):
    plain = Stack()
    model = copy.deepcopy(plain)
    with engine_of(model, lanes=lanes) as engine:
        expected = [task() for task in tasks(plain, 3, 1, 2)]
        losses = engine.window(tasks(model, 3, 1, 2))
        torch.testing.assert_close(losses, expected)
        for name, gradient in gradients(plain).items():
            torch.testing.assert_close(gradients(model)[name], gradient, rtol=1e-6, atol=1e-6)


def test_weights_are_fetched_once_per_window(lanes):
    counts = []
    for size in (1, 4):
        model = Stack(depth=5)
        with engine_of(model, lanes=lanes, slots=2, grad_slots=2) as engine:
            engine.window(tasks(model, *range(size)))
            counts.append((engine.counters.fetches, engine.counters.drains))
    assert counts[1] == counts[0]


def test_micro_batches_run_one_at_a_time_block_by_block():
    model = Stack()
    seen = []
    running = threading.Semaphore(1)

    def hook(module, args, output, name):
        assert running.acquire(blocking=False)
        seen.append((name, threading.current_thread().name))
        running.release()

    for name, layer in [("0", model.layers[0]), ("1", model.layers[1])]:
        layer.register_forward_hook(lambda *args, name=name: hook(*args, name))
    with engine_of(model) as engine:
        engine.window(tasks(model, 0, 1, 2))
    assert [name for name, _ in seen] == ["0"] * 3 + ["1"] * 3
    assert [thread for _, thread in seen[:3]] == [thread for _, thread in seen[3:]]
    assert len({thread for _, thread in seen}) == 3


def test_one_that_skipped_a_layer_waits_for_earlier_ones():
    """A buffer that a layer changes is changed in the order of the micro-batches."""
    model = Stack()
    seen = []
    model.layers[1].register_forward_hook(lambda *_: seen.append(int(threading.current_thread().name[-1])))
    with engine_of(model) as engine:
        engine.window([lambda skip=skip: model(inputs(0), skip=skip).sum() for skip in ((), (), (0,), ())])
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("full_step_window", [True, False])
def test_dropout_matches_sequential_micro_batches(full_step_window, precision, lanes):
    """One seed per task is drawn from the caller's generator."""
    results = []
    for windowed in (True, False):
        model = Stack(layer=Dropping)
        with engine_of(model, lanes=lanes, precision=precision) as engine:
            optimizer = engine.optimizer(lr=0.1)
            torch.manual_seed(11)
            for step in range(2):
                work = tasks(model, *range(3 * step, 3 * step + 3))
                if windowed:
                    losses = engine.window(work, full_step=full_step_window)
                else:
                    losses = []
                    seeds = torch.randint(0, 2**62, (3,)).tolist()
                    state = torch.get_rng_state()
                    for seed, task in zip(seeds, work, strict=True):
                        torch.manual_seed(seed)
                        losses.append(task())
                    torch.set_rng_state(state)
                optimizer.step()
                optimizer.zero_grad()
            results.append((losses, roles(engine), torch.get_rng_state()))
    assert differences(*results) == []


def test_grad_mode_and_autocast_are_inherited():
    model = Stack()
    with engine_of(model) as engine:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            seen = engine.window([lambda: (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))] * 2)
        assert seen == [(False, True)] * 2
        assert engine.window([torch.is_grad_enabled]) == [True]


def test_an_empty_window():
    model = Stack()
    with engine_of(model) as engine:
        assert engine.window([]) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("stage", ["before", "between", "after"])
def test_an_error_in_a_task_is_raised_and_the_engine_stays_usable(stage, failing, error, lanes):
    clean = Stack()
    model = copy.deepcopy(clean)

    def bad():
        if stage == "before":
            raise error("in a task")
        loss = model(inputs(9)).square().mean()
        if stage == "between":
            raise error("in a task")
        loss.backward()
        raise error("in a task")

    with engine_of(clean) as reference, engine_of(model, lanes=lanes, grad_slots=1) as engine:
        work = tasks(model, 0, 1, 2)
        work[failing] = bad
        with pytest.raises(error, match="in a task"):
            engine.window(work)
        optimizers = [reference.optimizer(lr=0.1), engine.optimizer(lr=0.1)]
        for each, optimizer, attached in zip((clean, model), optimizers, (reference, engine), strict=True):
            optimizer.zero_grad()
            attached.window(tasks(each, 4, 5, 6))
            optimizer.step()
        assert differences(roles(engine), roles(reference)) == []


def test_threads_end_with_the_engine(lanes):
    before = set(threading.enumerate())
    model = Stack()
    with engine_of(model, lanes=lanes) as engine:
        for _ in range(3):
            engine.window(tasks(model, 0, 1, 2))
        micro = [t for t in set(threading.enumerate()) - before if "micro" in t.name]
        assert len(micro) <= 3
    assert set(threading.enumerate()) <= before


def test_gradients_of_a_failed_window_are_dropped():
    model = Stack()

    def bad():
        micro_batch(model, 1)()
        raise ValueError

    with engine_of(model, grad_slots=1) as engine:
        with pytest.raises(ValueError):
            engine.window([micro_batch(model, 0), bad])
        assert all(gradient is None for gradient in gradients(model).values())
