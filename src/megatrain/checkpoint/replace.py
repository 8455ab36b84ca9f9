"""Replaces the content of a directory atomically: it is written beside the directory, then renamed.

    .NAME.megatrain-saving-PID   the new content of NAME while it is written; a leftover once its process is gone
    .NAME.megatrain-aside        the old content, while NAME is renamed in two steps; then until it is deleted
    .NAME.megatrain-before       the old content, while NAME itself is written anew
    NAME/.megatrain-saved        the new content of a NAME that cannot be renamed, until all of it is in its place

At every moment one of these directories is complete; `find` returns it.
"""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatrain import files
from megatrain.checkpoint import manifest
from megatrain.checkpoint.weights import INDEX
from megatrain.errors import CheckpointError
from megatrain.files import AnyPath
from megatrain.telemetry.notices import announce, warn

SAVED = ".megatrain-saved"
OWN = re.compile(
    rf"model[^/]*\.safetensors|{re.escape(INDEX)}|{manifest.FOLDER}/"
    r"(optimizer-[^/]*\.safetensors|manifest\.(json|tmp)|\.manifest\.json\.[^/]*)"
)
"""Files that belong to one save. The next save never takes them over."""


class Replacement:
    """The new content of a directory: write into `fresh`, then `carry`, make it durable, and `commit`."""

    def __init__(self, directory: AnyPath) -> None:
        # A link to a directory stays a link.
        self.target = Path(os.path.realpath(directory))
        if self.target.exists() and not self.target.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a directory, but a checkpoint is one", str(directory))
        if self.target.exists() and not os.access(self.target, os.W_OK | os.X_OK):
            raise PermissionError(
                errno.EACCES, "this process has no permission to write here; save to another directory", str(directory)
            )
        files.make_directory(self.target.parent)
        recover(self.target)
        self._stays = self.target.exists() and _must_stay(self.target)
        parent = self.target if self._stays else self.target.parent
        self.fresh = parent / f".{self.target.name}.megatrain-saving-{os.getpid()}"
        files.make_directory(self.fresh, like=self.target if self.target.exists() else None)
        self._written: set[str] = set()
        self.committed = False

    def carry(self) -> list[Path]:
        """Take over files that MegaTrain did not write; returns the files of the checkpoint."""
        self._written = _names(self.fresh)
        return carry(self.target, self.fresh)

    def commit(self) -> None:
        """Replace the old content with the new one, which has been synced."""
        aside = _beside(self.target, "aside")
        if not self.target.exists():
            files.rename(self.fresh, self.target)
            self.committed = True
            files.sync_directory(self.target.parent)
        elif self._stays or not self._replaced(aside):
            files.rename(self.fresh, self.target / SAVED)
            self.committed = True
            files.sync_directory(self.target)
            _install(self.target)
        else:
            self.committed = True
            files.sync_directory(self.target.parent)
            # Files may have been added while the others were taken over.
            _take_over(aside, self.target, self._written)
            _discard(aside)

    def _replaced(self, aside: Path) -> bool:
        try:
            files.replace_directory(self.fresh, self.target, aside)
        except OSError as error:
            if error.errno not in files.CANNOT_RENAME:
                raise
            return False
        return True


@contextmanager
def replacing(directory: AnyPath) -> Iterator[Replacement]:
    """A replacement to commit inside the block. Without a commit nothing is left behind."""
    replacement = Replacement(directory)
    try:
        yield replacement
    except BaseException:
        if not replacement.committed:
            with suppress(OSError):
                files.remove_tree(replacement.fresh)
        raise


def carry(old: Path, new: Path, left: re.Pattern[str] | None = None) -> list[Path]:
    """Take over files that MegaTrain did not write from an old directory; returns the files of the new checkpoint.

    Files that match `left` are not taken over.
    """
    listed = written = _names(new)
    if old.is_dir():
        _take_over(old, new, written, left)
        with suppress(CheckpointError):
            # Files of the old checkpoint that are not rewritten stay part of it, such as a Trainer's state.
            listed = written | manifest.read(old)["files"].keys()
    return [path for path in files.regular_files(new) if path.relative_to(new).as_posix() in listed]


def _names(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in files.regular_files(directory)}


def _take_over(old: Path, new: Path, written: set[str], left: re.Pattern[str] | None = None) -> None:
    for folder, folders, names in os.walk(old, onerror=files.reraise):
        inside = Path(folder).relative_to(old)
        # If the directory cannot be renamed, the new content is inside it.
        folders[:] = [name for name in folders if Path(folder, name) != new and (folder, name) != (str(old), SAVED)]
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in [*names, *links]:
            path = (inside / name).as_posix()
            if path not in written and not OWN.fullmatch(path) and not (left and left.fullmatch(path)):
                _take_over_file(old / path, new / path)
        for name in folders:
            # Of MegaTrain's own directory only foreign files are taken over.
            if name not in links and (inside / name).as_posix() != manifest.FOLDER:
                _make_like(old / inside / name, new / inside / name)


def _make_like(source: Path, target: Path) -> None:
    if not target.exists():
        files.make_directory(target, like=source)


