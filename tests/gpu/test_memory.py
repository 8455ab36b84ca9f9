"""On the GPU: caps hold as reported by the driver, plans hold, and running out of memory does not change bits."""

import gc

import pytest
import torch
import transformers
from tests import small

import megatrain as mt
from megatrain.hardware.machine import CUDA_CONTEXT_BYTES, cuda_bytes
from megatrain.store.ram import HostMemory

GIB = 1 << 30
SHAPE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 8,
         "num_key_value_heads": 8, "max_position_embeddings": 2048, "vocab_size": 8192}  # fmt: skip


@pytest.fixture(autouse=True)
def clean():
    # cuBLAS keeps a workspace for every thread that has computed, in any test.
    before = torch.cuda.memory_allocated()
    yield
    # The first collection ends the lanes of dropped engines, the second frees what the lanes held.
    gc.collect()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.memory_allocated() < before + GIB // 4, "a dropped engine still holds memory"


def rows(count=16, length=1024):
    source = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(1, 8192, (length,), generator=source)} for _ in range(count)]


def trained(directory, most=None, **settings):
    """A run in BF16. `most` limits the allocator after the first step."""
    mt.init(compile=False, **settings)
    model = small.llama(**SHAPE).to(torch.bfloat16)
    trainer = mt.Trainer(
        model=model,
        args=small.arguments(directory, use_cpu=False, bf16=True, max_steps=3, per_device_train_batch_size=8,
                             gradient_accumulation_steps=2),
        train_dataset=rows(48),
    )  # fmt: skip
    if most is not None:
        limit_after_first_step(trainer, most)
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    return trainer, torch.cuda.max_memory_allocated()


