"""On the GPU, in deterministic mode: state in GPU memory, in host memory, or in both gives the same bits."""

import random

import pytest
import torch
from benchmarks.shapes import random_model

import megatrain as mt

PLACEMENTS = {"mixed": ("*layers.[02]*", "*embed*"), "resident": ("*",)}
BLOCKS = ("*embed*", *(f"*layers.{i}" for i in range(4)), "*.norm", "lm_head")


def run(resident, precision, compression=False, clip=1.0, windows=False, **settings):
    model = random_model("tiny", torch.float32 if precision == "fp32" else torch.bfloat16, num_hidden_layers=4).train()
    generator = torch.Generator().manual_seed(7)
    with mt.Engine(
        model, device="cuda", resident=resident, precision=precision, optimizer_compression=compression, **settings
    ) as engine:
        optimizer = engine.optimizer(lr=1e-3, max_grad_norm=clip)
        losses = []

        def micro_batch(ids):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.detach())

        for _ in range(4):
            batches = [torch.randint(0, 512, (2, 96), generator=generator).cuda() for _ in range(2)]
            if windows:
                with optimizer.final_backward():
                    engine.window([lambda ids=ids: micro_batch(ids) for ids in batches], full_step=True)
            else:
                micro_batch(batches[0])
                with optimizer.final_backward():
                    micro_batch(batches[1])
            optimizer.step()
            optimizer.zero_grad()
        norm = optimizer.grad_norm
        engine.synchronize()
        found = {"norm": norm, "losses": [loss.item() for loss in losses]}
        for slab in engine.slabs:
            found[f"{slab.index}/weight"] = slab.weight.cpu().clone()
            found |= {f"{slab.index}/{role}": moment.bytes.cpu().clone() for role, moment in slab.moments.items()}
    return found


def assert_same(left, right):
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else value == right[key], key


QUICK = {("bf16-sr", 0.5, True)}
"""The others are slow tests. Random placements (below) cover all combinations but this one."""
ALL = [(precision, clip, windows) for precision in ("bf16", "fp32", "bf16-sr") for clip in (0.5, None)
       for windows in (False, True)]  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "clip", "windows"), [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.slow) for c in ALL]
)
def test_placement_does_not_change_bits(deterministic, precision, clip, windows):
    expected = run((), precision, clip=clip, windows=windows)
    for resident in PLACEMENTS.values():
        assert_same(run(resident, precision, clip=clip, windows=windows), expected)


@pytest.mark.parametrize(
    "compression", [*(pytest.param(width, marks=pytest.mark.slow) for width in ("bf16", "8bit")), "4bit"]
)
def test_placement_does_not_change_bits_of_quantized_states(deterministic, compression):
    expected = run((), "bf16", compression)
    for resident in PLACEMENTS.values():
        assert_same(run(resident, "bf16", compression), expected)


@pytest.mark.parametrize("policy", ["store", "offload"])
def test_placement_does_not_change_bits_of_other_policies(deterministic, policy):
    assert_same(run(("*layers.[02]*",), "bf16", policy=policy), run((), "bf16"))


def random_settings(seed):
    """Random placements and policies."""
    source = random.Random(seed)
    kinds = {
        block: source.choice(["resident", "states", "held", "streamed", "weights", "gradients"]) for block in BLOCKS
    }
    return {
        "resident": tuple(block for block, kind in kinds.items() if kind == "resident"),
        "held_weights": tuple(block for block, kind in kinds.items() if kind in ("held", "states", "weights")),
        "held_gradients": tuple(block for block, kind in kinds.items() if kind in ("held", "states", "gradients")),
        "streamed_states": tuple(block for block, kind in kinds.items() if kind == "states"),
        "policy": {block: source.choice(["recompute", "store", "offload"]) for block in BLOCKS},
        "debug": mt.Debug(slots=source.randint(1, 4)),
        "windows": source.random() < 0.5,
    }


@pytest.fixture(scope="module")
def streamed():
    known = {}

    def of(*options, windows):
        key = (*options, windows)
        if key not in known:
            known[key] = run((), options[0], clip=options[1], windows=windows)
        return known[key]

    return of


@pytest.mark.parametrize("seed", range(10))
def test_random_placements_are_bitwise(deterministic, streamed, seed):
    precision, clip = ("bf16", "bf16", "fp32")[seed % 3], (0.5, None)[seed % 2]
    settings = random_settings(seed)
    expected = streamed(precision, clip, windows=settings["windows"])
    assert_same(run(settings.pop("resident"), precision, clip=clip, **settings), expected)
