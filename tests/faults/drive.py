"""Small file systems of their own for tests of drives: an image file, mounted through a loop device.

Needs root and loop devices; tests are skipped elsewhere. Everything is unmounted when the test ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pytest

MIB = 1 << 20
SHUTDOWN = 0x8004587D
"""FS_IOC_SHUTDOWN: the file system behaves as if its device were gone."""
WITHOUT_FLUSH = 2


def command(*words: str | Path, skip: bool = False) -> str:
    """Run a command and return what it prints. `skip`: if it is missing or fails, the test is skipped."""
    if shutil.which(str(words[0])) is None:
        pytest.skip(f"there is no {words[0]} here")
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode and skip:
        pytest.skip(f"{' '.join(map(str, words))}: {done.stderr.strip()}")
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


@dataclass(frozen=True)
class Drive:
    """A mounted file system, and the file that it is in."""

    path: Path
    image: Path

    @property
    def free(self) -> int:
        """Bytes that anybody may use."""
        system = os.statvfs(self.path)
        return system.f_bavail * system.f_frsize

    def fill(self, keep: int = 0) -> None:
        """Somebody else's file takes all the space but `keep` bytes."""
        with open(self.path / "somebody-else", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, self.free - keep))
            with contextlib.suppress(OSError):
                # Blocks that only root may use, and the rest of the last ones.
                while keep == 0:
                    file.seek(0, os.SEEK_END)
                    file.write(bytes(4096))
                    file.flush()

    def abort(self) -> None:
        """What ext4 does after an error of its metadata: it becomes read-only."""
        command("mount", "-o", "remount,abort", self.path)

    def shut_down(self) -> None:
        """The device is gone: everything fails from now on."""
        file = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(file, SHUTDOWN, WITHOUT_FLUSH.to_bytes(4, "little"))
        except OSError as error:
            pytest.skip(f"the file system cannot be shut down: {error}")
        finally:
            os.close(file)

    def lose_data(self) -> None:
        """The device no longer has its blocks: reads of them fail."""
        os.truncate(self.image, 4096)

    def flip_bit(self, content: bytes) -> None:
        """Change one bit of these bytes where they are on the device."""
        with open(self.image, "r+b") as image:
            found = (start + data.find(content) for start, data in parts_with_data(image) if content in data)
            at = next(found, None)
            assert at is not None, "the bytes are not on the device"
            image.seek(at + len(content) // 2)
            byte = image.read(1)[0]
            image.seek(at + len(content) // 2)
            image.write(bytes([byte ^ 16]))

    def freeze(self) -> None:
        """Writes wait until `thaw`."""
        command("fsfreeze", "-f", self.path, skip=True)

    def thaw(self) -> None:
        with contextlib.suppress(AssertionError):
            command("fsfreeze", "-u", self.path)

    def unmount(self, *options: str) -> None:
        """Without options: fails if a file in it is open."""
        command("umount", *options, self.path)

    def mount(self, *options: str) -> None:
        command("mount", "-o", ",".join(("loop", *options)), self.image, self.path, skip=True)


def parts_with_data(sparse: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """What a file holds between its holes, and where."""
    end = 0
    # The search for data after the last of it fails.
    with contextlib.suppress(OSError):
        while True:
            start = os.lseek(sparse.fileno(), end, os.SEEK_DATA)
            end = os.lseek(sparse.fileno(), start, os.SEEK_HOLE)
            yield start, os.pread(sparse.fileno(), end - start, start)


def waiting_threads(process: int | str = "self") -> int:
    """How many threads of a process wait in the kernel for a drive."""
    waiting = 0
    for path in Path(f"/proc/{process}/task").glob("*/stat"):
        # Threads may end meanwhile.
        with contextlib.suppress(OSError):
            waiting += path.read_text().rpartition(")")[2].split()[0] == "D"
    return waiting


@contextlib.contextmanager
def mounted(folder: Path, mib: int = 256, kind: str = "ext4", name: str = "drive") -> Iterator[Drive]:
    """A file system of its own, in `folder/name`; its image takes space as it is written."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    drive = Drive(folder / name, folder / f"{name}.img")
    with open(drive.image, "wb") as image:
        image.truncate(mib * MIB)
    quiet = ("-q", "-F") if kind.startswith("ext") else ()
    command(f"mkfs.{kind}", *quiet, drive.image, skip=True)
    drive.path.mkdir(exist_ok=True)
    drive.mount()
    try:
        yield drive
    finally:
        drive.thaw()
        # Several times if the test mounted it several times. Its loop device goes with the last user.
        while os.path.ismount(drive.path):
            drive.unmount("-l")
