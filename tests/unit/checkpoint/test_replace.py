"""Saving over a directory never leaves it incomplete and keeps files that other programs put there."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatrain import files
from megatrain.checkpoint import manifest, replace

Saved = dict[str, str]
OLD: Saved = {"model-1.safetensors": "old 1", "model-2.safetensors": "old 2", "config.json": "old"}
NEW: Saved = {"model.safetensors": "new", "config.json": "new", "megatrain/optimizer-1.safetensors": "new"}
FOREIGN: Saved = {"notes.txt": "mine", "runs/today/events": "mine", "megatrain/readme": "mine"}


def put(directory: Path, content: Saved) -> None:
    for name, text in content.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def content(directory: Path) -> Saved:
    """The files of a directory, without the temporary files of a killed save."""
    current = {path.relative_to(directory).as_posix(): path for path in files.regular_files(directory)}
    return {name: path.read_text() for name, path in current.items() if "megatrain-saving" not in name}


def save(directory: Path | str, saved: Saved = NEW) -> list[str]:
    """Save as `Engine.save` does, and return the names of the listed files."""
    with replace.replacing(directory) as replacement:
        put(replacement.fresh, saved)
        listed = replacement.carry()
        files.sync_tree(replacement.fresh, listed)
        replacement.commit()
    return [path.relative_to(replacement.fresh).as_posix() for path in listed]


def siblings(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory.parent) if name != directory.name)


def no_exchange(operation: str, path: Path) -> None:
    if operation == "exchange":
        raise OSError(errno.EINVAL, "Invalid argument")


def no_rename(operation: str, path: Path) -> None:
    if operation == "exchange":
        raise OSError(errno.EBUSY, "Device or resource busy")


def no_link(operation: str, path: Path) -> None:
    if operation == "link":
        raise OSError(errno.EPERM, "Operation not permitted")


def nothing(operation: str, path: Path) -> None:
    pass


OBSTACLES: dict[str, list[files.Observer]] = {
    "exchanged": [nothing],
    "two renames": [no_exchange],
    "stays": [no_rename],
    "copied": [no_link],
    "stays, copied": [no_rename, no_link],
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    put(tmp_path / "out" / "target", OLD | FOREIGN)
    return tmp_path / "out" / "target"


@pytest.fixture(params=OBSTACLES)
def obstacles(request: pytest.FixtureRequest) -> Iterator[str]:
    with files.observing(OBSTACLES[request.param][0]), files.observing(OBSTACLES[request.param][-1]):
        yield request.param


def test_a_save_replaces_old_files_and_keeps_foreign_ones(target: Path, obstacles: str) -> None:
    listed = save(target)
    assert content(target) == NEW | FOREIGN
    assert sorted(listed) == sorted(NEW)
    assert siblings(target) == []
    assert replace.find(target) == target


def test_a_first_save(tmp_path: Path) -> None:
    save(tmp_path / "not" / "there" / "yet")
    assert content(tmp_path / "not" / "there" / "yet") == NEW
    assert siblings(tmp_path / "not" / "there" / "yet") == []


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child that is killed before operation `number`, and return whether it was killed."""
    child = os.fork()
    if child == 0:
        remaining = [number]

        def count(operation: str, path: Path) -> None:
            remaining[0] -= 1
            if remaining[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            with files.observing(count):
                work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_killed_at_every_operation(target: Path, obstacles: str) -> None:
    """The directory holds the complete old or new state, and the next save removes the leftovers."""
    seen = set()
    for number in range(0, 200, 1 if obstacles in ("exchanged", "two renames") else 3):
        killed = killed_at(number, lambda: save(target))
        current = content(replace.find(target))
        kind = "old" if current == OLD | FOREIGN else "new"
        assert current == (OLD if kind == "old" else NEW) | FOREIGN, number
        seen.add(kind)
        if not killed:
            break
        save(target, OLD)
        assert content(target) == OLD | FOREIGN
        assert siblings(target) == []
    assert not killed
    assert number > 10
    assert seen == {"old", "new"}


@pytest.mark.parametrize("operation", ["make", "sync", "sync_directory", "rename", "link", "remove_tree"])
def test_a_failure_leaves_the_old_or_the_new_state(target: Path, operation: str) -> None:
    for number in range(100):
        seen: list[str] = []

        def fails(current: str, path: Path, seen: list[str] = seen, number: int = number) -> None:
            if current == operation:
                seen.append(current)
                if len(seen) == number + 1:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        try:
            with files.observing(fails):
                save(target)
        except OSError:
            assert content(replace.find(target)) in (OLD | FOREIGN, NEW | FOREIGN), number
        if len(seen) <= number:
            break
        save(target, OLD)
    assert number > 0
    assert content(target) == NEW | FOREIGN


def test_files_added_during_a_save_are_kept(target: Path) -> None:
    """Another program adds a file and replaces another before the exchange."""

    def adds(operation: str, path: Path) -> None:
        if operation == "exchange":
            (target / "runs" / "late").write_text("late")
            (target / "anew").write_text("anew")
            os.utime(target / "anew", ns=(0, 4_000_000_000_000_000_000))
            (target / "anew").rename(target / "notes.txt")

    with files.observing(adds):
        save(target)
    assert content(target) == NEW | FOREIGN | {"runs/late": "late", "notes.txt": "anew"}


def test_a_file_that_another_program_has_open_stays_valid(target: Path) -> None:
    with (target / "notes.txt").open("a") as notes:
        save(target)
        notes.write(" and more")
    assert (target / "notes.txt").read_text() == "mine and more"


def test_foreign_links_directories_and_pipes_are_kept(target: Path, tmp_path: Path) -> None:
    (target / "link").symlink_to("notes.txt")
    (target / "away").symlink_to(tmp_path)
    (target / "dangling").symlink_to("nothing")
    (target / "empty").mkdir(mode=0o700)
    os.mkfifo(target / "pipe")
    save(target)
    assert {name: os.readlink(target / name) for name in ("link", "away", "dangling")} == {
        "link": "notes.txt", "away": str(tmp_path), "dangling": "nothing"
    }  # fmt: skip
    assert (target / "empty").stat().st_mode & 0o777 == 0o700
    assert (target / "pipe").is_fifo()


@pytest.mark.parametrize("rename_fails", [False, True])
def test_an_empty_folder_of_ours_is_removed(tmp_path: Path, rename_fails: bool) -> None:
    target = tmp_path / "target"
    with files.observing(no_rename if rename_fails else nothing):
        save(target, NEW)
        save(target, OLD)
    assert content(target) == OLD
    assert not (target / "megatrain").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_bind_mount_of_the_same_file_system(target: Path, tmp_path: Path) -> None:
    """Runs in a child with its own mount namespace. Neither device nor inode shows that this is a mount point."""
    mount_point = tmp_path / "mounted here"
    mount_point.mkdir()
    child = os.fork()
    if child == 0:
        libc, code = ctypes.CDLL(None, use_errno=True), 3
        try:
            new_namespace, private, bind = 0x20000, 0x44000, 0x1000
            if (
                libc.unshare(new_namespace)
                or libc.mount(None, b"/", None, private, None)
                or libc.mount(bytes(target), bytes(mount_point), None, bind, None)
            ):
                code = 2
            else:
                save(mount_point)
                code = 0 if content(mount_point) == NEW | FOREIGN else 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 2:
        pytest.skip("nothing can be mounted here")
    assert code == 0
    assert content(target) == NEW | FOREIGN
    assert sorted(os.listdir(tmp_path)) == ["mounted here", "out"]


def test_permissions_are_kept(target: Path) -> None:
    target.chmod(0o2770)
    save(target)
    assert target.stat().st_mode & 0o7777 == 0o2770


def test_a_linked_directory(target: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(target)
    save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert content(target) == NEW | FOREIGN
    assert sorted(os.listdir(tmp_path)) == ["link", "out"]


@pytest.mark.parametrize("where", ["target", "."])
def test_relative_paths_and_the_current_directory(target: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(target if where == "." else target.parent)
    save(where)
    assert content(Path(where)) == content(target) == NEW | FOREIGN
    save("..", OLD)
    assert os.listdir(".")
    assert content(target) == NEW | FOREIGN or where == "target"


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="not a directory"):
        replace.Replacement(tmp_path / "file")
    with pytest.raises(FileExistsError):
        replace.Replacement(tmp_path / "file" / "below")


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that other users can reach. Only its owner can reach `tmp_path`."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("which", ["target", "parent"])
def test_read_only(open_path: Path, which: str) -> None:
    """A read-only parent directory does not prevent a save. A read-only target does."""
    target = open_path / "target"
    put(target, OLD | FOREIGN)
    for path in [target, *target.rglob("*")]:
        os.chown(path, 65534, 65534)
    (target if which == "target" else target.parent).chmod(0o555)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        try:
            save(target)
        except PermissionError as error:
            os._exit(1 if "no permission to write" in str(error) and error.filename == str(target) else 2)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == (1 if which == "target" else 0)
    assert content(target) == (OLD if which == "target" else NEW) | FOREIGN
    assert siblings(target) == []


def test_temporary_files_of_a_running_process_are_kept(target: Path) -> None:
    running = target.parent / f".target.megatrain-saving-{os.getppid()}"
    put(running, NEW)
    save(target)
    assert siblings(target) == [running.name]


def test_names_with_wildcards(tmp_path: Path) -> None:
    target = tmp_path / "lr[1]*?"
    for saved in (OLD, NEW):
        put(tmp_path / ".lr[1]*?.megatrain-saving-999999999", OLD)
        save(target, saved)
        assert content(target) == saved
        assert siblings(target) == []


# ---- checkpoints rewritten in place


def write_checkpoint(directory: Path, text: str) -> None:
    put(directory, {"weights": text, "megatrain/states": text})
    manifest.write(directory, [directory / "weights"], {"optimizer": "adamw", "steps": {}, "groups": []})


def rewrite(directory: Path, text: str) -> None:
    with replace.rewriting(directory) as before:
        files.before("write", directory)
        put(directory, {"weights": text})
        files.before("write", directory)
        replace.carry(before, directory)
        write_checkpoint(directory, text)


def test_a_rewrite_killed_at_every_operation(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one", "old")
    put(tmp_path / "one", {"notes": "mine"})
    for number in range(100):
        killed = killed_at(number, lambda: rewrite(tmp_path / "one", "new"))
        current = replace.find(tmp_path / "one")
        manifest.verify(current)
        assert (current / "weights").read_text() == (
            "old" if killed and number < 8 else (current / "weights").read_text()
        )
        assert (current / "notes").read_text() == "mine"
        assert "one" in replace.names(tmp_path)
        rewrite(tmp_path / "one", "old")
        assert os.listdir(tmp_path) == ["one"]
        if not killed:
            break
    assert not killed


def test_a_linked_checkpoint_is_rewritten(tmp_path: Path) -> None:
    """The target of the link does not change."""
    write_checkpoint(tmp_path / "elsewhere" / "one", "old")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "one").symlink_to(tmp_path / "elsewhere" / "one")
    rewrite(tmp_path / "out" / "one", "new")
    assert not (tmp_path / "out" / "one").is_symlink()
    assert os.listdir(tmp_path / "out") == ["one"]
    assert [(tmp_path / where / "one" / "weights").read_text() for where in ("out", "elsewhere")] == ["new", "old"]


def test_a_failed_rewrite_restores_the_old_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one", "old")

    def fail_half_way(directory: Path) -> None:
        with replace.rewriting(directory):
            put(directory, {"weights": "half"})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_half_way(tmp_path / "one")
    assert os.listdir(tmp_path) == ["one"]
    manifest.verify(tmp_path / "one")
    with pytest.raises(KeyboardInterrupt):
        fail_half_way(tmp_path / "two")
    assert (tmp_path / "two").is_dir(), "a failed first save must leave its files, because they replace nothing"
