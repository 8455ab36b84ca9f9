"""Every test starts with default settings, offline, and on one thread, because its tensors are tiny."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from megatrain import settings
from megatrain.model import loading
from megatrain.native import disk
from megatrain.telemetry import notices

# Background jobs of a shell ignore SIGINT, and their children inherit that. Tests of Ctrl-C need Python's handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    settings.store(settings.Settings())
    yield
    settings.store(settings.Settings())
    loading.keep_in_files(False)
    torch.set_num_threads(threads)


@pytest.fixture
def announced(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Captures MegaTrain's notices; `announced.messages` lists them."""
    # `set_level` puts back the level that it found: that of a logger which has its handler.
    notices._installed()
    caplog.set_level("INFO", logger="megatrain")
    return caplog


@pytest.fixture(params=disk.BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Both ways to read and write a drive."""
    if request.param == "uring" and (why := disk.uring_refusal()):
        pytest.skip(f"io_uring cannot be used here: {why}")
    return str(request.param)


_file: Path | None = None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave what lives long out of the next file's collections: every engine that is attached collects garbage."""
    global _file
    if item.path != _file:
        _file = item.path
        gc.unfreeze()
        gc.collect()
        gc.freeze()
