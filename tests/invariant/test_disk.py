"""States on disk give the bits of states in RAM, whatever happens between steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import small
from tests.tiny import Stack, differences, engine_of, inputs, roles

import megatrain as mt
from megatrain.errors import EngineClosed, NotEnoughMemory, SettingsError
from megatrain.store.parameter import states_of
from megatrain.stream.lanes import SyncLanes, ThreadLanes

EVERYTHING = ("*",)
SOME = ("model.embed_tokens", "model.layers.[13]", "lm_head")


def on_disk(folder: Path, patterns: tuple[str, ...] = EVERYTHING) -> dict[str, Any]:
    return {"offload_dir": [folder / "a", folder / "b"], "on_disk": patterns, "allow_tmpfs": True}


def train(kind: str, clip: float | None, **settings: Any) -> list[Any]:
    """Steps in windows and without, with evaluation, `state_dict`, a user's write and a skipped step in between."""
    model = small.llama(num_hidden_layers=4)
    engine = engine_of(model, **settings)
    optimizer = engine.optimizer(lr=1e-2, kind=kind, max_grad_norm=clip)
    seen: list[Any] = []

    def micro_batch(number: int) -> torch.Tensor:
        loss = model(**small.batch(2, seed=number)).loss
        loss.backward()
        return loss.detach()

    for step in range(5):
        with optimizer.final_backward():
            seen += engine.window([partial(micro_batch, 3 * step + k) for k in range(1 + step % 3)], full_step=True)
        if step == 2 and clip is not None:
            model.model.layers[0].mlp.up_proj.weight.grad.mul_(float("nan"))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            with torch.no_grad():
                seen.append(model(**small.batch(2, seed=99)).loss)
                model.model.layers[1].mlp.up_proj.weight.mul_(0.5)
        if step == 3:
            seen.append({key: {k: v + 0 for k, v in s.items()} for key, s in optimizer.state_dict()["state"].items()})
    seen += [optimizer.grad_norm, roles(engine), engine.counters.steps]
    saved: dict[str, Any] = dict(engine.host_state_dict())
    seen.append({name: tensor.cpu() + 0 for name, tensor in saved.items()})
    released = engine.release()
    seen.append({name: p.detach().clone() for name, p in released.named_parameters()})
    return seen


@pytest.mark.parametrize("clip", [None, 0.5], ids=["early", "clipped"])
@pytest.mark.parametrize(
    ("kind", "precision", "compression"),
    [
        ("adamw", "bf16", False),
        ("adamw", "fp32", "bf16"),
        ("adamw", "bf16", "8bit"),
        ("lion", "bf16-sr", "4bit"),
        ("sgd", "bf16", False),
    ],
)
def test_training_is_bitwise(tmp_path: Path, kind: str, precision: str, compression: Any, clip: float | None) -> None:
    run = partial(train, kind, clip, precision=precision, optimizer_compression=compression)
    expected = run(lanes=SyncLanes())
    assert differences(run(lanes=SyncLanes(), **on_disk(tmp_path)), expected) == []
    assert differences(run(lanes=ThreadLanes(seed=1, max_delay=2e-4), **on_disk(tmp_path)), expected) == []
    assert differences(run(lanes=ThreadLanes(), **on_disk(tmp_path, SOME)), expected) == []


