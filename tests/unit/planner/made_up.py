"""Models of known shape, and random machines and runs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from unittest import mock

from benchmarks.shapes import SHAPES
from hypothesis import strategies as st
from transformers import AutoConfig

from megatrain.hardware.machine import Machine
from megatrain.model.shapes import ModelShape, describe
from megatrain.planner.api import dense_shape
from megatrain.planner.decision import Decisions
from megatrain.planner.memory import Ledger
from megatrain.planner.run import Run
from megatrain.planner.simulate import Simulator

GB = 10**9


@cache
def shape_of(name: str, layers: int | None = None) -> ModelShape:
    fields = SHAPES[name] | ({} if layers is None else {"num_hidden_layers": layers})
    return describe(
        AutoConfig.for_model(fields["model_type"], **{k: v for k, v in fields.items() if k != "model_type"})
    )


@cache
def moe() -> ModelShape:
    return describe(
        AutoConfig.for_model(
            "gpt_oss", hidden_size=2880, intermediate_size=2880, num_hidden_layers=36, num_attention_heads=64,
            num_key_value_heads=8, head_dim=64, num_local_experts=128, num_experts_per_tok=4, vocab_size=201088,
        )
    )  # fmt: skip


def shapes() -> st.SearchStrategy[ModelShape]:
    made = st.builds(dense_shape, st.integers(1, 64), st.integers(1, 24), st.sampled_from([512, 32000, 128256, 262144]))
    return st.one_of(made, st.sampled_from(["qwen2.5-1.5b", "qwen2.5-7b", "llama2-7b"]).map(shape_of))


def rate(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    h2d, dram = draw(rate(5e9, 4e11)), draw(rate(2e10, 6e11))
    bf16 = draw(rate(3e13, 2e15))
    widths = ("fp32", "bf16", "8bit", "4bit")
    return Machine(
        name="made up", source="a test", gpu="GPU", vram_bytes=int(draw(rate(4, 200)) * GB),
        ram_bytes=int(draw(rate(8, 2000)) * GB), cores=draw(st.integers(1, 128)), disks=(), h2d=h2d,
        d2h=h2d * draw(rate(0.5, 1)), duplex=h2d * draw(rate(1, 2)), pageable_h2d=h2d / 5, dram=dram,
        dram_under_dma=dram * draw(rate(0.3, 1)), matmul={"bf16": bf16, "tf32": bf16 / 2, "fp32": bf16 / 16},
        attention=bf16 * draw(rate(0.2, 0.8)), update=dict.fromkeys(widths, draw(rate(1e9, 2e10))),
        gpu_update=dict.fromkeys(widths, draw(rate(1e10, 3e11))), hbm=draw(rate(3e11, 8e12)),
        launches=draw(rate(5e4, 5e5)),
    )  # fmt: skip


def cpu_only(ram_bytes: int = 64 * GB, cores: int = 8) -> Machine:
    return Machine(
        name="cpu", source="a test", gpu=None, vram_bytes=0, ram_bytes=ram_bytes, cores=cores, disks=(), h2d=0.0,
        d2h=0.0, duplex=0.0, pageable_h2d=0.0, dram=5e10, dram_under_dma=0.0, matmul={"bf16": 1e12, "fp32": 1e12},
        attention=5e11, update=dict.fromkeys(("fp32", "bf16", "8bit", "4bit"), 1e9), gpu_update={}, hbm=0.0,
        launches=0.0,
    )  # fmt: skip


def any_machines() -> st.SearchStrategy[Machine]:
    """Machines with and without a GPU."""
    return st.one_of(machines(), st.builds(cpu_only, st.integers(2 * GB, 200 * GB), st.integers(1, 64)))


@st.composite
def runs(draw: st.DrawFn) -> Run:
    return Run(
        micro_batch=draw(st.integers(1, 8)),
        length=draw(st.sampled_from([64, 512, 2048, 8192])),
        accumulation=draw(st.sampled_from([1, 1, 2, 3, 8, 100])),
        evaluation=draw(st.sampled_from([0, 0, 2048, 16384, 131072])),
        predictions=draw(st.booleans()),
        precision=draw(st.sampled_from(["bf16", "bf16", "fp32", "bf16-sr"])),
        optimizer_compression=draw(st.sampled_from([False, "bf16", "8bit", "4bit"])),
        compile=draw(st.booleans()),
        clipping=draw(st.booleans()),
    )


def work_of(action: Callable[[], object]) -> dict[str, int]:
    """How much `action` plans: decisions whose memory was added up, decisions that were simulated, and calls. Planning
    takes as long as these say, on any machine."""
    work = dict.fromkeys(("added up", "simulated", "calls"), 0)

    def counted(owner: type, method: str, what: str) -> AbstractContextManager[object]:
        original = getattr(owner, method)

        def count(self: object, chosen: Decisions, *args: object) -> object:
            work[what] += len(chosen)
            work["calls"] += 1
            return original(self, chosen, *args)

        return mock.patch.object(owner, method, count)

    with counted(Ledger, "accounts", "added up"), counted(Simulator, "seconds", "simulated"):
        action()
    return work
