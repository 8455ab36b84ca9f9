"""Copies through a staging ring, for host memory that is not pinned. The device's memory is host memory here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.stream import transfer
from megatrain.stream.transfer import Transfer


class Event:
    """Of a stream that runs at once."""

    def synchronize(self) -> None: ...
    def record(self) -> None: ...


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Transfer:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 100)
    made: Any = Transfer(torch.device("cuda"), threads=1)
    made._staging = [(torch.zeros(100, dtype=torch.uint8), Event()) for _ in range(transfer.CHUNKS)]
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", [(), (7,), (300,), (3, 5, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_of_any_shape_pass_the_staging_ring(
    staged: Transfer, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Inputs that policy `offload` takes off the device have more dimensions than one."""
    source = torch.randn(shape).to(dtype)
    for move in (staged.to_device, staged.to_host):
        target = torch.zeros_like(source)
        move(target, source, False)
        assert torch.equal(target, source)
