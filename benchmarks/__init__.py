"""Benchmarks, run as modules from the source tree: `PYTHONPATH=src python -m benchmarks.step`."""
