"""Under a real memory limit of the kernel, a run saves a checkpoint and stops before it would be killed.

Needs a cgroup hierarchy that this user may write to; skipped elsewhere.
"""

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT = 3 << 29
LARGE = 8 << 30
ROOTS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))
"""cgroup v1, cgroup v2."""
PROGRAM = """
import os, sys
group, out = sys.argv[1:]
with open(os.path.join(group, "cgroup.procs"), "w") as members:
    members.write(str(os.getpid()))
import numpy, transformers
import megatrain as mt
from megatrain.hardware import inventory
from tests import small

class Hog(transformers.TrainerCallback):
    held = []

    def on_step_end(self, args, state, control, **_):
        # Almost all at once, then a little in every step.
        much = max(0, inventory.available_ram() - (48 << 20))
        self.held.append(numpy.ones(much if state.global_step == 2 else 1 << 20, dtype=numpy.uint8))

trainer = mt.Trainer(
    model=small.llama(), args=small.arguments(out, max_steps=500, save_strategy="no"),
    train_dataset=small.rows(24), callbacks=[Hog()],
)
try:
    trainer.train()
except mt.errors.OutOfRam as stopped:
    print("stopped:", stopped)
    print("saved:", os.path.isdir(os.path.join(out, f"checkpoint-{trainer.state.global_step}")))
"""


def set_limit(setting: Path, limit: int) -> None:
    try:
        setting.write_text(str(limit))
    except OSError as error:
        pytest.skip(f"no limit can be set: {error}")


@contextlib.contextmanager
def limited(limit: int = LIMIT) -> Iterator[Path]:
    for root, name in ROOTS:
        group = root / f"megatrain-{uuid.uuid4().hex[:8]}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / name).exists():
                set_limit(group / name, limit)
                yield group
                return
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
    pytest.skip("no cgroup hierarchy that this user may write to")


def test_a_run_short_of_ram_saves_and_stops(tmp_path: Path) -> None:
    with limited() as group:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(group), str(tmp_path / "out")],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "stopped: RAM is running out" in done.stdout, done.stdout[-2000:]
    assert "of 1.5" in done.stdout
    assert "saved: True" in done.stdout


SMALL = """
import os, sys
group, out, room, kind = sys.argv[1:]
with open(os.path.join(group, "cgroup.procs"), "w") as members:
    members.write(str(os.getpid()))
import torch, transformers
import megatrain as mt
from megatrain.hardware import inventory

torch.set_num_threads(1)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=7, num_attention_heads=8,
    num_key_value_heads=8, max_position_embeddings=256, bos_token_id=None, eos_token_id=None))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(1, 8192, (64, 32))]
limit = inventory.own_ram() + int(float(room) * sum(p.numel() for p in model.parameters()))
for name in ("memory.limit_in_bytes", "memory.max"):
    path = os.path.join(group, name)
    if os.path.exists(path):
        open(path, "w").write(str(limit))
try:
    if kind == "engine":
        engine = mt.Engine(model, device="cpu")
        optimizer = engine.optimizer(lr=1e-3)
        for step in range(3):
            ids = torch.stack([row["input_ids"] for row in rows[4 * step : 4 * step + 4]])
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.save(out, optimizer)
    else:
        trainer = mt.Trainer(model=model, train_dataset=rows, args=transformers.TrainingArguments(
            out, max_steps=3, save_steps=1, per_device_train_batch_size=4, use_cpu=True, report_to="none",
            gradient_accumulation_steps=2 if kind == "accumulating" else 1, bf16=kind == "accumulating"))
        trainer.train()
    print("ended: finished")
except mt.errors.NotEnoughMemory as refused:
    print("ended: refused", refused)
except mt.errors.OutOfRam as stopped:
    step = 0 if kind == "engine" else trainer.state.global_step
    saved = step == 0 or os.path.isfile(os.path.join(out, f"checkpoint-{step}", "megatrain", "manifest.json"))
    print("ended: stopped" if saved else "ended: lost", step, stopped)
"""


@pytest.mark.parametrize(
    ("kind", "room"),
    [("plain", 10), ("plain", 18.5), ("plain", 40), ("accumulating", 16.5), ("accumulating", 18.5), ("engine", 18.5)],
)
def test_no_run_is_killed_under_a_small_limit(tmp_path: Path, kind: str, room: float) -> None:
    """`room` is the memory in bytes per parameter beyond the process itself. The model has 32M parameters. Their states
    take 12 bytes each (8 in addition to the weights), slots 3 to 4, the rest is for activations, interpreter and save.
    """
    with limited(LARGE) as group:
        done = subprocess.run(
            [sys.executable, "-c", SMALL, str(group), str(tmp_path / "out"), str(room), kind],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    ended = next(line for line in done.stdout.splitlines() if line.startswith("ended: "))
    assert ended.startswith(("ended: finished", "ended: refused", "ended: stopped")), ended
    assert room > 10 or ended.startswith("ended: refused AdamW"), ended
    assert room < 40 or ended == "ended: finished", ended
