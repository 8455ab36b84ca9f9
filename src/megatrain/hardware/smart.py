"""What an NVMe drive reports about its own wear: the SMART / health log, read with an ioctl, which needs root."""

from __future__ import annotations

import fcntl
import os
import re
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ADMIN_COMMAND = 0xC0484E41
"""NVME_IOCTL_ADMIN_CMD of linux/nvme_ioctl.h."""
GET_LOG_PAGE, HEALTH_LOG, LOG_BYTES, EVERY_NAMESPACE = 0x02, 0x02, 512, 0xFFFFFFFF
UNIT_BYTES = 512_000
"""The log counts writes in thousands of 512-byte units."""
MIN_PERCENT = 5
"""Below this, a rating from a whole percentage would be off by more than a tenth."""


COMMAND = struct.Struct("=BBHI2IQQIII5III")
"""struct nvme_admin_cmd: opcode, flags, reserved, namespace, two words, metadata, address, length of metadata, length,
word 10, words 11 to 15, time limit, result."""


@dataclass(frozen=True)
class Wear:
    """The wear of one drive."""

    written: int
    """Bytes written in its life."""
    percent_used: int
    """Share of its life that is used, as the drive estimates it; may exceed 100."""

    @property
    def rating(self) -> float | None:
        """Bytes that the drive can take in all; None while too little of its life is used to tell."""
        return None if self.percent_used < MIN_PERCENT else self.written * 100 / self.percent_used


def wear_of(device: int) -> list[Wear] | None:
    """The wear of every drive below a file system, given its `st_dev`; None if any of them cannot be read."""
    found = [_read(Path("/dev") / name) for name in _drives(Path("/sys/dev/block") / _number(device))]
    known = [wear for wear in found if wear is not None]
    return known if known and len(known) == len(found) else None


def parse(log: bytes) -> Wear:
    """The health log of the NVMe specification."""
    return Wear(int.from_bytes(log[48:64], "little") * UNIT_BYTES, log[5])


def _number(device: int) -> str:
    return f"{os.major(device)}:{os.minor(device)}"


def _drives(block: Path) -> Iterator[str]:
    """Names of the whole drives below a block device, through partitions, device mapper and RAID."""
    block = Path(os.path.realpath(block))
    below = sorted((block / "slaves").iterdir()) if (block / "slaves").is_dir() else []
    if below:
        for each in below:
            yield from _drives(each)
    else:
        yield block.parent.name if (block / "partition").exists() else block.name


def _read(device: Path) -> Wear | None:
    """None if it is not an NVMe drive, or if this user may not ask it."""
    if not re.fullmatch(r"nvme\d+n\d+", device.name):
        return None
    log = array("B", bytes(LOG_BYTES))
    asked = (LOG_BYTES // 4 - 1) << 16 | HEALTH_LOG
    command = COMMAND.pack(
        GET_LOG_PAGE, 0, 0, EVERY_NAMESPACE, 0, 0, 0, log.buffer_info()[0], 0, LOG_BYTES, asked, 0, 0, 0, 0, 0, 0, 0
    )
    try:
        descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # The drive's own status, 0 for success; an error of the system is raised.
            status = fcntl.ioctl(descriptor, ADMIN_COMMAND, bytearray(command))
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return parse(log.tobytes()) if status == 0 else None
