"""On the GPU: the fused cross-entropy equals PyTorch's up to FP32 rounding."""

import subprocess
import sys

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from megatrain.compute import loss

IGNORED = -100
INFINITY = float("inf")


def both(logits, targets, scale=0.37):
    """Loss and gradient of the fused kernels, and of PyTorch's operations in FP64."""
    assert loss._fused_kernels() is not None
    found = []
    for one in (logits.clone().requires_grad_(), logits.double().requires_grad_()):
        if one.dtype == torch.float64:
            total = functional.cross_entropy(one, targets, ignore_index=IGNORED, reduction="sum")
        else:
            total = loss.cross_entropy(one, targets, IGNORED, fused=True)
            assert total.grad_fn.next_functions[0][0].name() == "_RowsBackward"
        (gradient,) = torch.autograd.grad(total * scale, one)
        found.append((total.detach(), gradient))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("vocabulary", [2, 8193, 152_064])
def test_close_to_exact(dtype, vocabulary):
    tokens = 65
    generator = torch.Generator("cuda").manual_seed(vocabulary + tokens)
    logits = (6 * torch.randn(tokens, vocabulary, device="cuda", generator=generator)).to(dtype)
    targets = torch.randint(vocabulary, (tokens,), device="cuda", generator=generator)
    targets[3::4] = IGNORED
    (ours, ours_by), (exact, exact_by) = both(logits, targets)
    # An exponential and a sum in FP32 per token; the gradient is rounded once to its dtype. Where the target is almost
    # certain, the gradient is a difference of nearly equal numbers, with an error of a few FP32 ulps.
    torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=2e-6)
    spacing = torch.finfo(dtype).eps / 2
    assert ours_by.dtype == dtype
    least = max(4 * torch.finfo(torch.float32).eps, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
    torch.testing.assert_close(ours_by.double(), exact_by, rtol=spacing + 2e-5, atol=least)
    assert not ours_by[3::4].any()


def test_infinities_and_nan():
    logits = torch.zeros(5, 20_000, device="cuda")
    targets = torch.arange(5, device="cuda")
    logits[0, 9000:] = -INFINITY
    logits[1, :9000] = -INFINITY  # the full first block, including the target
    logits[2, 12_345] = INFINITY
    logits[3, 17] = float("nan")
    logits[4] = -INFINITY
    ours = torch.stack([loss.cross_entropy(logits[i : i + 1], targets[i : i + 1], IGNORED, True) for i in range(5)])
    own = functional.cross_entropy(logits, targets, reduction="none")
    assert ours.isfinite().tolist() == own.isfinite().tolist() == [True, False, False, False, False]
    assert ours.isnan().tolist() == own.isnan().tolist()
    torch.testing.assert_close(ours, own, equal_nan=True)


def test_every_run_has_the_same_bits():
    logits = torch.randn(300, 50_000, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(50_000, (300,), device="cuda")
    (first, first_by), _ = both(logits, targets)
    (second, second_by), _ = both(logits, targets)
    assert torch.equal(first, second)
    assert torch.equal(first_by, second_by)


@pytest.mark.parametrize("size", [300, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_linear_head(dtype, size):
    """Its gradients are products of the gradient of the logits, whose bits are those of the kernels above."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (torch.randn(rows, 64, device="cuda", generator=generator).to(dtype) for rows in (300, 5003))
    targets = torch.randint(5003, (300,), device="cuda", generator=generator)
    targets[3::4] = IGNORED
    logits = functional.linear(hidden, weight).requires_grad_()
    expected = loss.cross_entropy(logits, targets, IGNORED, fused=True) / 7
    (by_logits,) = torch.autograd.grad(expected, logits)
    linear, by_hidden, total = loss.LinearLoss(weight, IGNORED), torch.empty_like(hidden), 0.0
    assert linear.supports(hidden, weight)
    for start in range(0, 300, size):
        piece = slice(start, start + size)
        total += linear.add(hidden[piece], targets[piece], 7, by_hidden[piece], trains=True)
    torch.testing.assert_close(total, expected.detach(), rtol=1e-6, atol=0)
    exact = by_logits.double() @ weight.double()
    # A sum of 5003 products in FP32, rounded once.
    torch.testing.assert_close(by_hidden.double(), exact, rtol=torch.finfo(dtype).eps, atol=2e-4)
    exact = by_logits.double().t() @ hidden.double()
    # A sum of 300 products in FP32.
    torch.testing.assert_close(linear.by_weight.double(), exact, rtol=1e-5, atol=1e-5)
    frozen = loss.LinearLoss(weight, IGNORED)
    frozen.add(hidden, targets, 7, None, trains=False)
    assert frozen.by_weight is None


@pytest.mark.parametrize("label", [97, pytest.param(-1, marks=pytest.mark.slow)])
def test_a_label_outside_the_vocabulary_is_an_error(label):
    """As with PyTorch's own, this is an assertion on the device, after which the process cannot use CUDA any more."""
    script = (
        "import torch; from megatrain.compute.loss import cross_entropy\n"
        f"cross_entropy(torch.zeros(2, 97, device='cuda'), torch.tensor([3, {label}], device='cuda'), -100, True)\n"
        "torch.cuda.synchronize()"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert "a label is neither" in ended.stderr or "device-side assert" in ended.stderr
