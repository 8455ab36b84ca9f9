"""How each peer of `benchmarks.peers` trains a row. One process runs one peer.

All peers get random weights of the same shape, the same number of random tokens, AdamW with the same hyperparameters
and clipping at 1.0, and train every parameter. None of them keeps a KV cache. What differs is in `PEERS` and in the
configuration that each returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from itertools import islice
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

import megatrain as mt
from benchmarks.peer_rows import ADAMW, CLIP, Row
from benchmarks.resumable import here
from benchmarks.row import WARM, batches, collated, with_trainer
from benchmarks.shapes import random_model
from benchmarks.step import GIB, now, seconds_between, vram_outside
from benchmarks.traffic import process_io
from megatrain.geometry import LANES

Batch = dict[str, torch.Tensor]
NO_MASTER = "BF16 weights, gradients and moments, no FP32 master: less work than MegaTrain, and less exact"
FP32_MASTER = "FP32 master weights and moments"


@dataclass
class Trained:
    seconds: list[float]
    losses: list[float]
    disk: dict[str, float] | None
    """GB per second read and written; None if nothing was counted."""
    config: dict[str, Any]
    """Everything that was chosen for this peer."""
    lanes: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of MegaTrain: lane → seconds busy, seconds that compute waited for it, GB/s over the link."""


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


# ---- MegaTrain


def ours(row: Row, steps: int, machine: mt.Machine | None = None) -> Trained:
    """`mt.Trainer` with its own plan, compiled on a GPU. The machine is measured unless it is given."""
    options = row.options(steps, compiled=device() == "cuda")
    model = random_model(row.shape, torch.bfloat16, lazy=row.offload_dir is not None, **row.overrides).train()
    machine = machine or mt.probe(offload_dir=row.offload_dir)
    torch.cuda.empty_cache()
    plan, engine, losses, seconds, moved = with_trainer(model, machine, options, {})
    chosen = {name: getattr(plan, name) for name in ("placement", "policies", "windows", "notes")}
    predicted = {"seconds": plan.step.seconds, **{f"{tier}_gib": plan.total(tier) / GIB for tier in ("vram", "ram")}}
    config = {
        "numerics": f"exact FP32 master, {row.compression or 'FP32'} moments", "compile": options.compile,
        "max_vram_gb": row.max_vram_gb, "max_ram_gb": row.max_ram_gb, "plan": chosen | predicted,
        "blocks_on_disk": len(plan.on_disk), "stalled_for_disk": moved.stall_share,
        "settings": {name: value for name, value in vars(engine.settings).items() if name not in ("plan", "machine")},
    }  # fmt: skip
    disk = disk_rates((moved.read, moved.written), moved.seconds)
    return Trained(seconds, losses, disk, kernels(model) | config, lanes_of(engine))


def kernels(model: PreTrainedModel) -> dict[str, Any]:
    """What transformers chose for attention and experts."""
    return {"attention": model.config._attn_implementation, "experts": model.config._experts_implementation}


def lanes_of(engine: mt.Engine) -> dict[str, dict[str, float]]:
    """The latest step by lane. Bytes are counted per direction, so lanes of one direction have one rate."""
    times, counters = engine.step_times, engine.counters
    if times is None:
        return {}
    moved = {"in": counters.bytes_h2d, "out": counters.bytes_d2h}
    lanes = {}
    for name, busy in times.busy.items():
        lanes[name] = {"busy": busy, "waited": times.waited.get(name, 0.0)}
        if (link := LANES[name].link) and busy:
            total = sum(seconds for other, seconds in times.busy.items() if LANES[other].link == link)
            lanes[name]["gb_per_s"] = moved[link] / max(1, counters.steps) / total / 1e9
    return lanes


# ---- plain PyTorch, everything on the GPU


