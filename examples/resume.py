"""Stop a run in the middle with SIGTERM, resume it, and see that nothing differs from a run that was not stopped.

Run it as it stands: `python examples/resume.py [OUTPUT_DIR]`. With a GPU, it uses it. In your own script all that
matters is `trainer.train(resume_from_checkpoint=True)`: it takes the newest complete checkpoint of `output_dir`.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import TrainerCallback, TrainingArguments

import megatrain as mt
from megatrain.cli.demo import bundled_text, byte_tokenizer, small_llama

STEPS, STOP_AFTER = 10, 4
# On a GPU: attention's backward adds in any order otherwise.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
torch.use_deterministic_algorithms(True)
rows = [{"text": paragraph[:160]} for paragraph in bundled_text().split("\n\n") if len(paragraph) > 40]


class Stop(TrainerCallback):
    """What a cluster does to a job, or `kill` in another terminal."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == STOP_AFTER - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def trainer(directory, callbacks=()):
    args = TrainingArguments(
        output_dir=str(directory), per_device_train_batch_size=4, max_steps=STEPS, learning_rate=3e-3, warmup_steps=2,
        logging_steps=1, save_steps=STEPS, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    tokenizer = byte_tokenizer()
    return mt.Trainer(small_llama(), args, train_dataset=rows, processing_class=tokenizer, callbacks=list(callbacks))


output = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
trainer(output / "straight").train()

try:
    trainer(output / "stopped", [Stop()]).train()
except SystemExit as end:  # as a process that SIGTERM ends; the checkpoint is complete by now
    saved = [path.name for path in (output / "stopped").glob("checkpoint-*")]
    print(f"stopped with exit status {end.code}, saved {saved}")
trainer(output / "stopped").train(resume_from_checkpoint=True)

straight, resumed = (
    load_file(output / run / f"checkpoint-{STEPS}" / "model.safetensors") for run in ("straight", "stopped")
)
different = [name for name in straight if not torch.equal(straight[name], resumed[name])]
print(f"after {STEPS} steps: {len(straight)} weights, {len(different)} differ from the run that was not stopped")
sys.exit(bool(different))
