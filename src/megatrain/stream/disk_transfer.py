"""Transfers between RAM and disk, on the lanes that submit them; the first failure stops training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from megatrain.errors import DiskFailed
from megatrain.native.disk import Transfer
from megatrain.store.disk import DiskBuffer
from megatrain.store.memory import Buffer
from megatrain.store.uninterrupted import uninterrupted
from megatrain.telemetry.counters import Counters


class DiskTransfers:
    """Moves bytes between RAM and disk, counts them, and describes failures."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.progress: object = ""
        """Its text says which parts of the model have taken the step that is being submitted (optim/schedule.py)."""
        self.failed: DiskFailed | None = None
        """The first failure. Some parts of the model may have taken a step that others have not."""

    def commit(self, copies: Sequence[tuple[torch.Tensor, Buffer]], sign: int = 1) -> None:
        """Count writes when they are submitted; -1: they will not take place."""
        for _, buffer in copies:
            assert isinstance(buffer, DiskBuffer)
            buffer.commit(sign)

    def move(
        self, lane: str, job: str, name: str, copies: Sequence[tuple[torch.Tensor, Buffer]], progress: object = None
    ) -> None:
        """Read or write buffers, as the first word of `job` says, and wait. `copies`: memory and buffer of each; of a
        longer buffer, as much as the memory holds. `name`: of the part of the model. `progress`: that of the step which
        this belongs to; None: it moves no state, so a failure leaves the model as it is."""
        verb, what = job.split()
        try:
            moved = uninterrupted(lambda: _transfer(copies, write=verb == "write"))
        except DiskFailed as error:
            done = {"read": "read", "write": "written"}[verb]
            unchanged = "No weight or state was changed by this." if progress is None else progress
            said = f"the {what} of {name} could not be {done} (lane {lane}): {error} {unchanged}"
            if progress is not None:
                self.failed = self.failed or DiskFailed(said)
            raise DiskFailed(said) from error
        if verb == "write":
            self._counters.bytes_disk_out += moved
        else:
            self._counters.bytes_disk_in += moved


def _transfer(copies: Sequence[tuple[torch.Tensor, Buffer]], *, write: bool) -> int:
    """Returns the bytes that moved, which are fewer if some are coded."""
    moved = 0

    def finish(buffer: DiskBuffer, transfer: Transfer) -> None:
        nonlocal moved
        moved += buffer.wait(transfer, write=write)

    # Its end waits for all that were submitted, also if one fails: they use the memory until they are done.
    with ExitStack() as held:
        for memory, buffer in copies:
            assert isinstance(buffer, DiskBuffer)
            held.enter_context(buffer.access(write=write))
            nbytes = min(memory.nbytes, buffer.nbytes)
            transfer = buffer.transfer(memory.data_ptr(), write=write, keep=memory, nbytes=nbytes)
            held.callback(finish, buffer, transfer)
    return moved
