"""How fast updates run on this machine, by where they run and how moments are stored: what the planner asks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from megatrain.optim.rules import AdamW
from megatrain.optim.update import Operands, device_kernel, native_kernel
from megatrain.store.formats import FORMATS, Format
from megatrain.store.moments import Piece

ELEMENTS = 1 << 26
"""Large enough that nothing stays in a cache."""
SECONDS = 0.4
"""For each width."""


def update_rates(device: torch.device, threads: int) -> dict[str, float]:
    """Width of the moments → parameters per second of AdamW on a split master with BF16 gradients."""
    kernel = device_kernel() if device.type == "cuda" else native_kernel(threads)
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    weight, gradient = (torch.ones(ELEMENTS, dtype=torch.bfloat16, device=device) for _ in range(2))
    residual = torch.ones(ELEMENTS, dtype=torch.int16, device=device)
    rates = {}
    for width, formats in FORMATS.items():
        operands = Operands(
            rule=AdamW,
            scalars=AdamW(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1).scalars(10, 1.0),
            weight=weight,
            residual=residual,
            gradient=gradient,
            gradient_dtype=torch.bfloat16,
            moments=tuple(_piece(chosen, device) for chosen in formats),
            seed=1,
            first=0,
        )
        kernel(operands)
        wait()
        times: list[float] = []
        while len(times) < 2 or sum(times) < SECONDS:
            start = time.perf_counter()
            kernel(operands)
            wait()
            times.append(time.perf_counter() - start)
        rates[width] = ELEMENTS / statistics.median(times)
    return rates


def _piece(chosen: Format, device: torch.device) -> Piece:
    payload = torch.zeros(chosen.payload_bytes(ELEMENTS), dtype=torch.uint8, device=device)
    scales = torch.ones(ELEMENTS // chosen.block, device=device) if chosen.block else None
    return Piece(chosen, payload, scales)
