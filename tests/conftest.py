"""Every test starts from the default settings, offline, and on one thread: tensors are tiny here."""

import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from megatrain import settings


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
