"""What code around a stock Trainer relies on: its callback list, its datasets, its files, and models of any kind."""

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
from transformers import TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback, PrinterCallback

import megatrain as mt
from megatrain.hf import stock
from megatrain.hf.data import Rows

TRAINERS = (mt.Trainer, transformers.Trainer)


class Wave(nn.Module):
    """No repeated layers, dropout, a tuple as result, and a buffer of another shape after every forward."""

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
    settled = {"output_dir": str(directory), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "seed": 3}
    steps = {"per_device_train_batch_size": 4, "learning_rate": 0.05, "logging_steps": 1, "save_steps": 2}
    return TrainingArguments(**(settled | steps | changes))


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
def test_a_model_without_repeated_layers_trains_as_in_stock(tmp_path: Path, accumulation: int) -> None:
    """Dropout too: random numbers are drawn in the order of stock, since no micro-batches share a block."""
    runs = [trained(kind, tmp_path, gradient_accumulation_steps=accumulation, max_steps=4) for kind in TRAINERS]
    assert_equal_runs(*runs)


@pytest.mark.parametrize("kind", TRAINERS)
def test_stock_and_ours_resume_each_others_checkpoints(tmp_path: Path, kind: type) -> None:
    """Also a buffer whose shape is the class's own business: its `load_state_dict` is asked, as by stock."""
    other = TRAINERS[1 - TRAINERS.index(kind)]
    whole = trained(kind, tmp_path / "whole", max_steps=5)
    resumed = trained(other, tmp_path / "resumed", str(tmp_path / "whole" / "checkpoint-2"), max_steps=5)
    assert resumed.state.global_step == 5
    assert_equal_runs(whole, resumed)


def test_a_resumed_run_is_the_same_in_every_bit(tmp_path: Path) -> None:
    whole = trained(mt.Trainer, tmp_path / "whole", max_steps=5)
    resumed = trained(mt.Trainer, tmp_path / "resumed", str(tmp_path / "whole" / "checkpoint-2"), max_steps=5)
    assert_equal_runs(whole, resumed, tolerance=0.0)


def test_a_load_state_dict_that_changes_values_is_followed(tmp_path: Path) -> None:
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


def test_a_large_state_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(mt.Trainer, tmp_path / "small", max_steps=2)
    monkeypatch.setattr(stock, "LARGEST", 64)
    trained(mt.Trainer, tmp_path / "large", max_steps=2)
    assert (tmp_path / "small" / "checkpoint-2" / "optimizer.pt").is_file()
    assert not (tmp_path / "large" / "checkpoint-2" / "optimizer.pt").exists()


def test_the_callback_list_is_the_users(tmp_path: Path) -> None:
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
    """`datasets` has a way to read many rows at once, which must not lead past it."""
    data = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5]], "metadata": ["a", "b"]})
    trainer = mt.Trainer(model=small.llama(), args=small.arguments(tmp_path), train_dataset=data)
    assert isinstance(trainer.train_dataset, Rows)
    assert trainer.train_dataset.column_names == ["input_ids", "metadata"]
    (batch,) = list(trainer.get_train_dataloader())
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
