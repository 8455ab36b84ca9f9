"""What code written for transformers' Trainer relies on: callbacks, datasets, files and any kind of model."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from tests import small
from torch import nn
from torch.utils.data import IterableDataset
from transformers import TrainingArguments, default_data_collator
from transformers.trainer_callback import DefaultFlowCallback, PrinterCallback

import megatrain as mt
from megatrain.errors import SettingsError
from megatrain.hf import checkpoints
from megatrain.hf.data import Rows

TRAINERS = (mt.Trainer, transformers.Trainer)


class Wave(nn.Module):
    """A model without repeated layers, with dropout, a tuple output and a buffer that grows in every forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(1, 8)
        self.out = nn.Linear(8, 1)
        self.seen = nn.Buffer(torch.empty(0))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        y = self.out(nn.functional.dropout(self.hidden(x[:, None]).sin(), 0.2, self.training)).squeeze(1)
        self.seen = torch.cat([self.seen, x.detach()[:1]])
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.seen = state_dict["seen"].clone()
        return super().load_state_dict(state_dict, strict, assign)


def points(count: int = 48) -> list[dict[str, float]]:
    return [{"x": i / count, "labels": (i / count) ** 2} for i in range(count)]


def arguments(directory: Path, **changes: Any) -> TrainingArguments:
    base = {"output_dir": str(directory), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "seed": 3}
    steps = {"per_device_train_batch_size": 4, "learning_rate": 0.05, "logging_steps": 1, "save_steps": 2}
    return TrainingArguments(**(base | steps | changes))


def trained(kind: type, directory: Path, resume: Any = None, **changes: Any) -> Any:
    trainer = kind(model=Wave(), args=arguments(directory, **changes), train_dataset=points())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_equal_runs(one: Any, other: Any, tolerance: float = small.WEIGHTS) -> None:
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (one, other)]
    assert losses[0] == pytest.approx(losses[1], abs=small.LOSSES)
    assert small.drift(small.snapshot(one.model), small.snapshot(other.model)) <= tolerance
    assert torch.equal(one.model.seen, other.model.seen)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_model_without_repeated_layers_trains_as_in_transformers(tmp_path: Path, accumulation: int) -> None:
    """Dropout matches too: micro-batches run one after the other, so random numbers are drawn in the same order."""
    runs = [trained(kind, tmp_path, gradient_accumulation_steps=accumulation, max_steps=4) for kind in TRAINERS]
    assert_equal_runs(*runs)


@pytest.mark.parametrize("init", [False, True], ids=["model", "model_init"])
def test_bf16_is_autocast_for_one_block(tmp_path: Path, init: bool) -> None:
    """BF16 weights would change or break a model with FP32 inputs or arithmetic outside modules."""
    runs = []
    for kind in TRAINERS:
        model: dict[str, Any] = {"model_init": Wave} if init else {"model": Wave()}
        trainer = kind(args=arguments(tmp_path, bf16=True, max_steps=4), train_dataset=points(), **model)
        trainer.train()
        assert trainer.model.out.weight.dtype == torch.float32
        runs.append(trainer)
    assert_equal_runs(*runs)


class Checkpointed(transformers.PreTrainedModel):
    """One block, whose activations are kept unless the model uses gradient checkpointing itself."""

    config_class = transformers.PretrainedConfig
    supports_gradient_checkpointing = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.wave, self.gradient_checkpointing, self.runs = Wave(), False, 0
        self.post_init()

    def once(self, *inputs: torch.Tensor) -> Any:
        self.runs += 1
        return self.wave(*inputs)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(self.once, x, labels)
        return self.once(x, labels)


def test_one_block_keeps_its_gradient_checkpointing(tmp_path: Path) -> None:
    args = arguments(tmp_path, gradient_checkpointing=True, max_steps=3, save_strategy="no")
    trainer = mt.Trainer(model=Checkpointed(transformers.PretrainedConfig()), args=args, train_dataset=points())
    trainer.train()
    assert trainer.model.runs == 6


@pytest.mark.parametrize("kind", TRAINERS)
def test_checkpoints_are_exchangeable_with_transformers(tmp_path: Path, kind: type) -> None:
    """This includes a buffer of varying shape: the model's own `load_state_dict` is called, as in transformers."""
    other = TRAINERS[1 - TRAINERS.index(kind)]
    uninterrupted = trained(kind, tmp_path / "whole", max_steps=5)
    resumed = trained(other, tmp_path / "resumed", str(tmp_path / "whole" / "checkpoint-2"), max_steps=5)
    assert resumed.state.global_step == 5
    assert_equal_runs(uninterrupted, resumed)


def test_a_resumed_run_is_bitwise_equal(tmp_path: Path) -> None:
    uninterrupted = trained(mt.Trainer, tmp_path / "whole", max_steps=5)
    resumed = trained(mt.Trainer, tmp_path / "resumed", str(tmp_path / "whole" / "checkpoint-2"), max_steps=5)
    assert_equal_runs(uninterrupted, resumed, tolerance=0.0)


