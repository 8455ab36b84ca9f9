"""Scratch files on file systems without O_TMPFILE, and in directories that several engines and processes use.

Nameless files are refused by the kernel here, through a seccomp filter in a forked child, as a file system that does
not have them would.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import stat
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import forked
from tests.faults.drive import Drive, mounted
from tests.tiny import Stack, backward, engine_of, roles

from megatrain.store.disk import DiskMemory
from megatrain.store.scratch import open_scratch

OPENAT = 257
TMPFILE = os.O_TMPFILE & ~os.O_DIRECTORY
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
ERRORS = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


def refuse_nameless_files(error: int) -> None:
    """From now on openat(..., O_TMPFILE) of this process fails with `error`."""
    program = [
        (0x20, 0, 0, 0),  # load the number of the system call
        (0x15, 0, 3, OPENAT),
        (0x20, 0, 0, 32),  # load the flags, its third argument
        (0x45, 0, 1, TMPFILE),
        (0x06, 0, 0, 0x00050000 | error),
        (0x06, 0, 0, 0x7FFF0000),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    library = ctypes.CDLL(None, use_errno=True)
    assert library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert library.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filters, 0, 0) == 0, os.strerror(ctypes.get_errno())


needs_seccomp = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the filter has the system calls of x86-64"
)


def trained(directory: Path) -> Any:
    model = Stack(depth=5)
    engine = engine_of(model, offload_dir=directory, on_disk=["*"], allow_tmpfs=True)
    optimizer = engine.optimizer(lr=0.1)
    for seed in range(3):
        backward(model, seed)
        optimizer.step()
        optimizer.zero_grad()
    found = {name: str(value) for name, value in roles(engine).items()}
    assert list(directory.iterdir()) == []
    engine.release()
    return found


@needs_seccomp
@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_a_file_system_without_nameless_files(tmp_path: Path, error: int) -> None:
    def work() -> Any:
        refuse_nameless_files(error)
        with pytest.raises(OSError, match=rf"\[Errno {error}\]"):
            os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
        file = open_scratch(tmp_path, allow_tmpfs=True)
        found = os.fstat(file.descriptor)
        assert found.st_nlink == 0, "its name is removed at once"
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert list(tmp_path.iterdir()) == []
        return trained(tmp_path)

    ended = forked.run(work)
    assert ended.raised is None, ended.raised
    assert ended.value == trained(tmp_path)


@pytest.mark.parametrize("kind", ["ext2", "ext3", "ext4", "xfs", "btrfs", "vfat"])
def test_file_systems(tmp_path: Path, kind: str) -> None:
    """Real ones, as far as this machine can make them."""
    with mounted(tmp_path, 320, kind) as drive:
        (drive.path / "scratch").mkdir()
        free = drive.free
        assert trained(drive.path / "scratch") == trained(tmp_path / "other")
        assert drive.free == free


def test_an_overlay(tmp_path: Path) -> None:
    from tests.faults.drive import command

    with mounted(tmp_path) as drive:
        for name in ("lower", "upper", "work", "merged"):
            (drive.path / name).mkdir()
        layers = ",".join(f"{key}dir={drive.path / key}" for key in ("lower", "upper", "work"))
        merged = Drive(drive.path / "merged", drive.image)
        command("mount", "-t", "overlay", "overlay", "-o", layers, merged.path, skip=True)
        try:
            (merged.path / "scratch").mkdir()
            assert trained(merged.path / "scratch") == trained(tmp_path / "other")
        finally:
            merged.unmount("-l")


def test_engines_and_processes_share_a_directory(tmp_path: Path) -> None:
    """Each has files of its own, and ends without harm to the others'."""
    scratch = tmp_path / "scratch"
    expected = trained(scratch)
    memory = DiskMemory([scratch], allow_tmpfs=True)
    buffer = memory.allocate(1 << 20, transferred=False)
    with buffer.changing(0, buffer.nbytes) as held:
        held.fill_(7)
    children = [forked.start(lambda: trained(scratch)) for _ in range(3)]
    assert trained(scratch) == expected
    for child in children:
        ended = forked.wait(child)
        assert ended.raised is None, ended.raised
        assert ended.value == expected
    # A child that ends, however, leaves its parent's file as it is.
    assert forked.run(lambda: memory.close()).raised is None
    assert (buffer.read(0, buffer.nbytes) == 7).all()
    memory.close()
    assert list(scratch.iterdir()) == []
