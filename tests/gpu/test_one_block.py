"""Models without repeated layers stay on the GPU if they fit; otherwise they are read from RAM at every use."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import megatrain as mt

WIDTH = 64


class Recurrent(nn.Module):
    """An LSTM, computed by cuDNN on the GPU, between an embedding and a tied head, and a scale of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 101, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embed(ids))
        return nn.functional.cross_entropy(self.head(hidden * self.scale).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("settings", [{}, {"resident": ("Recurrent",)}], ids=["all on the GPU", "most in RAM"])
def test_equals_plain_pytorch(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Naming what stays on the GPU (the scale) leaves the rest in RAM."""
    # cuDNN computes an LSTM in TF32 by default, and with another algorithm if its weights are not contiguous.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    model = Recurrent()
    plain = deepcopy(model).cuda()
    batches = [torch.randint(0, 101, (4, 16)) for _ in range(3)]
    with mt.Engine(model, device="cuda", precision="fp32", **settings) as engine:
        assert all(slab.on_device for slab in engine.slabs) == (not settings)
        ours = engine.optimizer(lr=1e-3, max_grad_norm=1.0)
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        for ids in batches:
            for part in ids.chunk(2):
                model(part).backward()
                plain(part.cuda()).backward()
            for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad + 0, other.grad, rtol=1e-4, atol=1e-6, msg=name)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.detach() + 0, other.detach(), rtol=0, atol=1e-4, msg=name)
