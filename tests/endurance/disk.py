"""Simulates a disk that loses power: only what was synced is certain to remain.

`Disk` observes file operations (megatrain.files). The content of a file is durable as of its last sync, the names in a
directory as of the last sync of that directory. Everything else may or may not remain, at random.
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
    """Calls `crashed(number)` before every operation; `build` then creates what a power cut may leave."""

    def __init__(self, root: Path, crashed: Callable[[int], None]) -> None:
        self.root = root
        self.operations = 0
        self._crashed = crashed
        self._held: dict[int, int] = {}
        """Open descriptors, so that the number of a known inode is not reused for another file."""
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, Names] = {}
        self._modes: dict[int, int] = {}
        self._paths: dict[int, Path] = {}
        """The current path of an inode."""
        self._pending: Callable[[], None] = lambda: None
        self._scan()
        for inode, path in self._paths.items():
            self._remember(inode, path)

    def observe(self, operation: str, path: Path) -> None:
        self._pending()
        self._pending = lambda: None
        if not path.is_relative_to(self.root):
            return
        self.operations += 1
        self._scan()
        self._crashed(self.operations)
        if operation in ("sync", "sync_directory"):
            # Once the sync is done, the current content is durable.
            inode = os.stat(path).st_ino
            content = self._content(inode, path)
            self._pending = lambda: self._store(inode, content)

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)

    def build(self, target: Path, draw: random.Random | None) -> None:
        """Without `draw`, only synced data remains; with it, names and contents are chosen at random."""
        self._build_directory(os.stat(self.root).st_ino, target, draw)

    # ---- current and durable state

    def _scan(self) -> None:
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
        current = self._paths.get(inode)
        names = durable
        if draw is not None and current is None:
            # The directory has been deleted, file by file.
            names = {name: entry for name, entry in durable.items() if draw.random() < 0.7}
        elif draw is not None and current is not None and draw.random() < 0.6:
            names = {name: (current / name).lstat().st_ino for name in os.listdir(current)}
        for name, entry in names.items():
            if stat.S_ISDIR(self._modes[entry]):
                self._build_directory(entry, target / name, draw)
            elif stat.S_ISREG(self._modes[entry]):
                (target / name).write_bytes(self._remaining(entry, draw))

    def _remaining(self, inode: int, draw: random.Random | None) -> bytes:
        durable = self._contents.get(inode, b"")
        current = self._paths.get(inode)
        now = current.read_bytes() if current is not None else durable
        if draw is None or now == durable:
            return durable
        return draw.choice([durable, b"", now[: len(now) // 2], bytes(len(now)), now])
