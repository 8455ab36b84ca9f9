"""A disk that loses power: what is left of a directory if only what was synced is sure to be there.

`Disk` watches file operations (megatrain.files). A file's content is durable as it was at its last sync, the names in a
directory as they were at that directory's last sync. Everything else may be there or not, and is drawn.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable
from pathlib import Path

Names = dict[str, int]
"""Name → inode."""


class Disk:
    """Calls `crashed(number)` before every operation; `build` then makes what a power cut at that moment may leave."""

    def __init__(self, root: Path, crashed: Callable[[int], None]) -> None:
        self.root = root
        self.operations = 0
        self._crashed = crashed
        self._held: dict[int, int] = {}
        """Open descriptors: the number of an inode that is known must not be given to another file."""
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, Names] = {}
        self._modes: dict[int, int] = {}
        self._paths: dict[int, Path] = {}
        """Where an inode is now."""
        self._pending: Callable[[], None] = lambda: None
        self._look()
        for inode, path in self._paths.items():
            self._remember(inode, path)

    def observe(self, operation: str, path: Path) -> None:
        self._pending()
        self._pending = lambda: None
        if not path.is_relative_to(self.root):
            return
        self.operations += 1
        self._look()
        self._crashed(self.operations)
        if operation in ("sync", "sync_directory"):
            # What is on the disk is what is there now, once this operation is done.
            inode = os.stat(path).st_ino
            content = self._content(inode, path)
            self._pending = lambda: self._store(inode, content)

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)

    def build(self, target: Path, draw: random.Random | None) -> None:
        """Without `draw` nothing is left that was not synced; else names of directories and contents are drawn."""
        self._build_directory(os.stat(self.root).st_ino, target, draw)

    # ---- what is there, and what is durable

    def _look(self) -> None:
        self._paths = {}
        for folder, folders, names in os.walk(self.root):
            for path in (Path(folder), *(Path(folder, name) for name in (*folders, *names))):
                inode, mode = path.lstat().st_ino, path.lstat().st_mode
                self._paths[inode], self._modes[inode] = path, mode
                if inode not in self._held:
                    self._held[inode] = os.open(path, os.O_PATH | os.O_NOFOLLOW)

    def _content(self, inode: int, path: Path) -> bytes | Names:
        if stat.S_ISDIR(self._modes[inode]):
            return {name: (path / name).lstat().st_ino for name in os.listdir(path)}
        return path.read_bytes() if stat.S_ISREG(self._modes[inode]) else b""

    def _remember(self, inode: int, path: Path) -> None:
        self._store(inode, self._content(inode, path))

    def _store(self, inode: int, content: bytes | Names) -> None:
        if isinstance(content, bytes):
            self._contents[inode] = content
        else:
            self._names[inode] = content

    # ---- after the power cut

    def _build_directory(self, inode: int, target: Path, draw: random.Random | None) -> None:
        target.mkdir()
        durable = self._names.get(inode, {})
        there = self._paths.get(inode)
        names = durable
        if draw is not None and there is None:
            # It has been deleted, file by file.
            names = {name: entry for name, entry in durable.items() if draw.random() < 0.7}
        elif draw is not None and there is not None and draw.random() < 0.6:
            names = {name: (there / name).lstat().st_ino for name in os.listdir(there)}
        for name, entry in names.items():
            if stat.S_ISDIR(self._modes[entry]):
                self._build_directory(entry, target / name, draw)
            elif stat.S_ISREG(self._modes[entry]):
                (target / name).write_bytes(self._left_of(entry, draw))

    def _left_of(self, inode: int, draw: random.Random | None) -> bytes:
        durable = self._contents.get(inode, b"")
        there = self._paths.get(inode)
        now = there.read_bytes() if there is not None else durable
        if draw is None or now == durable:
            return durable
        return draw.choice([durable, b"", now[: len(now) // 2], bytes(len(now)), now])
