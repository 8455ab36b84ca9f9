from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import resource
import signal
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forked

from megatrain.native import disk, library

PAGE = 4096


@pytest.fixture
def pool(backend: str) -> Iterator[disk.Pool]:
    made = disk.Pool(4, backend)
    yield made
    assert made.stop()


@pytest.fixture
def file() -> Iterator[int]:
    with tempfile.TemporaryFile() as opened:
        yield opened.fileno()


def memory(nbytes: int, seed: int | None = None) -> torch.Tensor:
    """Page-aligned bytes, random with a seed."""
    made = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    if seed is not None:
        made.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return made


def pieces(file: int, lengths: list[int], start: int = 0) -> Any:
    made = (disk.Piece * len(lengths))()
    for piece, length in zip(made, lengths, strict=True):
        piece.file, piece.offset, piece.length = file, start, length
        start += length
    return made


def move(pool: disk.Pool, parts: Any, tensor: torch.Tensor, *, write: bool) -> None:
    pool.submit(parts, 0, len(parts), tensor.data_ptr(), write=write, keep=tensor).wait()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", 0xEF46DB3751D8E999),
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"abc", 0x44BC2CF5AD770999),
        (b"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
    ],
)
def test_the_checksum_is_xxh64(text: bytes, expected: int) -> None:
    # Values of the reference implementation with seed 0.
    held = bytearray(text or b"\0")
    tensor = torch.frombuffer(held, dtype=torch.uint8)
    assert disk.checksum(tensor.data_ptr(), len(text)) == expected


def test_every_byte_and_length_counts_in_the_checksum() -> None:
    tensor = memory(PAGE, seed=0)
    before = {length: disk.checksum(tensor.data_ptr(), length) for length in range(80)}
    assert len(set(before.values())) == 80
    for at in range(79):
        tensor[at] ^= 1
        assert disk.checksum(tensor.data_ptr(), 79) != before[79], at
        tensor[at] ^= 1


@pytest.mark.parametrize("lengths", [[PAGE], [PAGE, 5 * PAGE, 2 * PAGE], [1 << 20] * 9, [17, 4097]])
def test_what_is_written_is_read_back(pool: disk.Pool, file: int, lengths: list[int]) -> None:
    parts, source = pieces(file, lengths, start=PAGE), memory(sum(lengths), seed=1)
    move(pool, parts, source, write=True)
    target = memory(sum(lengths), seed=2)
    move(pool, parts, target, write=False)
    assert torch.equal(source, target)
    assert os.pread(file, lengths[0], PAGE) == bytes(source[: lengths[0]])


def test_a_part_of_the_pieces_can_be_moved(pool: disk.Pool, file: int) -> None:
    parts, source = pieces(file, [PAGE] * 4), memory(4 * PAGE, seed=1)
    move(pool, parts, source, write=True)
    target = memory(2 * PAGE)
    pool.submit(parts, 1, 2, target.data_ptr(), write=False, keep=target).wait()
    assert torch.equal(target, source[PAGE : 3 * PAGE])


def test_pieces_that_were_never_written_read_as_zeros(pool: disk.Pool, file: int) -> None:
    os.pwrite(file, b"\1" * 2 * PAGE, 0)
    target = memory(2 * PAGE, seed=3)
    move(pool, pieces(file, [PAGE, PAGE]), target, write=False)
    assert not target.any()


def test_a_transfer_of_nothing_is_done(pool: disk.Pool, file: int) -> None:
    pool.submit(pieces(file, [PAGE]), 0, 0, 0, write=False, keep=None).wait()


def test_transfers_of_several_threads_take_turns(pool: disk.Pool, file: int) -> None:
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            parts, source, target = (
                pieces(file, [PAGE] * 8, start=8 * PAGE * number),
                memory(8 * PAGE),
                memory(8 * PAGE),
            )
            for turn in range(20):
                source.fill_(turn * 7 + number)
                move(pool, parts, source, write=True)
                move(pool, parts, target, write=False)
                assert torch.equal(source, target)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def written(pool: disk.Pool, file: int, count: int = 3) -> tuple[Any, torch.Tensor]:
    parts, source = pieces(file, [PAGE] * count), memory(count * PAGE, seed=1)
    move(pool, parts, source, write=True)
    return parts, source


def fault(pool: disk.Pool, parts: Any, tensor: torch.Tensor, *, write: bool) -> tuple[int | None, int]:
    with pytest.raises(disk.TransferFailed) as caught:
        move(pool, parts, tensor, write=write)
    assert caught.value.file == parts[0].file
    return caught.value.errno, caught.value.offset


def test_a_flipped_bit_is_found(pool: disk.Pool, file: int) -> None:
    parts, source = written(pool, file)
    byte = os.pread(file, 1, PAGE + 99)
    os.pwrite(file, bytes([byte[0] ^ 4]), PAGE + 99)
    assert fault(pool, parts, source, write=False) == (errno.EBADMSG, PAGE)


