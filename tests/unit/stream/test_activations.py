"""Offloaded inputs: the memory of an abandoned backward is not reused while a copy still writes to it."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatrain.store.ram import HostMemory
from megatrain.stream.activations import Activations
from megatrain.stream.lanes import SyncLanes
from megatrain.stream.transfer import Link
from megatrain.telemetry.counters import Counters

CPU = torch.device("cpu")


class PendingCopy:
    """A copy to the device that has not finished."""

    lane = queue = "h2d"
    done = False

    def __init__(self, lane):
        self._lane = lane

    def wait(self):
        self._lane.seen.append("waited")

    def order_stream(self):
        self._lane.seen.append("ordered")


class PendingLane:
    def __init__(self):
        self.seen = []

    def submit(self, work, after=(), label="", job=""):
        work()
        return PendingCopy(self)


def activations_and_lane():
    lanes = SyncLanes()
    lanes._by_name["h2d"] = PendingLane()
    memory = HostMemory(pin=False, threads=1)
    return Activations(Link(CPU, lanes, Counters(), 1), memory), lanes["h2d"]


def offload(activations, tensor):
    """The tensor as the only input of a call."""
    activations.wait_for_room(1, "block")
    (offloaded,) = activations.offload([tensor], "block")
    return offloaded


def restore(activations, offloaded):
    activations.start([offloaded])
    return activations.take(offloaded)


def test_inputs_are_restored_bitwise():
    activations, lane = activations_and_lane()
    tensors = [torch.randn(4, 8) for _ in range(3)]
    offloaded = [offload(activations, tensor.clone()) for tensor in tensors]
    for tensor, one in zip(tensors[::-1], offloaded[::-1], strict=True):
        assert torch.equal(restore(activations, one), tensor)
    assert lane.seen == ["ordered"] * 3


def abandon_backward(activations):
    """Abandon a backward that restored the last input, while the copy of the one before it is pending. Returns a weak
    reference to the target of that copy.
    """
    offloaded = [offload(activations, torch.randn(4, 8)) for _ in range(3)]
    restore(activations, offloaded[2])
    target = weakref.ref(offloaded[1].place.target)
    del offloaded
    gc.collect()
    return target


def test_the_target_of_a_pending_copy_is_kept_until_compute_waits_for_it():
    activations, lane = activations_and_lane()
    target = abandon_backward(activations)
    assert target() is not None, "the copy may still write to it"
    assert lane.seen == ["ordered"]
    activations.drop_all()
    assert target() is None
    assert lane.seen == ["ordered"] * 2


def test_the_next_forward_reuses_the_buffer():
    activations, lane = activations_and_lane()
    target = abandon_backward(activations)
    again = [offload(activations, torch.full((4, 8), float(value))) for value in range(3)]
    assert target() is None
    assert "ordered" in lane.seen[1:]
    assert [restore(activations, one)[0, 0].item() for one in again[::-1]] == [2.0, 1.0, 0.0]


def test_a_failed_copy_raises_once():
    activations, _ = activations_and_lane()
    abandon_backward(activations)
    failing = [place for place in activations._free if place.target is not None]
    failing[0].copy_back = Failed()
    with pytest.raises(RuntimeError, match="the link is gone"):
        activations.drop_all()
    activations.drop_all()
    assert all(place.target is None for place in activations._free)


class Failed(PendingCopy):
    def __init__(self):
        pass

    def order_stream(self):
        raise RuntimeError("the link is gone")


def upcoming(offloaded, names):
    return [names[tensor] for tensor in offloaded.upcoming()]


def window(activations, blocks, micro_batches, inputs=1):
    """Offload as the threads of a window do: (block, micro-batch, input) → tensor."""
    made = {}
    workers = [ThreadPoolExecutor(1) for _ in range(micro_batches)]
    for block in range(blocks):
        for micro, worker in enumerate(workers):
            tensors = [torch.full((8,), float(block + micro)) for _ in range(inputs)]
            for number, one in enumerate(worker.submit(activations.offload, tensors, f"{block}").result()):
                made[block, micro, number] = one
    for worker in workers:
        worker.shutdown()
    return made


def test_a_backward_needs_the_last_call_first_and_its_inputs_in_order():
    activations, _ = activations_and_lane()
    calls = [activations.offload([torch.zeros(4), torch.zeros(4)], block) for block in ("a", "b", "b", "c")]
    names = {tensor: f"{call}.{number}" for call, made in enumerate(calls) for number, tensor in enumerate(made)}
    # A layer that runs twice in a row is two turns.
    assert upcoming(calls[3][0], names) == ["3.1", "2.0", "2.1", "1.0", "1.1", "0.0", "0.1"]
    restore(activations, calls[1][0])
    assert upcoming(calls[3][1], names) == ["2.0", "2.1", "1.1", "0.0", "0.1"]


def test_micro_batches_of_a_window_take_turns_in_the_order_of_the_forward():
    activations, _ = activations_and_lane()
    made = window(activations, 3, 3)
    names = {tensor: key[:2] for key, tensor in made.items()}
    assert upcoming(made[2, 1, 0], names) == [(2, 2), (1, 0), (1, 1), (1, 2), (0, 0), (0, 1), (0, 2)]


def test_dropped_tensors_are_not_expected():
    activations, _ = activations_and_lane()
    made = window(activations, 4, 2)
    names = {tensor: key[:2] for key, tensor in made.items()}
    del names[made.pop((2, 1, 0))]
    gc.collect()
    assert upcoming(made[3, 0, 0], names) == [(3, 1), (2, 0), (1, 0), (1, 1), (0, 0), (0, 1)]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_as_many_copies_are_ahead_as_a_turn_has(micro_batches):
    activations, _ = activations_and_lane()
    made = window(activations, 5, micro_batches)
    order = [(block, micro, 0) for block in reversed(range(5)) for micro in range(micro_batches)]
    for number, key in enumerate(order):
        restore(activations, made[key])
        started = [other for other in order if made[other].place.target is not None]
        assert started == order[number + 1 : number + 1 + micro_batches]


def test_another_order_than_expected_does_not_fill_device_memory():
    activations, _ = activations_and_lane()
    first, second = ([activations.offload([torch.zeros(4)], f"{block}")[0] for block in range(6)] for _ in range(2))
    for one in first[::-1]:
        activations.start([second[-1]])
        restore(activations, one)
        assert sum(tensor.place.target is not None for tensor in first + second) <= 3
