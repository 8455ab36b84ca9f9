"""A real memory limit of the kernel's: a run that would be killed is saved and ended instead.

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
ROOTS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))
"""Version 1, version 2."""
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


def set_limit(setting: Path) -> None:
    try:
        setting.write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"no limit can be set: {error}")


@contextlib.contextmanager
def limited() -> Iterator[Path]:
    for root, name in ROOTS:
        group = root / f"megatrain-{uuid.uuid4().hex[:8]}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / name).exists():
                set_limit(group / name)
                yield group
                return
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
    pytest.skip("no cgroup hierarchy that this user may write to")


def test_a_run_short_of_ram_is_saved_and_ended_not_killed(tmp_path: Path) -> None:
    with limited() as group:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(group), str(tmp_path / "out")],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "stopped: RAM is running out" in done.stdout, done.stdout[-2000:]
    assert "of 1.5" in done.stdout
    assert "saved: True" in done.stdout