def test_an_overridden_load_state_dict_is_called(tmp_path: Path) -> None:
    class Negated(nn.Linear):
        def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
            return super().load_state_dict({k: -v if k == "weight" else v for k, v in state_dict.items()}, strict)

    model = Negated(2, 2)
    expected = small.snapshot(model)
    with mt.Engine(model, device="cpu") as engine:
        engine.save(tmp_path)
        engine.load(tmp_path)
        assert torch.equal(model.weight.detach() + 0, -expected["weight"])
        assert torch.equal(model.bias.detach() + 0, expected["bias"])


def test_a_large_state_is_not_written_as_optimizer_pt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(mt.Trainer, tmp_path / "small", max_steps=2)
    monkeypatch.setattr(checkpoints, "STOCK_BYTES", 64)
    trained(mt.Trainer, tmp_path / "large", max_steps=2)
    assert (tmp_path / "small" / "checkpoint-2" / "optimizer.pt").is_file()
    assert not (tmp_path / "large" / "checkpoint-2" / "optimizer.pt").exists()


def test_optimizer_pt_has_no_state_of_parameters_without_a_step(tmp_path: Path) -> None:
    """They have residuals, but a new optimizer of torch has nothing for them."""
    model = small.llama()
    model.unused = nn.Linear(8, 8)
    args = small.arguments(tmp_path, max_steps=2, bf16=True, save_strategy="steps", save_steps=2)
    trainer = mt.Trainer(model=model, args=args, train_dataset=small.rows())
    trainer.train()
    assert model.unused.weight.slab.residual is not None
    state = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt")["state"]
    assert len(state) == len([*model.parameters()]) - 2
    assert all(entry.keys() == {"step", "exp_avg", "exp_avg_sq"} for entry in state.values())


def user_optimizer(model: nn.Module, kind: str) -> tuple[torch.optim.Optimizer, Any]:
    groups = [{"params": model.hidden.parameters(), "lr": 0.02}, {"params": model.out.parameters()}]
    if kind == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    cls = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    optimizer = cls(groups, lr=0.1, betas=(0.8, 0.9), weight_decay=0.0 if kind == "adam" else 0.2)
    # OneCycleLR writes betas and keys of its own into the groups.
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=10)


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
def test_a_torch_optimizer_is_adopted(tmp_path: Path, kind: str, recwarn: pytest.WarningsRecorder) -> None:
    """Its groups, options, existing state, hooks and scheduler are kept."""
    runs, rates = [], []
    for trainer_class in TRAINERS:
        model, hook_calls = Wave(), []
        optimizer, scheduler = user_optimizer(model, kind)
        model(torch.ones(4), torch.zeros(4))[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        optimizer.register_step_pre_hook(lambda *_, hook_calls=hook_calls: hook_calls.append(1))
        recwarn.clear()
        trainer = trainer_class(
            model=model,
            args=arguments(tmp_path, max_steps=4),
            train_dataset=points(),
            optimizers=(optimizer, scheduler),
        )
        torch.manual_seed(1)
        trainer.train()
        assert len(hook_calls) == 4
        assert not any("lr_scheduler.step()" in str(warning.message) for warning in recwarn)
        assert trainer.lr_scheduler is scheduler
        rates.append([group["lr"] for group in optimizer.param_groups])
        assert rates[-1] == [group["lr"] for group in trainer.optimizer.param_groups]
        runs.append(trainer)
    assert rates[0] == rates[1]
    assert_equal_runs(*runs)


@pytest.mark.parametrize(
    ("optimizer", "error_text"),
    [
        (lambda model: torch.optim.RMSprop(model.parameters()), "RMSprop is not supported"),
        (lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True), "amsgrad=True is not supported"),
        (lambda model: torch.optim.Adam(model.parameters(), weight_decay=0.1), "Adam adds weight_decay=0.1"),
        (lambda _: torch.optim.SGD(nn.Linear(3, 2).parameters()), r"shape \(2, 3\) that is not the model's"),
    ],
)
def test_an_optimizer_that_cannot_be_adopted_is_refused(tmp_path: Path, optimizer: Any, error_text: str) -> None:
    model = Wave()
    with pytest.raises(SettingsError, match=error_text):
        mt.Trainer(model=model, args=arguments(tmp_path), optimizers=(optimizer(model), None))
    assert type(model.out.weight) is nn.Parameter, "the optimizer must be checked before the model is attached"


