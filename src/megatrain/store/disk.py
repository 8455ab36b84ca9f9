"""The disk as a tier for state and for inputs of blocks: nameless files in the directories of
`offload_dir`, striped piece by piece.

A buffer on disk has no memory: its tensors are on the meta device, so that sizes, shapes and dtypes are those of a
buffer in RAM. `read`, `changing` and `transfer` move its bytes. Files are scratch: they are never synced, and they
vanish with the process, however it ends.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatrain.errors import DiskFailed, EngineClosed, MegaTrainError
from megatrain.geometry import ALIGN_BYTES, DISK_PIECE_BYTES, DISK_THREADS, disk_threads, round_up, transit_bytes
from megatrain.native import disk as native
from megatrain.store import forks
from megatrain.store.memory import Buffer
from megatrain.store.scratch import ScratchFile, open_scratch
from megatrain.store.uninterrupted import uninterrupted

PIECE_BYTES, THREADS = DISK_PIECE_BYTES, DISK_THREADS
STALLED_SECONDS = 1500.0
"""After this a drive counts as failed. It is less than the time after which a lane does (stream/lanes.py), whose error
says less."""
RELEASED = "the model was released from its engine, which freed what was on disk."
_stuck: list[object] = []
"""Memories whose threads hang in a system call: their files must stay open."""


class Space(NamedTuple):
    """Reserved bytes of a file, of which a piece may use fewer."""

    length: int
    offset: int
    file: int
    """The number of the file."""


class Access:
    """Transfers of one buffer: reads share it, a write has it alone. A piece that is half written has a wrong checksum.

    Lanes never conflict (store/ticket.py); users may read and write from other threads.
    """

    def __init__(self) -> None:
        """Ctrl-C must not reach who holds it: see `uninterrupted`."""
        self._changed = threading.Condition()
        self._active = 0
        """The number of reads; -1 during a write."""
        self._writers = 0
        """Writes that wait. New reads wait for them: otherwise a write might never begin."""

    @contextmanager
    def __call__(self, *, write: bool) -> Iterator[None]:
        entered = -1 if write else 1
        with self._changed:
            self._writers += write
            self._changed.wait_for(lambda: not self._active if write else self._active >= 0 and not self._writers)
            self._writers -= write
            self._active += entered
        try:
            yield
        finally:
            with self._changed:
                self._active -= entered
                self._changed.notify_all()


class DiskBuffer(Buffer):
    """Bytes on disk, in pieces."""

    def __init__(self, nbytes: int, memory: DiskMemory, pieces: Any, spaces: Sequence[Space], inputs: bool) -> None:
        super().__init__(torch.empty(nbytes, dtype=torch.uint8, device="meta"), pinned=False)
        self._memory, self._pieces = memory, pieces
        self.spaces, self.inputs = spaces, inputs
        self.access = Access()
        self._changes = threading.RLock()
        """Held from the read to the write of a change: ranges that are changed at once may share a piece."""
        self._constant = False

    @property
    def coded(self) -> bool:
        return len(self._pieces) > 0 and self._pieces[0].dtype != 0

    def span(self, nbytes: int) -> int:
        """The length of the pieces that hold the first `nbytes`: what a transfer of them moves."""
        return sum(piece.length for piece in self._pieces[: -(-nbytes // PIECE_BYTES)])

    def transfer(self, address: int, *, write: bool, keep: object, nbytes: int | None = None) -> native.Transfer:
        """Submit a read of the buffer into memory, or a write from it; `ALIGN_BYTES` aligned and padded. With `nbytes`,
        only the pieces that hold so many. Hold its `access` until `wait` is done."""
        count = -(-(self.nbytes if nbytes is None else nbytes) // PIECE_BYTES)
        return self._memory.submit(self._pieces, 0, count, address, write=write, keep=keep)

    def commit(self, sign: int) -> None:
        """Count a write of the whole buffer before it begins; -1: it will not take place."""
        self._memory.commit(sign * round_up(self.nbytes, ALIGN_BYTES))

    def wait(self, transfer: native.Transfer, *, write: bool) -> int:
        """Wait for a transfer by `transfer`; raise `DiskFailed` if it failed. Returns the bytes that moved."""
        return self._memory.wait(transfer, round_up(self.nbytes, ALIGN_BYTES) if write and not self.inputs else 0)

    def set_constant(self, constant: bool) -> None:
        self._memory.constant_bytes += round_up(self.nbytes, ALIGN_BYTES) * (constant - self._constant)
        self._constant = constant

    def holds_fp32(self) -> None:
        """Code the bytes from now on, if this memory does."""
        if self._memory.ratio is not None and len(self._pieces) and not self.coded:
            self._memory.coded_bytes += round_up(self.nbytes, ALIGN_BYTES)
            for piece in self._pieces:
                piece.dtype = native.FP32

    def read(self, start: int, end: int) -> torch.Tensor:
        """A copy of the bytes, in host memory."""
        self._memory.require_owner()
        first, count, base, held = self._covering(start, end)
        self._move(first, count, held, write=False)
        return held[start - base : end - base]

    @contextmanager
    def changing(self, start: int, end: int) -> Iterator[torch.Tensor]:
        self._memory.require_owner()
        with self._changes:
            first, count, base, held = self._covering(start, end)
            self._move(first, count, held, write=False)
            yield held[start - base : end - base]
            self._move(first, count, held, write=True)

    def zero(self, start: int, end: int) -> None:
        """Fill with zeros. Pieces that become zero as a whole need no I/O."""
        for number in range(start // PIECE_BYTES, -(-end // PIECE_BYTES) if start < end else 0):
            begin, piece = number * PIECE_BYTES, self._pieces[number]
            stop = min(begin + PIECE_BYTES, self.nbytes)
            if start <= begin and stop <= end:
                piece.written = 0
            elif piece.written:
                with self.changing(max(start, begin), min(end, stop)) as part:
                    part.zero_()

    def _covering(self, start: int, end: int) -> tuple[int, int, int, torch.Tensor]:
        """The pieces that hold a range: the first, their number, where they start, and memory for them."""
        first = start // PIECE_BYTES
        count = max(0, -(-end // PIECE_BYTES) - first)
        nbytes = sum(piece.length for piece in self._pieces[first : first + count])
        return first, count, first * PIECE_BYTES, aligned(nbytes)

    def _move(self, first: int, count: int, held: torch.Tensor, *, write: bool) -> None:
        def work() -> None:
            with self.access(write=write):
                transfer = self._memory.submit(self._pieces, first, count, held.data_ptr(), write=write, keep=held)
                self._memory.commit(held.nbytes if write else 0)
                self._memory.wait(transfer, held.nbytes if write else 0)

        uninterrupted(work)


class DiskMemory:
    """Scratch files in one or several directories, and the threads that read and write them."""

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        *,
        allow_tmpfs: bool = False,
        ratio: float | None = None,
        backend: str = "threads",
    ) -> None:
        self.tier = "disk"
        self.allocated_bytes = self.padded_bytes = 0
        self.written_bytes = 0
        """Bytes written since the start; what wears the drive."""
        self.covered_bytes = 0
        """Bytes of states that these writes hold: more than were written if some are coded."""
        self._committed_bytes = 0
        """The same of all writes that were submitted."""
        self.ratio = ratio
        """Expected size of coded FP32 numbers, as a share; None: they are not coded."""
        self.coded_bytes = 0
        """What of `padded_bytes` is coded."""
        self.constant_bytes = 0
        """What of `padded_bytes` no step writes: frozen weights and their residuals."""
        self.input_bytes = 0
        """What of `written_bytes` was for inputs of blocks."""
        self.owner = forks.Owner()
        self.files: list[ScratchFile] = []
        self._freed: dict[int, list[Space]] = {number: [] for number in range(len(directories))}
        """By file: space that no buffer uses, in order of length."""
        self._next = 0
        self._stalled: DiskFailed | None = None
        self._lock = threading.Lock()
        self._pool = native.Pool(disk_threads(len(directories)), backend)
        self._close = weakref.finalize(self, _close, self._pool, self.files, self.owner)
        for directory in directories:
            self.files.append(open_scratch(Path(directory), allow_tmpfs))
            forks.close_in_child(self.files[-1])

    @property
    def transit_bytes(self) -> int:
        """The most RAM that transfers take: page cache, which direct I/O does not use, and memory for coded pieces."""
        return transit_bytes([file.direct for file in self.files], coded=self.ratio is not None)

    def require_owner(self) -> None:
        """Raise in a forked child. There, locks may be held by threads that do not exist."""
        self.owner.require("read or write its state on disk")

    def require(self, nbytes: int, what: str = "states") -> None:
        """Raise `DiskFull` unless the file systems have room for this much more."""
        if not nbytes:
            return
        share = round_up(-(-nbytes // len(self.files)), PIECE_BYTES)
        sharing = Counter(file.device for file in self.files)
        for file in self.files:
            file.require(share * sharing[file.device], what)

    def allocate(self, nbytes: int, *, transferred: bool, inputs: bool = False) -> DiskBuffer:
        """Reserved space that reads as zeros. `inputs`: it is for inputs of blocks, which are not part of what a step
        changes; `count_input` counts their writes."""
        self.owner.require("give its model more memory")
        padded, what = round_up(nbytes, ALIGN_BYTES), "inputs of blocks" if inputs else "states"
        freed = sum(space.length for spaces in self._freed.values() for space in spaces)
        # A number that is out of the question, before there is an object for every piece.
        self.require(max(0, nbytes - freed), what)
        pieces: Any = (native.Piece * -(-padded // PIECE_BYTES))()
        for number, piece in enumerate(pieces):
            piece.length = min(PIECE_BYTES, padded - number * PIECE_BYTES)
        with self._lock:
            spaces = self._reserve([piece.length for piece in pieces], what)
            self.allocated_bytes += nbytes
            self.padded_bytes += 0 if inputs else padded
        for piece, space in zip(pieces, spaces, strict=True):
            piece.file, piece.offset = self.files[space.file].descriptor, space.offset
        return DiskBuffer(nbytes, self, pieces, spaces, inputs)

    def free(self, buffer: DiskBuffer) -> None:
        """Give the space to later buffers. The files keep it until they are closed."""
        padded = round_up(buffer.nbytes, ALIGN_BYTES)
        buffer.set_constant(False)
        with self._lock:
            self.allocated_bytes -= buffer.nbytes
            self.padded_bytes -= 0 if buffer.inputs else padded
            self.coded_bytes -= padded if buffer.coded else 0
            self._give_back(buffer.spaces)

    def _reserve(self, lengths: Sequence[int], what: str) -> list[Space]:
        """Space for pieces of these lengths, in turn in every file: what was freed there, else more of it."""
        turns = [(self._next + number) % len(self.files) for number in range(len(lengths))]
        found = [self._take(file, length) for file, length in zip(turns, lengths, strict=True)]
        missing = [number for number, space in enumerate(found) if space is None]
        try:
            self.require(sum(lengths[number] for number in missing), what)
            for number in missing:
                length, file = lengths[number], turns[number]
                found[number] = Space(length, self.files[file].place(length), file)
            for each in self.files:
                each.reserve(what)
        except BaseException:
            self._give_back([space for space in found if space is not None])
            raise
        self._next = (self._next + len(lengths)) % len(self.files)
        return [space for space in found if space is not None]

    def _take(self, file: int, length: int) -> Space | None:
        """The smallest freed space of a file that is long enough."""
        freed = self._freed[file]
        at = bisect_left(freed, length, key=lambda space: space.length)
        return freed.pop(at) if at < len(freed) else None

    def _give_back(self, spaces: Sequence[Space]) -> None:
        for space in spaces:
            # A file that could not be extended is as long as before.
            if space.offset + space.length <= self.files[space.file].end:
                insort(self._freed[space.file], space)

    def count_input(self, nbytes: int) -> None:
        """Count a write of an input. When it is submitted, so that `written_bytes` does not depend on timing."""
        with self._lock:
            self.written_bytes += nbytes
            self.input_bytes += nbytes

    def commit(self, nbytes: int) -> None:
        """Count a write of states when it is submitted; less than 0: one that will not take place."""
        with self._lock:
            self._committed_bytes += nbytes

    @property
    def settled_bytes(self) -> int:
        """`written_bytes` once all submitted writes are complete; estimated if states are coded."""
        with self._lock:
            missing = self._committed_bytes - self.covered_bytes
            return self.written_bytes + missing * self.step_bytes // max(1, self.changing_bytes)

    def submit(
        self, pieces: Any, first: int, count: int, address: int, *, write: bool, keep: object
    ) -> native.Transfer:
        self.require_owner()
        if self._stalled is not None:
            raise DiskFailed(str(self._stalled))
        try:
            return self._pool.submit(pieces, first, count, address, write=write, keep=(keep, self))
        except OSError as error:
            raise EngineClosed(RELEASED) if error.errno == errno.ECANCELED else error from None

    def wait(self, transfer: native.Transfer, writes: int) -> int:
        """Wait for a transfer that writes this many bytes of states, or reads; raise `DiskFailed` if it failed.

        Returns the bytes that moved.
        """
        try:
            moved = transfer.wait(STALLED_SECONDS if self._stalled is None else 0.0)
        except native.TransferFailed as fault:
            raise self._failed(fault) from fault
        except native.Stalled:
            folders = " or ".join(dict.fromkeys(str(file.directory) for file in self.files))
            self._stalled = self._stalled or DiskFailed(
                f"no answer for {STALLED_SECONDS:.0f} s from the scratch file in {folders}: check the drive (dmesg, "
                "smartctl) or the network."
            )
            raise DiskFailed(str(self._stalled)) from None
        if writes:
            with self._lock:
                self.written_bytes += moved
                self.covered_bytes += writes
        return moved

    @property
    def step_bytes(self) -> int:
        """Bytes that writing everything once writes; estimated for what is coded."""
        saved = 0 if self.ratio is None else self.coded_bytes * (1 - self.ratio)
        return self.changing_bytes - int(saved)

    @property
    def changing_bytes(self) -> int:
        """Bytes that a step changes, before they are coded."""
        return self.padded_bytes - self.constant_bytes

    def close(self) -> None:
        """End the threads and close the files, which frees their space."""
        self._close()

    def _failed(self, fault: native.TransferFailed) -> MegaTrainError:
        if fault.errno == errno.ECANCELED:
            return EngineClosed(RELEASED)
        where = next((str(file.directory) for file in self.files if file.descriptor == fault.file), "offload_dir")
        place = f"the scratch file in {where}, at offset {fault.offset:,}"
        if fault.errno == errno.EBADMSG:
            return DiskFailed(
                f"what was read back from {place}, is not what was written there (wrong checksum): the drive, its "
                "cable or RAM is faulty; check them."
            )
        if fault.errno == errno.ENODATA:
            return DiskFailed(f"bytes are missing in {place}: the file was truncated; find out what did that.")
        if fault.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return DiskFailed(f"{fault.strerror} in {place}: free space, or raise the quota or file size limit.")
        return DiskFailed(f"{fault.strerror} (errno {fault.errno}) in {place}: check the drive (dmesg, smartctl).")


def aligned(nbytes: int) -> torch.Tensor:
    """Memory for direct I/O. A shared mapping: pages of private ones could be copied by a fork during a read."""
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]


def _close(pool: native.Pool, files: Sequence[ScratchFile], owner: forks.Owner) -> None:
    if not owner.is_current:
        return
    if not pool.stop():
        _stuck.append((pool, files))
        return
    for file in files:
        file.close()
