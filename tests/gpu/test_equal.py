"""On the GPU, in deterministic mode: a streamed model and a resident one give the same bits."""

import copy
import functools
import itertools

import pytest
import torch
from benchmarks.shapes import random_model

import megatrain as mt
from megatrain.optim.rules import AdamW
from megatrain.store.gradient import Snapshot
from megatrain.store.layout import lay_out
from megatrain.store.split import join, split
from megatrain.stream import norm

STEPS = 4
DTYPES = [pytest.param(torch.bfloat16, id="bf16"), pytest.param(torch.float32, id="fp32", marks=pytest.mark.slow)]
RULE = AdamW(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)


def batches(count):
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 512, (2, 96), generator=generator) for _ in range(count)]


class Resident:
    """The plain model on the GPU, updated by the reference AdamW on FP32 masters."""

    def __init__(self, model):
        self.model = model.cuda()
        self.state = {}
        for name, parameter in self.model.named_parameters():
            master = parameter.detach().float().cpu().flatten()
            self.state[name] = (master, torch.zeros_like(master), torch.zeros_like(master))

    def run(self, data):
        losses, gradients = [], []
        for number, ids in enumerate(data, start=1):
            loss = self.model(input_ids=ids.cuda(), labels=ids.cuda(), use_cache=False).loss
            loss.backward()
            losses.append(loss.item())
            gradients.append({name: p.grad.cpu() for name, p in self.model.named_parameters()})
            for name, parameter in self.model.named_parameters():
                self.step(name, parameter, number)
        return losses, gradients

    @torch.no_grad()
    def step(self, name, parameter, number):
        master, exp_avg, exp_avg_sq = self.state[name]
        gradient = parameter.grad.float().cpu().flatten()
        RULE.update(master, (exp_avg, exp_avg_sq), gradient, RULE.scalars(number, clip=1.0))
        weight = split(master)[0] if parameter.dtype == torch.bfloat16 else master
        parameter.copy_(weight.view(parameter.shape))
        parameter.grad = None