def _take_over_file(source: Path, target: Path) -> None:
    _make_like(source.parent, target.parent)
    if os.path.lexists(target):
        there, status = target.lstat(), source.lstat()
        if there.st_ino == status.st_ino or there.st_mtime_ns >= status.st_mtime_ns:
            return
        files.remove(target)
    files.link_or_copy(source, target)


def _must_stay(target: Path) -> bool:
    """Whether a directory cannot be renamed: it is a mount point, its parent is read-only, or it contains the cwd."""
    with suppress(FileNotFoundError):
        here = Path.cwd()
        if target in (here, *here.parents):
            return True
    # `Path.is_mount` misses bind mounts of the same file system.
    name = re.sub(r"[ \t\n\\]", lambda found: f"\\{ord(found[0]):03o}", str(target))
    mounts = Path("/proc/self/mountinfo")
    lines = mounts.read_text().splitlines() if mounts.exists() else []
    mounted = target.is_mount() or any(line.split()[4] == name for line in lines)
    return mounted or not os.access(target.parent, os.W_OK | os.X_OK)


def find(directory: AnyPath) -> Path:
    """The complete content of a directory, which is elsewhere if a process died while replacing it."""
    target = Path(os.path.realpath(directory))
    aside, before = _beside(target, "aside"), _beside(Path(os.path.abspath(directory)), "before")
    if (target / SAVED).is_dir():
        found = target / SAVED
    elif not target.exists() and aside.is_dir():
        found = aside
    elif before.is_dir() and manifest.sequence_of(target) is None:
        found = before
    else:
        return Path(directory)
    announce(f"{directory} was being replaced when its process was killed: using {found}")
    return found


def recover(target: Path) -> None:
    """Move the content that `find` returns into the directory, and delete leftovers of dead processes."""
    if (target / SAVED).is_dir():
        _install(target)
    aside, before = _beside(target, "aside"), _beside(target, "before")
    if aside.is_dir() and not target.exists():
        files.rename(aside, target)
    if before.is_dir() and manifest.sequence_of(target) is None:
        files.remove_tree(target)
        files.rename(before, target)
    for path in [aside, before, *_leftovers(target.parent, target.name), *_leftovers(target, target.name)]:
        if path.is_dir():
            _discard(path)


@contextmanager
def rewriting(directory: AnyPath) -> Iterator[Path]:
    """Write and seal a checkpoint under its own name inside the block. The old content is kept until then, in the
    directory that this yields."""
    # Links are not followed: their targets must not be deleted.
    target = Path(os.path.abspath(directory))
    recover(target)
    before = _beside(target, "before")
    if target.is_dir():
        files.rename(target, before)
    try:
        yield before
    except BaseException:
        if before.is_dir():
            with suppress(OSError):
                recover(target)
        raise
    if before.is_dir():
        _discard(before)


def names(parent: AnyPath) -> set[str]:
    """Names in a directory that `find` accepts: existing ones, and those that a process died replacing."""
    listed = os.listdir(parent) if os.path.isdir(parent) else []
    hidden = (re.fullmatch(r"\.(.+)\.megatrain-(?:aside|before)", name) for name in listed)
    return {*listed, *(found[1] for found in hidden if found is not None)}


def _install(target: Path) -> None:
    """Move each file of `SAVED` to its place. Idempotent, so it can be repeated after a crash."""
    saved = target / SAVED
    shards = [*target.glob("model*.safetensors"), *(target / manifest.FOLDER).glob("optimizer-*.safetensors")]
    for path in [target / INDEX, target / manifest.FILE, *shards]:
        # Other readers must never find a mixture of two saves.
        files.remove(path)
    names = [path.relative_to(saved) for path in files.regular_files(saved)]
    for name in sorted(names, key=lambda name: (name.as_posix() == manifest.FILE, name.name == INDEX)):
        place = target / name
        kept = not OWN.fullmatch(name.as_posix()) and place.exists()
        if kept and place.stat().st_mtime_ns >= (saved / name).stat().st_mtime_ns:
            # A foreign file that is already in its place.
            continue
        files.make_directory(place.parent)
        temporary = place.with_name(f".{place.name}.megatrain-installing")
        files.remove(temporary)
        files.link_or_copy(saved / name, temporary)
        files.rename(temporary, place)
    if not any((target / manifest.FOLDER).glob("*")):
        files.remove_tree(target / manifest.FOLDER)
    files.sync_tree(target, [])
    done = target / f".{target.name}.megatrain-saving-{os.getpid()}"
    files.rename(saved, done)
    # After a power cut `find` must not return it with some of its files gone.
    files.sync_directory(target)
    _discard(done)


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.megatrain-{kind}")


def _leftovers(parent: Path, name: str) -> list[Path]:
    """Leftovers of saves of this process or of dead ones."""
    found = []
    for path in parent.glob(f".{glob.escape(name)}.megatrain-saving-*") if parent.is_dir() else ():
        process = path.name.rpartition("-")[2]
        if process.isdigit() and (int(process) == os.getpid() or not Path("/proc", process).exists()):
            found.append(path)
    return found


def _discard(path: Path) -> None:
    try:
        (files.remove if path.is_symlink() else files.remove_tree)(path)
    except OSError as error:
        warn(f"{path} could not be deleted ({error.strerror}); it is no longer needed, delete it by hand")
