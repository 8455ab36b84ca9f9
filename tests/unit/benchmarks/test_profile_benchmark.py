"""A step between its marks."""

from dataclasses import replace
from functools import partial

import pytest
from benchmarks import profile
from benchmarks.accuracy import ESTIMATED
from benchmarks.peer_rows import ROWS
from benchmarks.row import measure

import megatrain as mt


@pytest.fixture(autouse=True)
def default_settings():
    """Rows set the limits of the process."""
    yield
    mt.init()


def test_a_step_with_gradients_in_ram_is_profiled_whole():
    kernels = []
    options = replace(ROWS["tiny"], layers=2, length=8, micro=1).options(1)
    options.trainer, options.around, options.more = True, partial(profile.last_step, found=kernels), 3
    measure(options, ESTIMATED)
    names = [kernel.name for kernel in kernels]
    backwards = [name for name in names if "ScaledDotProduct" in name and name.startswith("autograd::")]
    assert len(backwards) == 2
    marks = [number for number, kernel in enumerate(kernels) if kernel.kind == profile.MARK]
    assert marks == [0, len(kernels) - 1]
    whole = (kernels[-1].end - kernels[0].start) / 1e3
    assert next(profile.report(kernels, 5, 5)).startswith(f"{whole:.1f} ms, {len(kernels):,} kernels")


def test_a_step_is_cut_at_marks_alone():
    def at(name, start):
        return profile.Kernel(name, 7, start, start + 1.0)

    mark = "void at::native::vectorized_elementwise_kernel<4, at::native::nextafter_kernel_cuda(...)>"
    steps = [at(mark, 0.0), at("gemm", 5.0), at("_chunks", 6.0), at(mark, 7.0), at("gemm", 20.0), at("_chunks", 30.0)]
    kernels = [*steps, at("_tree", 20_000.0), at(mark, 20_010.0), at("_kernel", 20_011.0)]
    assert profile.between_marks(kernels) == kernels[3:8]
