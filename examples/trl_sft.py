"""Supervised fine-tuning with TRL's SFTTrainer: put `mt.MegaMixin` in front of it.

Run it as it stands: `python examples/trl_sft.py [OUTPUT_DIR]` (needs `pip install trl`). With a GPU, it uses it. The
same line works for other Trainers: `class DPO(mt.MegaMixin, trl.DPOTrainer): ...`. For a real model, replace
`small_llama()` by `AutoModelForCausalLM.from_pretrained("company/model", dtype=torch.bfloat16)` and
`byte_tokenizer()` by its tokenizer.
"""

import sys
import tempfile

from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

import megatrain as mt
from megatrain.cli.demo import bundled_text, byte_tokenizer, small_llama


class Trainer(mt.MegaMixin, SFTTrainer):
    """TRL's trainer; the model streams."""


output_dir = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
paragraphs = [paragraph for paragraph in bundled_text().split("\n\n") if len(paragraph) > 80]
# The loss is that of the completion alone.
pairs = {"prompt": [p[:40] for p in paragraphs], "completion": [p[40:120] for p in paragraphs]}

args = SFTConfig(
    output_dir=output_dir,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=20,
    max_length=128,
    learning_rate=3e-3,
    logging_steps=5,
    save_strategy="no",
    report_to="none",
    bf16=False,  # leave it out for a real model
    gradient_checkpointing=False,  # MegaTrain decides what is kept for the backward
)
trainer = Trainer(
    model=small_llama(), args=args, train_dataset=Dataset.from_dict(pairs), processing_class=byte_tokenizer()
)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss: {losses[0]:.3f} at the start, {losses[-1]:.3f} at the end")

trainer.save_model(output_dir)
reloaded = AutoModelForCausalLM.from_pretrained(output_dir)
print(f"saved in {output_dir}; stock transformers reloads {reloaded.num_parameters():,} parameters")
