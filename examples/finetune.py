"""Fine-tune every parameter of a model with `mt.Trainer`, on local text.

Run it as it stands: `python examples/finetune.py [OUTPUT_DIR]`. It takes seconds on a laptop; with a GPU, it uses it.
For a real model, replace the two marked lines:

    tokenizer = AutoTokenizer.from_pretrained("company/model")
    model = AutoModelForCausalLM.from_pretrained("company/model", dtype=torch.bfloat16)
"""

import sys
import tempfile

from transformers import AutoModelForCausalLM, TrainingArguments

import megatrain as mt
from megatrain.cli.demo import bundled_text, byte_tokenizer, small_llama

output_dir = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
tokenizer = byte_tokenizer()  # <- your tokenizer
model = small_llama()  # <- your model: here 0.4M random parameters

# Rows of `text`, `messages`, `prompt` with `completion`, or `input_ids`; a `datasets.Dataset` works too.
rows = [{"text": paragraph[:160]} for paragraph in bundled_text().split("\n\n") if len(paragraph) > 40]
train, held_out = rows[:-16], rows[-16:]

args = TrainingArguments(
    output_dir=output_dir,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,  # these four pass each layer on one fetch of its weights
    max_steps=30,
    learning_rate=3e-3,
    warmup_steps=3,
    logging_steps=10,
    save_strategy="no",
    report_to="none",
)
trainer = mt.Trainer(model=model, args=args, train_dataset=train, eval_dataset=held_out, processing_class=tokenizer)
before = trainer.evaluate()["eval_loss"]
trainer.train()
after = trainer.evaluate()["eval_loss"]
print(f"loss on held-out text: {before:.3f} before, {after:.3f} after")

# What is saved is an ordinary checkpoint.
trainer.save_model(output_dir)
reloaded = AutoModelForCausalLM.from_pretrained(output_dir)
print(f"saved in {output_dir}; stock transformers reloads {reloaded.num_parameters():,} parameters")
