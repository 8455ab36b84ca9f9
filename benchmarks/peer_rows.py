"""The rows of `benchmarks.peers`: what every peer trains, and the work that a step of it is."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, dataclass, replace

from benchmarks.row import row_parser
from benchmarks.shapes import config_of
from benchmarks.step import GIB
from megatrain.hardware.cgroups import usable_ram
from megatrain.model.shapes import ModelShape, describe

CLIP = 1.0
ADAMW = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
"""What transformers' Trainer uses by default, at the learning rate of `benchmarks.accuracy`."""
CAPS = ("max_vram_gb", "max_ram_gb")
ZERO3_BYTES = 25
"""RAM per parameter of ZeRO-3 with offloaded optimizer and parameters, as measured with models of 1.5B and 3B."""
ZERO3_SPARE = 8 * GIB
"""RAM for its process and for the system."""


@dataclass(frozen=True, kw_only=True)
class Row:
    shape: str
    micro: int
    """Micro-batches per step."""
    batch: int
    """Sequences per micro-batch."""
    length: int = 2048
    layers: int | None = None
    """None: as many as the shape has. 0: as many as ZeRO-3 with offload can train in the RAM of this machine."""
    max_vram_gb: float | None = None
    """Binds MegaTrain alone. The other peers may use the whole GPU."""
    max_ram_gb: float | None = None
    """The same of RAM: what does not fit goes to `offload_dir`."""
    compression: str | None = None
    """Moments of MegaTrain: None is FP32."""
    offload_dir: str | None = None
    """Where peers with state on disk keep it in this run."""

    @property
    def tokens(self) -> int:
        return self.micro * self.batch * self.length

    @property
    def overrides(self) -> dict[str, object]:
        return {} if self.layers is None else {"num_hidden_layers": self.layers}

    def described(self) -> ModelShape:
        return describe(config_of(self.shape, **self.overrides))

    def options(self, steps: int, compiled: bool = False) -> Namespace:
        """The row as options of `benchmarks.accuracy`."""
        defaults = vars(row_parser(None).parse_args([]))
        directories = None if self.offload_dir is None else [self.offload_dir]
        chosen = {"steps": steps, "compile": compiled, "offload_dir": directories}
        return Namespace(**(defaults | asdict(self) | chosen))

    def work(self) -> str:
        """What every peer does in this row."""
        shape = self.shape if self.layers is None else f"{self.layers} layers of {self.shape}"
        return f"{shape}, {self.micro} of {self.batch} × {self.length} tokens"

    def title(self) -> str:
        """The same with what MegaTrain alone is told."""
        caps = "".join(f", {name}={cap:g}" for name in CAPS if (cap := getattr(self, name)) is not None)
        return f"{self.work()}{caps}" + ("" if self.compression is None else f", {self.compression} moments")


ROWS = {
    "tiny": Row(shape="tiny", micro=2, batch=2, length=64),
    "1.5b": Row(shape="qwen2.5-1.5b", micro=1, batch=8),
    # With state on disk: ours by its cap, and DeepSpeed ZeRO-Infinity.
    "1.5b-disk": Row(shape="qwen2.5-1.5b", micro=1, batch=8, max_vram_gb=12, max_ram_gb=8),
    "3b-disk": Row(shape="qwen2.5-3b", micro=4, batch=4, max_vram_gb=16, max_ram_gb=20),
    "1.5b-12": Row(shape="qwen2.5-1.5b", micro=1, batch=8, max_vram_gb=12),
    "3b-16": Row(shape="qwen2.5-3b", micro=4, batch=4, max_vram_gb=16),
    "7b-24": Row(shape="qwen2.5-7b", micro=4, batch=4, max_vram_gb=24),
    "7b": Row(shape="qwen2.5-7b", micro=4, batch=4),
    "7b-131k": Row(shape="qwen2.5-7b", micro=16, batch=4),
    "7b-131k-32": Row(shape="qwen2.5-7b", micro=16, batch=4, max_vram_gb=32),
    "7b-8k-24": Row(shape="qwen2.5-7b", micro=1, batch=4, max_vram_gb=24),
    "14b": Row(shape="qwen2.5-14b", micro=16, batch=2),
    "14b-8bit": Row(shape="qwen2.5-14b", micro=16, batch=2, compression="8bit"),
    "14b-width-40": Row(shape="qwen2.5-14b", micro=4, batch=4, layers=0, max_vram_gb=40),
    "32b-4bit": Row(shape="qwen3-32b", micro=8, batch=1, length=4096, compression="4bit"),
    "30b-a3b": Row(shape="qwen3-30b-a3b", micro=4, batch=4, layers=6),
}


def row_of(name: str, layers: int | None = None) -> Row:
    """The row of that name, with its number of layers decided."""
    row = ROWS[name]
    if layers is None and row.layers == 0:
        layers = zero3_layers(replace(row, layers=1).described(), usable_ram())
    return row if layers is None else replace(row, layers=layers)


def zero3_layers(one: ModelShape, ram: int) -> int:
    """Layers that fit in RAM beside the other blocks, from the shape of a model with one layer."""
    layer = sum(block.parameters for block in one.blocks if block.kind == "layer")
    return (ram - ZERO3_SPARE - ZERO3_BYTES * (one.parameters - layer)) // (ZERO3_BYTES * layer)


def flops(row: Row) -> tuple[float, float]:
    """Products and attention of a step, forward and backward, without recomputation.

    Products: 6 × the matrix parameters that a token uses (the head once, only the experts that it is sent to) × tokens.
    Attention: 12 × its width × the length × tokens in each layer, halved by the causal mask.
    """
    shape = row.described()
    attended = sum(block.attention_width * min(row.length, block.span or row.length) for block in shape.blocks)
    return 6.0 * shape.matmul_parameters * row.tokens, 6.0 * attended * row.tokens
