"""Scratch files on file systems without O_TMPFILE, and in directories that several engines and processes use.

Nameless files are refused by the kernel here, through a seccomp filter in a forked child, as a file system that does
not have them would.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import stat
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import forked
from tests.faults.drive import Drive, mounted
from tests.tiny import Stack, backward, engine_of, roles

from megatrain.native import disk as native
from megatrain.store.disk import DiskMemory
from megatrain.store.scratch import open_scratch

OPENAT, UNLINK, UNLINKAT, FALLOCATE = 257, 87, 263, 285
TMPFILE = os.O_TMPFILE & ~os.O_DIRECTORY
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
ERRORS = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


def refuse_nameless_files(error: int) -> None:
    """From now on openat(..., O_TMPFILE) of this process fails with `error`."""
    _filter([
        (0x20, 0, 0, 0),  # load the number of the system call
        (0x15, 0, 3, OPENAT),
        (0x20, 0, 0, 32),  # load the flags, its third argument
        (0x45, 0, 1, TMPFILE),
        (0x06, 0, 0, 0x00050000 | error),
        (0x06, 0, 0, 0x7FFF0000),
    ])  # fmt: skip


def refuse_unlinking() -> None:
    """From now on the names of files stay, as on file systems that cannot remove the name of an open file."""
    _filter([
        (0x20, 0, 0, 0),
        (0x15, 1, 0, UNLINK),
        (0x15, 0, 1, UNLINKAT),
        (0x06, 0, 0, 0x00050000 | errno.EBUSY),
        (0x06, 0, 0, 0x7FFF0000),
    ])  # fmt: skip


def _filter(program: list[tuple[int, int, int, int]]) -> None:
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


OPERATIONS = {"os.mkdir", "open", "fcntl.flock", "os.listdir", "os.remove", "os.rmdir"}


def open_and_die(folder: Path, at: int) -> Any:
    """Opens scratch and closes it, without O_TMPFILE; the process is killed before file operation number `at`."""

    def work() -> Any:
        refuse_nameless_files(errno.EOPNOTSUPP)
        native.describe(0)  # loads the library
        count = 0

        def kill(event: str, _: Any) -> None:
            nonlocal count
            if event in OPERATIONS:
                count += 1
                if count > at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        open_scratch(folder, allow_tmpfs=True).close()

    return work


@needs_seccomp
@pytest.mark.parametrize("leftovers", [False, True])
def test_a_kill_at_any_moment_leaves_nothing_after_the_next_run(tmp_path: Path, leftovers: bool) -> None:
    """Also while the leftovers of another are removed."""

    def opened() -> None:
        refuse_nameless_files(errno.EOPNOTSUPP)
        file = open_scratch(tmp_path, allow_tmpfs=True)
        assert list(tmp_path.iterdir()) == [], "leftovers are removed, and nothing of this run has a name"
        file.close()

    left: set[frozenset[str]] = set()
    for at in range(100):
        if leftovers:
            (tmp_path / ".megatrain-scratch-1-00").mkdir(0o700)
            for name in ("lock", "states"):
                (tmp_path / ".megatrain-scratch-1-00" / name).touch()
        killed = forked.run(open_and_die(tmp_path, at))
        left.add(frozenset(path.name for path in tmp_path.rglob("*") if path.is_file()))
        assert forked.run(opened) == forked.Ended()
        if killed.signal == 0:
            break
        assert killed.signal == signal.SIGKILL
    assert killed == forked.Ended(), "the last one was not killed"
    assert left >= {frozenset(), frozenset({"lock"}), frozenset({"lock", "states"})}


@needs_seccomp
def test_names_that_stay_are_removed_by_the_next_run_and_only_then(tmp_path: Path) -> None:
    def live() -> None:
        refuse_nameless_files(errno.EOPNOTSUPP)
        refuse_unlinking()
        memory = DiskMemory([tmp_path], allow_tmpfs=True)
        memory.allocate(1 << 20, transferred=False)
        if os.fork() == 0:
            # A forked child neither holds the lock nor removes anything.
            os.close(end)
            memory.close()
            os.read(stop, 1)
            os._exit(0)
        os.write(told, b"1")
        os.close(end)
        os.read(stop, 1)

    def other() -> None:
        refuse_nameless_files(errno.EOPNOTSUPP)
        DiskMemory([tmp_path], allow_tmpfs=True).close()

    ready, told = os.pipe()
    stop, end = os.pipe()
    child = forked.start(live)
    os.close(told)
    assert os.read(ready, 1) == b"1", forked.wait(child)
    (folder,) = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert names.keys() == {"lock", "states"}
    assert names["states"] >= 1 << 20
    (tmp_path / ".megatrain-scratch-not-ours").symlink_to(tmp_path.parent, target_is_directory=True)
    assert forked.run(other) == forked.Ended()
    assert {path.name for path in folder.iterdir()} == names.keys(), "a live run's files stay"
    os.kill(child[0], signal.SIGKILL)
    os.waitpid(child[0], 0)
    assert forked.run(other) == forked.Ended()
    assert [path.name for path in tmp_path.iterdir()] == [".megatrain-scratch-not-ours"]
    for descriptor in (ready, stop, end, child[1]):
        os.close(descriptor)


@needs_seccomp
def test_a_run_removes_its_own_names_when_it_ends(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    def work() -> list[str]:
        refuse_nameless_files(errno.EOPNOTSUPP)
        plain = os.unlink
        # Only while the file is open, which a filter of system calls cannot tell.
        os.unlink = lambda *_, **__: None  # type: ignore[assignment]
        file = open_scratch(tmp_path, allow_tmpfs=True)
        os.unlink = plain
        held = [path.name for path in tmp_path.rglob("states")]
        file.close()
        return held + [path.name for path in tmp_path.iterdir()] + announced.messages

    ended = forked.run(work)
    assert ended.raised is None, ended.raised
    assert ended.value[0] == "states"
    (said,) = ended.value[1:]
    assert (
        "keeps the name of an open file: it is left behind if the run is killed; the next run there removes it" in said
    )


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


@needs_seccomp
def test_space_is_not_reserved_by_writing_to_every_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the C library does where the file system cannot reserve: that takes hours over a network."""
    monkeypatch.setattr(os, "O_DIRECT", 0)

    def work() -> tuple[int, int]:
        _filter([(0x20, 0, 0, 0), (0x15, 0, 1, FALLOCATE), (0x06, 0, 0, 0x00050000 | errno.EOPNOTSUPP),
                 (0x06, 0, 0, 0x7FFF0000)])  # fmt: skip
        memory = DiskMemory([tmp_path], allow_tmpfs=True)
        buffer = memory.allocate(64 << 20, transferred=False)
        status = os.fstat(memory.files[0].descriptor)
        assert not buffer.read(0, 10).any()
        return status.st_size, status.st_blocks * 512

    ended = forked.run(work)
    assert ended.value is not None, ended.raised
    assert ended.value[0] == 64 << 20
    assert ended.value[1] <= 4096, "the page that was written to find out what the drive can do"


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
