"""File operations: durable where it matters, seen by observers, and open to injected faults.

Checkpoints, caches and traces are written through here. Files that another library writes are announced with `before`
and made durable with `sync`. An observer is called before every operation and may raise OSError in its place.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megatrain.native import library as native
from megatrain.telemetry.notices import warn

AnyPath = str | os.PathLike[str]
Observer = Callable[[str, Path], None]
"""Called with the operation and its path: make, write, sync, sync_directory, rename, exchange, link, copy, remove,
remove_tree. A rename and a link name the new path."""

CANNOT_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
CANNOT_RENAME = frozenset({errno.EBUSY, errno.EXDEV, errno.EPERM, errno.EACCES})
CANNOT_LINK = frozenset({errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
CANNOT_SYNC_DIRECTORY = frozenset({errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.ENOTSUP})
PIECE = 16 << 20
DELETED = ".megatrain-deleted"

_observers: tuple[Observer, ...] = ()
_failed: set[tuple[int, int, int]] = set()
"""Device, inode and time of change of what could not be synced."""
_unable: set[int] = set()
"""Devices whose file system cannot sync directories."""
_seconds = 0.0


# ---- observers


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call `observer` before every operation of this process, in whichever thread that is."""
    global _observers
    _observers = (*_observers, observer)
    try:
        yield
    finally:
        _observers = tuple(kept for kept in _observers if kept is not observer)


def before(operation: str, path: AnyPath) -> None:
    """Tell observers what comes next. Call it directly only for what another library is about to write."""
    for observer in _observers:
        observer(operation, Path(path))


# ---- to the disk


class Stopwatch:
    """How long something took that was written, and how much of that went into syncing."""

    def __init__(self) -> None:
        self._start, self._synced = time.perf_counter(), _seconds

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def report(self, name: str, nbytes: int) -> str:
        took, syncing = self.seconds, _seconds - self._synced
        return f"{name} written to disk: {_size(nbytes)} in {took:.1f} s, {syncing:.1f} s of it syncing"


def sync(path: AnyPath) -> int:
    """Wait until a regular file's content is on the disk; its size.

    After a failed sync the kernel may have dropped what was not written, and the next sync of the same file would
    succeed. So such a file is refused until it is written anew.
    """
    return _fsync(path, "sync")


def sync_directory(path: AnyPath) -> None:
    """Wait until the names in a directory are on the disk. Some file systems cannot do that, which is said once."""
    try:
        _fsync(path, "sync_directory", os.O_DIRECTORY, CANNOT_SYNC_DIRECTORY)
    except OSError as error:
        if error.errno not in CANNOT_SYNC_DIRECTORY:
            raise
        device = os.stat(path).st_dev
        if device not in _unable:
            _unable.add(device)
            warn(f"the file system of {path} cannot sync directories: after a power cut new files may be missing")


def sync_tree(directory: AnyPath, only: Iterable[AnyPath]) -> int:
    """Sync some regular files below a directory, then every directory from the bottom up; the files' size."""
    tree = list(os.walk(directory, topdown=False, onerror=reraise))
    total = sum(sync(path) for path in only)
    for folder, _, _ in tree:
        sync_directory(folder)
    return total


def sync_names(path: AnyPath) -> None:
    """Sync the directories that lead to a path, within its file system: each may be new itself."""
    path = Path(os.path.realpath(path))
    device = path.stat().st_dev
    for folder in path.parents:
        if folder.stat().st_dev != device:
            return
        # A directory that this user may not read has been there before.
        if os.access(folder, os.R_OK):
            sync_directory(folder)


# ---- changes


def make_directory(path: AnyPath, like: AnyPath | None = None) -> None:
    """With its parents; no error if it is there. Owner and permissions are those of `like`, as far as this user may."""
    before("make", path)
    Path(path).mkdir(parents=True, exist_ok=True)
    if like is not None:
        status = os.stat(like)
        with suppress(PermissionError):
            os.chown(path, status.st_uid, status.st_gid)
        shutil.copystat(like, path)


