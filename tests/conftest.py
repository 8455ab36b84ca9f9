"""Every test starts from the default settings, offline, and on one thread: tensors are tiny here."""

import os
import signal
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from megatrain import settings

# A shell's background jobs ignore Ctrl-C, and what they start inherits that: tests of it need Python's own handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    settings.store(settings.Settings())
    yield
    settings.store(settings.Settings())
    torch.set_num_threads(threads)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What MegaTrain announces; `said.messages` is the list."""
    caplog.set_level("INFO", logger="megatrain")
    return caplog
