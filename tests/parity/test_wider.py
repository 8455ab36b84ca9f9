"""Two steps of many more architectures match plain transformers with torch's AdamW in FP32."""

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


def test_the_page_lists_all_architectures():
    """`python -m tests.parity.table` writes docs/architectures.md. Run it again after adding an entry."""
    page = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text()
    names = {*zoo.ALL, *wider.ALL, *vision.ALL}
    assert not {name for name in names if f"| {name} |" not in page}
    assert "## Different\n\nNone." in page


def test_many_architectures_are_listed():
    decoders = {name for name, entry in zoo.ZOO.items() if not entry.encoder_decoder}
    decoders |= {name for name, entry in wider.WIDER.items() if entry.kind in wider.CAUSAL_KINDS}
    assert len(decoders) >= 45
    assert not set(zoo.ALL) & set(wider.ALL), "an architecture is in both tables"
    for kind in wider.AUTO:
        assert any(entry.kind == kind for entry in wider.WIDER.values()), kind
    shown = {trait for entry in wider.WIDER.values() for trait in entry.traits}
    assert set(wider.TRAITS) - set(zoo.TRAITS) <= shown <= set(wider.TRAITS)
    assert {trait for entry in vision.VISION.values() for trait in entry.traits} == set(vision.TRAITS)


@pytest.mark.parametrize("name", wider.ALL)
def test_training(name: str):
    require(name)
    measure(wider.build(name), wider.batches(name)).check(rng=not wider.WIDER[name].seeds_itself)


@pytest.mark.parametrize("name", wider.PADDED)
def test_padded_batches(name: str):
    require(name)
    measure(wider.build(name), wider.batches(name, steps=1, padded=True)).check()


@pytest.mark.parametrize("name", [name for name, entry in wider.WIDER.items() if "unmarked" in entry.traits])
def test_layers_are_found_without_gradient_checkpointing_layer(name: str):
    from transformers.modeling_layers import GradientCheckpointingLayer

    model = wider.build(name)
    assert not any(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
    with compare.adopted(model) as engine:
        layers = [block for block in engine.blocks if block.name.split(".")[-1].isdigit()]
    assert len(layers) >= 2


@pytest.mark.parametrize("name", vision.ALL)
def test_vision(name: str):
    """Text and vision layers stream, and both get gradients from an image in the prompt."""
    entry, batch = vision.VISION[name], vision.batch(name)
    model = vision.build(name)
    # In some models an image changes the loss by less than one FP32 bit, so check the gradient instead.
    image = batch["pixel_values"].clone().requires_grad_()
    (image_gradient,) = torch.autograd.grad(model.eval()(**{**batch, "pixel_values": image}).loss, image)
    assert image_gradient.any(), "the image has no effect"
    parity = measure(model.train(), [batch, batch])
    vision_layers = [layer for layer in parity.layers if layer.startswith(entry.tower)]
    assert len(vision_layers) == entry.layers, parity.layers
    assert len(parity.layers) >= entry.layers + 2, "the text layers must stream too"
    parity.check()


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "mllama"])
def test_vision_gradients_arrive(name: str):
    """Every weight of every vision layer has a gradient that is not zero, so the comparison is meaningful."""
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
    """Vision layers are not called and get neither gradient nor update, as in plain PyTorch."""
    parity = measure(vision.build(name), [generic.batch()] * 2)
    parity.check()


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_frozen_tower(name: str):
    """The usual recipe: the vision tower is frozen and the text model trains."""
    model = vision.build(name)
    for key, parameter in model.named_parameters():
        if key.startswith(("model.vision_tower", "model.visual")):
            parameter.requires_grad_(False)
    measure(model, [vision.batch(name)] * 2).check()


def test_a_wrong_gradient_is_detected(monkeypatch: pytest.MonkeyPatch):
    """The comparison detects gradients of one block that are wrong by a factor of 1.0001."""
    from megatrain.compute import node

    deliver_gradients = node.deliver_gradients

    def slightly_wrong(runtime, block, call_id, gradients):
        if block.name == "model.visual.blocks.0":
            gradients = {weight: gradient * 1.0001 for weight, gradient in gradients.items()}
        deliver_gradients(runtime, block, call_id, gradients)

    monkeypatch.setattr(node, "deliver_gradients", slightly_wrong)
    parity = measure(vision.build("qwen2_5_vl"), [vision.batch("qwen2_5_vl")])
    assert 0.5e-4 < parity.gradient < 2e-4
    assert parity.worst.startswith("model.visual.blocks.0")
    with pytest.raises(AssertionError, match=r"model\.visual"):
        parity.check()
