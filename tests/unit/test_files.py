"""File operations: the order in which data becomes durable, what observers see, and what a fault leaves behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain import files

Seen = list[tuple[str, str]]


def recording(seen: Seen) -> files.Observer:
    return lambda operation, path: seen.append((operation, path.name))


def failing(operation: str, name: str, code: int = errno.EIO) -> files.Observer:
    def observe(found: str, path: Path) -> None:
        if (found, path.name) == (operation, name):
            raise OSError(code, os.strerror(code))

    return observe


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- writing


def test_a_file_is_synced_before_it_has_its_name(tmp_path: Path) -> None:
    seen: Seen = []
    with files.observing(recording(seen)):
        files.write(tmp_path / "name", "text")
    files.write(tmp_path / "name", b"unseen")
    assert [operation for operation, _ in seen] == ["write", "sync", "rename", "sync_directory"]
    assert seen[0][1] == seen[1][1] != "name"
    assert seen[2:] == [("rename", "name"), ("sync_directory", tmp_path.name)]
    assert tree(tmp_path) == {"name": b"unseen"}


@pytest.mark.parametrize("operation", ["write", "sync", "rename"])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, operation: str) -> None:
    files.write(tmp_path / "name", "old")

    def full(found: str, path: Path) -> None:
        if found == operation:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with files.observing(full), pytest.raises(OSError, match="No space"):
        files.write(tmp_path / "name", "new")
    assert tree(tmp_path) == {"name": b"old"}


def test_links_stay_links_and_devices_are_written_to(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    files.write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    (tmp_path / "nowhere").symlink_to("/dev/null")
    files.write(tmp_path / "nowhere", "gone")
    assert not Path("/dev/null").is_file()


def test_a_written_file_has_the_default_mode(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    files.write(tmp_path / "name", "")
    assert (tmp_path / "name").stat().st_mode == (tmp_path / "plain").stat().st_mode


# ---- syncing


def test_a_tree_is_synced_from_the_bottom_up(tmp_path: Path) -> None:
    (tmp_path / "inner" / "deep").mkdir(parents=True)
    for name in ("a", "inner/b", "inner/deep/c"):
        (tmp_path / name).write_text(name)
    (tmp_path / "away").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    seen: Seen = []
    with files.observing(recording(seen)):
        assert files.sync_tree(tmp_path, files.regular_files(tmp_path)) == len("a" + "inner/b" + "inner/deep/c")
    assert sorted(seen[:3]) == [("sync", "a"), ("sync", "b"), ("sync", "c")]
    assert seen[3:] == [("sync_directory", name) for name in ("deep", "inner", tmp_path.name)]


def test_a_failed_sync_is_not_retried(tmp_path: Path) -> None:
    """A second sync would succeed although the kernel dropped the data after the first."""
    (tmp_path / "name").write_text("lost")
    with files.observing(failing("sync", "name")), pytest.raises(OSError, match="while syncing") as failed:
        files.sync_tree(tmp_path, files.regular_files(tmp_path))
    assert failed.value.filename == str(tmp_path / "name")
    seen: Seen = []
    with files.observing(recording(seen)), pytest.raises(OSError, match="has not been written again"):
        files.sync(tmp_path / "name")
    assert seen == []
    (tmp_path / "name").unlink()
    (tmp_path / "name").write_text("anew")
    os.utime(tmp_path / "name", ns=(0, 1))
    assert files.sync(tmp_path / "name") == 4


def test_directories_that_cannot_be_synced(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    with files.observing(failing("sync_directory", tmp_path.name, errno.EINVAL)):
        files.sync_directory(tmp_path)
        files.sync_directory(tmp_path)
    assert [line for line in announced.messages if "cannot sync directories" in line]
    assert len(announced.messages) == 1
    files._unable.clear()
    with files.observing(failing("sync_directory", tmp_path.name)), pytest.raises(OSError, match="while syncing"):
        files.sync_directory(tmp_path)


def test_syncing_is_timed(tmp_path: Path) -> None:
    stopwatch = files.Stopwatch()
    (tmp_path / "name").write_bytes(bytes(1_500_000))
    assert stopwatch.report("x", files.sync(tmp_path / "name")).startswith("x written to disk: 1.5 MB in ")


# ---- replacing directories


def pair(tmp_path: Path) -> tuple[Path, Path, Path]:
    for name in ("fresh", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    return tmp_path / "fresh", tmp_path / "target", tmp_path / "aside"


@pytest.mark.parametrize("code", [None, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_directory_replaces_another(tmp_path: Path, code: int | None) -> None:
    observer = recording([]) if code is None else failing("exchange", "target", code)
    with files.observing(observer):
        files.replace_directory(*pair(tmp_path))
    assert tree(tmp_path) == {"target/content": b"fresh", "aside/content": b"target"}


def test_an_interrupt_between_two_renames_restores_the_old_directory(tmp_path: Path) -> None:
    found = []

    def observe(operation: str, path: Path) -> None:
        if operation == "exchange":
            raise OSError(errno.EINVAL, "")
        if (operation, path.name) == ("rename", "target"):
            found.append(sorted(os.listdir(tmp_path)))
            raise KeyboardInterrupt

    with files.observing(observe), pytest.raises(KeyboardInterrupt):
        files.replace_directory(*pair(tmp_path))
    assert found == [["aside", "fresh"]]
    assert tree(tmp_path) == {"target/content": b"target", "fresh/content": b"fresh"}, "the first rename is undone"


def test_a_directory_that_may_not_be_renamed_stays(tmp_path: Path) -> None:
    with files.observing(failing("exchange", "target", errno.EBUSY)), pytest.raises(OSError, match="busy"):
        files.replace_directory(*pair(tmp_path))
    assert tree(tmp_path) == {"target/content": b"target", "fresh/content": b"fresh"}


@pytest.mark.parametrize("code", [None, errno.EPERM, errno.EXDEV])
def test_link_or_copy(tmp_path: Path, code: int | None) -> None:
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to("file")
    with files.observing(recording([]) if code is None else failing("link", "other", code)):
        files.link_or_copy(tmp_path / "file", tmp_path / "other")
    files.link_or_copy(tmp_path / "link", tmp_path / "another")
    assert (tmp_path / "other").read_text() == "content"
    assert (tmp_path / "other").samefile(tmp_path / "file") == (code is None)
    assert os.readlink(tmp_path / "another") == "file"


def test_a_tree_is_renamed_before_it_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    (tmp_path / ".other.megatrain-deleted" / "half").mkdir(parents=True)
    seen: list[list[str]] = []

    def list_folder(operation: str, path: Path) -> None:
        if operation == "sync_directory":
            seen.append(sorted(os.listdir(tmp_path)))

    with files.observing(list_folder):
        files.remove_tree(tmp_path / "tree")
        files.remove_tree(tmp_path / "absent")
    assert seen == [[".tree.megatrain-deleted"]]
    assert os.listdir(tmp_path) == []


# ---- reading untrusted paths


@pytest.mark.parametrize("name", ["", "/etc/hostname", "../outside", "inner/../../outside", "./file", "a//b", "a\0b"])
def test_names_outside_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_text("")
    (tmp_path / "in" / "inner").mkdir(parents=True)
    with pytest.raises(OSError, match="not a name"), files.opened_inside(tmp_path / "in", name):
        pass


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": make_pipe,
    "directory": Path.mkdir,
    "link": lambda path: path.symlink_to("/etc/hostname"),
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    KINDS[kind](tmp_path / "name")
    with pytest.raises(OSError, match=r"regular|symbolic") as error, files.opened_inside(tmp_path, "name"):
        pass
    assert error.value.filename == str(tmp_path / "name")


def test_a_folder_may_not_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("content")
    (tmp_path / "link").symlink_to("real")
    with files.opened_inside(tmp_path, "real/file") as file:
        assert file.read() == b"content"
    with pytest.raises(OSError, match="Not a directory"), files.opened_inside(tmp_path, "link/file"):
        pass
    # The directory that is opened may itself be a link.
    with files.opened_inside(tmp_path / "link", "file") as file:
        assert file.read() == b"content"


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    make_pipe(tmp_path / "pipe")
    before = set(os.listdir("/proc/self/fd"))
    for name in ("pipe", "absent", "absent/deeper", "/"):
        with pytest.raises(OSError, match=r"E|n"), files.opened_inside(tmp_path, name):
            pass
    files.write(tmp_path / "name", "")
    assert set(os.listdir("/proc/self/fd")) == before


def test_free_bytes_of_a_path_that_does_not_exist(tmp_path: Path) -> None:
    assert files.free_bytes(tmp_path / "not" / "yet") > 0


def test_removing_a_link_keeps_its_target(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    files.remove_tree(tmp_path / "link")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]
    assert (tmp_path / "there" / "file").read_text() == "x"
