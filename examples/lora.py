"""Train LoRA adapters of PEFT with `mt.Trainer`: the frozen base model streams, only the adapters are updated.

Run it as it stands: `python examples/lora.py [OUTPUT_DIR]` (needs `pip install peft`). With a GPU, it uses it. For a
real model, replace `small_llama()` by `AutoModelForCausalLM.from_pretrained("company/model", dtype=torch.bfloat16)`
and `byte_tokenizer()` by its tokenizer.
"""

import sys
import tempfile

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import TrainingArguments

import megatrain as mt
from megatrain.cli.demo import bundled_text, byte_tokenizer, small_llama

output_dir = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
rows = [{"text": paragraph[:160]} for paragraph in bundled_text().split("\n\n") if len(paragraph) > 40]

lora = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
model = get_peft_model(small_llama(), lora)
model.print_trainable_parameters()

args = TrainingArguments(
    output_dir=output_dir,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=20,
    learning_rate=1e-2,
    logging_steps=5,
    save_strategy="no",
    report_to="none",
)
trainer = mt.Trainer(model=model, args=args, train_dataset=rows, processing_class=byte_tokenizer())
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss: {losses[0]:.3f} at the start, {losses[-1]:.3f} at the end")

# An ordinary adapter: load it on any copy of the base model.
trainer.save_model(output_dir)
reloaded = PeftModel.from_pretrained(small_llama(), output_dir)
print(f"adapters saved in {output_dir}; PEFT reloads {type(reloaded).__name__}")
