"""A recompute runs in the training mode of its forward, or raises."""

from __future__ import annotations

import pytest
import torch
from tests import small
from tests.tiny import engine_of, gradients

from megatrain.errors import UnsupportedCall


@pytest.mark.parametrize("policy", ["recompute", "offload"])
@pytest.mark.parametrize("training", [True, False])
def test_switching_the_mode_before_the_backward_is_refused(policy: str, training: bool) -> None:
    model = small.gpt2().train(training)
    with engine_of(model, policy=policy):
        loss = model(**small.batch()).loss
        model.train(not training)
        with pytest.raises(UnsupportedCall, match=r"train\(\) and eval\(\)"):
            loss.backward()


def test_a_stored_graph_ignores_a_later_switch_of_the_mode() -> None:
    results = []
    for switched in (False, True):
        model = small.gpt2().train()
        with engine_of(model, policy="store"):
            torch.manual_seed(0)
            loss = model(**small.batch()).loss
            model.train(not switched)
            loss.backward()
            results.append(gradients(model))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