def resident(row: Row, steps: int, checkpointing: bool = False, compiled: str = "") -> Trained:
    """The training loop that a user writes by hand. `compiled` is "model", "layers" or nothing."""
    model = prepared(random_model(row.shape, torch.bfloat16, device=device(), **row.overrides), checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    if compiled == "layers":
        for layer in model.model.layers:
            layer.compile()
    call = torch.compile(model) if compiled == "model" else model
    results = timed(partial(plain_step, model, call, optimizer), model, row, steps)
    config = {"numerics": NO_MASTER, "checkpointing": checkpointing, "compiled": compiled, "adamw": "fused, GPU"}
    return Trained(*results, kernels(model) | config)


def prepared(model: PreTrainedModel, checkpointing: bool, reentrant: bool = False) -> PreTrainedModel:
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model.train()


def plain_step(
    model: PreTrainedModel,
    call: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    inputs: list[Batch],
    prepare: Callable[[bool], None] = lambda last: None,
) -> torch.Tensor:
    losses = []
    for number, batch in enumerate(inputs):
        prepare(number == len(inputs) - 1)
        loss = call(**batch).loss / len(inputs)
        loss.backward()
        losses.append(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum()


def timed(
    step: Callable[[list[Batch]], torch.Tensor], model: PreTrainedModel, row: Row, steps: int
) -> tuple[list[float], list[float], dict[str, float] | None]:
    """Of the steps after the warm-up: seconds, and what this process moved to and from drives. All losses, which are
    read after the last step."""
    drawn = (collated(rows) for rows in batches(model, row.options(steps), row.micro * (WARM + steps)))
    ends, losses, before, began = [], [], None, 0.0
    for number in range(WARM + steps):
        if number == WARM:
            before, began = process_io(), perf_counter()
        inputs = [{name: values.to(device()) for name, values in batch.items()} for batch in islice(drawn, row.micro)]
        losses.append(step(inputs))
        ends.append(now())
    seconds, after = seconds_between(ends[WARM - 1 :]), process_io()
    moved = (0, 0) if before is None or after is None else (after[0] - before[0], after[1] - before[1])
    return seconds, [loss.item() for loss in losses], disk_rates(moved, perf_counter() - began)


def disk_rates(moved: tuple[int, int], seconds: float) -> dict[str, float] | None:
    """GB per second, given bytes read and written. Some systems do not count them."""
    return {"read": moved[0] / seconds / 1e9, "written": moved[1] / seconds / 1e9} if any(moved) else None


# ---- DeepSpeed

SUB_GROUP = 10**8
"""Parameters that ZeRO-Infinity updates at once. A larger parameter is a group of its own."""
NVME = {"device": "nvme", "pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
"""Reads of the next group and writes of the last one go on during an update. Each of the three groups needs 4 buffers:
parameter, gradient and two moments."""
AIO = {
    "block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 8, "thread_count": 8, "single_submit": False,
    "overlap_events": True,
}  # fmt: skip
"""Up to 32 blocks of 1 MiB in flight in each of 8 threads. Older releases know the threads as `thread_count`."""


def zero(row: Row, steps: int, stage: int, checkpointing: bool = True, nvme: bool = False) -> Trained:
    """ZeRO with the optimizer, and in stage 3 the parameters, in pinned RAM. Bucket sizes are DeepSpeed's defaults.

    `nvme`: the optimizer in files, as in ZeRO-Infinity.
    """
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        if error.name == "deepspeed":
            error.msg = "DeepSpeed is not installed; install it, or name a folder that has it with --peer-path"
        raise

    pinned = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    options = {"stage": stage, "offload_optimizer": pinned, "overlap_comm": True, "contiguous_gradients": True}
    if nvme:
        require_async_io()
        options |= {"offload_optimizer": pinned | NVME | {"nvme_path": row.offload_dir}, "sub_group_size": SUB_GROUP}
    config = {
        "train_micro_batch_size_per_gpu": row.batch,
        "gradient_accumulation_steps": row.micro,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        # With an offloaded optimizer, DeepSpeed takes its CPUAdam for this.
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": options | ({"offload_param": pinned} if stage == 3 else {}),
        "steps_per_print": 10**9,
    } | ({"aio": AIO} if nvme else {})
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    model = prepared(random_model(row.shape, torch.bfloat16, **row.overrides), checkpointing, reentrant=True)
    engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(inputs: list[Batch]) -> torch.Tensor:
        losses = []
        for batch in inputs:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    results = timed(step, model, row, steps)
    more = {"numerics": FP32_MASTER, "checkpointing": checkpointing, "optimizer_class": _names(optimizer)}
    more |= kernels(model)
    return Trained(*results, more | {"deepspeed": config, "deepspeed_version": metadata.version("deepspeed")})


def require_async_io() -> None:
    """Raise unless DeepSpeed can compile the extension that moves its files."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=True):
        raise RuntimeError("DeepSpeed cannot build async_io: it needs libaio with its header (package libaio-dev)")


def _names(optimizer: Any) -> list[str]:
    return [type(optimizer).__name__, type(optimizer.optimizer).__name__]


# ---- FSDP2


def fsdp2(row: Row, steps: int, checkpointing: bool = True) -> Trained:
    """`fully_shard` for every layer and the model, FP32 parameters in pinned RAM, products in BF16.

    Gradients of a step are summed on the GPU and copied to RAM in its last backward.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    cuda = torch.cuda.is_available()
    # Norms of gradients in RAM are reduced by gloo.
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    sharding = {
        "mesh": torch.distributed.init_device_mesh(device(), (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=cuda),
    }
    model = prepared(random_model(row.shape, torch.float32, **row.overrides), checkpointing)
    for layer in model.model.layers:
        fully_shard(layer, **sharding)
    fully_shard(model, **sharding)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    step = partial(plain_step, model, model, optimizer, prepare=model.set_requires_gradient_sync)
    results = timed(step, model, row, steps)
    config = {"numerics": FP32_MASTER, "checkpointing": checkpointing, "adamw": "fused, CPU"}
    config |= kernels(model) | {name: repr(value) for name, value in sharding.items()}
    return Trained(*results, config)


# ---- all of them


@dataclass(frozen=True)
class Peer:
    label: str
    train: Callable[[Row, int], Trained] | None
    """None: a command of the user's."""
    starting: float
    """Estimated seconds to start and to compile."""
    placing: float
    """To build and place a billion parameters."""
    updating: float
    """Per step and billion parameters, for updates and copies that are not hidden."""
    tflops: float
    """Of the rest of a step."""
    distributed: bool = False


NVME_BYTES = 16
"""Read and written per parameter and step: FP32 parameter, gradient and two moments."""
ZERO, FSDP = (70, 20, 0.55, 300, True), (35, 15, 1.2, 250, True)
PEERS = {
    "ours": Peer("MegaTrain", ours, 65, 4, 0.15, 330),
    "eager": Peer("plain PyTorch, checkpointing", partial(resident, checkpointing=True), 20, 1, 0, 280),
    "stored": Peer("plain PyTorch, stored", resident, 20, 1, 0, 340),
    "compiled": Peer("plain PyTorch, compiled", partial(resident, compiled="model"), 120, 1, 0, 360),
    "compiled-layers": Peer("plain PyTorch, compiled layers", partial(resident, compiled="layers"), 45, 1, 0, 360),
    "zero3": Peer("DeepSpeed ZeRO-3 offload", partial(zero, stage=3), *ZERO),
    "zero-infinity": Peer(
        "DeepSpeed ZeRO-Infinity",
        partial(zero, stage=3, nvme=True),
        100,
        25,
        NVME_BYTES * (1 / 4.0 + 1 / 2.4),
        300,
        True,
    ),
    "zero3-stored": Peer("ZeRO-3 offload, stored", partial(zero, stage=3, checkpointing=False), *ZERO),
    "zero2": Peer("DeepSpeed ZeRO-2 offload", partial(zero, stage=2), *ZERO),
    "zero2-stored": Peer("ZeRO-2 offload, stored", partial(zero, stage=2, checkpointing=False), *ZERO),
    "fsdp2": Peer("FSDP2 with CPU offload", fsdp2, *FSDP),
    "fsdp2-stored": Peer("FSDP2 with CPU offload, stored", partial(fsdp2, checkpointing=False), *FSDP),
    "upstream": Peer("MegaTrain upstream", None, 60, 10, 0.8, 300),
}
STANDARD = ("ours", "eager", "stored", "compiled", "zero3", "zero2", "fsdp2")


def run(name: str, row: Row, steps: int) -> dict[str, Any]:
    """Train a row as the named peer does, in this process."""
    train = PEERS[name].train
    assert train is not None
    trained = train(row, steps)
    cuda = torch.cuda.is_available()
    return {
        "all_seconds": trained.seconds,
        "losses": trained.losses,
        "vram_gib": vram_outside() + torch.cuda.max_memory_reserved() / GIB if cuda else None,
        "lanes": trained.lanes,
        "disk": trained.disk,
        "config": trained.config | {"adamw_settings": ADAMW, "clipping": CLIP},
        **here(),
    }
