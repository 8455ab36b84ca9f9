"""Host memory: exactly as large as requested, zeroed, aligned, and allocated only if the guard agrees."""

import pytest
import torch

from megatrain.store.ram import HostBuffer, HostMemory


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 1 << 20, (8 << 20) + 4096])
def test_a_buffer_has_the_requested_size_zeroed_and_page_aligned(nbytes):
    buffer = HostBuffer(nbytes, threads=2)
    assert buffer.bytes.numel() == buffer.nbytes == nbytes
    assert buffer.address % 4096 == 0
    assert not buffer.bytes.any()
    assert not buffer.pinned


def test_views_share_the_memory():
    buffer = HostBuffer(4096, threads=1)
    floats = buffer.view(torch.float32)
    assert floats.numel() == 1024
    floats[3] = 1.0
    assert buffer.bytes[12:16].any()
    assert not buffer.bytes[16:].any()


def test_an_empty_buffer():
    assert HostBuffer(0, threads=1).bytes.numel() == 0


def test_memory_outlives_the_buffer_object():
    view = HostBuffer(8 << 20, threads=1).view(torch.float32)
    view.fill_(7.0)
    assert bool((view == 7.0).all())


def test_the_guard_sees_requested_and_allocated_bytes():
    calls = []
    memory = HostMemory(pin=False, threads=1, guard=lambda wanted, held: calls.append((wanted, held)))
    memory.allocate(100, transferred=True)
    memory.allocate(200, transferred=False)
    assert calls == [(100, 0), (200, 100)]
    assert memory.allocated_bytes == 300


def test_nothing_is_allocated_if_the_guard_refuses():
    def guard(wanted, held):
        if wanted + held > 100:
            raise MemoryError

    memory = HostMemory(pin=False, threads=1, guard=guard)
    memory.allocate(100, transferred=True)
    with pytest.raises(MemoryError):
        memory.allocate(1, transferred=True)
    assert memory.allocated_bytes == 100


class Driver:
    """Has only the functions of the CUDA runtime that PyTorch binds: `pin` must not call any other."""

    def __init__(self, code):
        self.code, self.registered = code, []

    def cudaHostRegister(self, address, nbytes, flags):
        self.registered.append((address, nbytes, flags))
        return self.code

    def cudaHostUnregister(self, address):
        self.registered = [entry for entry in self.registered if entry[0] != address]
        return 0


def test_pinning_registers_and_unregisters_the_exact_bytes(monkeypatch):
    driver = Driver(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    memory = HostMemory(pin=True, threads=1)
    memory.allocate(5000, transferred=False)
    assert memory.pin_seconds == 0
    buffer = memory.allocate(5000, transferred=True)
    assert buffer.pinned
    assert memory.pin_seconds > 0
    assert driver.registered == [(buffer.address, 5000, 0)]
    memory.unpin()
    assert not buffer.pinned
    assert driver.registered == []


def test_memory_stays_usable_if_pinning_is_refused(monkeypatch, caplog):
    """The driver's pending error code must be cleared, or the next kernel launch would report it."""
    launched = []

    class Launch:
        def fill_(self, value):
            launched.append(value)
            raise RuntimeError("CUDA error: operation not supported")

    real = torch.empty
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(1))
    monkeypatch.setattr(torch, "empty", lambda *size, **options: Launch() if options else real(*size))
    memory = HostMemory(pin=True, threads=1)
    buffer = memory.allocate(5000, transferred=True)
    assert not buffer.pinned
    assert not memory.pinning
    assert launched == [0]
    assert "staging ring" in caplog.text
    buffer.bytes.fill_(7)
    assert bool((buffer.bytes == 7).all())


def test_a_refusing_driver_is_called_once_and_announced(monkeypatch, caplog):
    requests = []

    def refuse(buffer):
        requests.append(buffer.nbytes)
        return False

    monkeypatch.setattr(HostBuffer, "pin", refuse)
    memory = HostMemory(pin=True, threads=1)
    memory.allocate(4096, transferred=False)
    assert requests == []
    first = memory.allocate(8192, transferred=True)
    memory.allocate(4096, transferred=True)
    assert requests == [8192]
    assert not first.pinned
    assert not memory.pinning
    assert caplog.text.count("refused to pin") == 1
