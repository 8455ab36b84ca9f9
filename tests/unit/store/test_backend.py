from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
from tests import forked
from tests.tiny import Stack, backward, differences, engine_of, roles

from megatrain.errors import DiskFull, SettingsError
from megatrain.native import disk as native
from megatrain.store import backend as backend_module
from megatrain.store import scratch
from megatrain.store.backend import MIN_GAIN, choose_backend, measure
from megatrain.store.disk import DiskMemory

SETUP, ENTER = 425, 426
"""Numbers of the system calls of io_uring, on every architecture."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatrain"


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    """A directory that may be measured, where io_uring can be used."""
    if why := native.uring_refusal():
        pytest.skip(f"io_uring cannot be used here: {why}")
    if native.describe(os.open(tmp_path, os.O_RDONLY)).magic in scratch.MEMORY_SYSTEMS:
        pytest.skip("the directory for temporary files is in RAM")
    return tmp_path / "scratch"


def forbid(number: int, code: int) -> None:
    """From now on, this system call fails in this process, as the seccomp filters of containers make it."""
    # Load the number; if it is this one, return the code; else allow.
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | code), (0x06, 0, 0, 0x7FFF0000)]
    code_of = b"".join(struct.pack("HBBI", *step) for step in steps)
    held = ctypes.create_string_buffer(code_of, len(code_of))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(held))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong]
    assert prctl(38, 1, None, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS"
    assert prctl(22, 2, program, 0, 0) == 0, "PR_SET_SECCOMP"


@pytest.mark.parametrize("call", [SETUP, ENTER], ids=["setup", "enter"])
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.EACCES, errno.ENOMEM])
def test_where_io_uring_is_refused_threads_are_used(tmp_path: Path, call: int, code: int) -> None:
    if native.uring_refusal():
        pytest.skip("io_uring cannot be used here anyway")

    def work() -> Any:
        forbid(call, code)
        memory = DiskMemory([tmp_path], allow_tmpfs=True, backend=choose_backend([tmp_path], "auto"))
        buffer = memory.allocate(10_000, transferred=False)
        with buffer.changing(0, 10_000) as held:
            held.fill_(7)
        try:
            choose_backend([tmp_path], "uring")
        except SettingsError as error:
            return bool((buffer.read(0, 10_000) == 7).all()), native.uring_refusal(), str(error)

    ended = forked.run(work)
    refusal = f"{os.strerror(code)} (errno {code})"
    assert ended.value is not None, ended.raised
    assert ended.value[:2] == (True, refusal)
    assert f"io_uring cannot be used here: {refusal}. " in ended.value[2]
    assert ended.value[2].endswith("use 'auto' or 'threads'.")


def test_both_are_measured_once(drive: Path, cache: Path, announced: pytest.LogCaptureFixture) -> None:
    first = choose_backend([drive], "auto")
    kept = json.loads(next(cache.iterdir()).read_text())
    assert [message for message in announced.messages if message.startswith("disk I/O by")] == announced.messages
    assert len(announced.messages) == 1
    for rate in kept["rates"].values():
        assert f"{rate / 1e9:.3g} GB/s" in announced.messages[0] or len(kept["rates"]) == 1
    announced.clear()
    # Another directory of the same drive needs no measurement.
    assert choose_backend([drive.parent / "other"], "auto") == first
    assert "measured now" not in announced.text
    assert len(list(cache.iterdir())) == 1
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({"threads": 2e9, "uring": 2e9 * MIN_GAIN + 1e6}, "uring"),
        ({"threads": 2e9, "uring": 2e9 * MIN_GAIN - 1e6}, "threads"),
        ({"threads": 1e8}, "threads"),
    ],
)
def test_the_rates_decide(
    drive: Path, cache: Path, announced: pytest.LogCaptureFixture, rates: dict[str, float], chosen: str
) -> None:
    choose_backend([drive], "auto")
    file = next(cache.iterdir())
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rates": rates}))
    announced.clear()
    assert choose_backend([drive], "auto") == chosen
    # Threads are the default, which needs no notice.
    assert [("2.2 GB/s by io_uring, 2 GB/s by threads" in message) for message in announced.messages] == (
        [True] if chosen == "uring" else []
    )


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"facts": 1}', '{"facts": {}, "rates": {}}'])
def test_a_damaged_cache_is_replaced(drive: Path, cache: Path, content: str) -> None:
    choose_backend([drive], "auto")
    file = next(cache.iterdir())
    intact = json.loads(file.read_text())
    file.write_text(content)
    choose_backend([drive], "auto")
    again = json.loads(file.read_text())
    assert again["facts"] == intact["facts"]
    assert again["rates"]["threads"] > 0


def test_a_measurement_writes_at_most_256_mb(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, submit = [], native.Pool.submit

    def counted(pool: native.Pool, pieces: Any, *args: Any, write: bool, **options: Any) -> native.Transfer:
        written.extend(piece.length for piece in pieces if write)
        return submit(pool, pieces, *args, write=write, **options)

    monkeypatch.setattr(native.Pool, "submit", counted)
    rates = measure(drive)
    assert set(rates) in ({"threads"}, {"threads", "uring"})
    assert 0 < sum(written) <= 256e6


def test_without_room_nothing_is_measured(drive: Path, cache: Path, announced: pytest.LogCaptureFixture) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        assert choose_backend([drive], "auto") == "threads"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "io_uring could not be measured" in announced.text
    assert not cache.exists()


def test_a_directory_that_cannot_be_used_is_reported_when_it_is_opened(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "file").write_text("")
    assert choose_backend([tmp_path / "file" / "below"], "auto") == "threads"


def test_an_engine_uses_the_chosen_backend(backend: str, tmp_path: Path) -> None:
    # A pool that an earlier test left stuck in the kernel keeps its ring.
    gc.collect()
    before = open_rings()

    def trained(**settings: Any) -> Any:
        model = Stack()
        engine = engine_of(model, **settings)
        optimizer = engine.optimizer(lr=0.1)
        rings = open_rings() - before
        for seed in range(3):
            backward(model, seed)
            optimizer.step()
            optimizer.zero_grad()
        found = roles(engine)
        engine.release()
        return found, len(rings)

    on_disk, rings = trained(offload_dir=tmp_path, on_disk=["*"], allow_tmpfs=True, disk_io=backend)
    in_ram, _ = trained()
    assert rings == (1 if backend == "uring" else 0)
    assert differences(on_disk, in_ram) == []
    assert open_rings() <= before


def open_rings() -> set[str]:
    """Descriptors of io_uring that this process has."""
    return {descriptor for descriptor in os.listdir("/proc/self/fd") if "io_uring" in name_of(descriptor)}


def name_of(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""


@pytest.mark.parametrize("choice", ["auto", "threads"])
@pytest.mark.parametrize("uring", [True, False])
def test_a_network_file_system_is_warned_about_with_its_measured_rate(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, announced: pytest.LogCaptureFixture, choice: str,
    uring: bool,
) -> None:  # fmt: skip
    kind = native.describe(os.open(tmp_path, os.O_RDONLY)).magic
    if kind in scratch.MEMORY_SYSTEMS:
        pytest.skip("the directory for temporary files is in RAM")
    monkeypatch.setitem(backend_module.NETWORK_SYSTEMS, kind, "NFS")
    if not uring:
        monkeypatch.setattr(native, "uring_refusal", lambda: "refused")
    for _ in range(2):
        announced.clear()
        choose_backend([tmp_path / "scratch"], choice)
        (kept,) = (json.loads(file.read_text())["rates"] for file in cache.iterdir())
        (said,) = (message for message in announced.messages if "network file system" in message)
        rate = f"{max(kept.values()) / 1e9:.3g} GB/s"
        assert said.startswith(
            f"{tmp_path}/scratch is on a network file system (NFS): state moves to and from it at {rate}"
        )
    monkeypatch.setattr(backend_module, "measure", out_of_space)
    for file in cache.iterdir():
        file.unlink()
    announced.clear()
    choose_backend([tmp_path / "scratch"], choice)
    assert "its rate, which could not be measured (states need 3 GB" in announced.text


def out_of_space(folder: Path) -> dict[str, float]:
    raise DiskFull("states need 3 GB")
