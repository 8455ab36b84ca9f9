"""Gradients of any dtype are added in pieces, with the bits of one addition and almost no memory beside the sum."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatrain.store import gradient
from megatrain.store.layout import lay_out


def laid_out(*sizes):
    return lay_out([(str(i), torch.Size([size])) for i, size in enumerate(sizes)], torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("piece", [1, 7, 300, 512, 1 << 20])
def test_pieces_do_not_change_bits(dtype, piece, monkeypatch):
    monkeypatch.setattr(gradient, "ADD_CHUNK_ELEMENTS", piece)
    layout = laid_out(300, 70, 1000)
    generator = torch.Generator().manual_seed(0)
    total = torch.randn(layout.numel, generator=generator)
    flat = torch.randn(layout.numel, generator=generator).to(dtype)
    expected = total.clone()
    for index, known in ((0, True), (1, False), (2, True)):
        segment = layout.segments[index]
        own = slice(segment.offset, segment.end)
        expected[own] = expected[own] + flat[own].float() if known else flat[own].float()
    gradient.add_segments(layout, total, flat, frozenset({0, 1, 2}), {0, 2})
    for segment in layout.segments:
        assert torch.equal(total[segment.offset : segment.end], expected[segment.offset : segment.end])


def test_a_sum_makes_no_copy_of_the_gradient():
    """PyTorch's addition of BF16 to FP32 would first convert the gradient."""
    layout = laid_out(8 << 20)
    total, flat = torch.zeros(layout.numel), torch.ones(layout.numel, dtype=torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        gradient.add_segments(layout, total, flat, frozenset({0}), {0})
    taken = [event.self_cpu_memory_usage for event in profiler.events() if event.self_cpu_memory_usage > 0]
    assert taken, "the profiler recorded no allocation"
    assert max(taken) <= gradient.ADD_CHUNK_ELEMENTS * 4
