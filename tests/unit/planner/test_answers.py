"""Answers are printed as one line."""

from __future__ import annotations

from tests import small

import megatrain as mt

HERE = {"machine": "h200-128gb"}


def test_one_line_each() -> None:
    batch = mt.largest_batch(small.llama(), length=2048, **HERE)
    assert str(batch) == repr(batch)
    assert str(batch).startswith(f"largest batch: {batch.value:,} sequences of 2,048 tokens (plan: ")
    assert f"{batch.plan.step.seconds:.2f} s per step, {batch.plan.total('vram') / 2**30:.1f} of " in str(batch)
    assert str(batch).endswith(" GiB VRAM)")
    context = mt.largest_context(small.llama(), batch=2, **HERE)
    assert str(context).startswith(f"largest context: {context.value:,} tokens per sequence, 2 per micro-batch (plan: ")
    model = mt.largest_model(family=[small.llama()], batch=1, length=8, **HERE)
    assert str(model).startswith("largest model: ")
    assert "25,824 parameters (plan: " in str(model)
    assert all("\n" not in str(answer) for answer in (batch, context, model))
