"""The table of attention backends, and the process-wide order that it sets."""

import pytest
import torch
from tests.tiny import Stack, engine_of
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatrain import process
from megatrain.hardware import attention
from megatrain.hardware.attention import AttentionShape, Gpu, order_for, sdpa_backend
from megatrain.process import sdpa_order, sdpa_order_of, sdpa_state

CPU = torch.device("cpu")
FLASH_FIRST, CUDNN_FIRST = (1, 2, 0, 3, 4), (3, 1, 2, 0, 4)
H200 = Gpu(capability=(9, 0), torch_version=(2, 11), cudnn_version=91900)


@pytest.fixture(autouse=True)
def unchanged():
    before = sdpa_state()
    yield
    assert sdpa_state() == before


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [{}, {"head_dim": 64}, {"head_dim": 128, "length": 32768}])
def test_hopper_takes_cudnn_first(shape, masked):
    order = order_for(H200, AttentionShape(**shape, masked=masked))
    assert order is not None
    assert order[0] == "cudnn"
    assert set(order) == {"cudnn", "flash", "efficient", "math"}, "a call that cuDNN refuses must find another"


@pytest.mark.parametrize(
    ("gpu", "shape"),
    [
        (Gpu(capability=(8, 0), torch_version=(2, 11), cudnn_version=91900), {}),
        (Gpu(capability=(9, 0), torch_version=(2, 11), cudnn_version=91500), {}),
        (Gpu(capability=(9, 0), torch_version=(2, 9), cudnn_version=91900), {}),
        (H200, {"dtype": torch.float32}),
        (H200, {"head_dim": 12}),
        (H200, {"head_dim": 512}),
    ],
)
def test_what_the_table_does_not_have_keeps_pytorchs_order(gpu, shape):
    assert order_for(gpu, AttentionShape(**shape)) is None


def test_the_order_lasts_while_it_is_requested():
    assert sdpa_state()[0] == FLASH_FIRST, "PyTorch's own order without a GPU"
    first, second = object(), object()
    sdpa_order.request(first, sdpa_order_of(("cudnn", "flash", "efficient", "math")))
    sdpa_order.request(second, sdpa_order_of(("efficient",)))
    assert sdpa_state()[0] == CUDNN_FIRST, "the first request stays"
    process.release(first)
    assert sdpa_state()[0] == (2, 0, 1, 3, 4)
    process.release(second)
    assert sdpa_state()[0] == FLASH_FIRST


def test_an_order_of_the_user_is_kept():
    owner = object()
    everything = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(everything, set_priority=True):
        before = sdpa_state()
        sdpa_order.request(owner, CUDNN_FIRST)
        assert sdpa_state() == before
        process.release(owner)
        assert sdpa_state() == before


def test_a_backend_that_the_user_disables_stays_disabled():
    owner = object()
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        sdpa_order.request(owner, CUDNN_FIRST)
        assert [name for name, on in zip(process.SDPA_BACKENDS, sdpa_state()[1], strict=True) if on] == [
            "math", "flash",
        ]  # fmt: skip
        process.release(owner)


def test_backends_are_named_in_their_order():
    assert sdpa_backend(CPU, deterministic=False) == "flash, math"
    with sdpa_kernel(SDPBackend.MATH):
        assert sdpa_backend(CPU, deterministic=False) == "math"


def test_deterministic_mode_leaves_out_cudnn(monkeypatch):
    # A device type that is not the CPU has all backends; nothing of it is touched.
    device = torch.device("meta")
    assert sdpa_backend(device, deterministic=False) == "flash, efficient, math, cudnn"
    assert sdpa_backend(device, deterministic=True) == "flash, efficient, math"


def test_a_record_says_which_backends_are_used(tmp_path):
    import json

    with engine_of(Stack()) as engine, engine.record(tmp_path / "run.jsonl"):
        pass
    start = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])
    assert start["attention"] == {"implementation": None, "sdpa": "flash, math", "deterministic": False}


def test_warnings_only_is_not_deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert not attention.is_deterministic()
        torch.use_deterministic_algorithms(True)
        assert attention.is_deterministic()
    finally:
        torch.use_deterministic_algorithms(False)