def write(path: AnyPath, content: str | bytes) -> None:
    """Write a file whole or not at all: under a temporary name beside it, synced, renamed, and the directory synced.

    What is not a regular file (a terminal, a pipe) is written to as it is.
    """
    # A link stays one: the file that it leads to is replaced.
    target = Path(os.path.realpath(path))
    data = content.encode() if isinstance(content, str) else content
    if target.exists() and not target.is_file():
        before("write", target)
        target.write_bytes(data)
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        before("write", temporary)
        temporary.write_bytes(data)
        sync(temporary)
        rename(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_directory(target.parent)


def rename(source: AnyPath, target: AnyPath) -> None:
    """Replaces a file that has the new name, as `os.rename` does."""
    before("rename", target)
    os.rename(source, target)


def replace_directory(fresh: AnyPath, target: AnyPath, aside: AnyPath) -> None:
    """Let `fresh` take the place of `target`, which is `aside` afterwards; all three lie in one directory.

    The two are exchanged in one step where the file system can do that. Else there are two renames, and between them
    nothing has the name `target`.
    """
    try:
        before("exchange", target)
        native.exchange(fresh, target)
    except OSError as error:
        if error.errno not in CANNOT_EXCHANGE:
            raise
        rename(target, aside)
        try:
            rename(fresh, target)
        except BaseException:
            os.rename(aside, target)
            raise
    else:
        rename(fresh, aside)


def link_or_copy(source: AnyPath, target: AnyPath) -> None:
    """A second name for a file (or for a symbolic link itself); a durable copy where there can be none."""
    try:
        before("link", target)
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in CANNOT_LINK:
            raise
        before("copy", target)
        shutil.copy2(source, target, follow_symlinks=False)
        if stat.S_ISREG(os.lstat(target).st_mode):
            sync(target)


def remove(path: AnyPath) -> None:
    """Remove a file, if it is there."""
    before("remove", path)
    Path(path).unlink(missing_ok=True)


def remove_tree(path: AnyPath) -> None:
    """Remove a directory and what is in it, if it is there. Its name is gone first: nobody finds the half of it."""
    before("remove_tree", path)
    path = Path(os.path.abspath(path))
    if path.is_symlink():
        path.unlink()
        return
    for left in path.parent.glob(f".*{DELETED}"):
        # Its process died.
        shutil.rmtree(left, ignore_errors=True)
    doomed = path.with_name(f".{path.name}{DELETED}")
    try:
        os.rename(path, doomed)
        sync_directory(path.parent)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in CANNOT_RENAME:
            raise
        doomed = path
    shutil.rmtree(doomed)


# ---- looking


def regular_files(directory: AnyPath) -> list[Path]:
    """Every regular file below a directory, in order; links are not followed."""
    tree = os.walk(directory, onerror=reraise)
    found = (Path(folder, name) for folder, _, names in tree for name in names)
    return sorted(path for path in found if stat.S_ISREG(path.lstat().st_mode))


def free_bytes(path: AnyPath) -> int:
    """What this user may still write where `path` is or will be."""
    path = Path(os.path.abspath(path))
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


@contextmanager
def opened_inside(directory: AnyPath, name: str) -> Iterator[BinaryIO]:
    """A regular file below a directory, for reading. Links are not followed, and nothing waits for a pipe's writer."""
    parts = name.split("/")
    inside = "\0" not in name and not {"", ".", ".."}.intersection(parts)
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        inside = False
    if not inside:
        raise OSError(errno.EINVAL, "not a name inside the directory", name)
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = inner
        descriptor = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        # Its own words are about too many links.
        why = "a symbolic link, which is not followed" if error.errno == errno.ELOOP else error.strerror
        raise OSError(error.errno, why, str(Path(directory) / name)) from error
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(Path(directory) / name))
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        yield file


def _fsync(path: AnyPath, operation: str, flags: int = 0, harmless: Collection[int] = ()) -> int:
    """Sync a file or directory; its size. `harmless`: errors that do not say that content was lost."""
    global _seconds
    descriptor = os.open(path, os.O_RDONLY | flags | os.O_NONBLOCK | os.O_CLOEXEC)
    start = time.perf_counter()
    try:
        status = os.fstat(descriptor)
        key = (status.st_dev, status.st_ino, status.st_mtime_ns)
        if key in _failed:
            raise OSError(errno.EIO, "an earlier sync failed, and the file has not been written again", os.fspath(path))
        try:
            before(operation, path)
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in harmless:
                _failed.add(key)
            raise OSError(error.errno, f"{error.strerror} while syncing", os.fspath(path)) from error
        return status.st_size
    finally:
        _seconds += time.perf_counter() - start
        os.close(descriptor)


def reraise(error: OSError) -> None:
    """For `os.walk`, which passes over what it cannot read otherwise."""
    raise error


def _size(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} bytes"
