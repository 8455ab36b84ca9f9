"""On the GPU: `mt.Trainer` trains like the stock one and saves, and a resumed run equals the uninterrupted one."""

import threading
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from tests import small

import megatrain as mt


def run(kind, directory, resume=None, **changes):
    trainer = kind(
        model=small.llama(hidden_size=64, intermediate_size=128),
        args=small.arguments(directory, use_cpu=False, gradient_accumulation_steps=2, **changes),
        train_dataset=small.rows(32),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("bf16", [False, True])
def test_losses_match_the_stock_trainer(tmp_path, deterministic, bf16):
    ours, stock = run(mt.Trainer, tmp_path / "a", bf16=bf16), run(transformers.Trainer, tmp_path / "b", bf16=bf16)
    # In BF16, the stock run uses autocast with FP32 weights and ours has BF16 weights, so losses are only close.
    tolerance = 3e-2 if bf16 else 2e-5
    assert small.losses(ours) == pytest.approx(small.losses(stock), abs=tolerance)
    assert small.losses(ours)[0] != small.losses(ours)[-1]


@pytest.mark.parametrize("bf16", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, deterministic, bf16):
    uninterrupted = run(mt.Trainer, tmp_path / "whole", max_steps=6, bf16=bf16)
    half = run(mt.Trainer, tmp_path / "half", max_steps=6, save_strategy="steps", save_steps=3, bf16=bf16)
    checkpoint = tmp_path / "half" / "checkpoint-3"
    resumed = run(mt.Trainer, tmp_path / "resumed", resume=str(checkpoint), max_steps=6, bf16=bf16)
    assert small.losses(uninterrupted) == small.losses(half)
    assert small.losses(uninterrupted)[3:] == small.losses(resumed)[3:]
    assert small.same(small.snapshot(uninterrupted.model), small.snapshot(resumed.model))


def test_saved_models_load_in_plain_transformers(tmp_path):
    trainer = run(mt.Trainer, tmp_path)
    trainer.save_model(tmp_path / "final")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    expected = {name: value.cpu() for name, value in small.snapshot(trainer.model).items()}
    assert small.same({name: value.cpu() for name, value in loaded.state_dict().items()}, expected)
    ids = torch.ones(1, 4, dtype=torch.long)
    assert loaded.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 7)


class WarnsOfWaits(transformers.TrainerCallback):
    """From the fourth step on, whatever makes the host wait for the GPU gives a warning."""

    def on_step_begin(self, args, state, control, **_):
        torch.cuda.set_sync_debug_mode("warn" if state.global_step >= 3 else "default")

    def on_step_end(self, args, state, control, **_):
        # The last step is logged.
        torch.cuda.set_sync_debug_mode("default" if control.should_log else torch.cuda.get_sync_debug_mode())


@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 1}, {"max_grad_norm": 0.0}])
def test_a_step_that_is_not_logged_does_not_wait_for_the_gpu(tmp_path, changes):
    arguments = {"use_cpu": False, "bf16": True, "gradient_accumulation_steps": 2, "max_steps": 8, "logging_steps": 8}
    trainer = mt.Trainer(
        model=small.llama(hidden_size=64, intermediate_size=128),
        args=small.arguments(tmp_path, **(arguments | changes)),
        train_dataset=small.rows(32),
        callbacks=[WarnsOfWaits()],
    )
    waits = []

    def show(message, category, filename, lineno, *_):
        # The thread of a lane may wait, as an early update does for the norm of its gradient: compute goes on.
        of_lane = threading.current_thread().name.endswith("-issue")
        if "synchronizing CUDA operation" in str(message) and not of_lane:
            waits.append(f"{Path(filename).name}:{lineno}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        try:
            trainer.train()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert trainer.state.global_step == 8
    assert waits == []
