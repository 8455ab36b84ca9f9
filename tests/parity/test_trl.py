"""TRL's Trainers behave with `MegaMixin` as without: same losses, generations, tokens and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from tests import small
from transformers import LlamaForSequenceClassification

import megatrain as mt
from megatrain.cli.demo import VOCAB_SIZE, byte_tokenizer

PROMPTS = ["We the", "People of", "the United", "States, in"]
COMPLETIONS = [" People", " the land", " Colonies", " order to form"]


def model() -> Any:
    return small.llama(vocab_size=VOCAB_SIZE, eos_token_id=258, pad_token_id=256, num_hidden_layers=2)


def options(kind: str, directory: Path, accumulation: int) -> dict[str, Any]:
    common = {
        "output_dir": str(directory), "per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation,
        "max_steps": 2, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
    }  # fmt: skip
    if kind in ("GRPO", "RLOO"):
        common |= {"num_generations": 2, "max_completion_length": 6, "beta": 0.0}
    return common


def data(kind: str) -> Dataset:
    columns: dict[str, list[Any]] = {"prompt": PROMPTS * 4}
    if kind == "SFT":
        columns["completion"] = COMPLETIONS * 4
    if kind in ("DPO", "Reward"):
        columns |= {"chosen": COMPLETIONS * 4, "rejected": COMPLETIONS[::-1] * 4}
    if kind == "KTO":
        columns |= {"completion": COMPLETIONS * 4, "label": [True, False, False, True] * 4}
    return Dataset.from_dict(columns)


def length_reward(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs between completions, so advantages are not zero."""
    return [float(len(text) + 3 * text.count("e")) for text in completions]


def counting(kind: type) -> type:
    """A subclass that counts generated batches and tokens."""

    class Counting(kind):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            self.generations, self.tokens = 0, 0
            super().__init__(**arguments)

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            result = super()._generate_single_turn(*args, **kwargs)
            self.generations += 1
            self.tokens += sum(len(ids) for ids in (result[0] if isinstance(result, tuple) else result))
            return result

    return Counting


def train(kind: str, ours: bool, directory: Path, accumulation: int, **changes: Any) -> Any:
    base = getattr(trl, f"{kind}Trainer")
    if kind in ("GRPO", "RLOO"):
        base = counting(base)
    cls = type("Ours", (mt.MegaMixin, base), {}) if ours else base
    arguments: dict[str, Any] = {"model": model(), "processing_class": byte_tokenizer(), "train_dataset": data(kind)}
    if kind == "Reward":
        torch.manual_seed(0)
        config = model().config
        config.num_labels = 1
        arguments["model"] = LlamaForSequenceClassification(config)
    if kind in ("DPO", "KTO"):
        arguments["ref_model"] = model()
    if kind in ("GRPO", "RLOO"):
        arguments["reward_funcs"] = length_reward
    trainer = cls(args=getattr(trl, f"{kind}Config")(**(options(kind, directory, accumulation) | changes)), **arguments)
    trainer.train()
    return trainer


IGNORED = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "step_time"}


def assert_equal_runs(ours: Any, stock: Any) -> None:
    assert len(ours.state.log_history) == len(stock.state.log_history)
    for mine, theirs in zip(ours.state.log_history, stock.state.log_history, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - IGNORED:
            # Sums over up to 16 tokens (logits, log-probabilities of a completion) have more rounding than one loss.
            assert mine[name] == pytest.approx(float(theirs[name]), abs=16 * small.LOSSES), name
    assert small.drift(small.snapshot(ours.model), small.snapshot(stock.model)) < small.WEIGHTS


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", ["SFT", "DPO", "Reward", "KTO"])
def test_offline(kind: str, accumulation: int, tmp_path: Path) -> None:
    assert_equal_runs(*[train(kind, ours, tmp_path, accumulation) for ours in (True, False)])


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_online(kind: str, accumulation: int, tmp_path: Path) -> None:
    ours, stock = (train(kind, mine, tmp_path, accumulation) for mine in (True, False))
    assert (ours.generations, ours.tokens) == (stock.generations, stock.tokens)
    assert_equal_runs(ours, stock)
