"""`megatrain demo`: the same small training run twice, in plain PyTorch and streamed, with the losses side by side."""

from __future__ import annotations

import copy
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from megatrain.engine.session import Engine
from megatrain.settings import Debug

ADAMW: dict[str, Any] = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MAX_GRAD_NORM = 1.0
SLOTS = 3
ROWS, LENGTH = 4, 128  # of one batch
TOLERANCE = {"fp32": 1e-3, "bf16": 0.1}
"""How far apart the losses of the two runs may be: rounding differs a little, and training amplifies it."""
Batches = list[dict[str, Tensor]]
PROMPT = "We the People of the United States"
SPECIAL = ("<pad>", "<bos>", "<eos>")
VOCAB_SIZE = 256 + len(SPECIAL)


def run_demo(*, steps: int, device: str | None, precision: str, out: Path | None) -> str | None:
    """Train, compare, save, reload, generate. Returns what went wrong in one sentence, or None."""
    from transformers.utils import logging

    bars, threads = logging.is_progress_bar_enabled(), torch.get_num_threads()
    logging.disable_progress_bar()
    # Matrices this small gain little from a second thread, and wait long for it where the cores are busy.
    torch.set_num_threads(1)
    try:
        return _run(Console(), steps, device, precision, out)
    finally:
        torch.set_num_threads(threads)
        if bars:
            logging.enable_progress_bar()


def _run(console: Console, steps: int, device: str | None, precision: str, out: Path | None) -> str | None:
    tokenizer = byte_tokenizer(max_length=LENGTH * 2)
    model = small_llama()
    plain = copy.deepcopy(model)

    engine = Engine(model, device=device, precision=precision, debug=Debug(slots=SLOTS))
    where = torch.device(engine.device)
    batches = text_batches(tokenizer, steps, where)
    console.print(f"A small random Llama, {steps} steps on {where}: first in plain PyTorch, then streamed.")
    plain_optimizer = torch.optim.AdamW(plain.to(where).parameters(), **ADAMW)
    start = time.perf_counter()
    plain_losses = list(train(plain, plain_optimizer, batches, plain=True, autocast=precision == "bf16"))
    plain_seconds = time.perf_counter() - start
    optimizer = engine.optimizer(**ADAMW, max_grad_norm=MAX_GRAD_NORM)
    losses: list[float] = []
    table = Table("step", "MegaTrain", "plain PyTorch", "difference")
    for column in table.columns:
        column.justify = "right"
    every = max(1, steps // 12)
    start = time.perf_counter()
    with Live(table, console=console, auto_refresh=False) as live:
        for step, loss in enumerate(train(model, optimizer, batches)):
            losses.append(loss)
            if (step + 1) % every == 0 or step in (0, steps - 1):
                other = plain_losses[step]
                table.add_row(str(step + 1), f"{loss:.6f}", f"{other:.6f}", f"{loss - other:+.1e}")
                live.refresh()
    seconds = time.perf_counter() - start
    console.print()

    apart = (torch.tensor(losses) - torch.tensor(plain_losses)).abs().max().item()
    counters = engine.counters
    console.print(
        f"{plain.num_parameters() / 1e6:.1f}M parameters in {len(engine.blocks)} blocks on {where} in {precision}: "
        f"{counters.bytes_h2d / 1e6:,.0f} MB of weights in through {SLOTS} slots ({counters.fetches} fetches), "
        f"{counters.bytes_d2h / 1e6:,.0f} MB of gradients out; "
        f"MegaTrain {seconds:.1f} s, plain PyTorch {plain_seconds:.1f} s; losses at most {apart:.1e} apart.",
        soft_wrap=True,
        highlight=False,
    )
    with nullcontext(str(out)) if out is not None else tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        engine.close()
        console.print(f"Reloaded with transformers{'' if out is None else f' from {out}'}, it continues:")
        console.print(PROMPT + continuation(directory), soft_wrap=True, highlight=False, markup=False)
    return verdict(losses, apart, precision)


def small_llama() -> Any:
    """A Llama of 1M parameters with random weights, the same at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH * 2,
        pad_token_id=256,
        bos_token_id=257,
        eos_token_id=258,
    )
    return LlamaForCausalLM(config)


def byte_tokenizer(max_length: int | None = None) -> Any:
    """A tokenizer whose tokens are bytes: byte b has id b, and `<pad>`, `<bos>`, `<eos>` have 256, 257, 258.

    It is saved and loaded like any other, and gives every UTF-8 text back unchanged. No special token is added on its
    own.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # `tokenizers` shows each byte as a printable letter: itself, or the next one from U+0100 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    pad, bos, eos = SPECIAL
    limit = {} if max_length is None else {"model_max_length": max_length}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
        **limit,
    )


def text_batches(tokenizer: Any, steps: int, device: torch.device) -> Batches:
    """Random windows of the bundled text, one batch per step."""
    text = resources.files("megatrain.cli").joinpath("text/us-founding.txt").read_text(encoding="ascii")
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    starts = torch.randint(len(tokens) - LENGTH, (steps, ROWS), generator=torch.Generator().manual_seed(1))
    windows = tokens.unfold(0, LENGTH, 1)[starts].to(device)
    return [{"input_ids": ids, "labels": ids} for ids in windows]


def train(
    model: Any, optimizer: torch.optim.Optimizer, batches: Batches, *, plain: bool = False, autocast: bool = False
) -> Iterator[float]:
    """The loop both runs share. The engine clips and casts on its own; plain PyTorch has to be told."""
    schedule = LambdaLR(optimizer, lambda step: learning_rate(step, len(batches)))
    for batch in batches:
        # Entered for each forward: autocast keeps its copies of the weights until it is left.
        with torch.autocast(batch["labels"].device.type, torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        loss.backward()
        if plain:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield loss.item()


def learning_rate(step: int, steps: int) -> float:
    """A tenth of the run up to the full rate, then a cosine down to a tenth of it."""
    warmup = max(1, steps // 10)
    progress = min(1.0, max(0, step - warmup) / max(1, steps - warmup))
    return min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * progress))


def continuation(directory: str) -> str:
    """What the saved model writes after the prompt, greedily, as stock transformers loads it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=100, min_new_tokens=100, do_sample=False)
    return str(tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True))


def verdict(losses: list[float], apart: float, precision: str) -> str | None:
    """What is wrong with the run, if anything. Comparisons are written so that NaN is wrong."""
    part = max(1, len(losses) // 4)
    first, last = sum(losses[:part]) / part, sum(losses[-part:]) / part
    if not last < first:
        return f"the loss did not fall: {first:.4f} on average at the start, {last:.4f} at the end."
    if not apart <= TOLERANCE[precision]:
        return f"the losses are {apart:.1e} apart from plain PyTorch's; {TOLERANCE[precision]:g} is allowed."
    return None