def test_the_mean_loss_over_a_stream_is_weighted_by_rows(tmp_path: Path) -> None:
    """The last batch is smaller. The dataset is given to the Trainer or to evaluate()."""
    results = []
    for kind in TRAINERS:
        trainer = kind(model=Wave(), args=arguments(tmp_path, per_device_eval_batch_size=5), eval_dataset=Stream())
        results.append((trainer.evaluate()["eval_loss"], trainer.evaluate(Stream())["eval_loss"]))
    assert results[0] == pytest.approx(results[1], abs=small.LOSSES)


def test_the_callback_list_has_no_callbacks_of_ours(tmp_path: Path) -> None:
    for kind in TRAINERS:
        trainer = kind(model=Wave(), args=arguments(tmp_path), train_dataset=points())
        listed = [type(callback) for callback in trainer.callback_handler.callbacks]
        assert listed == [DefaultFlowCallback, PrinterCallback]
        assert trainer.pop_callback(PrinterCallback) is not None
        assert len(trainer.callback_handler.callbacks) == 1


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.rows = points(8)

    def __iter__(self) -> Any:
        return iter(self.rows)


def test_datasets_keep_their_attributes(tmp_path: Path) -> None:
    trainer = mt.Trainer(model=Wave(), args=arguments(tmp_path, max_steps=1), train_dataset=Stream())
    assert len(trainer.train_dataset.rows) == 8
    with pytest.raises(AttributeError, match="no_such"):
        _ = trainer.train_dataset.no_such
    assert len(pickle.loads(pickle.dumps(trainer.train_dataset)).rows) == 8


def test_rows_are_read_through_the_encoder(tmp_path: Path) -> None:
    """The batched reads of `datasets` must not bypass the encoder."""
    data = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5]], "metadata": ["a", "b"]})
    trainer = mt.Trainer(model=small.llama(), args=small.arguments(tmp_path), train_dataset=data)
    assert isinstance(trainer.train_dataset, Rows)
    assert trainer.train_dataset.column_names == ["input_ids", "metadata"]
    (batch,) = list(trainer.get_train_dataloader())
    assert set(batch) == {"input_ids", "attention_mask", "labels"}


def test_trainers_of_one_block_and_of_many_share_arguments(tmp_path: Path) -> None:
    """The state of accelerate is global. A Trainer must not change it for another Trainer."""
    arguments = tiny_arguments(tmp_path, bf16=True)
    runs = []
    for make in (one_block, streamed, one_block):
        model, rows = make()
        trainer = mt.Trainer(model=model, args=arguments, train_dataset=rows, data_collator=default_data_collator)
        trainer.train()
        runs.append(trainer)
    assert [trainer.accelerator.native_amp for trainer in runs] == [True, False, True]
    assert {trainer.accelerator.mixed_precision for trainer in runs} == {"bf16"}
    assert small.same(small.snapshot(runs[0].model), small.snapshot(runs[2].model))


def test_batches_that_are_not_mappings(tmp_path: Path) -> None:
    class Pairs(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            x_values, target = inputs
            loss = (model(x_values)[0] - target).square().mean()
            return (loss, None) if return_outputs else loss

    class Ours(mt.MegaMixin, Pairs):
        pass

    def pairs(rows: list[Any]) -> Any:
        return torch.stack([row["x"] for row in rows]), torch.stack([row["labels"] for row in rows])

    results = []
    for kind in (Ours, Pairs):
        model, rows = one_block()
        arguments = tiny_arguments(tmp_path, remove_unused_columns=False)
        trainer = kind(model=model, args=arguments, train_dataset=rows, data_collator=pairs)
        trainer.train()
        results.append(trainer)
    assert small.drift(small.snapshot(results[0].model), small.snapshot(results[1].model)) < small.WEIGHTS


def tiny_arguments(directory: Path, **changes: Any) -> Any:
    return small.arguments(directory, max_steps=2, **changes)


def one_block() -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(0)
    rows = [{"x": torch.randn(4, generator=source), "labels": torch.randn(4, generator=source)} for _ in range(16)]
    return Line(), rows


def streamed() -> tuple[Any, list[Any]]:
    return small.llama(), small.rows()


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        results = self.line(x)
        return (results,) if labels is None else (nn.functional.mse_loss(results, labels), results)


def test_model_init_resumes_from_a_transformers_checkpoint(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 1}
    transformers.Trainer(
        model=small.llama(), args=tiny_arguments(tmp_path, **options), train_dataset=small.rows()
    ).train()
    results = []
    for kind in TRAINERS:
        trainer = kind(
            model_init=lambda: small.llama(), args=tiny_arguments(tmp_path / "again"), train_dataset=small.rows()
        )
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        results.append(small.snapshot(trainer.model))
    assert small.drift(*results) < small.WEIGHTS


def test_recreating_the_accelerator_keeps_torch_compile(tmp_path: Path) -> None:
    trainer = mt.Trainer(
        model=small.llama(), args=tiny_arguments(tmp_path, torch_compile=True), train_dataset=small.rows()
    )
    trainer.create_accelerator_and_postprocess()
    assert trainer._compile
