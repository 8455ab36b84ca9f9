"""Layout of parameters in a slab: aligned, disjoint, padded to whole pages."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.geometry import ALIGN_BYTES, ALIGN_ELEMENTS
from megatrain.store.layout import lay_out

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(torch.Size), max_size=12)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8])


def named(shapes):
    return [(f"p{i}", shape) for i, shape in enumerate(shapes)]


@given(SHAPES, DTYPES)
def test_segments_are_aligned_and_disjoint(shapes, dtype):
    layout = lay_out(named(shapes), dtype)
    assert [(s.name, s.shape, s.numel) for s in layout.segments] == [(n, s, s.numel()) for n, s in named(shapes)]
    end = 0
    for segment in layout.segments:
        assert segment.offset % ALIGN_ELEMENTS == 0
        assert segment.offset >= end
        assert segment.end - segment.offset == segment.shape.numel()
        end = segment.end
    assert layout.numel >= end


@given(SHAPES, DTYPES)
def test_slabs_are_whole_pages_and_no_more(shapes, dtype):
    layout = lay_out(named(shapes), dtype)
    assert layout.nbytes == layout.numel * dtype.itemsize
    assert layout.nbytes % ALIGN_BYTES == 0
    used = sum(-(-s.numel() // ALIGN_ELEMENTS) * ALIGN_ELEMENTS for s in shapes) * dtype.itemsize
    assert used <= layout.nbytes < used + ALIGN_BYTES


@given(SHAPES, st.data())
def test_runs_cover_exactly_the_requested_segments(shapes, data):
    layout = lay_out(named(shapes), torch.float32)
    requested = data.draw(
        st.permutations(range(len(shapes))).flatmap(lambda p: st.integers(0, len(p)).map(lambda n: p[:n]))
    )
    runs = layout.runs(requested)
    assert runs == sorted(runs)
    covered = [any(start <= s.offset and s.end <= end for start, end in runs) for s in layout.segments]
    for index, segment in enumerate(layout.segments):
        touched = any(max(start, segment.offset) < min(end, segment.end) for start, end in runs)
        if index in requested:
            assert covered[index]
        else:
            assert not touched
    for (_, end), (start, _) in pairwise(runs):
        assert end <= start


def test_neighbours_are_one_run_across_their_padding():
    layout = lay_out([(name, torch.Size([100])) for name in "abcd"], torch.float32)
    assert layout.runs([0, 1, 2, 3]) == [(0, 3 * 256 + 100)]
    assert layout.runs([3, 0, 1]) == [(0, 256 + 100), (3 * 256, 3 * 256 + 100)]
    assert layout.runs([]) == []
