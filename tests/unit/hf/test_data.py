"""Datasets in every supported form become batches, or raise an error of one sentence."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from megatrain.cli.demo import VOCAB_SIZE, byte_tokenizer
from megatrain.errors import DataError
from megatrain.hf.data import CausalCollator, Rows, StreamedRows, load_tokenizer, prepare

LIMIT = 32
CHAT = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
HELLO = list(b"hello")
ENDED = [*HELLO, 258]
"""The tokens of "hello" as text, with the EOS."""


def llama(**changes: Any) -> LlamaForCausalLM:
    options = {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    options |= {
        "num_attention_heads": 2,
        "max_position_embeddings": LIMIT,
        "pad_token_id": 256,
        "eos_token_id": 258,
    }
    return LlamaForCausalLM(LlamaConfig(**options | changes))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return llama()


@pytest.fixture
def tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


class Listed(Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Stream(IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows
        self.started = 0
        self.epoch = 0

    def __iter__(self) -> Any:
        self.started += 1
        yield from self.rows

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def first_batch(dataset: Any, model: Any, tokenizer: Any = None, size: int = 2) -> dict[str, torch.Tensor]:
    prepared, collator = prepare(dataset, model, tokenizer)
    assert collator is not None
    return next(iter(DataLoader(prepared, batch_size=size, collate_fn=collator)))


# ---- containers and kinds of rows


@pytest.mark.parametrize(
    "container",
    [
        list,
        tuple,
        Listed,
        Stream,
        datasets.Dataset.from_list,
        lambda rows: datasets.Dataset.from_list(rows).to_iterable_dataset(),
        lambda rows: datasets.Dataset.from_list(rows).with_format("torch"),
        lambda rows: datasets.Dataset.from_list(rows).with_format("numpy"),
        lambda rows: datasets.IterableDataset.from_generator(lambda: iter(rows)),
    ],
    ids=["list", "tuple", "torch", "stream", "hf", "hf-stream", "hf-torch", "hf-numpy", "hf-generator"],
)
@pytest.mark.parametrize("column", ["text", "input_ids"])
def test_containers(container: Any, column: str, model: Any, tokenizer: Any) -> None:
    rows = [{"text": "hello"}, {"text": "hey"}, {"text": "x"}]
    if column == "input_ids":
        rows = [{"input_ids": list(row["text"].encode())} for row in rows]
    batch = first_batch(container(rows), model, tokenizer)
    end = [258] if column == "text" else []
    assert batch["input_ids"].tolist() == [HELLO + end, [*b"hey", *end, 256, 256]]
    assert batch["labels"].tolist() == [HELLO + end, [*b"hey", *end, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1] * (5 + len(end)), [1] * (3 + len(end)) + [0, 0]]
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    assert torch.isfinite(model(**batch).loss)


def test_input_ids_need_no_tokenizer(model: Any) -> None:
    batch = first_batch([{"input_ids": HELLO, "labels": [-100, *HELLO[1:]], "attention_mask": [1] * 5}], model)
    assert batch["labels"].tolist() == [[-100, *HELLO[1:]]]


def test_metadata_and_null_columns_are_dropped(model: Any) -> None:
    rows = [{"input_ids": [1, 2], "labels": None, "id": "a", "score": 0.5, "tags": ["x", "y"]}]
    assert set(first_batch(rows, model)) == {"input_ids", "labels", "attention_mask"}


def test_text_is_truncated_and_announced_once(model: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    prepared, _ = prepare([{"text": "ab" * LIMIT}] * 3, model, tokenizer)
    assert [len(row["input_ids"]) for row in prepared] == [LIMIT] * 3
    assert caplog.text.count("are cut to 32 tokens") == 1
    tokenizer.model_max_length = 8
    prepared, _ = prepare([{"text": "ab" * LIMIT}], model, tokenizer)
    assert len(prepared[0]["input_ids"]) == 8


def test_text_ends_with_the_eos(model: Any, tokenizer: Any) -> None:
    """The EOS is added once, and not to truncated text."""

    def ids(text: str) -> list[int]:
        token_ids: list[int] = prepare([{"text": text}], model, tokenizer)[0][0]["input_ids"].tolist()
        return token_ids

    assert ids("ab") == [*b"ab", 258]
    assert ids("ab<eos>") == [*b"ab", 258]
    assert ids("") == [258]
    assert ids("a" * (LIMIT - 1)) == [*b"a" * (LIMIT - 1), 258]
    assert ids("a" * (LIMIT + 1)) == [*b"a" * LIMIT]
    tokenizer.eos_token = None
    assert ids("ab") == [*b"ab"]


def test_messages(model: Any, tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    prepared, _ = prepare(datasets.Dataset.from_list([{"messages": chat}]), model, tokenizer)
    assert prepared[0]["input_ids"].tolist() == list(b"u:hi\na:yo\n")
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="row 0 has messages, but the tokenizer has no chat template"):
        prepare([{"messages": chat}], model, tokenizer)[0][0]


def test_prompt_and_completion(model: Any, tokenizer: Any) -> None:
    row = {"prompt": "2+2=", "completion": "4"}
    encoded = prepare([row], model, tokenizer)[0][0]
    assert encoded["input_ids"].tolist() == [*b"2+2=4", 258]
    assert encoded["labels"].tolist() == [-100] * 4 + [*b"4", 258]
    chat = {
        "prompt": [{"role": "user", "content": "hi"}],
        "completion": [{"role": "assistant", "content": "yo"}],
    }
    encoded = prepare([chat], model, tokenizer)[0][0]
    assert encoded["input_ids"].tolist() == list(b"u:hi\na:yo\n")
    assert encoded["labels"].tolist() == [-100] * 7 + list(b"yo\n")


def test_prompt_seam_inside_a_token(model: Any) -> None:
    """A token that merges the end of the prompt with the start of the completion is trained on."""

    class Merging:
        eos_token_id = None
        pad_token_id = 0
        chat_template = None
        model_max_length = 10**30

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [200 if letter == "\0" else ord(letter) for letter in text.replace("bc", "\0")]}

    encoded = prepare([{"prompt": "ab", "completion": "cd"}], model, Merging())[0][0]
    assert encoded["input_ids"].tolist() == [ord("a"), 200, ord("d")]
    assert encoded["labels"].tolist() == [-100, 200, ord("d")]


def test_order_of_columns(model: Any, tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "hi"}]
    row: dict[str, Any] = {"text": "t", "prompt": "p", "completion": "c", "messages": chat, "input_ids": [7]}
    seen = []
    for column in ("input_ids", "messages", "prompt", "text"):
        seen.append(bytes(i for i in prepare([row], model, tokenizer)[0][0]["input_ids"] if i < 256))
        row[column] = None
    assert seen == [b"\x07", b"u:hi\n", b"pc", b"t"]


def test_none_and_dict_of_datasets(model: Any, tokenizer: Any) -> None:
    assert prepare(None, model, tokenizer) == (None, None)
    parts = datasets.DatasetDict({"a": datasets.Dataset.from_list([{"text": "hello"}])})
    prepared, collator = prepare({**parts, "b": [{"inputs_embeds": torch.zeros(2, 16)}]}, model, tokenizer)
    assert set(prepared) == {"a", "b"}
    assert isinstance(prepared["a"], Rows)
    assert isinstance(prepared["b"], list)
    assert collator([prepared["a"][0]])["input_ids"].tolist() == [ENDED]
    assert collator(prepared["b"])["inputs_embeds"].shape == (1, 2, 16)


# ---- rows that are passed through


@pytest.mark.parametrize(
    "row",
    [
        {"inputs_embeds": torch.zeros(2, 16), "labels": [1, 2]},
        {"chosen_ids": [1, 2], "rejected_ids": [3]},
        {"input_ids": [1, 2], "attention_mask": torch.ones(1, 2, 2)},
        {"input_ids": [1, 2], "labels": 1},
        {"input_ids": [1, 2], "inputs_embeds": np.zeros((2, 16))},
    ],
    ids=["embeddings", "pairs", "4d-mask", "classification", "both"],
)
def test_rows_for_other_collators_are_unchanged(row: dict[str, Any], model: Any) -> None:
    dataset = [row]
    prepared, collator = prepare(dataset, model, None)
    assert prepared is dataset
    assert collator is None


def test_streams_of_other_inputs_use_the_default_collator(model: Any) -> None:
    batch = first_batch(Stream([{"inputs_embeds": torch.zeros(2, 16), "labels": torch.tensor([1, 2])}] * 2), model)
    assert batch["inputs_embeds"].shape == (2, 2, 16)
    with pytest.raises(DataError, match="row 0 has inputs that are not one number per token"):
        first_batch(Stream([{"input_ids": [1, 2], "inputs_embeds": torch.zeros(2, 16)}]), model)


# ---- streams


def test_preparing_does_not_start_a_stream(model: Any, tokenizer: Any) -> None:
    stream = Stream([{"text": "hello"}])
    prepared, _ = prepare(stream, model, tokenizer)
    assert stream.started == 0
    prepared.set_epoch(3)
    assert stream.epoch == 3
    with pytest.raises(TypeError):
        len(prepared)
    assert len(list(prepared)) == 1


def test_a_one_shot_stream_keeps_all_rows_and_raises_when_exhausted(model: Any, tokenizer: Any) -> None:
    rows = iter([{"text": "a"}, {"text": "b"}])
    prepared, _ = prepare(rows, model, tokenizer)
    assert isinstance(prepared, StreamedRows)
    assert [row["input_ids"].tolist() for row in prepared] == [[97, 258], [98, 258]]
    with pytest.raises(DataError, match="one-shot stream"):
        list(prepared)


# ---- other processes


@pytest.mark.parametrize("column", ["text", "input_ids"])
def test_pickle(column: str, model: Any, tokenizer: Any) -> None:
    rows = [{"text": "hello"}] if column == "text" else [{"input_ids": HELLO}]
    for container in (list, Listed, Stream, datasets.Dataset.from_list):
        prepared, collator = pickle.loads(pickle.dumps(prepare(container(rows), model, tokenizer)))
        assert collator([next(iter(prepared))])["input_ids"].tolist() == [ENDED if column == "text" else HELLO]


@pytest.mark.parametrize("kind", [datasets.Dataset.from_list, Stream])
def test_worker_process(kind: Any, model: Any, tokenizer: Any) -> None:
    prepared, collator = prepare(kind([{"text": "hello"}, {"text": "x"}]), model, tokenizer)
    loader = DataLoader(prepared, batch_size=2, collate_fn=collator, num_workers=1)
    assert [batch["input_ids"].tolist() for batch in loader] == [[ENDED, [*b"x", 258] + [256] * 4]]


def test_importing_hf_data_does_not_import_datasets() -> None:
    code = "import megatrain.hf.data, sys; sys.exit('datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0


# ---- the tokenizer


def test_the_tokenizer_is_loaded_from_the_models_directory(tmp_path: Any, tokenizer: Any) -> None:
    llama().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path))("hello")["input_ids"] == HELLO
    prepared, collator = prepare([{"text": "hello"}], model, None)
    assert prepared[0]["input_ids"].tolist() == ENDED
    assert collator is not None
    assert collator.tokenizer is prepared.encode.tokenizer  # the tokenizer that the Trainer saves


def test_processor_holds_the_tokenizer(model: Any, tokenizer: Any) -> None:
    class Processor:
        pass

    processor = Processor()
    processor.tokenizer = tokenizer  # type: ignore[attr-defined]
    assert prepare([{"text": "hello"}], model, processor)[0][0]["input_ids"].tolist() == ENDED


@pytest.mark.parametrize("column", ["text", "messages", "prompt"])
def test_no_tokenizer(column: str, model: Any, tmp_path: Any) -> None:
    row = {"text": {"text": "a"}, "messages": {"messages": []}, "prompt": {"prompt": "a", "completion": "b"}}[column]
    with pytest.raises(DataError, match=rf"column `{column}` needs a tokenizer: pass `processing_class=tokenizer`"):
        prepare([row], model, None)
    with pytest.raises(DataError, match=column):
        prepare(datasets.Dataset.from_list([row]).to_iterable_dataset(), model, None)  # before the first batch
    # The directory holds a model without a tokenizer. GPT-2's class would load an empty tokenizer.
    for other in (llama(), GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=8, n_layer=1, n_head=1))):
        other.save_pretrained(tmp_path / other.config.model_type)
        loaded = type(other).from_pretrained(tmp_path / other.config.model_type)
        with pytest.raises(DataError, match=column):
            prepare([row], loaded, None)


def test_unknown_name(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.config, "_name_or_path", "nobody/nothing-of-this-name")
    with pytest.raises(DataError, match="none could be loaded from 'nobody/nothing-of-this-name'"):
        prepare([{"text": "hello"}], model, None)


@pytest.mark.parametrize(
    ("changes", "pad"),
    [
        ({"pad_token_id": 7}, 7),
        ({"pad_token_id": None, "eos_token_id": 9}, 9),
        ({"pad_token_id": None, "eos_token_id": [8, 9]}, 8),
        ({"pad_token_id": None, "eos_token_id": None}, 0),
        ({"pad_token_id": -1, "eos_token_id": None}, 0),
    ],
)
def test_pad_id(changes: dict[str, Any], pad: int, tokenizer: Any) -> None:
    model = llama(**changes)
    assert prepare([{"input_ids": [1]}], model, None)[1].pad_token_id == pad  # type: ignore[union-attr]
    assert prepare([{"input_ids": [1]}], model, tokenizer)[1].pad_token_id == 256  # type: ignore[union-attr]


def test_a_pad_token_added_without_resizing_the_model(tokenizer: Any) -> None:
    model = llama(vocab_size=128, pad_token_id=None, eos_token_id=5)
    assert prepare([{"input_ids": [1]}], model, tokenizer)[1].pad_token_id == 5  # type: ignore[union-attr]


# ---- bad input


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the dataset is empty"),
        (
            [{"id": 3, "content": "abc"}],
            r"row 0 has no usable column: found `id`, `content`; MegaTrain reads `input_ids`",
        ),
        ([{"prompt": "a"}], "found `prompt`; MegaTrain reads"),
        ([{}], "found none; MegaTrain reads"),
        (["just a string"], "row 0 is a str, not a dict"),
        ([torch.zeros(3)], "row 0 is a Tensor, not a dict"),
        ([{"input_ids": [1]}, (1, 2)], "row 1 is a tuple, not a dict"),
        ([{"text": "a"}, {"text": ["a"]}], "row 1: column `text` holds a list, not a string"),
        ([{"text": "a"}, {"text": None}], "row 1 has no usable column: found `text`"),
        ([{"messages": "hi"}], "row 0: messages must be a list of dicts, not a str"),
        ([{"prompt": "a", "completion": []}], "row 0: `prompt` and `completion` are str and list"),
        ([{"input_ids": [1]}, {"input_ids": [1] * 33}], "row 1 has 33 tokens, but the model takes at most 32"),
        (
            [{"input_ids": [1]}, {"input_ids": [1, 259]}],
            r"row 1: token id 259 is outside .* \(vocab_size 259\)",
        ),
        ([{"input_ids": [-1, 1]}], "row 0: token id -1 is outside the vocabulary"),
        ([{"input_ids": [1, 2], "labels": [-100, 300]}], "row 0: token id 300 is outside the vocabulary"),
        (
            [{"input_ids": [1, 2], "labels": [1]}],
            "row 0: `labels` does not have one number for each of the 2 tokens",
        ),
        ([{"input_ids": [1, 2], "attention_mask": [1]}], "row 0: `attention_mask` does not have one number"),
        (
            [{"input_ids": [[1, 2]], "labels": [[1, 2]]}],
            "row 0: `input_ids` must be one flat list of integers",
        ),
        ([{"input_ids": [0.5, 1.0]}], "row 0: `input_ids` must be one flat list of integers"),
    ],
)
def test_errors(rows: list[Any], message: str, model: Any, tokenizer: Any) -> None:
    def read_all(dataset: Any) -> None:
        prepared, _ = prepare(dataset, model, tokenizer)
        for i in range(len(rows)):
            prepared[i]

    with pytest.raises(DataError, match=message):
        read_all(rows)
    stream, _ = prepare(Stream(rows), model, tokenizer)
    with pytest.raises(DataError, match="gave no rows" if not rows else message):
        list(stream)


# ---- the collator

rows_of_ids = st.lists(st.lists(st.integers(0, 250), max_size=12), min_size=1, max_size=5)


@given(rows_of_ids, st.data())
def test_collator_properties(ids: list[list[int]], data: st.DataObject) -> None:
    rows: list[dict[str, Any]] = []
    for row in ids:
        fields: dict[str, Any] = {"input_ids": data.draw(st.sampled_from([list, torch.tensor, np.array]))(row)}
        if not row:
            fields = {"input_ids": row}
        if data.draw(st.booleans()):
            fields["labels"] = [-100 if data.draw(st.booleans()) else i for i in row]
        if data.draw(st.booleans()):
            fields["attention_mask"] = [data.draw(st.integers(0, 1)) for _ in row]
        rows.append(fields)
    batch = CausalCollator(251)(rows)

    width = max(1, *map(len, ids))
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    for tensor in batch.values():
        assert tensor.shape == (len(ids), width)
        assert tensor.dtype == torch.int64
    for i, (row, fields) in enumerate(zip(ids, rows, strict=True)):
        n = len(row)
        tokens, labels, mask = (batch[k][i].tolist() for k in ("input_ids", "labels", "attention_mask"))
        assert tokens == row + [251] * (width - n)
        assert labels[n:] == [-100] * (width - n)
        if n:
            assert mask == fields.get("attention_mask", [1] * n) + [0] * (width - n)
            copied = [t if m else -100 for t, m in zip(row, mask, strict=False)]
            assert labels[:n] == fields.get("labels", copied)
        else:
            assert mask[0] == 1  # attention over nothing would be NaN


def test_equal_lengths_get_a_full_mask() -> None:
    batch = CausalCollator(0)([{"input_ids": [1, 2]}, {"input_ids": [0, 0]}])
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 1]]
    assert batch["labels"].tolist() == [[1, 2], [0, 0]]


def test_already_padded_rows_keep_their_padding_unlabelled() -> None:
    batch = CausalCollator(0)([{"input_ids": [0, 0, 5], "attention_mask": [0, 0, 1]}])
    assert batch["labels"].tolist() == [[-100, -100, 5]]


def test_columns_per_token_pass_if_every_row_has_them() -> None:
    rows = [
        {"input_ids": [1, 2, 3], "weights": [0.5, 1.0, 2.0], "token_type_ids": [0, 1, 1], "some": [1, 1, 1]},
        {"input_ids": [4], "weights": [1], "token_type_ids": [1]},
    ]
    batch = CausalCollator(0)(rows)
    assert set(batch) == {"input_ids", "labels", "attention_mask", "weights", "token_type_ids"}
    assert batch["weights"].tolist() == [[0.5, 1.0, 2.0], [1.0, 0.0, 0.0]]
    assert batch["weights"].dtype == torch.float32
    assert batch["token_type_ids"].tolist() == [[0, 1, 1], [1, 0, 0]]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=3), min_size=1, max_size=3))
def test_packed_documents_do_not_attend_to_each_other(packed: list[list[int]]) -> None:
    """Documents packed into rows and separated by position_ids give the logits of separate documents."""
    torch.manual_seed(0)
    model = llama().eval()
    generator = torch.Generator().manual_seed(len(packed))
    documents = [[torch.randint(250, (n,), generator=generator) for n in row] for row in packed]
    rows = []
    for row in documents:
        labels = torch.cat([torch.cat([torch.tensor([-100]), document[1:]]) for document in row])
        positions = torch.cat([torch.arange(len(document)) for document in row])
        rows.append({"input_ids": torch.cat(row), "position_ids": positions, "labels": labels})
    batch = CausalCollator(256)(rows)
    assert "attention_mask" not in batch
    with torch.no_grad():
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False).logits
        for i, row in enumerate(documents):
            start = 0
            for document in row:
                alone = model(document[None]).logits[0]
                torch.testing.assert_close(logits[i, start : start + len(document)], alone, atol=1e-5, rtol=1e-4)
                start += len(document)


def test_padding_does_not_change_the_loss(model: Any) -> None:
    rows = [{"input_ids": HELLO}, {"input_ids": list(b"hi")}, {"input_ids": []}]
    batch = CausalCollator(256)(rows)
    with torch.no_grad():
        together = model(**batch).loss
        alone = [model(**CausalCollator(256)([row])).loss * (len(row["input_ids"]) - 1) for row in rows[:2]]
    torch.testing.assert_close(together, sum(alone) / 5)


# ---- in a Trainer


@pytest.mark.parametrize("kind", [datasets.Dataset.from_list, Listed, Stream])
def test_transformers_trains_on_prepared_data(kind: Any, tmp_path: Any, tokenizer: Any) -> None:
    model = llama()
    rows = [{"text": "hello", "id": 1}, {"text": "we the people", "id": 2}]
    train, collator = prepare(kind(rows), model, tokenizer)
    evaluation, _ = prepare({"a": kind(rows)}, model, tokenizer)
    arguments = TrainingArguments(tmp_path, max_steps=2, report_to="none", use_cpu=True, save_steps=2)
    trainer = Trainer(model, arguments, collator, train_dataset=train, eval_dataset=evaluation)
    assert np.isfinite(trainer.train().training_loss)
    assert np.isfinite(trainer.evaluate()["eval_a_loss"])
    saved = load_tokenizer(str(tmp_path / "checkpoint-2"))
    assert saved("hello")["input_ids"] == HELLO
