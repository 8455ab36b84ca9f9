"""Durable file operations, with observers for tests.

Checkpoints, caches and traces are written through this module. Files that another library writes are reported with
`before` and made durable with `sync`. An observer is called before every operation and may raise OSError in its place.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from megatrain.native import library as native
from megatrain.telemetry.notices import warn

AnyPath = str | os.PathLike[str]
Observer = Callable[[str, Path], None]
"""Called with the operation and its path: make, write, sync, sync_directory, rename, exchange, link, copy, remove,
remove_tree. The path of a rename or a link is the new one."""

CANNOT_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
CANNOT_RENAME = frozenset({errno.EBUSY, errno.EXDEV, errno.EPERM, errno.EACCES})
CANNOT_LINK = frozenset({errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
CANNOT_SYNC_DIRECTORY = frozenset({errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.ENOTSUP})
PIECE = 16 << 20
DELETED = ".megatrain-deleted"

_observers: tuple[Observer, ...] = ()
_failed: set[tuple[int, int, int]] = set()
"""Device, inode and modification time of files that could not be synced."""
_unable: set[int] = set()
"""Devices whose file systems cannot sync directories."""
_seconds = 0.0


# ---- observers


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call `observer` before every operation, in every thread."""
    global _observers
    _observers = (*_observers, observer)
    try:
        yield
    finally:
        _observers = tuple(other for other in _observers if other is not observer)


def before(operation: str, path: AnyPath) -> None:
    """Tell observers of an operation. Call it directly only for a file that another library is about to write."""
    for observer in _observers:
        observer(operation, Path(path))


# ---- durability


class Stopwatch:
    """Measures how long writing took, and how much of that was syncing."""

    def __init__(self) -> None:
        self._start, self._synced = time.perf_counter(), _seconds

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def report(self, name: str, nbytes: int) -> str:
        took, syncing = self.seconds, _seconds - self._synced
        return f"{name} written to disk: {_size(nbytes)} in {took:.1f} s, {syncing:.1f} s of it syncing"


def sync(path: AnyPath) -> int:
    """Wait until a regular file's content is on the disk; returns its size.

    After a failed sync the kernel may have dropped unwritten data, and the next sync of the file would succeed.
    Therefore such a file is refused until it is written again.
    """
    return _fsync(path, "sync")


def sync_directory(path: AnyPath) -> None:
    """Wait until the names in a directory are on the disk. Warns once if the file system cannot do that."""
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
    """Sync some regular files below a directory, then every directory, bottom up; returns the files' total size."""
    tree = list(os.walk(directory, topdown=False, onerror=reraise))
    total = sum(sync(path) for path in only)
    for folder, _, _ in tree:
        sync_directory(folder)
    return total


def sync_names(path: AnyPath) -> None:
    """Sync the parent directories of a path within its file system, because each of them may be new."""
    path = Path(os.path.realpath(path))
    device = path.stat().st_dev
    for folder in path.parents:
        if folder.stat().st_dev != device:
            return
        # A directory that this user cannot read is not new.
        if os.access(folder, os.R_OK):
            sync_directory(folder)


# ---- changes


def make_directory(path: AnyPath, like: AnyPath | None = None) -> None:
    """Create a directory and its parents. Owner and permissions are those of `like`, if this user may set them."""
    before("make", path)
    Path(path).mkdir(parents=True, exist_ok=True)
    if like is not None:
        status = os.stat(like)
        with suppress(PermissionError):
            os.chown(path, status.st_uid, status.st_gid)
        shutil.copystat(like, path)


def write(path: AnyPath, content: str | bytes) -> None:
    """Write a file atomically: under a temporary name, synced, renamed, and the directory synced.

    A target that is not a regular file (a terminal, a pipe) is written to directly.
    """
    # A symbolic link stays; its target is replaced.
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
    """`os.rename`, which replaces an existing file."""
    before("rename", target)
    os.rename(source, target)


def replace_directory(fresh: AnyPath, target: AnyPath, aside: AnyPath) -> None:
    """Rename `fresh` to `target`, and the old `target` to `aside`. All three are in the same directory.

    The exchange is atomic if the file system supports that. Otherwise there are two renames, and `target` does not
    exist between them.
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
    """Hard-link a file (or a symbolic link itself), or copy and sync it if links are not supported."""
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
    """Remove a file if it exists."""
    before("remove", path)
    Path(path).unlink(missing_ok=True)


def make_private(path: AnyPath) -> None:
    """Create a directory that only this user can use; fails if it exists."""
    before("make", path)
    os.mkdir(path, 0o700)


def remove_in(folder: int, name: str) -> None:
    """Remove a file of an open directory."""
    before("remove", name)
    os.unlink(name, dir_fd=folder)


def remove_empty(path: AnyPath) -> None:
    """Remove a directory without files."""
    before("remove_tree", path)
    os.rmdir(path)


def remove_tree(path: AnyPath) -> None:
    """Remove a directory tree if it exists. It is renamed first, so that no reader finds it half deleted."""
    before("remove_tree", path)
    path = Path(os.path.abspath(path))
    if path.is_symlink():
        path.unlink()
        return
    for leftover in path.parent.glob(f".*{DELETED}"):
        # The process that renamed it died.
        shutil.rmtree(leftover, ignore_errors=True)
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


# ---- reading


def regular_files(directory: AnyPath) -> list[Path]:
    """Every regular file below a directory, sorted. Links are not followed."""
    tree = os.walk(directory, onerror=reraise)
    paths = (Path(folder, name) for folder, _, names in tree for name in names)
    return sorted(path for path in paths if stat.S_ISREG(path.lstat().st_mode))


def cache_file(kind: str, facts: dict[str, Any]) -> Path | None:
    """Where measurements that hold for these facts are kept; None if there is neither XDG_CACHE_HOME nor a home
    directory."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    fingerprint = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return None if base == "~/.cache" else Path(base) / "megatrain" / f"{kind}-{fingerprint}.json"


def free_bytes(path: AnyPath) -> int:
    """Bytes that this user can still write at `path`, which need not exist."""
    path = Path(os.path.abspath(path))
    return shutil.disk_usage(next(parent for parent in (path, *path.parents) if parent.exists())).free


@contextmanager
def opened_inside(directory: AnyPath, name: str) -> Iterator[BinaryIO]:
    """Open a regular file below a directory for reading. Links are not followed, and pipes do not block."""
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
        # The system's message for ELOOP speaks of too many links.
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
    """Sync a file or directory; returns its size. `harmless`: errors that do not mean lost data."""
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
    """For `os.walk`, which otherwise skips directories that it cannot read."""
    raise error


def _size(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} bytes"
