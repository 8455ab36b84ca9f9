"""`megatrain demo`: the same small training run twice, in plain PyTorch and streamed, with the losses side by side."""

from __future__ import annotations

import copy
import math
import os
import shutil
import sys
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
from rich.text import Text
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from megatrain import files
from megatrain.cli.chart import curves
from megatrain.engine.session import Engine
from megatrain.errors import SettingsError
from megatrain.settings import Debug

ADAMW: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
MAX_GRAD_NORM = 1.0
SLOTS = 3
ROWS, LENGTH = 5, 80  # of one batch
WIDTH = 80  # columns of the output, or fewer in a narrow terminal
TOLERANCE = {"fp32": 1e-3, "bf16": 0.2}
"""How far apart the losses of the two runs may be: rounding differs a little, and training amplifies it."""
PLAIN: dict[str, Any] = {"soft_wrap": True, "highlight": False, "markup": False}
"""How sentences are printed: as they are."""
Batches = list[dict[str, Tensor]]
PROMPTS = ("We the People of the United States", "The President shall", "No Person shall be")
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.6, "top_k": 10}
NEXT = (
    ("{megatrain} plan examples/llama-13b --machine h200-128gb", "13B parameters on a machine you do not have"),
    ("{megatrain} doctor", "versions, GPU, memory, disks"),
    ("{python} examples/finetune.py", "fine-tuning with mt.Trainer, to copy from"),
)
"""Commands to try next, run from the root of the source tree."""
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
    if out is not None:
        _make_directory(out)
    tokenizer = byte_tokenizer(max_length=LENGTH * 2)
    model = small_llama()
    plain = copy.deepcopy(model)

    # Compiling would take longer than the run.
    engine = Engine(model, device=device, precision=precision, compile=False, debug=Debug(slots=SLOTS))
    batches = text_batches(tokenizer, steps, engine.device)
    console.print(f"A small random Llama learns English on {engine.device}: in plain PyTorch, then streamed.", **PLAIN)
    plain_optimizer = torch.optim.AdamW(plain.to(engine.device).parameters(), **ADAMW)
    optimizer = engine.optimizer(**ADAMW, max_grad_norm=MAX_GRAD_NORM)
    runs = Runs(console, steps)
    with Live(runs.picture(), console=console, auto_refresh=False) as live:
        plain_run = train(plain, plain_optimizer, batches, plain=True, autocast=precision == "bf16")
        plain_seconds = runs.follow(live, runs.plain, plain_run)
        seconds = runs.follow(live, runs.streamed, train(model, optimizer, batches))
    console.line(1 if console.is_terminal else 2)  # elsewhere Live leaves its last line open
    console.print(runs.table(), width=WIDTH, crop=False, no_wrap=True)
    difference = (torch.tensor(runs.streamed) - torch.tensor(runs.plain)).abs().max().item()
    counters = engine.counters
    console.print(
        f"\nLosses are at most {difference:.1e} apart in {steps} steps ({TOLERANCE[precision]:g} is allowed).\n"
        f"{plain.num_parameters() / 1e6:.1f}M parameters in {len(engine.blocks)} blocks, {precision}: "
        f"{counters.bytes_h2d / 1e6:,.0f} MB of weights in through {SLOTS} slots,\n"
        f"{counters.bytes_d2h / 1e6:,.0f} MB of gradients out; "
        f"MegaTrain {seconds:.1f} s, plain PyTorch {plain_seconds:.1f} s.\n",
        **PLAIN,
    )
    with nullcontext(str(out)) if out is not None else tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        engine.close()
        source = "" if out is None else f" from {printable(str(out), console.encoding)}"
        console.print(f"Saved, reloaded with transformers{source}, it writes:", **PLAIN)
        for text in samples(directory):
            line = Text("  " + printable(text, console.encoding), "green", no_wrap=True, overflow="crop")
            console.print(line, width=runs.width)
    problem = verdict(runs.streamed, difference, precision)
    if problem is None:
        show_next(console)
    return problem


def _make_directory(out: Path) -> None:
    """Before training, so that a directory that cannot be written to costs no wait."""
    try:
        files.make_directory(out)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise SettingsError(f"--out {out} cannot be written to: {error.strerror}.") from error


