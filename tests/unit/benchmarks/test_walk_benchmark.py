"""Calls of a step, and hops between files."""

import sys

from benchmarks import walk


def test_calls_of_a_step_and_of_training_are_counted():
    step, training = walk.of_step(), walk.of_train()
    assert sys.getprofile() is None
    *parts, whole = step.values()
    assert whole.calls.total() == sum(part.calls.total() for part in parts) > whole.hops.total() > whole.up > 0
    forward = step["forward"]
    assert forward.hops["engine/step.py", "compute/node.py"] > 0
    assert "optim/update.py" not in forward.calls
    (of_training,) = training.values()
    assert of_training.calls["hf/trainer.py"] > 0
    calls, hops = of_training.calls.total(), of_training.hops.total()
    lines = "\n".join(walk.table(training, 2)).splitlines()
    assert lines[2] == f"| **`train()`** | {calls:,} | {hops:,} | {of_training.up} |"
    assert len(lines) == 8


def test_a_hop_goes_up_if_its_folder_is_later():
    counted = walk.Walk()
    hops = {
        ("store/slab.py", "stream/fetch.py"): 1,
        ("hf/trainer.py", "store/slab.py"): 2,
        ("errors.py", "hf/data.py"): 4,
    }
    counted.hops.update(hops)
    assert counted.up == 1
