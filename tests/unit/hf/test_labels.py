"""Rows without labels are counted and announced. A dataset without any labels is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from tests import small
from torch.utils.data import IterableDataset

import megatrain as mt
from megatrain.cli.demo import VOCAB_SIZE, byte_tokenizer
from megatrain.errors import DataError
from megatrain.hf.labels import LOOKED_AT

NOTHING = "no label to train on"


def unlabelled(rows: list[Any]) -> list[Any]:
    return [{**row, "labels": torch.full_like(row["labels"], -100)} for row in rows]


def trained(data: Any, directory: Path, kind: type = mt.Trainer, **changes: Any) -> Any:
    extra = {name: changes.pop(name) for name in ("model", "processing_class", "data_collator") if name in changes}
    trainer = kind(
        **({"model": small.llama()} | extra),
        args=small.arguments(directory, train_sampling_strategy="sequential", **changes),
        train_dataset=data,
    )
    trainer.train()
    return trainer


class Stream(IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def test_some_rows_without_labels_are_counted(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    data = small.rows(3) + unlabelled(small.rows(1, seed=1)) + small.rows(2, seed=2) + unlabelled(small.rows(2, seed=3))
    stock = trained(data, tmp_path, transformers.Trainer, max_steps=4, gradient_accumulation_steps=2)
    ours = trained(data, tmp_path, max_steps=4, gradient_accumulation_steps=2)
    assert small.losses(ours) == pytest.approx(small.losses(stock), abs=small.LOSSES)
    lines = [line for line in announced.messages if NOTHING in line]
    assert [line.split(" rows")[0] for line in lines] == ["1 of the first 4", "6 of all 16"]


def test_rows_with_labels_give_no_notice(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    trained(small.rows(), tmp_path)
    trained([{"input_ids": row["input_ids"]} for row in small.rows()], tmp_path)
    assert not any(NOTHING in line for line in announced.messages)


@pytest.mark.parametrize("collator", [None, transformers.default_data_collator], ids=["ours", "theirs"])
def test_a_dataset_without_labels_is_refused_before_the_first_step(tmp_path: Path, collator: Any) -> None:
    model = small.llama()
    before = small.snapshot(model)
    for data in (
        unlabelled(small.rows()),
        datasets.Dataset.from_list([{k: v.tolist() for k, v in r.items()} for r in unlabelled(small.rows())]),
    ):
        with pytest.raises(DataError, match=r"none of the first 16 rows has a label to train on"):
            trained(data, tmp_path, model=model, data_collator=collator)
        assert small.same(before, small.snapshot(model))


def test_a_dataset_that_starts_with_rows_without_labels(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    """The dataset starts with more rows without labels than are checked, but the check samples the whole dataset."""
    data = unlabelled(small.rows(LOOKED_AT + 8)) + small.rows(8)
    trained(data, tmp_path, per_device_train_batch_size=8, max_steps=10)
    lines = [line.split(" rows")[0] for line in announced.messages if NOTHING in line]
    assert lines == ["8 of the first 8", f"{LOOKED_AT + 8} of all {LOOKED_AT + 16}"]


def test_a_stream_without_labels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"none of the first {LOOKED_AT} rows"):
        trained(Stream(unlabelled(small.rows(2 * LOOKED_AT))), tmp_path, per_device_train_batch_size=8, max_steps=100)
    with pytest.raises(DataError, match=r"none of the first 8 rows"):
        trained(Stream(unlabelled(small.rows(8))), tmp_path, max_steps=4)


def test_prompts_that_leave_no_room_for_the_completion(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    def run(prompts: list[str]) -> Any:
        return trained(
            [{"prompt": prompt, "completion": "yes"} for prompt in prompts],
            tmp_path, model=small.llama(vocab_size=VOCAB_SIZE, pad_token_id=256), processing_class=byte_tokenizer(),
            max_steps=2,
        )  # fmt: skip

    run(["short", "x" * 40, "short", "short"])
    assert any(line.startswith("1 of the first 2 rows") for line in announced.messages)
    with pytest.raises(DataError, match=r"none of the first 4 rows"):
        run(["x" * 40] * 4)


def test_a_row_of_one_token_has_no_label(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    """No position predicts the first token."""
    data = [{"input_ids": row["input_ids"][: 1 if i == 1 else 4]} for i, row in enumerate(small.rows(4))]
    trained(data, tmp_path, max_steps=1)
    assert any(line.startswith("1 of the first 2 rows") for line in announced.messages)


def test_a_custom_loss_is_not_checked(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    class Own(mt.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model(input_ids=inputs["input_ids"]).logits.square().mean()

    trained(unlabelled(small.rows()), tmp_path, Own)
    assert not any(NOTHING in line for line in announced.messages)


def test_checking_rows_draws_no_random_numbers(tmp_path: Path) -> None:
    """The rows are random. The check must not change the rows that training reads."""

    class Random(list):  # type: ignore[type-arg]
        def __getitem__(self, index: Any) -> Any:
            ids = torch.randint(1, small.VOCAB, (small.LENGTH,))
            return {"input_ids": ids, "labels": ids.clone() if index > 1 else torch.full_like(ids, -100)}

    runs = [trained(Random(range(16)), tmp_path, kind) for kind in (mt.Trainer, transformers.Trainer)]
    assert small.losses(runs[0])[1:] == pytest.approx(small.losses(runs[1])[1:], abs=small.LOSSES)