def test_a_lost_write_is_found(pool: disk.Pool, file: int) -> None:
    parts, source = written(pool, file, 1)
    old = os.pread(file, PAGE, 0)
    move(pool, parts, source.add_(1), write=True)
    os.pwrite(file, old, 0)
    assert fault(pool, parts, source, write=False) == (errno.EBADMSG, 0)


def test_a_truncated_file_is_found(pool: disk.Pool, file: int) -> None:
    parts, source = written(pool, file)
    os.ftruncate(file, 2 * PAGE)
    assert fault(pool, parts, source, write=False) == (errno.ENODATA, 2 * PAGE)


@pytest.mark.parametrize("end", [0, 1, PAGE, PAGE + 1, 3 * PAGE - 1])
def test_a_piece_that_ends_early_is_missing(pool: disk.Pool, file: int, end: int) -> None:
    parts, source = pieces(file, [3 * PAGE]), memory(3 * PAGE, seed=1)
    move(pool, parts, source, write=True)
    os.ftruncate(file, end)
    assert fault(pool, parts, source, write=False) == (errno.ENODATA, 0)


def test_no_space_is_reported_with_its_offset(pool: disk.Pool, file: int) -> None:
    parts, source = written(pool, file)
    with open("/dev/full", "r+b", buffering=0) as full:
        os.dup2(full.fileno(), file)
    assert fault(pool, parts, source, write=True)[0] == errno.ENOSPC


def test_an_error_of_the_device_is_reported(pool: disk.Pool, file: int) -> None:
    parts, source = written(pool, file, 1)
    # Address 0 of a process cannot be read, which the kernel reports as EIO.
    with open("/proc/self/mem", "rb", buffering=0) as unreadable:
        os.dup2(unreadable.fileno(), file)
    assert fault(pool, parts, source, write=False) == (errno.EIO, 0)


