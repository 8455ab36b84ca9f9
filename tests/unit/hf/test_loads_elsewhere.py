"""Models saved by `mt.Trainer` load and generate in a process that does not import megatrain."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import small

import megatrain as mt
from megatrain.cli.demo import VOCAB_SIZE, byte_tokenizer

PROMPT = [5, 6, 7]
NEW = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
CASES = {
    "llama": (small.llama, False),
    "llama-bf16": (small.llama, True),
    "gpt2": (small.gpt2, False),
    "mixtral-bf16": (small.mixtral, True),
    "qwen3_moe": (small.qwen3_moe, False),
}

ELSEWHERE = """
import hashlib, json, sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
prompt, options, directories, tokenizer = json.loads(sys.argv[1])
answers = {"text": AutoTokenizer.from_pretrained(tokenizer).decode(list(b"We the"))}
for directory in directories:
    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    answers[directory] = {
        "tokens": model.generate(torch.tensor([prompt]), **options)[0].tolist(),
        "problems": {name: sorted(map(str, keys)) for name, keys in report.items() if keys},
        "state": digest.hexdigest(),
        "dtype": str(model.dtype),
    }
answers["ours"] = [name for name in sys.modules if name.split(".")[0] == "megatrain"]
print(json.dumps(answers))
"""


def run_without_megatrain(directories: list[Path], tokenizer: Path) -> dict[str, Any]:
    """Run the script without megatrain on the path. Other entries of PYTHONPATH stay."""
    folders = [Path(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    others = [str(folder) for folder in folders if folder.is_absolute() and not (folder / "megatrain").exists()]
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(others)}
    question = json.dumps([PROMPT, NEW, [str(directory) for directory in directories], str(tokenizer)])
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, question],
        env=dict(os.environ) | environment,
        cwd=tokenizer,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def trained(directory: Path, name: str) -> dict[str, Any]:
    """Train, save twice, and return what the trained model generates and holds."""
    build, bf16 = CASES[name]
    args = small.arguments(directory, max_steps=8, save_strategy="steps", save_steps=8, bf16=bf16, learning_rate=3e-2)
    # A model loaded in BF16 is saved in BF16, so both processes compute the same.
    model = build().to(torch.bfloat16) if bf16 else build()
    trainer = mt.Trainer(model=model, args=args, train_dataset=small.rows())
    trainer.train()
    trainer.save_model(str(directory / "final"))
    model = trainer.model.eval()
    digest = hashlib.sha256()
    for key, value in sorted(small.snapshot(model).items()):
        digest.update(key.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return {
        "tokens": model.generate(torch.tensor([PROMPT]), **NEW)[0].tolist(),
        "problems": {},
        "state": digest.hexdigest(),
        "dtype": str(torch.bfloat16 if bf16 else torch.float32),
    }


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """One process serves all cases, because starting it takes most of the time."""
    base = tmp_path_factory.mktemp("elsewhere")
    expected = {name: trained(base / name, name) for name in CASES}
    text = base / "text"
    args = small.arguments(text, max_steps=2, save_strategy="steps", save_steps=2)
    rows = [{"text": "We the People of the United"}] * 4
    model = small.llama(vocab_size=VOCAB_SIZE, pad_token_id=256)
    mt.Trainer(model=model, args=args, train_dataset=rows, processing_class=byte_tokenizer()).train()
    directories = [base / name / part for name in CASES for part in ("checkpoint-8", "final")]
    return base, expected, run_without_megatrain(directories, text / "checkpoint-2")


def test_megatrain_was_not_imported(answers: Any) -> None:
    assert answers[2]["ours"] == []


def test_the_tokenizer_is_beside_the_weights(answers: Any) -> None:
    assert answers[2]["text"] == "We the"


@pytest.mark.parametrize("part", ["checkpoint-8", "final"])
@pytest.mark.parametrize("name", CASES)
def test_loads_and_generates(answers: Any, name: str, part: str) -> None:
    base, expected, results = answers
    theirs, ours = dict(results[str(base / name / part)]), dict(expected[name])
    if CASES[name][1]:
        # In BF16 many tokens tie, and rounding of matrix products depends on memory alignment. Weights are compared
        # bitwise, and of the text only the length.
        theirs["tokens"], ours["tokens"] = len(theirs["tokens"]), len(ours["tokens"])
    assert theirs == ours