class Runs:
    """The losses of both runs so far, and how they are shown."""

    def __init__(self, console: Console, steps: int) -> None:
        self.steps = steps
        self.plain: list[float] = []
        self.streamed: list[float] = []
        self.width = min(WIDTH, console.width)
        self.ascii_only = console.options.ascii_only

    def follow(self, live: Live, losses: list[float], run: Iterator[float]) -> float:
        """Take a run to its end, drawing its losses as they come; the seconds it took."""
        start = time.perf_counter()
        for loss in run:
            losses.append(loss)
            if len(losses) % max(1, self.steps // 50) == 0 or len(losses) == self.steps:
                live.update(self.picture(), refresh=True)
        return time.perf_counter() - start

    def picture(self) -> Text:
        stroke = "***" if self.ascii_only else "⠤⠤⠤"
        legend = Text.assemble("\n   loss   ", (stroke, "cyan"), " MegaTrain   ", ("o o", "yellow"), " plain PyTorch\n")
        return legend + curves(
            self.streamed, self.plain, steps=self.steps, width=self.width, ascii_only=self.ascii_only
        )

    def table(self) -> Table:
        table = Table("step", "MegaTrain", "plain PyTorch", "difference", box=None, padding=(0, 2))
        for column in table.columns:
            column.justify, column.no_wrap, column.overflow = "right", True, "crop"
        for step in sorted({1, *(self.steps * part // 5 for part in range(1, 6))} - {0}):
            loss, other = self.streamed[step - 1], self.plain[step - 1]
            table.add_row(str(step), f"{loss:.6f}", f"{other:.6f}", f"{loss - other:+.1e}")
        return table


def printable(text: str, encoding: str) -> str:
    """One line that this encoding has and that does not command the terminal: "?" for anything else a model writes."""
    line = "".join(letter if letter.isprintable() else "?" for letter in text.replace("\n", " "))
    return line.encode(encoding, "replace").decode(encoding)


def show_next(console: Console) -> None:
    """The commands to try next, written so that they can be pasted into the shell that this one was started from."""
    script = Path(sys.executable).with_name("megatrain")
    python = "python" if shutil.which("python") == sys.executable else _shortest(sys.executable)
    if shutil.which("megatrain") == str(script):
        megatrain = "megatrain"
    else:
        megatrain = _shortest(str(script)) if script.exists() else f"{python} -m megatrain"
    console.print("\nTry next, in MegaTrain's source tree:\n")
    for command, what in NEXT:
        console.print(f"  # {what}", style="dim", **PLAIN)
        console.print("  " + command.format(megatrain=megatrain, python=python), **PLAIN)


def _shortest(path: str) -> str:
    """A path, relative to the working directory if it lies in it."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def small_llama() -> Any:
    """A Llama of 0.4M parameters with random weights, the same at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        max_position_embeddings=LENGTH * 2,
        initializer_range=0.06,  # learns faster than with the default, which is for wide models
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


def bundled_text() -> str:
    """The Declaration of Independence and the Constitution of the United States, 55 kB of ASCII."""
    return resources.files("megatrain.cli").joinpath("text/us-founding.txt").read_text(encoding="ascii")


def text_batches(tokenizer: Any, steps: int, device: torch.device) -> Batches:
    """Random windows of the bundled text, one batch per step."""
    tokens = torch.tensor(tokenizer(bundled_text(), verbose=False)["input_ids"])
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


def samples(directory: str) -> Iterator[str]:
    """What the saved model writes after each prompt, as stock transformers loads it; the same at every call."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    torch.manual_seed(0)
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        # One line of the terminal, and no longer than what it was trained on: later positions are unknown to it.
        length = min(LENGTH, WIDTH - 3)
        yield str(tokenizer.decode(model.generate(**inputs, min_length=length, max_length=length, **SAMPLING)[0]))


def verdict(losses: list[float], difference: float, precision: str) -> str | None:
    """What is wrong with the run, if anything. Comparisons are written so that NaN is wrong."""
    part = max(1, len(losses) // 4)
    first, last = sum(losses[:part]) / part, sum(losses[-part:]) / part
    if not last < first:
        return f"the loss did not fall: {first:.4f} on average at the start, {last:.4f} at the end."
    if not difference <= TOLERANCE[precision]:
        return f"the losses are {difference:.1e} apart from plain PyTorch's; {TOLERANCE[precision]:g} is allowed."
    return None