def limit_after_first_step(trainer, most):
    class Limit(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 1:
                torch.cuda.empty_cache()
                total = torch.cuda.get_device_properties(0).total_memory
                torch.cuda.set_per_process_memory_fraction(most / total)

    trainer.add_callback(Limit())


def test_a_trainers_step_is_repeated_with_fewer_stored_graphs(tmp_path, deterministic, announced):
    """A real out-of-memory error: after the first step the allocator gets less than the stored graphs need."""
    stored, most = trained(tmp_path / "a", policy="store")
    recomputed, least = trained(tmp_path / "b", policy="recompute", plan=None)
    assert most - least > GIB // 2
    limited, _ = trained(tmp_path / "c", policy="store", most=(2 * least + most) // 3 + GIB // 4)
    assert any("the step was undone" in line for line in announced.messages)
    stored_blocks = [b for b in limited.engine.blocks if limited.engine.memory_limit.policies[b.name] == "store"]
    assert len(stored_blocks) in (5, 2), "half of 11 blocks, or half of those if that was not enough"
    assert small.losses(limited) == small.losses(stored) == small.losses(recomputed)
    assert small.same(small.snapshot(limited.model), small.snapshot(stored.model))


@pytest.mark.slow
def test_a_custom_loop_continues_after_zero_grad(deterministic):
    def run(failing):
        model = small.llama(**SHAPE).to(torch.bfloat16)
        engine = mt.Engine(model, device="cuda", policy="store")
        optimizer = engine.optimizer(lr=1e-3, max_grad_norm=1.0)
        data = torch.stack([row["input_ids"] for row in rows(16)]).cuda()

        def step(ids):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step(data[:4])
        if failing:
            total = torch.cuda.get_device_properties(0).total_memory
            engine.synchronize()
            torch.cuda.empty_cache()
            allowed = torch.cuda.memory_allocated() + int(0.7 * GIB)
            torch.cuda.set_per_process_memory_fraction(allowed / total)
            with pytest.raises(torch.OutOfMemoryError) as error:
                step(data)
            assert any("zero_grad()" in note for note in error.value.__notes__)
            del error
            torch.cuda.set_per_process_memory_fraction(1.0)
            optimizer.zero_grad()
        step(data[4:8])
        step(data[8:12])
        return small.snapshot(model)

    assert small.same(run(True), run(False))


@pytest.mark.parametrize("cap", [pytest.param(6.0, marks=pytest.mark.slow), 9.0])
def test_the_cap_is_on_what_the_driver_reports(cap):
    torch.cuda.reset_peak_memory_stats()
    model = small.llama(**SHAPE).to(torch.bfloat16)
    engine = mt.Engine(model, device="cuda", max_vram_gb=cap)
    optimizer = engine.optimizer(lr=1e-3)
    ids = torch.stack([row["input_ids"] for row in rows(16)]).cuda()
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    free, total = torch.cuda.mem_get_info()
    assert total - free <= cap * GIB
    assert torch.cuda.max_memory_reserved() <= cap * GIB - CUDA_CONTEXT_BYTES
    engine.close()


def test_a_trainer_plans_and_stays_within_its_plan(tmp_path, announced):
    # The plan does not count cuBLAS workspaces of earlier tests.
    others = torch.cuda.memory_allocated()
    trainer, _ = trained(tmp_path)
    plan = trainer.engine.settings.plan
    assert any("blocks resident" in line for line in announced.messages)
    planned = plan.total("vram") - plan.outside_allocator + others
    assert planned - GIB // 8 <= torch.cuda.max_memory_reserved() <= planned + (8 << 20)
    assert all(slab.on_device for slab in trainer.engine.slabs)


def test_other_memory_of_the_process_counts_against_the_cap(tmp_path):
    reference = torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
    cap = 8.0
    trainer, _ = trained(tmp_path, max_vram_gb=cap)
    planned = trainer.engine.settings.plan.total("vram")
    assert cap * GIB - reference.nbytes - 2 * GIB < planned <= cap * GIB - reference.nbytes
    free, total = torch.cuda.mem_get_info()
    assert total - free <= cap * GIB
    with pytest.raises(mt.errors.NotEnoughMemory, match="GiB that this process holds on the GPU already"):
        mt.Engine(small.llama(), device="cuda", max_vram_gb=3.0)


def allowed():
    total = torch.cuda.get_device_properties(0).total_memory
    return torch.cuda.get_per_process_memory_fraction(0) * total / GIB


@pytest.mark.slow
def test_a_cap_lasts_as_long_as_its_engine():
    first = mt.Engine(small.llama(**SHAPE), device="cuda", max_vram_gb=20.0)
    with mt.Engine(small.llama(**SHAPE), device="cuda", max_vram_gb=30.0):
        assert 18.5 < allowed() < 19.5
        first.close()
        assert 28.5 < allowed() < 29.5, "only the second engine's cap is left"
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(30 * GIB, dtype=torch.uint8, device="cuda")
    uncapped = allowed()
    assert uncapped > 31
    with pytest.raises(mt.errors.SettingsError):
        mt.Engine(small.llama(**SHAPE), device="cuda", max_vram_gb=10.0, debug=mt.Debug(lanes="threads"))
    assert allowed() == uncapped, "a refused engine leaves no cap"
    mt.Engine(small.llama(**SHAPE), device="cuda", max_vram_gb=10.0)
    gc.collect()
    assert allowed() == uncapped, "a dropped engine leaves no cap"


@pytest.mark.slow
def test_a_dropped_engine_is_collected_when_memory_is_needed():
    gc.collect()
    gc.disable()
    try:
        mt.Engine(small.llama(**SHAPE | {"num_hidden_layers": 20}), device="cuda", resident=("*",))
        assert torch.cuda.memory_allocated() > 2 * GIB - CUDA_CONTEXT_BYTES, "kept alive by a reference cycle"
        mt.Engine(small.llama(**SHAPE), device="cuda", max_vram_gb=2.0).close()
    finally:
        gc.enable()


@pytest.mark.slow
def test_gpu_memory_for_pinned_memory_is_as_planned():
    torch.zeros(1, device="cuda")
    memory = HostMemory(pin=True, threads=8)
    before = torch.cuda.mem_get_info()[0]
    buffers = [memory.allocate(2 * GIB, transferred=True) for _ in range(8)]
    taken, planned = before - torch.cuda.mem_get_info()[0], cuda_bytes(memory.pinned) - cuda_bytes(0)
    print(f"16 GiB pinned: {taken >> 20} MiB of the GPU, {planned >> 20} planned")
    assert taken <= planned + (8 << 20)
    for buffer in buffers:
        memory.free(buffer)
