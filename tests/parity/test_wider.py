"""Two steps of many more architectures equal plain transformers + torch AdamW in FP32; see `measure.Parity.check`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from . import compare, generic, vision, wider, zoo
from .measure import measure


def require(name: str) -> None:
    if not wider.present(name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")


def test_the_page_lists_them():
    """docs/architectures.md is written by `python -m tests.parity.table`; a new entry asks for a new run."""
    page = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text()
    names = {*zoo.ALL, *wider.ALL, *vision.ALL}
    assert not {name for name in names if f"| {name} |" not in page}
    assert "## Different\n\nNone." in page


def test_there_are_enough_of_them():
    decoders = {name for name, entry in zoo.ZOO.items() if not entry.encoder_decoder}
    decoders |= {name for name, entry in wider.WIDER.items() if entry.kind in wider.CAUSAL_KINDS}
    assert len(decoders) >= 45
    assert not set(zoo.ALL) & set(wider.ALL), "in both tables"
    for kind in wider.AUTO:
        assert any(entry.kind == kind for entry in wider.WIDER.values()), kind
    shown = {trait for entry in wider.WIDER.values() for trait in entry.traits}
    assert set(wider.TRAITS) - set(zoo.TRAITS) <= shown <= set(wider.TRAITS)
    assert {trait for entry in vision.VISION.values() for trait in entry.traits} == set(vision.TRAITS)


@pytest.mark.parametrize("name", wider.ALL)
def test_plain(name: str):
    require(name)
    measure(wider.build(name), wider.batches(name)).check(rng=not wider.WIDER[name].seeds_itself)


@pytest.mark.parametrize("name", wider.PADDED)
def test_padded(name: str):
    require(name)
    measure(wider.build(name), wider.batches(name, steps=1, padded=True)).check()


@pytest.mark.parametrize("name", [name for name, entry in wider.WIDER.items() if "unmarked" in entry.traits])
def test_layers_are_found_without_the_mark(name: str):
    from transformers.modeling_layers import GradientCheckpointingLayer

    model = wider.build(name)
    assert not any(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
    with compare.adopted(model) as engine:
        layers = [block for block in engine.blocks if block.name.split(".")[-1].isdigit()]
    assert len(layers) >= 2


@pytest.mark.parametrize("name", vision.ALL)
def test_vision(name: str):
    """Text and vision layers stream, and both learn from an image in the prompt."""
    entry, batch = vision.VISION[name], vision.batch(name)
    model = vision.build(name)
    # Of the loss itself FP32 may not show it: in some models an image moves it by less than its last bit.
    image = batch["pixel_values"].clone().requires_grad_()
    (moved,) = torch.autograd.grad(model.eval()(**{**batch, "pixel_values": image}).loss, image)
    assert moved.any(), "the image is not looked at"
    parity = measure(model.train(), [batch, batch])
    seen = [layer for layer in parity.layers if layer.startswith(entry.tower)]
    assert len(seen) == entry.layers, parity.layers
    assert len(parity.layers) >= entry.layers + 2, "the text layers stream as well"
    parity.check()


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "mllama"])
def test_vision_gradients_arrive(name: str):
    """Every weight of every vision layer has a gradient that is not zero, so there is something to compare."""
    entry, batch = vision.VISION[name], vision.batch(name)
    model = vision.build(name)
    with compare.adopted(model):
        model(**batch).loss.backward()
        gradients = compare.gradients_of(model)
    inside = [key for key, _ in model.named_parameters() if key.startswith(entry.tower)]
    assert inside
    assert all(gradients[key].abs().max() > 0 for key in inside)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_text_alone_in_a_vision_language_model(name: str):
    """Vision layers are not called at all: they get no gradient and no update, as in plain PyTorch."""
    parity = measure(vision.build(name), [generic.batch()] * 2)
    parity.check()


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_frozen_tower(name: str):
    """The common recipe: the tower keeps its weights, the text model trains."""
    model = vision.build(name)
    for key, parameter in model.named_parameters():
        if key.startswith(("model.vision_tower", "model.visual")):
            parameter.requires_grad_(False)
    measure(model, [vision.batch(name)] * 2).check()


def test_a_wrong_gradient_shows(monkeypatch: pytest.MonkeyPatch):
    """The comparison can fail: one block's gradients, wrong by a ten-thousandth, are found."""
    from megatrain.compute import node

    deliver_gradients = node.deliver_gradients

    def slightly_wrong(runtime, block, place, gradients):
        if block.name == "model.visual.blocks.0":
            gradients = {weight: gradient * 1.0001 for weight, gradient in gradients.items()}
        deliver_gradients(runtime, block, place, gradients)

    monkeypatch.setattr(node, "deliver_gradients", slightly_wrong)
    parity = measure(vision.build("qwen2_5_vl"), [vision.batch("qwen2_5_vl")])
    assert 0.5e-4 < parity.gradient < 2e-4
    assert parity.worst.startswith("model.visual.blocks.0")
    with pytest.raises(AssertionError, match=r"model\.visual"):
        parity.check()