def test_states_really_are_on_disk(tmp_path: Path) -> None:
    model = Stack()
    engine = engine_of(model, precision="fp32", **on_disk(tmp_path))
    optimizer = engine.optimizer(lr=0.1)
    states = sum(buffer.nbytes for slab in engine.slabs for buffer in slab.state_buffers())
    assert states > 0
    assert engine._placement.disk is not None
    assert engine._placement.disk.allocated_bytes == states
    assert engine._placement.disk.written_bytes == 0, "zeros need no write"
    assert all(view.is_meta for p in model.parameters() for view in states_of(p, values=False).values())
    for step in range(2):
        model(inputs(step)).square().mean().backward()
        optimizer.step()
    engine.synchronize()
    # One pass over the states per step, padded to whole pages.
    padded = sum(-(-b.nbytes // 4096) * 4096 for slab in engine.slabs for b in slab.state_buffers())
    assert engine.counters.bytes_disk_out == 2 * padded == engine._placement.disk.written_bytes
    assert engine.counters.bytes_disk_in <= 4 * padded
    engine.close()


def test_a_skipped_step_writes_nothing(tmp_path: Path) -> None:
    model = Stack()
    engine = engine_of(model, **on_disk(tmp_path))
    optimizer = engine.optimizer(lr=0.1, max_grad_norm=1.0)
    model(inputs(0) * float("nan")).square().mean().backward()
    optimizer.step()
    assert optimizer.step_was_skipped
    engine.synchronize()
    assert engine.counters.bytes_disk_out == 0
    engine.close()


def trainer(directory: Path, seed: int = 0, **settings: Any) -> mt.Trainer:
    mt.init(device="cpu", **settings)
    options: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.5}
    return mt.Trainer(model=small.llama(seed), args=small.arguments(directory, **options), train_dataset=small.rows())


def test_states_that_ram_does_not_hold_are_saved_and_resumed(tmp_path: Path) -> None:
    """A stock Trainer's format is left out, since it needs all states in RAM at once."""

    def train(out: str, resume: Path | None = None, **settings: Any) -> dict[str, torch.Tensor]:
        mt.init(device="cpu", **settings)
        model = small.llama(num_hidden_layers=14, hidden_size=64).bfloat16()
        args = small.arguments(tmp_path / out, max_steps=2, save_strategy="steps", save_steps=1)
        trainer = mt.Trainer(model=model, args=args, train_dataset=small.rows())
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        if settings:
            with pytest.raises(NotEnoughMemory, match=r"state_dict\(\) would copy"):
                trainer.optimizer.state_dict()
        return small.snapshot(model)

    disk = {"offload_dir": tmp_path / "scratch", "max_ram_gb": 0.004, "debug": mt.Debug(allow_tmpfs=True)}
    expected = train("ram")
    assert small.same(expected, train("disk", **disk))
    checkpoint = tmp_path / "disk" / "checkpoint-1"
    assert not (checkpoint / "optimizer.pt").exists()
    assert small.same(expected, train("resumed", checkpoint, **disk))
    assert small.same(expected, train("in ram again", checkpoint))


@pytest.mark.parametrize("compression", ["8bit", "lossless"])
def test_checkpoints_do_not_depend_on_where_states_are(tmp_path: Path, compression: Any) -> None:
    """Saved on disk and resumed in RAM, and the other way round."""
    debug = {"debug": mt.Debug(allow_tmpfs=True)}
    disk = {"offload_dir": tmp_path / "scratch", "on_disk": EVERYTHING, **debug, "optimizer_compression": compression}
    ram = {"optimizer_compression": compression}
    found = []
    for number, (first, second) in enumerate([(ram, ram), (disk, ram), (ram, disk)]):
        out = tmp_path / str(number)
        trainer(out, **first).train()
        files = {f.name: f.read_bytes() for f in (out / "checkpoint-4" / "megatrain").glob("optimizer*")}
        again = trainer(out, seed=1, **second)
        again.train(resume_from_checkpoint=str(out / "checkpoint-2"))
        assert files
        assert found[:1] in ([], [files])
        found.append(files)
        assert {f.name: f.read_bytes() for f in (out / "checkpoint-4" / "megatrain").glob("optimizer*")} == files
        again.engine.close()


def test_an_optimizers_state_dict_can_be_loaded(tmp_path: Path) -> None:
    def run(**settings: Any) -> dict[str, Any]:
        first, second = Stack(), Stack(seed=0)
        engines = [engine_of(model, precision="bf16", **settings) for model in (first, second)]
        optimizers = [engine.optimizer(lr=0.1) for engine in engines]
        for step in range(2):
            first(inputs(step)).square().mean().backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
        optimizers[1].load_state_dict(optimizers[0].state_dict())
        second.load_state_dict(first.state_dict())
        for model, optimizer in zip((first, second), optimizers, strict=True):
            model(inputs(9)).square().mean().backward()
            optimizer.step()
        return {"first": roles(engines[0]), "second": roles(engines[1])}

    assert differences(run(**on_disk(tmp_path)), run()) == []


def test_a_second_optimizer_starts_with_zeros(tmp_path: Path) -> None:
    def run(**settings: Any) -> Any:
        model = Stack()
        engine = engine_of(model, precision="bf16", **settings)
        for kind in ("adamw", "lion"):
            optimizer = engine.optimizer(lr=0.1, kind=kind)
            for step in range(2):
                model(inputs(step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return roles(engine)

    assert differences(run(**on_disk(tmp_path)), run()) == []


@pytest.mark.parametrize("where", ["on disk", "streamed"])
def test_an_optimizer_with_more_moments_may_follow_at_once(tmp_path: Path, where: str) -> None:
    """While updates of the one before it are still to be done."""
    held = ("held_weights", "held_gradients", "streamed_states")
    staged = on_disk(tmp_path) if where == "on disk" else dict.fromkeys(held, EVERYTHING)

    def run(lanes: Any, **settings: Any) -> Any:
        model = Stack()
        engine = engine_of(model, precision="bf16", lanes=lanes, **settings)
        for kind in ("sgd", "adamw"):
            optimizer = engine.optimizer(lr=0.1, kind=kind)
            model(inputs(0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return roles(engine)

    lanes = ThreadLanes()
    slow: Any = lanes["disk_update" if where == "on disk" else "gpu_update"]
    slow._delay = lambda: 2e-2
    assert differences(run(lanes, **staged), run(SyncLanes())) == []


def test_staged_states_survive_a_second_optimizer_with_larger_ones(tmp_path: Path) -> None:
    """Their staging buffers are allocated again, in a backward that updates."""

    def run(**settings: Any) -> Any:
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 96))
        engine = engine_of(model, **settings)
        optimizer = engine.optimizer(model[0].parameters(), lr=0.1)
        for step in range(4):
            if step == 2:
                engine.optimizer(model[1].parameters(), lr=0.1)
            with optimizer.final_backward():
                model(torch.randn(2, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return roles(engine)

    assert differences(run(**on_disk(tmp_path)), run()) == []


def test_on_disk_needs_a_directory() -> None:
    for directories in (None, []):
        with pytest.raises(SettingsError, match="name a directory for them with offload_dir"):
            engine_of(Stack(), on_disk=("*",), offload_dir=directories)


def test_released_states_are_gone(tmp_path: Path) -> None:
    model = Stack()
    engine = engine_of(model, **on_disk(tmp_path))
    optimizer = engine.optimizer(lr=0.1)
    model(inputs(0)).square().mean().backward()
    optimizer.step()
    engine.close()
    assert optimizer.state_dict()["state"][0]["exp_avg"].any(), "a closed engine's state can be read"
    engine.release()
    with pytest.raises(EngineClosed, match="which freed what was on disk"):
        optimizer.state_dict()


def test_a_state_dict_that_does_not_fit_in_ram_is_refused(tmp_path: Path) -> None:
    model = small.llama(num_hidden_layers=10, hidden_size=128, intermediate_size=256)
    engine = engine_of(model, precision="fp32", max_ram_gb=0.02, **on_disk(tmp_path))
    optimizer = engine.optimizer(lr=0.1)
    model(**small.batch(2)).loss.backward()
    optimizer.step()
    with pytest.raises(
        NotEnoughMemory, match=r"state_dict\(\) would copy 0.0133 GB of states from disk to RAM: .*engine.save"
    ):
        optimizer.state_dict()
    engine.save(tmp_path / "saved", optimizer)


def test_a_weight_may_be_written_between_a_backward_that_updates_and_its_step(tmp_path: Path) -> None:
    def run(**settings: Any) -> Any:
        model = Stack()
        engine = engine_of(model, precision="bf16", **settings)
        optimizer = engine.optimizer(lr=0.1)
        for step in range(4):
            with optimizer.final_backward():
                model(inputs(step)).square().mean().backward()
            with torch.no_grad():
                for layer in model.layers:
                    layer.scale.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        return roles(engine)

    expected = run()
    assert differences(run(**on_disk(tmp_path)), expected) == []
    assert differences(run(lanes=ThreadLanes(seed=1), **on_disk(tmp_path, ("layers.*",))), expected) == []
