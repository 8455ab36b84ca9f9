"""Lossless compression of FP32 and BF16 states.

The bytes do not depend on the number of threads. csrc/lossless.cpp documents the format.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Container

import torch

from megatrain.errors import CheckpointError
from megatrain.native import library

CHUNK = 1 << 16
"""Elements that are encoded and checked together; equal to kChunk in csrc/lossless.cpp."""

_DTYPES = {torch.float32: 1, torch.bfloat16: 2}
"""The values of mt_lossless_dtype in csrc/lossless.h."""
_CODABLE = "only flat FP32 or BF16 tensors in host memory can be coded"
_ENCODING = "an encoding is a flat uint8 tensor in host memory"


def encode(source: torch.Tensor, threads: int, room: torch.Tensor | None = None) -> torch.Tensor:
    """Encode a flat tensor in host memory; returns the used front of `room`, a flat uint8 tensor of `bound` bytes.

    Without `room`, a new tensor is allocated; its unused pages are never touched. `clone()` the result to free them.
    """
    _check_flat(source, _DTYPES, _CODABLE)
    if room is None:
        room = torch.empty(bound(source.numel(), source.itemsize), dtype=torch.uint8)
    _check_flat(room, (torch.uint8,), _ENCODING)
    used = ctypes.c_size_t()
    code = library.load().mt_lossless_encode(
        source.data_ptr(),
        source.numel(),
        _DTYPES[source.dtype],
        room.data_ptr(),
        room.numel(),
        ctypes.byref(used),
        threads,
    )
    library.check(code, f"encoding {source.numel()} elements")
    return room[: used.value]


def decode(encoded: torch.Tensor, out: torch.Tensor, threads: int) -> None:
    """Decode into a flat tensor in host memory that has the dtype and number of elements of the source.

    Bytes that are damaged or not an encoding raise CheckpointError. Intact chunks have then been decoded; the content
    of the others in `out` is arbitrary.
    """
    _check_flat(out, _DTYPES, _CODABLE)
    _check_flat(encoded, (torch.uint8,), _ENCODING)
    chunk = ctypes.c_size_t()
    code = library.load().mt_lossless_decode(
        # An empty tensor has a null address; pass any other, so that its length is what is reported.
        encoded.data_ptr() or ctypes.byref(chunk),
        encoded.numel(),
        out.data_ptr(),
        out.numel(),
        _DTYPES[out.dtype],
        threads,
        ctypes.byref(chunk),
    )
    if code == errno.EMSGSIZE:
        raise CheckpointError(
            f"The encoded state is intact, but does not hold {out.numel()} elements of {out.dtype}; use another "
            "checkpoint."
        )
    if code == errno.EBADMSG:
        raise CheckpointError(f"The encoded state of {out.numel()} elements is damaged: {_place(chunk.value, out)}.")
    library.check(code, f"decoding {out.numel()} elements")


def bound(numel: int, itemsize: int) -> int:
    """The maximum encoded size of `numel` elements, in bytes."""
    dtypes = {dtype.itemsize: code for dtype, code in _DTYPES.items()}
    if itemsize not in dtypes or numel < 0:
        raise ValueError(f"only elements of 2 or 4 bytes can be encoded, not {numel} elements of {itemsize} bytes")
    nbytes = ctypes.c_size_t()
    code = library.load().mt_lossless_bound(numel, dtypes[itemsize], ctypes.byref(nbytes))
    library.check(code, f"sizing the encoding of {numel} elements")
    return nbytes.value


def _place(chunk: int, out: torch.Tensor) -> str:
    if chunk == ctypes.c_size_t(-1).value:
        return "its header is truncated or changed, so none of it can be decoded"
    first, last = chunk * CHUNK, min((chunk + 1) * CHUNK, out.numel()) - 1
    return f"chunk {chunk} of {-(-out.numel() // CHUNK)}, elements {first} to {last}, is the first that is damaged"


def _check_flat(tensor: torch.Tensor, dtypes: Container[torch.dtype], rule: str) -> None:
    if tensor.dtype not in dtypes or tensor.device.type != "cpu" or tensor.ndim != 1 or not tensor.is_contiguous():
        strided = "" if tensor.is_contiguous() else "strided "
        raise ValueError(
            f"{rule}, not a {strided}{tensor.dtype} tensor of shape {list(tensor.shape)} on {tensor.device}"
        )
