"""Benchmarks configure PyTorch's allocator when they are imported, which other tests must not see."""

import os

_before = dict(os.environ)

import benchmarks.resumable  # noqa: E402
import benchmarks.row  # noqa: E402
import benchmarks.step  # noqa: E402, F401

os.environ.clear()
os.environ.update(_before)
