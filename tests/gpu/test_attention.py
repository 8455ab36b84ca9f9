"""The attention backend on the GPU: from the table, kept over PyTorch's first call, deterministic on request."""

import subprocess
import sys

import pytest
import torch
from benchmarks.shapes import random_model

import megatrain as mt
from megatrain.hardware.attention import AttentionShape, Gpu, order_for, sdpa_backend
from megatrain.process import SDPA_BACKENDS

CUDA = torch.device("cuda")
FIRST_CALL = """
import torch
from megatrain import process
from megatrain.hardware import attention
for order in (("efficient", "flash", "math", "cudnn"), ("flash", "efficient", "math", "cudnn")):
    attention.TABLE = (attention.Row(order=order, capability=torch.cuda.get_device_capability(), torch_version=(2, 0),
                                     cudnn_version=0),)
    attention.request_backend(order, torch.device("cuda"), attention.AttentionShape())
    q = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert attention.sdpa_backend(torch.device("cuda"), False) == ", ".join(order)
    process.release(order)
"""


def choice(masked=False, dtype=torch.bfloat16):
    """The backend that PyTorch takes for a causal or masked call."""
    q = torch.randn(2, 4, 256, 128, device=CUDA, dtype=dtype, requires_grad=True)
    mask = torch.ones(2, 1, 256, 256, device=CUDA, dtype=torch.bool).tril() if masked else None
    return SDPA_BACKENDS[torch._fused_sdp_choice(q, q, q, mask, 0.0, not masked)]


@pytest.fixture
def engine():
    model = random_model("llama3.2-1b", torch.bfloat16, num_hidden_layers=1, vocab_size=512)
    with mt.Engine(model, device="cuda") as engine:
        yield engine


def test_an_engine_uses_the_table(engine):
    order = order_for(Gpu.of(CUDA), AttentionShape(head_dim=64))
    if order is None:
        pytest.skip("this GPU has no row")
    assert sdpa_backend(CUDA, deterministic=False) == ", ".join(order)
    assert choice() == order[0]


def test_deterministic_mode_takes_a_deterministic_backend(engine, deterministic):
    assert "cudnn" not in sdpa_backend(CUDA, deterministic=True)
    assert choice() == "flash"
    assert choice(masked=True) == "efficient"


def test_fp32_falls_through_to_a_backend_that_supports_it(engine):
    assert choice(dtype=torch.float32) == "efficient"


def test_the_order_survives_pytorchs_first_call():
    """PyTorch sets its own order at the first call of SDPA."""
    result = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_the_forward_is_repeatable():
    """A recompute must give the values of its forward, in any mode."""
    q, k, v = (torch.randn(4, 16, 1000, 128, device=CUDA, dtype=torch.bfloat16) for _ in range(3))
    first = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    for _ in range(3):
        assert torch.equal(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), first)
