"""Micro-batches that skip layers inside a window, with updates that start in the backward."""

from typing import Any

import pytest
from tests.tiny import Stack, differences, engine_of, inputs, roles


@pytest.mark.parametrize(
    "skips", [[(), (1,), ()], [(), (2,), ()], [(1,), (), ()], [(), (0,), (), (1,)], [(2,), (), (1,)]]
)
@pytest.mark.parametrize("full_step", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_early_updates_with_skipped_blocks_are_bitwise(skips: Any, full_step: bool, precision: str) -> None:
    def run(early: bool) -> Any:
        model = Stack()
        engine = engine_of(model, precision=precision)
        optimizer = engine.optimizer(lr=0.1)

        def micro(seed: int, skip: Any) -> None:
            model(inputs(seed), skip=skip).square().mean().backward()

        norms = []
        for step in range(3):
            tasks = [
                lambda seed=10 * step + k, skip=skip: micro(seed, skip)
                for k, skip in enumerate(skips if step else [()] * len(skips))
            ]
            if early:
                with optimizer.final_backward():
                    engine.window(tasks, full_step=full_step)
            else:
                engine.window(tasks, full_step=full_step)
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm)
        return [norms, roles(engine)]

    assert differences(run(True), run(False)) == []
