"""Tests that need a CUDA GPU; skipped without one. Run: PYTHONPATH=src python -m pytest tests/gpu -s"""

import os

import pytest
import torch

from megatrain import settings

# Deterministic matrix products need this before cuBLAS is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def eager(defaults):
    """Layers run eagerly unless a test says otherwise: many compare bits with PyTorch, and compiling takes seconds."""
    settings.store(settings.Settings(compile=False))


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
