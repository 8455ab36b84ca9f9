from __future__ import annotations

import contextlib
import errno
import gc
import linecache
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import _base as futures
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests import forked
from tests.unit.native.test_library import resident_pages

from megatrain.errors import DiskFailed, DiskFull, EngineClosed, SettingsError
from megatrain.store import disk, scratch, uninterrupted
from megatrain.store.disk import PIECE_BYTES, DiskMemory


@pytest.fixture
def memory(tmp_path: Path, backend: str) -> Iterator[DiskMemory]:
    made = DiskMemory([tmp_path / "a", tmp_path / "b"], allow_tmpfs=True, backend=backend)
    yield made
    made.close()


def descriptors() -> set[str]:
    return {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def filled(buffer: disk.DiskBuffer, seed: int = 0) -> torch.Tensor:
    values = torch.randint(0, 256, (buffer.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    with buffer.changing(0, buffer.nbytes) as held:
        held.copy_(values)
    return values


@pytest.mark.parametrize("nbytes", [1, 4096, 5000, PIECE_BYTES, 2 * PIECE_BYTES + 12_345])
def test_bytes_come_back(memory: DiskMemory, nbytes: int) -> None:
    buffer = memory.allocate(nbytes, transferred=False)
    assert buffer.nbytes == nbytes
    assert buffer.bytes.is_meta
    assert not buffer.read(0, nbytes).any()
    values = filled(buffer)
    assert torch.equal(buffer.read(0, nbytes), values)


def test_ranges_are_read_and_changed_alone(memory: DiskMemory) -> None:
    before, buffer, after = (memory.allocate(3 * PIECE_BYTES + 100, transferred=False) for _ in range(3))
    others, values = [filled(before, 1), filled(after, 2)], filled(buffer)
    for start, end in [(0, 1), (PIECE_BYTES - 3, PIECE_BYTES + 5), (17, 3 * PIECE_BYTES + 99), (100, 100)]:
        assert torch.equal(buffer.read(start, end), values[start:end])
        with buffer.changing(start, end) as part:
            part.add_(3)
        values[start:end] += 3
        assert torch.equal(buffer.read(0, buffer.nbytes), values)
    assert torch.equal(before.read(0, before.nbytes), others[0])
    assert torch.equal(after.read(0, after.nbytes), others[1])


def test_threads_may_read_and_change_one_piece(memory: DiskMemory) -> None:
    """As with memory: every change is kept, and nothing that is half written is read."""
    buffer = memory.allocate(PIECE_BYTES, transferred=False)
    half, rounds = PIECE_BYTES // 2, 20

    def change(start: int) -> None:
        for _ in range(rounds):
            with buffer.changing(start, start + half) as part:
                part.add_(1)

    with ThreadPoolExecutor(3) as threads:
        changes = [threads.submit(change, start) for start in (0, half)]
        reads = threads.submit(
            lambda: [buffer.read(0, PIECE_BYTES).view(2, half).aminmax(dim=1) for _ in range(rounds)]
        )
    assert [done.result() for done in changes] == [None, None]
    assert all(torch.equal(*values) for values in reads.result())
    assert (buffer.read(0, PIECE_BYTES) == rounds).all()


class Interrupter:
    """Raises KeyboardInterrupt at one of the points of some work in Python: before a line, or before a return."""

    FILES = frozenset({disk.__file__, uninterrupted.__file__, contextlib.__file__, futures.__file__})

    def __init__(self, point: int) -> None:
        self._point, self.points = point, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self.FILES:
            return None
        # The end of a `with` is its first line again, where a signal could not arrive before its lock is released.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "return" or (event == "line" and not line.startswith("with ")):
            self.points += 1
            if self.points == self._point:
                raise KeyboardInterrupt
        return self

    def run(self, work: Callable[[], object]) -> BaseException | None:
        sys.settrace(self)
        try:
            work()
        except KeyboardInterrupt as interrupt:
            # Its traceback keeps frames alive, as `sys.last_traceback` does in a notebook.
            return interrupt
        finally:
            sys.settrace(None)
        return None


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_ctrl_c_at_any_point_leaves_a_buffer_that_others_can_use(memory: DiskMemory, write: bool) -> None:
    buffer = memory.allocate(20_000, transferred=False)
    filled(buffer)

    def change() -> None:
        with buffer.changing(0, 10_000) as part:
            part.add_(1)

    def transfer() -> None:
        """As lanes do."""
        for direction in (True, False):
            with buffer.access(write=direction):
                buffer.wait(buffer.transfer(held.data_ptr(), write=direction, keep=held), write=direction)

    held = disk.aligned(20_480)
    work = change if write else lambda: buffer.read(0, 20_000)
    whole = Interrupter(0)
    whole.run(work)
    assert whole.points > 20
    with ThreadPoolExecutor(1) as lane:
        for point in range(1, whole.points + 1):
            interrupt = Interrupter(point).run(work)
            lane.submit(transfer).result(timeout=300)
            change()
            del interrupt


def test_pieces_are_striped_over_the_directories(memory: DiskMemory) -> None:
    buffer: Any = memory.allocate(4 * PIECE_BYTES, transferred=False)
    files = [piece.file for piece in buffer._pieces]
    assert files == [memory.files[0].descriptor, memory.files[1].descriptor] * 2
    small: list[Any] = [memory.allocate(4096, transferred=False) for _ in range(4)]
    assert len({piece.file for each in small for piece in each._pieces}) == 2


def test_zeroing_whole_pieces_writes_nothing(memory: DiskMemory) -> None:
    buffer = memory.allocate(2 * PIECE_BYTES + 10, transferred=False)
    values = filled(buffer)
    before = memory.written_bytes
    buffer.zero(PIECE_BYTES, buffer.nbytes)
    assert memory.written_bytes == before
    values[PIECE_BYTES:] = 0
    assert torch.equal(buffer.read(0, buffer.nbytes), values)
    buffer.zero(5, 9)
    buffer.zero(9, 9)
    values[5:9] = 0
    assert torch.equal(buffer.read(0, buffer.nbytes), values)
    assert memory.written_bytes == before + PIECE_BYTES


def ends(memory: DiskMemory) -> list[int]:
    return [file.end for file in memory.files]


def test_freed_space_is_used_again_and_reads_as_zeros(memory: DiskMemory) -> None:
    sizes = [2 * PIECE_BYTES + 5000, PIECE_BYTES, 4096, 9000]
    first = [memory.allocate(nbytes, transferred=False) for nbytes in sizes]
    kept, before = filled(first[1]), ends(memory)
    for number in (0, 2, 3):
        filled(first[number])
        memory.free(first[number])
    assert memory.allocated_bytes == PIECE_BYTES
    second = [memory.allocate(nbytes, transferred=False) for nbytes in (sizes[0], 4096, 8192)]
    for buffer in second:
        assert not buffer.read(0, buffer.nbytes).any()
    values = [filled(buffer, seed) for seed, buffer in enumerate(second)]
    for buffer, expected in zip([first[1], *second], [kept, *values], strict=True):
        assert torch.equal(buffer.read(0, buffer.nbytes), expected)
    assert sum(ends(memory)) - sum(before) <= 2 * PIECE_BYTES


def test_space_does_not_leak_when_it_is_freed_and_used_again(memory: DiskMemory) -> None:
    """Also if sizes differ: a short piece takes the place of a long one, which is whole again when it is freed."""
    for nbytes in (3 * PIECE_BYTES, 3 * PIECE_BYTES):
        memory.free(memory.allocate(nbytes, transferred=False))
    before = ends(memory)
    for nbytes in range(1, 3 * PIECE_BYTES, 777_777):
        buffers = [memory.allocate(nbytes // 2, transferred=False) for _ in range(2)]
        for buffer in buffers:
            memory.free(buffer)
    memory.free(memory.allocate(3 * PIECE_BYTES, transferred=False))
    assert ends(memory) == before


def test_a_full_drive_has_room_for_what_was_freed(memory: DiskMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    for buffer in [memory.allocate(PIECE_BYTES, transferred=False) for _ in range(4)]:
        memory.free(buffer)
    monkeypatch.setattr(scratch, "KEPT_FREE", 1 << 62)
    memory.allocate(4 * PIECE_BYTES, transferred=False)
    with pytest.raises(DiskFull):
        memory.allocate(1, transferred=False)


def test_space_that_is_used_again_is_striped(memory: DiskMemory) -> None:
    for _ in range(2):
        buffer: Any = memory.allocate(4 * PIECE_BYTES, transferred=False)
        assert len({piece.file for piece in buffer._pieces[:2]}) == len({p.file for p in buffer._pieces[2:]}) == 2
        memory.free(buffer)


def test_a_refused_allocation_gives_its_space_back(memory: DiskMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.free(memory.allocate(2 * PIECE_BYTES, transferred=False))
    before, fallocate = ends(memory), scratch.native.reserve

    def full(descriptor: int, *more: int) -> None:
        if descriptor == memory.files[1].descriptor:
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(descriptor, *more)

    monkeypatch.setattr(scratch.native, "reserve", full)
    with pytest.raises(DiskFull, match=r"GB for states could not be reserved in .*b \(No space left"):
        memory.allocate(6 * PIECE_BYTES, transferred=False)
    assert memory.allocated_bytes == memory.padded_bytes == 0
    monkeypatch.undo()
    buffer = memory.allocate(6 * PIECE_BYTES, transferred=False)
    assert torch.equal(filled(buffer), buffer.read(0, buffer.nbytes))
    assert ends(memory) == [before[0] + 2 * PIECE_BYTES, before[1] + 2 * PIECE_BYTES]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO])
def test_a_drive_that_cannot_reserve_is_named(memory: DiskMemory, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(descriptor: int, *more: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(scratch.native, "reserve", failing)
    with pytest.raises(DiskFailed, match=rf"could not be reserved in .*a \({os.strerror(code)}\): check the drive"):
        memory.allocate(100, transferred=False)


def test_part_of_a_buffer_moves(memory: DiskMemory) -> None:
    buffer = memory.allocate(2 * PIECE_BYTES + 100, transferred=False)
    values = filled(buffer)
    held = disk.aligned(PIECE_BYTES)
    held.fill_(7)
    assert [buffer.span(n) for n in (0, 1, PIECE_BYTES + 1, buffer.nbytes)] == [
        0, PIECE_BYTES, 2 * PIECE_BYTES, 2 * PIECE_BYTES + 4096,
    ]  # fmt: skip
    moved = buffer.wait(buffer.transfer(held.data_ptr(), write=True, keep=held, nbytes=100), write=True)
    assert moved == PIECE_BYTES
    assert (buffer.read(0, PIECE_BYTES) == 7).all()
    assert torch.equal(buffer.read(PIECE_BYTES, buffer.nbytes), values[PIECE_BYTES:])


def test_the_files_have_no_names_and_are_closed(tmp_path: Path) -> None:
    memory = DiskMemory([tmp_path], allow_tmpfs=True)
    filled(memory.allocate(1 << 20, transferred=False))
    assert list(tmp_path.iterdir()) == []
    assert any(str(tmp_path) in name for name in descriptors())
    memory.close()
    memory.close()
    assert not any(str(tmp_path) in name for name in descriptors())


def test_the_files_are_closed_with_the_last_buffer(tmp_path: Path) -> None:
    buffer = DiskMemory([tmp_path], allow_tmpfs=True).allocate(100, transferred=False)
    gc.collect()
    assert torch.equal(buffer.read(0, 100), torch.zeros(100, dtype=torch.uint8))
    del buffer
    gc.collect()
    assert not any(str(tmp_path) in name for name in descriptors())


def test_without_nameless_files_they_are_unlinked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def without_tmpfile(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE here")
        return plain(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", without_tmpfile)
    memory = DiskMemory([tmp_path], allow_tmpfs=True)
    buffer = memory.allocate(100, transferred=False)
    values = filled(buffer)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(buffer.read(0, 100), values)
    memory.close()


@pytest.fixture
def without_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def without_direct(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return plain(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", without_direct)


@pytest.mark.usefixtures("without_direct_io")
def test_without_direct_io_nothing_stays_in_the_page_cache(tmp_path: Path, backend: str) -> None:
    memory = DiskMemory([tmp_path], allow_tmpfs=True, backend=backend)
    if memory.files[0].kind.magic in scratch.MEMORY_SYSTEMS:
        pytest.skip(f"{tmp_path} is in RAM")
    assert memory.transit_bytes == disk.THREADS * PIECE_BYTES
    buffer: Any = memory.allocate(3 * PIECE_BYTES, transferred=False)
    held = disk.aligned(buffer.nbytes)
    mapping = mmap.mmap(memory.files[0].descriptor, buffer.nbytes)
    for write in (True, False, True):
        buffer.wait(buffer.transfer(held.data_ptr(), write=write, keep=held), write=write)
        assert resident_pages(mapping, buffer.nbytes) == 0
    mapping.close()
    memory.close()


def test_direct_io_uses_no_page_cache(memory: DiskMemory) -> None:
    if not all(file.direct for file in memory.files):
        pytest.skip("no direct I/O here")
    assert memory.transit_bytes == 0


@pytest.mark.usefixtures("without_direct_io")
def test_without_direct_io_a_warning_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        memory = DiskMemory([tmp_path], allow_tmpfs=True)
        buffer = memory.allocate(10_000, transferred=False)
        values = filled(buffer)
        assert torch.equal(buffer.read(0, 10_000), values)
        memory.close()
    assert caplog.text.count("does not support direct I/O") == 1


def test_memory_is_refused_as_a_disk() -> None:
    if scratch.native.describe(os.open("/dev/shm", os.O_RDONLY)).magic not in scratch.MEMORY_SYSTEMS:
        pytest.skip("/dev/shm is no tmpfs here")
    with (
        pytest.raises(SettingsError, match="is on tmpfs, which is RAM"),
        tempfile.TemporaryDirectory(dir="/dev/shm") as d,
    ):
        DiskMemory([d])


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"offload_dir=.*file.* cannot be used"):
        DiskMemory([tmp_path / "file"])


def test_more_than_is_free_is_refused_with_the_numbers(memory: DiskMemory) -> None:
    with pytest.raises(DiskFull, match=r"states need 1.15e\+09 GB in .*, but only .* GB are free"):
        memory.require(1 << 60)
    with pytest.raises(DiskFull, match="GB are free"):
        memory.allocate(1 << 50, transferred=False)
    # The failed allocation does not count.
    filled(memory.allocate(4096, transferred=False))


def test_damage_is_reported_with_file_and_offset(tmp_path: Path) -> None:
    memory = DiskMemory([tmp_path], allow_tmpfs=True)
    buffer = memory.allocate(2 * PIECE_BYTES, transferred=False)
    filled(buffer)
    with open(f"/proc/self/fd/{memory.files[0].descriptor}", "r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, PIECE_BYTES + 5)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), PIECE_BYTES + 5)
    with pytest.raises(DiskFailed, match=rf"the scratch file in {tmp_path}, at offset 8,388,608, .*wrong checksum"):
        buffer.read(0, buffer.nbytes)
    # The first piece is intact.
    buffer.read(0, PIECE_BYTES)
    memory.close()


def test_children_close_the_files_and_do_not_use_them(memory: DiskMemory, tmp_path: Path) -> None:
    buffer = memory.allocate(10_000, transferred=False)
    values = filled(buffer)
    assert forked.run(lambda: [name for name in descriptors() if str(tmp_path) in name]).value == []
    with buffer.access(write=True):
        # As if another thread were writing.
        for work in (lambda: buffer.read(0, 10), lambda: buffer.zero(0, 10)):
            ended = forked.run(work)
            assert ended.raised is not None
            assert ended.raised[0] == "ForkedProcess"
    assert forked.run(memory.close).raised is None
    assert torch.equal(buffer.read(0, 10_000), values)


def test_directories_on_one_drive_share_its_space(memory: DiskMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [*os.statvfs("/")]
    # Bytes per block, and free blocks.
    fields[1], fields[4] = 1, 10 * PIECE_BYTES + scratch.KEPT_FREE
    monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs_result(fields))
    memory.require(10 * PIECE_BYTES)
    with pytest.raises(DiskFull, match=r"states need 0.101 GB in .*/a, but only 0.151 GB are free"):
        memory.require(11 * PIECE_BYTES)


def test_a_full_drive_does_not_matter_if_nothing_is_needed(memory: DiskMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = list(os.statvfs("/"))
    fields[4] = 0
    monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs_result(fields))
    memory.require(0)
    assert memory.allocate(0, transferred=False).read(0, 0).numel() == 0


def test_a_file_that_cannot_be_used_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SettingsError, match="cannot be used: no space"):
        DiskMemory([tmp_path], allow_tmpfs=True)
    assert not any(str(tmp_path) in name for name in descriptors())


def test_a_thread_that_reads_while_the_files_are_closed_is_refused(tmp_path: Path) -> None:
    for _ in range(30):
        memory = DiskMemory([tmp_path], allow_tmpfs=True)
        buffer = memory.allocate(1 << 16, transferred=False)
        with ThreadPoolExecutor(1) as threads:

            def read() -> None:
                while True:
                    buffer.read(0, 1 << 16)  # noqa: B023

            reading = threads.submit(read)
            memory.close()
            with pytest.raises((EngineClosed, DiskFailed)):
                reading.result()
