"""Recording a step makes the host wait for nothing on the GPU."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tests import small

import megatrain as mt


def test_logging_does_not_wait(tmp_path: Path) -> None:
    engine = mt.Engine(small.llama(), device="cuda")
    optimizer = engine.optimizer(max_grad_norm=1.0)
    record = engine.record(tmp_path)
    losses = []
    for seed in range(4):
        batch = {name: tensor.cuda() for name, tensor in small.batch(seed=seed).items()}
        loss = engine.model(**batch, attention_mask=torch.ones_like(batch["input_ids"])).loss
        loss.backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            record.log(loss=loss, nested={"values": [loss * 2]})
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    engine.close()
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    assert [step["loss"] for step in steps] == [loss.item() for loss in losses]
    assert [step["nested"]["values"][0] for step in steps] == [2 * loss.item() for loss in losses]
    assert {step["tokens"] for step in steps} == {batch["input_ids"].numel()}
