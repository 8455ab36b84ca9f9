"""Settings and states that must not be ignored silently, and Trainers with their own training step."""

from typing import Any

import pytest
import torch
from tests import small
from tests.tiny import Stack, engine_of, inputs

import megatrain as mt
from megatrain.errors import CheckpointError, MegaTrainError, SettingsError


def test_resident_given_as_one_string_is_refused() -> None:
    """Each character would be a pattern, and the "*" in "layers.*" would make everything resident."""
    with pytest.raises(SettingsError, match=r"resident must be a list of patterns, such as \['layers.\*'\]"):
        engine_of(Stack(), resident="layers.*")


def test_weights_in_gpu_memory_are_not_counted_as_ram() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
    nbytes = sum(p.numel() * 4 for p in model.parameters())
    engine_of(model, resident=("*",), max_ram_gb=0.5 * nbytes / 2**30)


def test_bf16_sr_reserves_no_memory_for_residuals() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
    nbytes = sum(p.numel() * 2 for p in model.parameters())
    engine_of(model, precision="bf16-sr", max_ram_gb=1.3 * nbytes / 2**30)


def test_optim_8bit_on_a_model_with_an_fp32_engine_is_refused(tmp_path: Any) -> None:
    model = small.llama(hidden_size=64, intermediate_size=128)
    mt.Engine(model, device="cpu")
    with pytest.raises(SettingsError, match=r"optim='lion_8bit' keeps moments in 8bit, but .* keeps them in fp32"):
        mt.Trainer(model=model, args=small.arguments(tmp_path, optim="lion_8bit"), train_dataset=small.rows())


@pytest.mark.parametrize("compression", ["lossless", "4bit"])
def test_optim_8bit_against_another_compression_is_refused(tmp_path: Any, compression: str) -> None:
    model = small.llama(hidden_size=64, intermediate_size=128)
    mt.init(optimizer_compression=compression)
    with pytest.raises(SettingsError, match=rf"optim='adamw_8bit' keeps moments in 8bit, .*'{compression}'"):
        mt.Trainer(model=model, args=small.arguments(tmp_path, optim="adamw_8bit"), train_dataset=small.rows())


def trained(kind: Any, **options: Any) -> Any:
    model = Stack()
    optimizer = kind(model.parameters(), **options)
    for seed in range(3):
        model(inputs(seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.state_dict()


def test_the_state_of_another_optimizer_is_refused() -> None:
    """AdamW would continue at step three without moments, and its next step would be three times too large."""
    for kind, state in (
        ("adamw", trained(torch.optim.SGD, lr=0.1, momentum=0.9)),
        ("sgd", trained(torch.optim.AdamW, lr=0.1)),
        ("lion", trained(torch.optim.AdamW, lr=0.1)),
    ):
        engine = engine_of(Stack())
        with pytest.raises(CheckpointError):
            engine.optimizer(kind=kind).load_state_dict(state)


def test_moments_under_unknown_names_are_refused() -> None:
    """bitsandbytes' 8-bit AdamW writes these names (`optim="adamw_bnb_8bit"` in transformers)."""
    state = trained(torch.optim.AdamW, lr=0.1)
    for entry in state["state"].values():
        entry["state1"], entry["state2"] = entry.pop("exp_avg"), entry.pop("exp_avg_sq")
        entry["step"] = 3
    optimizer = engine_of(Stack()).optimizer()
    with pytest.raises(CheckpointError):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("SGD", {"nesterov": True, "momentum": 0.9}), ("SGD", {"dampening": 0.5, "momentum": 0.9}),
     ("SGD", {"maximize": True, "momentum": 0.9}), ("AdamW", {"amsgrad": True}), ("AdamW", {"maximize": True})],
)  # fmt: skip
def test_unsupported_options_are_refused(kind: str, options: Any) -> None:
    state = trained(getattr(torch.optim, kind), lr=0.1, **options)
    optimizer = engine_of(Stack()).optimizer(kind=kind.lower())
    with pytest.raises(MegaTrainError):
        optimizer.load_state_dict(state)


def test_options_of_a_group_are_checked_like_the_others() -> None:
    engine = engine_of(Stack())
    params = list(engine.model.parameters())
    for wrong in ({"momentum": 0.9}, {"lr": -1.0}, {"betas": (0.9, 1.0)}):
        with pytest.raises(SettingsError):
            engine.optimizer([{"params": params, **wrong}])


class ZeroesGradients(mt.Trainer):
    """Changes gradients after the backward."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        return loss


def test_a_trainer_whose_training_step_changes_gradients(tmp_path: Any) -> None:
    model = small.llama()
    before = small.snapshot(model)
    args = small.arguments(tmp_path, max_grad_norm=0.0, weight_decay=0.0, max_steps=3)
    ZeroesGradients(model=model, args=args, train_dataset=small.rows()).train()
    assert small.furthest(before, small.snapshot(model)) == 0.0, "weights changed although the gradients were zeroed"


def test_a_training_step_with_two_backwards(tmp_path: Any) -> None:
    """MegaMixin in front of a Trainer that runs two backwards per micro-batch, as SAM does."""
    from transformers import Trainer

    from megatrain.hf.trainer import MegaMixin

    class Theirs(Trainer):
        def training_step(self, model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            super().training_step(model, batch, *args, **kwargs)
            return super().training_step(model, batch, *args, **kwargs)

    class Ours(MegaMixin, Theirs):
        pass

    args = small.arguments(tmp_path, max_grad_norm=0.0, max_steps=3)
    trainer = Ours(model=small.llama(), args=args, train_dataset=small.rows())
    trainer.train()
    trainer.engine.synchronize()
    assert trainer.engine.counters.steps == 3
    assert small.furthest(small.snapshot(small.llama()), small.snapshot(trainer.model)) > 1e-3
