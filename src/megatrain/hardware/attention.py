"""Which backend of `scaled_dot_product_attention` (SDPA) a run uses: the fastest one by a table, never by a timing.

`TABLE` orders the backends by GPU, versions and shape; `benchmarks/pieces.py` measures its rows. PyTorch takes the
first backend of the order that supports a call, so masks, dropout or dtypes that one backend does not support go to the
next. A GPU without a row keeps PyTorch's own order. The order is set for the process while an engine is open
(process.py), so that forward, recompute and compiled graphs have the same.

In deterministic mode PyTorch leaves out cuDNN, and uses deterministic variants of the other backends.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from megatrain import process
from megatrain.process import SDPA_BACKENDS


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What SDPA is called with, as far as the choice depends on it."""

    head_dim: int | None = None
    """None: not known."""
    length: int | None = None
    """None: not known, or different in every batch."""
    masked: bool = False
    """Whether there is a mask other than the causal one."""
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU and the versions that its kernels come from."""

    capability: tuple[int, int]
    torch_version: tuple[int, int]
    cudnn_version: int
    """As `torch.backends.cudnn.version()` gives it."""

    @classmethod
    def of(cls, device: torch.device) -> Gpu:
        major, minor = torch.__version__.split(".")[:2]
        return cls(
            capability=torch.cuda.get_device_capability(device),
            torch_version=(int(major), int(minor)),
            cudnn_version=torch.backends.cudnn.version() or 0,
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """An order of backends, fastest first, and what it holds for."""

    order: tuple[str, ...]
    capability: tuple[int, int]
    torch_version: tuple[int, int]
    """The oldest that it holds for."""
    cudnn_version: int
    """The same of cuDNN."""
    head_dims: range = range(8, 257, 8)
    lengths: range = range(1, 1 << 31)
    masked: tuple[bool, ...] = (False, True)
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)

    def holds(self, gpu: Gpu, shape: AttentionShape) -> bool:
        return (
            gpu.capability == self.capability
            and gpu.torch_version >= self.torch_version
            and gpu.cudnn_version >= self.cudnn_version
            and (shape.head_dim is None or shape.head_dim in self.head_dims)
            and (shape.length is None or shape.length in self.lengths)
            and shape.masked in self.masked
            and shape.dtype in self.dtypes
        )


TABLE = (
    # H200, torch 2.11, cuDNN 9: causal 4 x 28 x 2048 x 128, forward and backward: cuDNN 1.11 ms, flash 2.22 ms. Before
    # cuDNN 9.15.1, lengths that are no multiple of 128 could give wrong results.
    Row(order=("cudnn", "flash", "efficient", "math"), capability=(9, 0), torch_version=(2, 10), cudnn_version=91501),
)


def order_for(gpu: Gpu, shape: AttentionShape) -> tuple[str, ...] | None:
    """The backends for a shape, fastest first; None: PyTorch's own order."""
    return next((row.order for row in TABLE if row.holds(gpu, shape)), None)


def request_backend(owner: Hashable, device: torch.device, shape: AttentionShape) -> None:
    """Use the table's order for this shape until `process.release(owner)`. An order that the user has set is kept."""
    if device.type != "cuda":
        return
    _initialize_order(device)
    order = order_for(Gpu.of(device), shape)
    if order is not None:
        process.sdpa_order.request(owner, process.sdpa_order_of(order))


@contextmanager
def requested_backend(device: torch.device, shape: AttentionShape) -> Iterator[None]:
    """`request_backend`, inside."""
    owner = object()
    request_backend(owner, device, shape)
    try:
        yield
    finally:
        process.release(owner)


def sdpa_backend(device: torch.device, deterministic: bool) -> str:
    """The enabled backends in the order in which PyTorch tries them now, such as "cudnn, flash, efficient, math".

    Two runs whose strings differ may differ in bits.
    """
    _initialize_order(device)
    available = ("flash", "math") if device.type == "cpu" else SDPA_BACKENDS[:4]
    order, enabled = process.sdpa_state()
    names = [SDPA_BACKENDS[number] for number in order if enabled[number]]
    return ", ".join(name for name in names if name in available and not (deterministic and name == "cudnn"))


def is_deterministic() -> bool:
    """Whether PyTorch refuses operations that are not deterministic, and so leaves out cuDNN."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


@cache
def _initialize_order(device: torch.device) -> None:
    """Let PyTorch set its own order for this GPU, which it otherwise does at the first call of SDPA."""
    if device.type != "cuda":
        return
    before = process.sdpa_order.read()
    states = torch.empty(1, 1, 8, 8, device=device, dtype=torch.bfloat16)
    torch._fused_sdp_choice(states, states, states)
    if before not in process.PYTORCH_SDPA_ORDERS:
        process.sdpa_order.write(before)
