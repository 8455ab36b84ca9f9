"""Offloaded inputs: the memory of an abandoned backward is not reused while a copy still writes to it."""

import gc
import weakref

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


def test_inputs_are_restored_bitwise():
    activations, lane = activations_and_lane()
    tensors = [torch.randn(4, 8) for _ in range(3)]
    offloaded = [activations.offload(tensor.clone()) for tensor in tensors]
    for tensor, one in zip(tensors[::-1], offloaded[::-1], strict=True):
        assert torch.equal(activations.restore(one), tensor)
    assert lane.seen == ["ordered"] * 3


def abandon_backward(activations):
    """Abandon a backward that restored the last input, while the copy of the one before it is pending. Returns a weak
    reference to the target of that copy.
    """
    offloaded = [activations.offload(torch.randn(4, 8)) for _ in range(3)]
    activations.restore(offloaded[2])
    target = weakref.ref(offloaded[1].buffer.target)
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
    again = [activations.offload(torch.full((4, 8), float(value))) for value in range(3)]
    assert target() is None
    assert "ordered" in lane.seen[1:]
    assert [activations.restore(one)[0, 0].item() for one in again[::-1]] == [2.0, 1.0, 0.0]


def test_a_failed_copy_raises_once():
    activations, _ = activations_and_lane()
    abandon_backward(activations)
    failing = [buffer for buffer in activations._free if buffer.target is not None]
    failing[0].copy_back = Failed()
    with pytest.raises(RuntimeError, match="the link is gone"):
        activations.drop_all()
    activations.drop_all()
    assert all(buffer.target is None for buffer in activations._free)


class Failed(PendingCopy):
    def __init__(self):
        pass

    def order_stream(self):
        raise RuntimeError("the link is gone")
