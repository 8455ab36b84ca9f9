"""Saving again into the same directory: written beside it, then put in its place whole.

    .NAME.megatrain-saving-PID   the new content of NAME while it is written; a leftover once its process is gone
    .NAME.megatrain-aside        the old content, while NAME is renamed in two steps; then until it is deleted
    .NAME.megatrain-before       the old content, while NAME itself is written anew
    NAME/.megatrain-saved        the new content of a NAME that cannot be renamed, until all of it is in its place

At every moment one of them is complete, and `find` says which.
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
"""Names of files that belong to one save: none of them outlives it."""


class Replacement:
    """The new content of a directory: write into `fresh`, then `carry`, make it durable, and `commit`."""

    def __init__(self, directory: AnyPath) -> None:
        # A link to a directory stays one.
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
        """Take over the files of others; the files that the checkpoint consists of."""
        self._written = _names(self.fresh)
        return carry(self.target, self.fresh)

    def commit(self) -> None:
        """Put the new content, which is on the disk, in the place of the old."""
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
            # Somebody may have added a file while the others were taken over.
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
    """A replacement that is committed inside, or leaves nothing behind."""
    replacement = Replacement(directory)
    try:
        yield replacement
    except BaseException:
        if not replacement.committed:
            with suppress(OSError):
                files.remove_tree(replacement.fresh)
        raise


def carry(old: Path, new: Path, left: re.Pattern[str] | None = None) -> list[Path]:
    """Take over the files of others from an old directory; the files that the new checkpoint consists of.

    Names that match `left` belong to one save and stay behind.
    """
    listed = written = _names(new)
    if old.is_dir():
        _take_over(old, new, written, left)
        with suppress(CheckpointError):
            # What is not rewritten stays a part of it: the state of a Trainer, say.
            listed = written | manifest.read(old)["files"].keys()
    return [path for path in files.regular_files(new) if path.relative_to(new).as_posix() in listed]


def _names(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in files.regular_files(directory)}


def _take_over(old: Path, new: Path, written: set[str], left: re.Pattern[str] | None = None) -> None:
    for folder, folders, names in os.walk(old, onerror=files.reraise):
        inside = Path(folder).relative_to(old)
        # In a directory that must stay, the new content lies inside.
        folders[:] = [name for name in folders if Path(folder, name) != new and (folder, name) != (str(old), SAVED)]
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in [*names, *links]:
            path = (inside / name).as_posix()
            if path not in written and not OWN.fullmatch(path) and not (left and left.fullmatch(path)):
                _take_over_file(old / path, new / path)
        for name in folders:
            # Of our own folder nothing is left but what others put there.
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
    """Whether a directory cannot be renamed: it is mounted, its parent is read-only, or this process is in it."""
    with suppress(FileNotFoundError):
        here = Path.cwd()
        if target in (here, *here.parents):
            return True
    # `Path.is_mount` does not see that a directory of the same file system is mounted there.
    name = re.sub(r"[ \t\n\\]", lambda found: f"\\{ord(found[0]):03o}", str(target))
    mounts = Path("/proc/self/mountinfo")
    lines = mounts.read_text().splitlines() if mounts.exists() else []
    mounted = target.is_mount() or any(line.split()[4] == name for line in lines)
    return mounted or not os.access(target.parent, os.W_OK | os.X_OK)


def find(directory: AnyPath) -> Path:
    """Where the content of a directory is: elsewhere if a process died while it replaced it."""
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
    """Bring a directory into the state that `find` would find, and delete what dead processes left of it."""
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
    """A checkpoint is written under its own name inside, and sealed. What has the name already is kept until then.

    Gives the directory where it is kept.
    """
    # Not where a link leads: what a link has as its content is somebody else's to delete.
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
    """What `find` may be asked for in a directory: what is there, and what a process died replacing."""
    listed = os.listdir(parent) if os.path.isdir(parent) else []
    hidden = (re.fullmatch(r"\.(.+)\.megatrain-(?:aside|before)", name) for name in listed)
    return {*listed, *(found[1] for found in hidden if found is not None)}


def _install(target: Path) -> None:
    """Put each file of `SAVED` in its place. Repeated after a crash it has the same result."""
    saved = target / SAVED
    shards = [*target.glob("model*.safetensors"), *(target / manifest.FOLDER).glob("optimizer-*.safetensors")]
    for path in [target / INDEX, target / manifest.FILE, *shards]:
        # A reader that knows nothing of us must find no mixture of two saves.
        files.remove(path)
    names = [path.relative_to(saved) for path in files.regular_files(saved)]
    for name in sorted(names, key=lambda name: (name.as_posix() == manifest.FILE, name.name == INDEX)):
        place = target / name
        kept = not OWN.fullmatch(name.as_posix()) and place.exists()
        if kept and place.stat().st_mtime_ns >= (saved / name).stat().st_mtime_ns:
            # Somebody else's file, which is in its place.
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
    # Under its old name it would be found after a power cut, with some of its files gone.
    files.sync_directory(target)
    _discard(done)


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.megatrain-{kind}")


def _leftovers(parent: Path, name: str) -> list[Path]:
    """What saves of other processes, which are gone, or of this one have left."""
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
