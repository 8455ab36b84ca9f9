"""`mt.Trainer` behaves as `transformers.Trainer` on a streamed model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from tests import small as tiny
from torch import nn
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments

import megatrain as mt
from megatrain.cli.demo import VOCAB_SIZE, byte_tokenizer
from megatrain.errors import MissingLabels, SettingsError
from megatrain.optim.optimizer import Optimizer
from megatrain.store.split import join


def run(kind: type, directory: Path, model: Any = None, data: Any = None, **changes: Any) -> Any:
    extra = {name: changes.pop(name) for name in ("compute_loss_func", "callbacks", "eval_dataset") if name in changes}
    trainer = kind(
        model=tiny.llama() if model is None else model,
        args=tiny.arguments(directory, **changes),
        train_dataset=tiny.rows() if data is None else data,
        **extra,
    )
    trainer.train()
    return trainer


def assert_equal_runs(ours: Any, stock: Any) -> None:
    mine = [entry for entry in ours.state.log_history if "loss" in entry]
    theirs = [entry for entry in stock.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in mine] == [entry["step"] for entry in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=tiny.LOSSES)
        assert one["grad_norm"] == pytest.approx(float(other["grad_norm"]), rel=1e-5)
        assert one["learning_rate"] == other["learning_rate"]
    assert tiny.drift(tiny.snapshot(ours.model), tiny.snapshot(stock.model)) < tiny.WEIGHTS


# ---- the example


def test_the_introductory_example(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    tiny.llama().save_pretrained(tmp_path / "company")
    ds = tiny.rows(12)

    mt.init(offload_dir=tmp_path / "cache", max_vram_gb=80, optimizer_compression=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "company", torch_dtype=torch.float32)
    trainer = mt.Trainer(
        model=model,
        train_dataset=ds,
        args=TrainingArguments(
            per_device_train_batch_size=1, gradient_accumulation_steps=4, output_dir=str(tmp_path / "out")
        ),
    )
    result = trainer.train()

    assert result.global_step == 9  # three epochs of twelve rows, four rows per step
    assert trainer.args.logging_steps == 500
    assert math.isfinite(result.training_loss)
    lines = [line for line in announced.messages if line.startswith("step ")]
    assert len(lines) == 9, "every step must have a line, although transformers logs every 500 steps"
    assert not tiny.same(tiny.snapshot(model), tiny.snapshot(tiny.llama()))
    assert any("offload_dir" in line for line in announced.messages)
    assert any("optimizer_compression" in line for line in announced.messages)


# ---- the same numbers as transformers.Trainer


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05, 1.0])
def test_equals_transformers(tmp_path: Path, max_grad_norm: float) -> None:
    changes = {"max_grad_norm": max_grad_norm, "weight_decay": 0.1, "warmup_steps": 2, "lr_scheduler_type": "cosine"}
    runs = [run(kind, tmp_path, max_steps=6, **changes) for kind in (mt.Trainer, transformers.Trainer)]
    assert_equal_runs(*runs)
    assert len({entry["learning_rate"] for entry in runs[0].state.log_history if "loss" in entry}) >= 5


def test_clipping_and_decay_change_the_weights_in_these_tests(tmp_path: Path) -> None:
    """Otherwise the test above could not fail."""
    plain, clipped, decayed = (
        tiny.snapshot(run(mt.Trainer, tmp_path, max_steps=6, adam_epsilon=1e-3, **changes).model)
        for changes in ({"max_grad_norm": 0.0}, {"max_grad_norm": 0.05}, {"max_grad_norm": 0.0, "weight_decay": 0.1})
    )
    assert tiny.drift(plain, clipped) > 100 * tiny.WEIGHTS
    assert tiny.drift(plain, decayed) > 100 * tiny.WEIGHTS
    # Norm weights are in the group without decay. They still change, because the other weights do.
    trainer = run(mt.Trainer, tmp_path, weight_decay=0.1)
    groups = trainer._own_optimizer().param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(parameter.dim() == 1 for parameter in groups[1]["params"])


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation_steps": 4},
        {"label_smoothing_factor": 0.1},
        {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
        {"neftune_noise_alpha": 5.0},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_options_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert_equal_runs(*[run(kind, tmp_path, **changes) for kind in (mt.Trainer, transformers.Trainer)])


def test_dropout_equals_transformers(tmp_path: Path) -> None:
    """Blocks draw random numbers in the order of the plain forward, and a recompute draws the same numbers."""
    runs = [run(kind, tmp_path, model=tiny.gpt2()) for kind in (mt.Trainer, transformers.Trainer)]
    assert tiny.losses(runs[0]) == pytest.approx(tiny.losses(runs[1]), abs=1e-5)


def test_accumulation_equals_the_large_batch(tmp_path: Path) -> None:
    large = run(mt.Trainer, tmp_path, per_device_train_batch_size=4)
    pieces = run(mt.Trainer, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    assert tiny.losses(pieces) == pytest.approx(tiny.losses(large), abs=tiny.LOSSES)
    assert tiny.drift(tiny.snapshot(pieces.model), tiny.snapshot(large.model)) < tiny.WEIGHTS


def test_accumulation_of_uneven_rows_equals_the_large_batch(tmp_path: Path) -> None:
    """The loss is a mean over all tokens of the step. A mean over micro-batches would overweight short rows."""
    data = [{"input_ids": row["input_ids"][: 3 + index % 5]} for index, row in enumerate(tiny.rows())]
    large = run(mt.Trainer, tmp_path, data=data, per_device_train_batch_size=4)
    pieces = run(mt.Trainer, tmp_path, data=data, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    assert tiny.losses(pieces) == pytest.approx(tiny.losses(large), abs=tiny.LOSSES)
    assert tiny.drift(tiny.snapshot(pieces.model), tiny.snapshot(large.model)) < tiny.WEIGHTS


def half_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch / 2


def test_compute_loss_func_equals_transformers(tmp_path: Path) -> None:
    runs = [run(kind, tmp_path, compute_loss_func=half_loss) for kind in (mt.Trainer, transformers.Trainer)]
    assert_equal_runs(*runs)
    assert tiny.losses(runs[0])[0] < 0.6 * tiny.losses(run(mt.Trainer, tmp_path))[0]


def with_own_loss(kind: type) -> type:
    class Own(kind):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(input_ids=inputs["input_ids"])
            loss = outputs.logits.square().mean()
            return (loss, outputs) if return_outputs else loss

    return Own


def test_a_subclass_with_its_own_loss_equals_transformers(tmp_path: Path) -> None:
    unlabelled = [{"input_ids": row["input_ids"]} for row in tiny.rows()]
    runs = [
        run(with_own_loss(kind), tmp_path, data=unlabelled, remove_unused_columns=False)
        for kind in (mt.Trainer, transformers.Trainer)
    ]
    assert_equal_runs(*runs)


def test_the_mixin_in_front_of_another_trainer(tmp_path: Path) -> None:
    mixed = type("Mixed", (mt.MegaMixin, with_own_loss(transformers.Trainer)), {})
    assert_equal_runs(run(mixed, tmp_path), run(with_own_loss(transformers.Trainer), tmp_path))


# ---- step lines


@pytest.mark.parametrize("logging_steps", [10, 3])
def test_every_step_has_a_line(tmp_path: Path, announced: pytest.LogCaptureFixture, logging_steps: int) -> None:
    trainer = run(mt.Trainer, tmp_path, max_steps=6, logging_steps=logging_steps)
    logged = {entry["step"] for entry in trainer.state.log_history if "loss" in entry}
    printed = {int(line.split("/")[0].split()[1]) for line in announced.messages if line.startswith("step ")}
    assert logged | printed == set(range(1, 7))
    assert not logged & printed, "a step that the Trainer logs must not get a second line"
    assert all("grad norm" in line and " s" in line for line in announced.messages if line.startswith("step "))


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_step_line_shows_values_of_its_step_without_waiting(
    tmp_path: Path, announced: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, max_grad_norm: float
) -> None:
    options = {"max_steps": 4, "lr_scheduler_type": "linear", "max_grad_norm": max_grad_norm}
    logged = [entry for entry in run(mt.Trainer, tmp_path, **options).state.log_history if "loss" in entry]
    waited: list[Any] = []
    monkeypatch.setattr(Optimizer, "_finished", waited.append)
    announced.clear()
    run(mt.Trainer, tmp_path, logging_steps=500, **options)
    shown = [line.split(", ") for line in announced.messages if line.startswith("step ")]
    assert [line[0].split(": ")[1] for line in shown] == [f"loss {entry['loss']:.4g}" for entry in logged]
    assert all(line[2].endswith(" tokens/s") for line in shown)
    assert [line[1] for line in shown] == [f"grad norm {entry['grad_norm']:.4g}" for entry in logged]
    assert [line[3] for line in shown] == [f"lr {entry['learning_rate']:.3g}" for entry in logged]
    assert not waited


class RecordsEvents(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda args, state, control, **_: self.events.append(name)
        return super().__getattribute__(name)


def test_callbacks_are_called_as_in_transformers(tmp_path: Path) -> None:
    events_of_runs = []
    for kind in (mt.Trainer, transformers.Trainer):
        callback = RecordsEvents()
        run(kind, tmp_path, max_steps=2, gradient_accumulation_steps=2, callbacks=[callback])
        events_of_runs.append(callback.events)
    assert events_of_runs[0] == events_of_runs[1]
    assert events_of_runs[0].count("on_step_end") == 2
    assert "on_substep_end" in events_of_runs[0]


# ---- evaluation


def accuracy(prediction: Any) -> dict[str, float]:
    hits = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float(hits.mean())}


def test_evaluate_and_predict_equal_transformers(tmp_path: Path) -> None:
    results = []
    for kind in (mt.Trainer, transformers.Trainer):
        trainer = kind(
            model=tiny.llama(),
            args=tiny.arguments(tmp_path, eval_strategy="steps", eval_steps=2),
            train_dataset=tiny.rows(),
            eval_dataset=tiny.rows(5, seed=1),
            compute_metrics=accuracy,
        )
        before = trainer.evaluate()
        trainer.train()
        inside = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        prediction = trainer.predict(tiny.rows(3, seed=2))
        results.append((before, inside, trainer.evaluate(), prediction))
    (mine_before, mine_inside, mine_after, mine), (before, inside, after, theirs) = results
    assert len(inside) == 2
    assert mine_inside == pytest.approx(inside, abs=tiny.LOSSES)
    assert mine_before["eval_loss"] == pytest.approx(before["eval_loss"], abs=tiny.LOSSES)
    assert mine_after["eval_accuracy"] == after["eval_accuracy"]
    assert mine_after["eval_loss"] != pytest.approx(before["eval_loss"], abs=tiny.LOSSES)
    torch.testing.assert_close(torch.tensor(mine.predictions), torch.tensor(theirs.predictions), atol=1e-5, rtol=0)
    assert (mine.label_ids == theirs.label_ids).all()


def test_evaluation_does_not_change_training(tmp_path: Path) -> None:
    plain = run(mt.Trainer, tmp_path)
    with_evaluation = run(mt.Trainer, tmp_path, eval_dataset=tiny.rows(3, seed=1), eval_strategy="steps", eval_steps=1)
    assert tiny.losses(plain) == tiny.losses(with_evaluation)
    assert tiny.same(tiny.snapshot(plain.model), tiny.snapshot(with_evaluation.model))


def test_load_best_model_at_end(tmp_path: Path) -> None:
    """At this learning rate the evaluation loss is lowest in an early step."""
    trainer = run(
        mt.Trainer,
        tmp_path,
        max_steps=6,
        learning_rate=0.1,
        eval_dataset=tiny.rows(4, seed=1),
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
    )
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert min(evaluated) < evaluated[-1], "an earlier step must be the best for this test"
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(evaluated), abs=1e-7)
    best = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    assert tiny.same(tiny.snapshot(trainer.model), tiny.snapshot(best))


def test_save_total_limit(tmp_path: Path) -> None:
    run(mt.Trainer, tmp_path, save_strategy="steps", save_steps=1, save_total_limit=2)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]


# ---- data


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        for seed in range(100):
            yield from tiny.rows(4, seed=seed)


def test_an_iterable_dataset(tmp_path: Path) -> None:
    runs = [run(kind, tmp_path, data=Stream()) for kind in (mt.Trainer, transformers.Trainer)]
    assert_equal_runs(*runs)


def test_text_and_a_byte_tokenizer(tmp_path: Path) -> None:
    """A `datasets.Dataset` of text trains with the tokenizer saved beside the model."""
    tiny.llama(vocab_size=VOCAB_SIZE, pad_token_id=256).save_pretrained(tmp_path / "model")
    byte_tokenizer(max_length=32).save_pretrained(tmp_path / "model")
    data = datasets.Dataset.from_dict({"text": ["We the People", "of the United States, in Order to form", "a"] * 4})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    trainer = run(mt.Trainer, tmp_path / "out", model=model, data=data, max_steps=12, save_strategy="epoch")
    results = tiny.losses(trainer)
    assert results[0] == pytest.approx(math.log(VOCAB_SIZE), abs=0.3)
    assert results[-1] < results[0] - 1
    last = tmp_path / "out" / "checkpoint-12"
    assert transformers.AutoTokenizer.from_pretrained(last)("We")["input_ids"] == list(b"We")


def test_missing_labels(tmp_path: Path) -> None:
    """A user's collator that makes no labels raises one sentence and leaves the model unchanged."""
    model = tiny.llama()
    before = tiny.snapshot(model)
    trainer = mt.Trainer(
        model=model,
        args=tiny.arguments(tmp_path),
        train_dataset=tiny.rows(),
        data_collator=lambda results: {"input_ids": torch.stack([row["input_ids"] for row in results])},
    )
    with pytest.raises(MissingLabels, match=r"the batch has input_ids but none of labels"):
        trainer.train()
    assert tiny.same(before, tiny.snapshot(model))
    trainer.data_collator = transformers.default_data_collator
    trainer.train()
    assert len(tiny.losses(trainer)) == 4