def streamed(model, data, **settings):
    with mt.Engine(model, device="cuda", **settings) as engine:
        optimizer = engine.optimizer(lr=1e-3, weight_decay=0.1)
        losses, gradients = [], []
        for ids in data:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
            gradients.append({name: p.grad.cpu() + 0 for name, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
        weights = {}
        for name, parameter in model.named_parameters():
            slab, segment = parameter.slab, parameter.slab.layout.segments[parameter.segment]
            slab.settle()
            weight = slab.weight[segment.offset : segment.end]
            residual = slab.residual
            weights[name] = weight.clone() if residual is None else join(weight, residual[segment.offset : segment.end])
        return losses, gradients, weights


@pytest.mark.parametrize("dtype", DTYPES)
def test_streamed_equals_resident(dtype, deterministic):
    model = random_model("tiny", dtype).train()
    data = batches(STEPS)
    resident = Resident(copy.deepcopy(model))
    losses, gradients = resident.run(data)
    for settings in (mt.Debug(slots=2), mt.Debug(slots=3), mt.Debug(slots=20), mt.Debug(pin=False)):
        got_losses, got_gradients, weights = streamed(copy.deepcopy(model), data, debug=settings)
        assert got_losses == losses, settings
        for ours, theirs in zip(got_gradients, gradients, strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs), settings
        for name, (master, _, _) in resident.state.items():
            assert torch.equal(weights[name], master), (settings, name)
    assert len(set(losses)) == STEPS


@pytest.mark.parametrize("dtype", DTYPES)
def test_window_equals_one_after_the_other(dtype, deterministic):
    """Four micro-batches in one window, in two, and one by one give the same bits."""

    def run(sizes):
        model = random_model("tiny", dtype, attention_dropout=0.1).train()
        with mt.Engine(model, device="cuda") as engine:
            optimizer = engine.optimizer(lr=1e-3, max_grad_norm=0.5)
            losses = []
            for step in range(3):
                torch.manual_seed(step)
                data = iter(batches(4))
                for size in sizes:

                    def task(ids):
                        loss = model(input_ids=ids, labels=ids).loss / 4
                        loss.backward()
                        return loss.item()

                    seeded = [functools.partial(with_seed, task, ids, step) for ids in itertools.islice(data, size)]
                    losses += engine.window(seeded, full_step=len(sizes) == 1)
                optimizer.step()
                optimizer.zero_grad()
            engine.synchronize()
            return (
                losses,
                [slab.weight.clone() for slab in engine.slabs],
                [slab.moments["exp_avg"].bytes.clone() for slab in engine.slabs],
            )

    def with_seed(task, ids, step):
        torch.manual_seed(int(ids.sum()) + step)
        return task(ids)

    reference = run([1, 1, 1, 1])
    for sizes in ([4], [2, 2], [1, 3]):
        losses, weights, moments = run(sizes)
        assert losses == reference[0]
        assert all(torch.equal(a, b) for a, b in zip(weights, reference[1], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(moments, reference[2], strict=True))


def test_logits_memory_is_one_chunk():
    """With 152k words, the logits of a batch would take 4.6 GiB in FP32; a chunk takes a fraction of that."""
    model = random_model("tiny", torch.bfloat16, vocab_size=152064).train()
    with mt.Engine(model, device="cuda") as engine:
        ids = torch.randint(0, 152064, (4, 2048), device="cuda")
        peaks = {}
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(input_ids=ids, labels=ids).loss.backward()
            engine.synchronize()
            peaks["chunked"] = torch.cuda.max_memory_allocated() - before
            for slab in engine.slabs:
                slab.grad.clear()
        print(f"\nlogits of 8192 x 152064: peak above the model {peaks['chunked'] / 2**30:.2f} GiB")
        assert peaks["chunked"] < 8192 * 152064 * 2


def test_exact_pinning_and_release():
    model = random_model("tiny", torch.bfloat16)
    engine = mt.Engine(model, device="cuda")
    assert all(slab.weight.is_pinned() for slab in engine.slabs)
    engine.close()
    assert not any(slab.weight.is_pinned() for slab in engine.slabs)


def test_vram_cap_is_enforced():
    model = random_model("tiny", torch.bfloat16).train()
    # Freed, but still reserved from the driver.
    torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    with mt.Engine(model, device="cuda", max_vram_gb=2.0):
        free, total = torch.cuda.mem_get_info()
        assert total - free < 2 << 30
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 << 30, dtype=torch.uint8, device="cuda")


def test_generate_and_parameters_on_the_device():
    model = random_model("tiny", torch.bfloat16)
    plain = copy.deepcopy(model).cuda()
    with mt.Engine(model, device="cuda"):
        assert model.device.type == "cuda"
        assert all(p.device.type == "cuda" for p in model.parameters())
        ids = torch.randint(0, 512, (1, 8))
        kwargs = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        ours = model.generate(input_ids=ids.cuda(), attention_mask=torch.ones_like(ids).cuda(), **kwargs)
        theirs = plain.generate(input_ids=ids.cuda(), attention_mask=torch.ones_like(ids).cuda(), **kwargs)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("numel", [1000, 65536, 65537, 1_000_003, 40_000_000])
def test_norm_has_the_same_bits_on_both_devices(dtype, numel):
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    kernel = norm._fused_kernel()
    assert kernel is not None
    assert norm.square_sum(flat.cuda()).item() == norm.square_sum(flat).item()
    if numel >= norm.CHUNK:
        assert kernel(flat.cuda(), True).item() == norm.square_sum(flat.bfloat16()).item()


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_norm_in_pieces_has_the_same_bits_on_both_devices(dtype, calls):
    """For a tied slab, and one with a parameter without gradient, no full copy is made on the device."""
    layout = lay_out([("a", torch.Size([40_000_001])), ("b", torch.Size([1000])), ("c", torch.Size([500_000]))], dtype)
    flats = [torch.randn(layout.numel, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(calls)]
    present = [frozenset({0, 2}), frozenset({0})]

    def found(device):
        parts = tuple((flat.to(device), present[i]) for i, flat in enumerate(flats))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = norm.gradient_square_sum(Snapshot(layout, parts, dtype)).item()
        return result, torch.cuda.max_memory_allocated() - before

    (there, taken), (here, _) = found("cuda"), found("cpu")
    assert there == here
    assert taken < 20 << 20, "a full FP32 copy would take 160 MB"