def test_a_file_size_limit_ends_a_write_after_a_short_one(pool: disk.Pool, file: int) -> None:
    parts, source = pieces(file, [4 * PAGE]), memory(4 * PAGE, seed=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE + 100, before[1]))
    try:
        assert fault(pool, parts, source, write=True) == (errno.EFBIG, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    # A piece whose write failed cannot be mistaken for an older one.
    assert fault(pool, parts, source, write=False)[0] in (errno.EBADMSG, errno.ENODATA)


def test_the_pool_goes_on_after_a_fault(pool: disk.Pool, file: int) -> None:
    parts, source = written(pool, file)
    os.ftruncate(file, 0)
    fault(pool, parts, source, write=False)
    written(pool, file)


def test_stopping_cancels_what_has_not_started(backend: str, file: int) -> None:
    pool = disk.Pool(1, backend)
    parts, source = pieces(file, [1 << 20] * 64), memory(64 << 20)
    transfers = [pool.submit(parts, 0, 64, source.data_ptr(), write=True, keep=source) for _ in range(4)]
    assert pool.stop()
    codes = []
    for transfer in transfers:
        try:
            transfer.wait()
            codes.append(0)
        except disk.TransferFailed as error:
            codes.append(error.errno)
    assert codes[-1] == errno.ECANCELED


def test_many_transfers_at_once(pool: disk.Pool, file: int) -> None:
    parts, source = pieces(file, [PAGE] * 512), memory(512 * PAGE, seed=1)
    target = memory(512 * PAGE)
    for tensor, write in ((source, True), (target, False)):
        transfers = [
            pool.submit(parts, at, 1, tensor.data_ptr() + at * PAGE, write=write, keep=tensor) for at in range(512)
        ]
        assert [transfer.wait() for transfer in reversed(transfers)] == [PAGE] * 512
    assert torch.equal(source, target)


def test_forks_while_pieces_are_under_way(pool: disk.Pool, file: int) -> None:
    def mapped_rings() -> list[str]:
        with open("/proc/self/maps") as maps:
            return [line for line in maps if "io_uring" in line]

    parts, source, target = pieces(file, [1 << 18] * 64), memory(16 << 20, seed=1), memory(16 << 20)
    for turn in range(5):
        source[turn :: 1 << 18] ^= 255
        writing = pool.submit(parts, 0, 64, source.data_ptr(), write=True, keep=source)
        assert forked.run(mapped_rings).value == []
        assert writing.wait() == 16 << 20
        reading = pool.submit(parts, 0, 64, target.data_ptr(), write=False, keep=target)
        assert forked.run(os.getpid).raised is None
        assert reading.wait() == 16 << 20
        assert torch.equal(source, target)


def test_threads_receive_no_signals(pool: disk.Pool, file: int) -> None:
    written(pool, file)
    seen = 0
    for task in Path("/proc/self/task").iterdir():
        fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        if fields["Name"].strip() == "megatrain-disk":
            seen += 1
            assert int(fields["SigBlk"], 16) >> (signal.SIGINT - 1) & 1
            assert int(fields["SigBlk"], 16) >> (signal.SIGTERM - 1) & 1
    assert seen >= 2


class Model:
    """Pieces in two files, one of them with direct I/O, and what each must contain."""

    def __init__(self, seed: int) -> None:
        self.source = random.Random(seed)
        self.noise = memory(1 << 20, seed)
        with tempfile.TemporaryFile() as buffered:
            self.files = [os.dup(buffered.fileno())]
        try:
            self.files.append(os.open(tempfile.gettempdir(), os.O_RDWR | os.O_TMPFILE | os.O_DIRECT, 0o600))
        except OSError:
            self.files.append(os.dup(self.files[0]))
        self.parts = (disk.Piece * 64)()
        self.expected = []
        start = 0
        for number, part in enumerate(self.parts):
            direct = number % 2
            length = self.source.randrange(1, 40) * PAGE
            part.file, part.offset, part.length = self.files[direct], start, length
            part.length -= 0 if direct or number % 4 else self.source.randrange(PAGE)
            part.dtype = disk.FP32 if number % 3 == 0 and part.length % PAGE == 0 else 0
            start += length
            self.expected.append(torch.zeros(part.length, dtype=torch.uint8))

    def content(self, number: int) -> torch.Tensor:
        """New bytes for a piece. Those of pieces that are coded can be compressed."""
        length = self.parts[number].length
        at = self.source.randrange(len(self.noise) - length)
        made = self.noise[at : at + length].clone()
        if self.parts[number].dtype and self.source.random() < 0.8:
            made.view(-1, 4)[:, 2:] = self.source.randrange(256)
        return made

    def begin(self, pool: disk.Pool, first: int, count: int) -> tuple[disk.Transfer, range, torch.Tensor | None]:
        """Write or read some consecutive pieces: the transfer, their numbers, and the memory of a read."""
        numbers = range(first, first + count)
        held, write = memory(sum(self.parts[number].length for number in numbers), 0), self.source.random() < 0.5
        if write:
            for number in numbers:
                self.expected[number] = self.content(number)
            held.copy_(torch.cat([self.expected[number] for number in numbers]))
        transfer = pool.submit(self.parts, first, count, held.data_ptr(), write=write, keep=held)
        return transfer, numbers, None if write else held

    def close(self) -> None:
        for file in self.files:
            os.close(file)


@pytest.mark.parametrize("seed", range(2))
def test_random_transfers_agree_with_a_model(backend: str, seed: int) -> None:
    pool, model = disk.Pool(6, backend), Model(seed)
    coded = 0
    for _ in range(30):
        at, under_way = 0, []
        while at < 64:
            # The memory of the second piece of a transfer is aligned only if the first is whole pages.
            count = 2 if at + 2 <= 64 and model.parts[at].length % PAGE == 0 and model.source.random() < 0.5 else 1
            if model.source.random() < 0.9:
                under_way.append(model.begin(pool, at, count))
            at += count
        model.source.shuffle(under_way)
        for transfer, numbers, read in under_way:
            moved = transfer.wait()
            assert moved == sum(on_disk(model.parts[number]) for number in numbers)
            if read is not None:
                assert torch.equal(read, torch.cat([model.expected[number] for number in numbers]))
        coded += sum(part.written and part.stored < part.length for part in model.parts)
    assert pool.stop()
    assert coded > 0
    model.close()


def on_disk(part: Any) -> int:
    """The bytes of a piece in its file."""
    if not part.written:
        return 0
    return int(part.length if part.stored == part.length else -(-part.stored // PAGE) * PAGE)


def test_describes_file_systems(file: int) -> None:
    alignment = disk.describe(file).alignment
    assert alignment is None or all(size & (size - 1) == 0 for size in alignment)
    with open("/proc/self/status") as proc:
        assert disk.describe(proc.fileno()).magic == 0x9FA0


class InterruptedCalls:
    """The native library; Ctrl-C comes at the end of a call, before Python has used its result."""

    def __init__(self, name: str) -> None:
        self._name, self._library = name, library.load()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)

        def call(*args: Any) -> Any:
            function(*args)
            raise KeyboardInterrupt

        return call if name == self._name else function


@pytest.mark.parametrize("name", ["mt_disk_submit", "mt_disk_wait"])
def test_ctrl_c_leaves_memory_to_the_transfer_until_it_is_done(
    pool: disk.Pool, file: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Keep:
        pass

    parts, keep = pieces(file, [1 << 20] * 8), Keep()
    held, source = weakref.ref(keep), memory(8 << 20, seed=0)
    with monkeypatch.context() as patched:
        interrupted = InterruptedCalls(name)
        patched.setattr(library, "load", lambda: interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.submit(parts, 0, 8, source.data_ptr(), write=True, keep=keep).wait()
    del keep
    gc.collect()
    assert (held() is None) == (name == "mt_disk_wait"), "nobody knows when the transfer that was submitted is done"
    assert pool.stop()