class Forwarding(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Names none of its inputs, so transformers finds no label names."""

    def forward(self, **kwargs: Any) -> Any:
        return super().forward(**kwargs)


@pytest.mark.parametrize("labelled", [True, False])
def test_labels_of_a_forward_that_names_none(tmp_path: Path, labelled: bool) -> None:
    def collate(results: Any) -> dict[str, torch.Tensor]:
        ids = torch.stack([row["input_ids"] for row in results])
        return {"input_ids": ids, "labels": ids} if labelled else {"input_ids": ids}

    trainer = mt.Trainer(
        model=Forwarding(tiny.llama().config),
        args=tiny.arguments(tmp_path, remove_unused_columns=False),
        train_dataset=tiny.rows(),
        data_collator=collate,
    )
    assert trainer.label_names == []
    if labelled:
        trainer.train()
        assert len(tiny.losses(trainer)) == 4
    else:
        with pytest.raises(MissingLabels, match=r"the batch has input_ids but none of labels"):
            trainer.train()


def test_a_model_that_makes_its_own_labels(tmp_path: Path) -> None:
    """Models for masked prediction do this."""

    class Reading(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            return super().forward(input_ids=input_ids, labels=input_ids)

    trainer = mt.Trainer(
        model=Reading(tiny.llama().config),
        args=tiny.arguments(tmp_path),
        train_dataset=tiny.rows(),
        data_collator=lambda results: {"input_ids": torch.stack([row["input_ids"] for row in results])},
    )
    trainer.train()
    assert len(tiny.losses(trainer)) == 4


def test_missing_labels_in_the_mapping_of_a_tokenizer(tmp_path: Path) -> None:
    def collate(results: Any) -> Any:
        return transformers.BatchEncoding({"input_ids": torch.stack([row["input_ids"] for row in results])})

    trainer = mt.Trainer(
        model=tiny.llama(), args=tiny.arguments(tmp_path), train_dataset=tiny.rows(), data_collator=collate
    )
    with pytest.raises(MissingLabels, match=r"the batch has input_ids but none of labels"):
        trainer.train()


class Labelling:
    """Batches have no labels; `_prepare_inputs` adds them."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        results = super()._prepare_inputs(inputs)  # type: ignore[misc]
        return {**results, "labels": results["input_ids"]}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_labels_added_by_prepare_inputs(tmp_path: Path, accumulation: int) -> None:
    def collate(results: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.stack([row["input_ids"] for row in results])}

    behind = type("Behind", (Labelling, transformers.Trainer), {})
    stock, *ours = [
        type("Made", bases, {})(
            model=tiny.llama(),
            args=tiny.arguments(tmp_path, gradient_accumulation_steps=accumulation),
            train_dataset=tiny.rows(),
            data_collator=collate,
        )
        for bases in ((behind,), (Labelling, mt.Trainer), (mt.MegaMixin, behind))
    ]
    stock.train()
    for trainer in ours:
        trainer.train()
        assert tiny.losses(trainer) == pytest.approx(tiny.losses(stock), abs=tiny.LOSSES)


# ---- models


class Plain(nn.Module):
    """A plain module, a stack of layers, that returns a dict with a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(tiny.VOCAB, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(16, tiny.VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Tuples(Plain):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return tuple(super().forward(input_ids, labels).values())


def test_missing_labels_of_a_model_that_returns_tuples(tmp_path: Path) -> None:
    """Without labels the first output is not a loss."""
    trainer = mt.Trainer(
        model=Tuples(),
        args=tiny.arguments(tmp_path),
        train_dataset=tiny.rows(),
        data_collator=lambda results: {"input_ids": torch.stack([row["input_ids"] for row in results])},
    )
    with pytest.raises(MissingLabels, match=r"the batch has input_ids but none of labels"):
        trainer.train()


def test_a_plain_module_that_returns_a_loss(tmp_path: Path) -> None:
    runs = [
        run(kind, tmp_path / kind.__module__, model=Plain(), save_strategy="steps", save_steps=4)
        for kind in (mt.Trainer, transformers.Trainer)
    ]
    assert_equal_runs(*runs)
    saved = [
        transformers.modeling_utils.load_state_dict(tmp_path / kind.__module__ / "checkpoint-4" / "model.safetensors")
        for kind in (mt.Trainer, transformers.Trainer)
    ]
    assert tiny.drift(*saved) < tiny.WEIGHTS
    assert tiny.same(saved[0], tiny.snapshot(runs[0].model))


def test_a_second_trainer_on_the_same_model(tmp_path: Path) -> None:
    """The second Trainer uses the existing engine with a new optimizer, as in transformers."""
    runs = []
    for kind in (mt.Trainer, transformers.Trainer):
        first = run(kind, tmp_path)
        runs.append((first, run(kind, tmp_path, model=first.model, learning_rate=3e-3, weight_decay=0.2)))
    (ours, ours_again), (_, stock_again) = runs
    assert ours.engine is ours_again.engine
    assert_equal_runs(ours_again, stock_again)


def test_model_init(tmp_path: Path) -> None:
    results = []
    for kind in (mt.Trainer, transformers.Trainer):
        trainer = kind(model_init=lambda: tiny.llama(), args=tiny.arguments(tmp_path), train_dataset=tiny.rows())
        trainer.train()
        results.append(tiny.losses(trainer))
    assert results[0] == pytest.approx(results[1], abs=tiny.LOSSES)


# ---- precision and arguments with another meaning


def test_bf16_keeps_the_exact_fp32_master(tmp_path: Path) -> None:
    model = tiny.llama()
    original = tiny.snapshot(model)
    trainer = mt.Trainer(model=model, args=tiny.arguments(tmp_path, bf16=True), train_dataset=tiny.rows())
    assert trainer.engine.precision == "bf16"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    named: dict[str, Any] = dict(model.named_parameters())
    for name, parameter in named.items():
        weight = parameter.host()
        residual = parameter.slab.residual
        segment = parameter.slab.layout.segments[parameter.segment]
        none = torch.zeros(segment.numel, dtype=torch.int16)
        low = none if residual is None else residual[segment.offset : segment.end]
        assert torch.equal(join(weight.reshape(-1), low), original[name].reshape(-1)), name
    assert any(parameter.slab.residual is not None for parameter in named.values())


def test_bf16_runs_without_autocast(tmp_path: Path) -> None:
    """The weights are BF16, so matrix products need no autocast, which would cast the weights again."""
    model = tiny.llama()
    seen: list[tuple[bool, torch.dtype]] = []
    model.model.layers[1].mlp.register_forward_hook(
        lambda module, args, output: seen.append((torch.is_autocast_enabled("cpu"), output.dtype))
    )
    trainer = run(mt.Trainer, tmp_path, model=model, bf16=True)
    assert set(seen) == {(False, torch.bfloat16)}
    stock = run(transformers.Trainer, tmp_path)
    assert tiny.losses(trainer) == pytest.approx(tiny.losses(stock), abs=0.05)


def test_bf16_updates_can_be_smaller_than_a_bf16_step(tmp_path: Path) -> None:
    """Without a master, such small updates would leave most weights unchanged."""
    model = tiny.llama()
    before = tiny.snapshot(model)
    trainer = run(mt.Trainer, tmp_path, model=model, bf16=True, learning_rate=1e-6, max_steps=3, warmup_steps=0)
    moved = total = 0
    named: dict[str, Any] = dict(trainer.model.named_parameters())
    for name, parameter in named.items():
        segment = parameter.slab.layout.segments[parameter.segment]
        residual = parameter.slab.residual[segment.offset : segment.end]
        master = join(parameter.host().reshape(-1), residual)
        if before[name].dim() > 1 and "embed" not in name:
            moved += int((master != before[name].reshape(-1)).sum())
            total += master.numel()
    assert moved > 0.9 * total


def test_fp16_is_refused(tmp_path: Path) -> None:
    model = tiny.llama()
    with pytest.raises(SettingsError, match=r"fp16=True is not supported: use bf16=True"):
        mt.Trainer(model=model, args=tiny.arguments(tmp_path, fp16=True), train_dataset=tiny.rows())
    run(mt.Trainer, tmp_path, model=model)


def test_a_frozen_model_is_refused(tmp_path: Path) -> None:
    trainer = mt.Trainer(
        model=tiny.llama().requires_grad_(False),
        args=tiny.arguments(tmp_path),
        train_dataset=tiny.rows(),
        eval_dataset=tiny.rows(),
    )
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    with pytest.raises(SettingsError, match="no parameter of the model requires grad, so there is nothing to train"):
        trainer.train()


def test_deepspeed_is_refused(tmp_path: Path) -> None:
    args = tiny.arguments(tmp_path)
    # With a configuration in its constructor, TrainingArguments needs the package.
    args.deepspeed = {"zero_optimization": {"stage": 3}}
    with pytest.raises(SettingsError, match=r"deepspeed in TrainingArguments is not supported"):
        mt.Trainer(model=tiny.llama(), args=args, train_dataset=tiny.rows())


@pytest.mark.parametrize("optim", ["adafactor", "adamw_torch_8bit", "galore_adamw"])
def test_another_optimizer_is_refused(tmp_path: Path, optim: str) -> None:
    with pytest.raises(SettingsError, match=r"not supported.*adamw_torch"):
        mt.Trainer(model=tiny.llama(), args=tiny.arguments(tmp_path, optim=optim), train_dataset=tiny.rows())


def test_an_optimizer_of_the_engine_is_used(tmp_path: Path) -> None:
    model = tiny.llama()
    optimizer = mt.Engine(model).optimizer(lr=1e-2, weight_decay=0.0, max_grad_norm=1.0)
    trainer = mt.Trainer(
        model=model, args=tiny.arguments(tmp_path), train_dataset=tiny.rows(), optimizers=(optimizer, None)
    )
    trainer.train()
    assert trainer._own_optimizer() is optimizer
    assert tiny.losses(trainer) == pytest.approx(tiny.losses(run(transformers.Trainer, tmp_path)), abs=tiny.LOSSES)


def test_gradient_checkpointing_is_not_needed(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    plain = run(mt.Trainer, tmp_path)
    announced.clear()
    requested = run(mt.Trainer, tmp_path, gradient_checkpointing=True)
    assert any("gradient_checkpointing=True is not needed" in line for line in announced.messages)
    assert not requested.model.is_gradient_checkpointing
    assert tiny.losses(plain) == tiny.losses(requested)


def test_gradient_checkpointing_of_the_model_is_switched_off(
    tmp_path: Path, announced: pytest.LogCaptureFixture
) -> None:
    model = tiny.llama()
    model.gradient_checkpointing_enable()
    assert tiny.losses(run(mt.Trainer, tmp_path, model=model)) == tiny.losses(run(mt.Trainer, tmp_path))
    assert any("gradient checkpointing is off" in line for line in announced.messages)


# ---- resuming with other arguments


@pytest.mark.parametrize("changes", [{"learning_rate": 1e-3}, {"weight_decay": 0.5}, {"max_steps": 8}, {}], ids=str)
def test_resuming_with_changed_arguments_equals_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    runs = []
    for kind in (mt.Trainer, transformers.Trainer):
        directory = tmp_path / kind.__module__
        options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "warmup_steps": 1, "weight_decay": 0.1}
        run(kind, directory, **options)
        trainer = kind(
            model=tiny.llama(), args=tiny.arguments(directory, **(options | changes)), train_dataset=tiny.rows()
        )
        trainer.train(resume_from_checkpoint=str(directory / "checkpoint-3"))
        runs.append(trainer)
    assert len(tiny.losses(runs[0])) == changes.get("max_steps", 6)
    assert_equal_runs(*runs)


def test_a_model_without_a_head_does_not_raise_missing_labels(tmp_path: Path) -> None:
    headless = transformers.LlamaModel(tiny.llama().config)
    trainer = mt.Trainer(
        model=headless,
        args=tiny.arguments(tmp_path, remove_unused_columns=False),
        train_dataset=tiny.rows(),
        data_collator=transformers.default_data_collator,
    )
    with pytest.raises(ValueError, match="did not return a loss") as error:
        trainer.train()
    assert not isinstance(error.value, MissingLabels)
