from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.errors import DiskFailed, EngineClosed
from megatrain.store.disk import DiskMemory, aligned
from megatrain.stream.disk_transfer import DiskTransfers
from megatrain.telemetry.counters import Counters


@pytest.mark.parametrize("error", [DiskFailed, EngineClosed, OSError])
@pytest.mark.parametrize("where", ["submit", "wait"])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_waits_for_the_other_transfers_of_its_request(
    tmp_path: Path, error: type[Exception], where: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They use memory that the caller may free."""
    memory = DiskMemory([tmp_path], allow_tmpfs=True)
    buffers = [memory.allocate(4 << 20, transferred=False) for _ in range(3)]
    submitted: list[Any] = []
    submit, wait = memory.submit, memory.wait

    def record(*args: Any, **options: Any) -> Any:
        if where == "submit" and len(submitted) == failing:
            raise error("submit")
        submitted.append(submit(*args, **options))
        return submitted[-1]

    def fail(transfer: Any, writes: int) -> int:
        if where == "wait" and submitted.index(transfer) == failing:
            wait(transfer, writes)
            raise error("wait")
        return wait(transfer, writes)

    monkeypatch.setattr(memory, "submit", record)
    monkeypatch.setattr(memory, "wait", fail)
    copies = [(aligned(buffer.nbytes), buffer) for buffer in buffers]
    with pytest.raises(error, match=where):
        DiskTransfers(Counters()).move("disk_out", "write states", "layers.0", copies)
    assert len(submitted) == (failing if where == "submit" else 3)
    assert not any(transfer._running for transfer in submitted)
    monkeypatch.undo()
    assert all(not buffer.read(0, 100).any() for buffer in buffers), "none is locked"
    memory.close()


def test_bytes_are_counted(tmp_path: Path) -> None:
    memory, counters = DiskMemory([tmp_path], allow_tmpfs=True), Counters()
    buffers = [memory.allocate(10_000, transferred=False) for _ in range(2)]
    copies = [(aligned(12_288).fill_(seed), buffer) for seed, buffer in enumerate(buffers, start=1)]
    transfers = DiskTransfers(counters)
    transfers.move("disk_out", "write states", "layers.0", copies)
    assert [torch.unique(buffer.read(0, 10_000)).tolist() for buffer in buffers] == [[1], [2]]
    assert counters.bytes_disk_out == 2 * 12_288
    transfers.move("disk_in", "read states", "layers.0", copies)
    assert counters.bytes_disk_in == 2 * 12_288
    memory.close()
