"""The chunked head computes the model's loss and gradients with one chunk of logits in memory at a time."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tests import small
from tests.parity import zoo
from tests.tiny import differences, engine_of, gradients
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import megatrain as mt
from megatrain.compute.head import Head, _ChunkedCall, _scaled
from megatrain.compute.logits import LazyLogits
from megatrain.errors import UnsupportedCall
from megatrain.geometry import CHUNK_ELEMENTS, chunk_tokens

LENGTH = 20
TOKENS = 3 * LENGTH
ROUNDING = 2e-6
"""Relative error of a loss or of a gradient's norm: 60 terms summed in a different order."""

UNCHUNKED = 0
"""The setting that computes all logits at once and uses the model's own loss."""


def build(family: str, **changes: Any) -> Any:
    if family == "gptj":
        torch.manual_seed(0)
        shape = {"vocab_size": zoo.VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
        config = AutoConfig.for_model(
            "gptj", **shape, bos_token_id=1, eos_token_id=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            model.lm_head.bias.normal_()
        return model.train()
    return zoo.build(family, **changes)


def batch(seed: int = 0, padded: bool = True, length: int = LENGTH) -> dict[str, torch.Tensor]:
    return zoo.batch("llama", seed, padded=padded, length=length, rows=3)


def loss_and_grads(family: str, chunk: int | None, *, precision: str = "fp32", data: Any = None, **options: Any) -> Any:
    """Loss and gradients of one forward and backward."""
    model = build(family)
    with engine_of(model, head_chunk=chunk, precision=precision):
        out = model(**(batch() if data is None else data), **options)
        assert isinstance(out.logits, LazyLogits) == (chunk != UNCHUNKED)
        out.loss.backward()
        return out.loss.detach(), gradients(model)


def assert_close(left: Any, right: Any, tolerance: float = ROUNDING) -> None:
    torch.testing.assert_close(left[0], right[0], rtol=tolerance, atol=0, equal_nan=True)
    assert left[1].keys() == right[1].keys()
    for name, expected in right[1].items():
        if expected is None:
            assert left[1][name] is None, name
            continue
        scale = expected.double().norm() + 1e-12 * expected.numel()
        off = ((left[1][name].double() - expected.double()).norm() / scale).item()
        assert off < 20 * tolerance, f"{name}: {off:.1e}"


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of chunks of each chunked loss computed with gradients, one entry per loss."""
    calls: list[int] = []
    loss = Head.chunked

    def spy(self: Head, logits: LazyLogits, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            calls.append(-(-logits.hidden.shape[:-1].numel() // self.tokens))
        return loss(self, logits, *args, **kwargs)

    monkeypatch.setattr(Head, "chunked", spy)
    return calls


# ---- the same loss and gradients as without chunks


@pytest.mark.parametrize("chunk", [1, 7, 32, 60, 1000, None])
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "granite", "gptj", "gpt2", "smollm3"])
def test_the_chunk_changes_the_loss_by_rounding_only(family: str, chunk: int | None, chunked: list[int]):
    """Heads without extras, with a softcap, with logit scales (multiplied and divided), a bias, tied embeddings."""
    # This fails if recorded operations are skipped, if the last chunk is skipped, or if a chunk's weight gradient
    # replaces the sum so far.
    if family in ("gpt2", "smollm3", "granite") and chunk not in (7, None):
        pytest.skip("the same path as the others")
    assert_close(loss_and_grads(family, chunk), loss_and_grads(family, UNCHUNKED))
    assert chunked == [-(-TOKENS // (chunk or chunk_tokens(zoo.VOCAB, False)))]


@pytest.mark.parametrize("chunk", [7, 60])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_bf16_gradients_agree_within_rounding(family: str, chunk: int):
    """Gradients of chunks are summed in FP32. Only the rounding of each chunk's products differs."""
    assert_close(
        loss_and_grads(family, chunk, precision="bf16"),
        loss_and_grads(family, UNCHUNKED, precision="bf16"),
        tolerance=1e-3,
    )


@pytest.mark.parametrize("lanes", ["sync", "threads"])
def test_the_chunk_is_the_only_thing_that_changes_bits(lanes: str):
    expected = loss_and_grads("gemma2", 7)
    model = build("gemma2")
    with engine_of(model, head_chunk=7, slots=1, grad_slots=1, lanes=lanes, policy="store"):
        out = model(**batch())
        out.loss.backward()
        assert differences([out.loss.detach(), gradients(model)], list(expected)) == []


def test_the_default_chunk_depends_on_the_vocabulary_alone():
    for fused, elements in CHUNK_ELEMENTS.items():
        assert chunk_tokens(152_064, fused) == elements // 152_064 // 64 * 64
        assert chunk_tokens(1 << 40, fused) == 64
        assert chunk_tokens(97, fused) * 97 <= elements


@pytest.mark.parametrize("items", [37, torch.tensor(37), torch.tensor(37.0), 1], ids=str)
def test_num_items_in_batch(items: Any, chunked: list[int]):
    assert_close(
        loss_and_grads("llama", 7, num_items_in_batch=items),
        loss_and_grads("llama", UNCHUNKED, num_items_in_batch=items),
    )
    assert chunked == [9]
    assert not torch.allclose(loss_and_grads("llama", 7)[0], loss_and_grads("llama", 7, num_items_in_batch=items)[0])


def test_ignore_index(chunked: list[int]):
    data = batch(padded=False)
    data["labels"] = data["labels"].masked_fill(data["labels"] % 3 == 0, 5)
    expected = loss_and_grads("llama", UNCHUNKED, data=data, ignore_index=5)
    assert_close(loss_and_grads("llama", 7, data=data, ignore_index=5), expected)
    assert not torch.allclose(loss_and_grads("llama", 7, data=data)[0], expected[0])
    assert chunked == [9, 9]


@pytest.mark.parametrize("with_labels", [True, False])
def test_shift_labels(with_labels: bool, chunked: list[int]):
    """Labels that are already shifted, as in packed and sequence-parallel batches. `labels` is then ignored."""
    data = batch()
    shifted = data["labels"].roll(-1, 1) if with_labels else data["labels"].flip(1)
    expected = loss_and_grads("llama", UNCHUNKED, data=data, shift_labels=shifted)
    assert_close(loss_and_grads("llama", 7, data=data, shift_labels=shifted), expected)
    assert chunked == [9]


@pytest.mark.parametrize("chunk", [7, 1000])
def test_all_labels_ignored(chunk: int):
    """The model's own loss is 0 / 0 here. Loss and gradients match it."""
    data = batch() | {"labels": torch.full((3, LENGTH), -100)}
    loss, grads = loss_and_grads("llama", chunk, data=data)
    expected, theirs = loss_and_grads("llama", UNCHUNKED, data=data)
    assert loss.isnan()
    assert expected.isnan()
    assert {name: None if g is None else g.isnan().any().item() for name, g in grads.items()} == {
        name: None if g is None else g.isnan().any().item() for name, g in theirs.items()
    }
    counted = loss_and_grads("llama", chunk, data=data, num_items_in_batch=5)
    assert counted[0] == 0
    assert all(g is None or g.abs().max() == 0 for g in counted[1].values())


def test_one_chunk_without_labels():
    """Only the last row has labels, so some chunks have none."""
    labels = torch.full((3, LENGTH), -100)
    labels[2, 5:] = batch()["labels"][2, 5:]
    data = batch(padded=False) | {"labels": labels}
    assert_close(loss_and_grads("llama", 7, data=data), loss_and_grads("llama", UNCHUNKED, data=data))


@pytest.mark.parametrize("rows", [1, 2])
def test_one_token(rows: int):
    """There is nothing to predict, so the loss is NaN, as in transformers."""
    data = {"input_ids": torch.full((rows, 1), 5), "labels": torch.full((rows, 1), 5)}
    assert loss_and_grads("llama", 7, data=data)[0].isnan()
    assert loss_and_grads("llama", UNCHUNKED, data=data)[0].isnan()
    assert_close(
        loss_and_grads("llama", 7, data=data, num_items_in_batch=1),
        loss_and_grads("llama", UNCHUNKED, data=data, num_items_in_batch=1),
    )


def test_no_rows():
    """An empty batch behaves as in transformers."""
    data = {"input_ids": torch.zeros(0, 4, dtype=torch.long), "labels": torch.zeros(0, 4, dtype=torch.long)}
    seen = []
    for chunk in (7, UNCHUNKED):
        try:
            seen.append(str(loss_and_grads("llama", chunk, data=data)[0]))
        except Exception as error:
            seen.append(type(error).__name__)
    assert seen[0] == seen[1]


def test_labels_of_the_wrong_length_are_refused_as_in_transformers():
    model = build("llama")
    with engine_of(model, head_chunk=7), pytest.raises(ValueError, match="batch_size"):
        model(**batch(padded=False), logits_to_keep=5)


def test_logits_to_keep():
    """Logits of the last positions, with labels for those positions."""
    data = batch(padded=False)
    kept = {"logits_to_keep": 6, "shift_labels": data["labels"][:, -6:].flip(1)}
    assert_close(loss_and_grads("llama", 7, data=data, **kept), loss_and_grads("llama", UNCHUNKED, data=data, **kept))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("chunk", [7, 60])
def test_autocast(chunk: int, inside: bool):
    """The forward runs under autocast; the backward runs inside or outside that context."""
    seen = []
    for setting in (chunk, UNCHUNKED):
        model = build("gemma2")
        with engine_of(model, head_chunk=setting):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(**batch())
                assert out.logits.dtype == torch.bfloat16 if setting == 7 else True
                if inside:
                    out.loss.backward()
            if not inside:
                out.loss.backward()
            seen.append((out.loss.detach(), gradients(model)))
    assert_close(*seen, tolerance=1e-3)


@pytest.mark.parametrize("scale", [3.0, 1 / 128, torch.tensor(0.25)], ids=str)
def test_a_scaled_loss(scale: Any):
    seen = []
    for chunk in (7, UNCHUNKED):
        model = build("llama")
        with engine_of(model, head_chunk=chunk):
            loss = model(**batch()).loss
            (loss * scale + 1).backward()
            seen.append((loss.detach(), gradients(model)))
    assert_close(*seen)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("scale", [1 / 3, 1 / 7, 1000.1])
def test_gradients_are_scaled_in_fp32_and_rounded_once(precision: str, scale: float):
    model = build("llama")
    with engine_of(model, head_chunk=7, precision=precision):
        out = model(**batch())
        assert isinstance(out.logits, LazyLogits)
        hidden, weight = out.logits.hidden, model.lm_head.weight
        plain, scaled = (
            torch.autograd.grad(out.loss, hidden, torch.tensor(factor), retain_graph=True)[0] for factor in (1.0, scale)
        )
        assert plain.dtype == (torch.float32 if precision == "fp32" else torch.bfloat16)
        assert torch.equal(scaled, (plain.float() * scale).to(plain.dtype))
        if precision == "fp32":
            by_weight = []
            for factor in (1.0, scale):
                out.loss.backward(torch.tensor(factor), retain_graph=True)
                by_weight.append(weight.grad.clone())
                weight.grad = None
            assert torch.equal(by_weight[1], by_weight[0] * scale)


def test_a_gradient_of_a_few_rows_is_scaled_like_a_whole_one():
    torch.manual_seed(0)
    scale = torch.tensor(1 / 3)
    for shape in ((3, 1 << 23), (5,), (0, 4)):
        gradient = torch.randn(shape)
        for source in (gradient, gradient.bfloat16()):
            assert torch.equal(_scaled(source, scale, torch.bfloat16), (source.float() * scale).bfloat16())


def test_retain_graph():
    model = build("llama")
    with engine_of(model, head_chunk=7):
        loss = model(**batch()).loss
        loss.backward(retain_graph=True)
        once = gradients(model)
        loss.backward()
        assert differences(gradients(model), {name: g * 2 for name, g in once.items()}) == []
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


@pytest.mark.parametrize("frozen", ["head", "all but head", "embedding", "layers"])
def test_frozen(frozen: str, chunked: list[int]):
    seen = []
    for chunk in (7, UNCHUNKED):
        model = build("llama")
        for name, parameter in model.named_parameters():
            part = "head" if "lm_head" in name else "embedding" if "embed" in name else "layers"
            parameter.requires_grad_(part != frozen if frozen != "all but head" else part == "head")
        with engine_of(model, head_chunk=chunk):
            loss = model(**batch()).loss
            loss.backward()
            seen.append((loss.detach(), gradients(model)))
    assert_close(*seen)
    assert any(g is None for g in seen[0][1].values())
    assert any(g is not None for g in seen[0][1].values())
    assert chunked == [9]


def test_a_frozen_model_computes_all_logits_at_once(chunked: list[int]):
    model = build("llama").requires_grad_(False)
    with engine_of(model, head_chunk=7):
        out = model(**batch())
        assert not isinstance(out.logits, LazyLogits)
        assert not out.loss.requires_grad
    assert chunked == []


def test_an_input_that_needs_a_gradient():
    """The gradient of `inputs_embeds` through a frozen model, as soft prompts need it."""
    seen = []
    for chunk in (7, UNCHUNKED):
        model = build("llama").requires_grad_(False)
        with engine_of(model, head_chunk=chunk):
            torch.manual_seed(1)
            embedded = torch.randn(3, LENGTH, zoo.HIDDEN).requires_grad_()
            loss = model(inputs_embeds=embedded, labels=batch(padded=False)["labels"]).loss
            loss.backward()
            seen.append((loss.detach(), {"inputs": embedded.grad}))
    assert_close(*seen)


# ---- uses of logits


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def user_loss(model: Any, data: Any) -> torch.Tensor:
    return loss_of(model(input_ids=data["input_ids"]).logits, data["labels"])


def loss_and_logits(model: Any, data: Any) -> torch.Tensor:
    out = model(**data)
    return out.loss + 0.1 * out.logits.float().logsumexp(-1).square().mean()


def logits_and_loss(model: Any, data: Any) -> torch.Tensor:
    out = model(**data)
    return 0.1 * out.logits.float().logsumexp(-1).square().mean() + out.loss


def sliced(model: Any, data: Any) -> torch.Tensor:
    return model(**data).logits[:, -3:, ::2].square().mean()


def with_temperature(model: Any, data: Any) -> torch.Tensor:
    """Scales logits as preference and policy losses do."""
    logits = model(input_ids=data["input_ids"]).logits
    logits = logits / 0.7
    return -logits.log_softmax(-1).gather(-1, data["input_ids"].unsqueeze(-1)).mean()


def divided_in_place(model: Any, data: Any) -> torch.Tensor:
    out = model(input_ids=data["input_ids"])
    logits = out.logits
    logits /= 0.7
    return loss_of(out.logits, data["labels"])


def divided_by_method_in_place(model: Any, data: Any) -> torch.Tensor:
    out = model(input_ids=data["input_ids"])
    out.logits.div_(0.7)
    return loss_of(out.logits, data["labels"])


def masked(model: Any, data: Any) -> torch.Tensor:
    """A mask that differs by position cannot be applied as one constant to every chunk."""
    logits = model(input_ids=data["input_ids"]).logits
    mask = torch.arange(LENGTH).view(1, -1, 1) % 2
    return loss_of(logits + 3.0 * mask, data["labels"])


def biased(model: Any, data: Any) -> torch.Tensor:
    """One value per vocabulary entry can be applied as a constant to every chunk."""
    logits = model(input_ids=data["input_ids"]).logits
    return model.loss_function(logits + torch.linspace(-1, 1, zoo.VOCAB), data["labels"], zoo.VOCAB)


def a_row_as_long_as_the_vocabulary(model: Any, data: Any) -> torch.Tensor:
    """One value per position, with as many positions as vocabulary entries: must not be mistaken for `biased`."""
    tokens = data["input_ids"].flatten().repeat(2)[: zoo.VOCAB].view(1, -1)
    logits = model(input_ids=tokens).logits
    return loss_of(logits + torch.linspace(-1, 1, zoo.VOCAB).view(1, -1, 1), tokens)


def with_a_learned_scale(model: Any, data: Any) -> torch.Tensor:
    """A factor that needs a gradient."""
    scale = model.model.norm.weight.mean()
    return loss_of(model(input_ids=data["input_ids"]).logits * scale, data["labels"])


def with_accuracy(model: Any, data: Any) -> torch.Tensor:
    out = model(**data)
    with torch.no_grad():
        right = (out.logits.argmax(-1) == data["labels"]).float().mean()
    return out.loss * (1 + right)


def through_the_loss_function_twice(model: Any, data: Any) -> torch.Tensor:
    logits = model(input_ids=data["input_ids"]).logits
    first = model.loss_function(logits, data["labels"], zoo.VOCAB)
    return first + model.loss_function(logits, data["labels"].flip(0), zoo.VOCAB, num_items_in_batch=11)


@pytest.mark.parametrize(
    "use",
    [
        user_loss, loss_and_logits, logits_and_loss, sliced, with_temperature, divided_in_place,
        divided_by_method_in_place, masked, biased, a_row_as_long_as_the_vocabulary, with_a_learned_scale,
        with_accuracy, through_the_loss_function_twice,
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_uses_of_logits(family: str, use: Any):
    """Each use gives the loss and gradients of transformers."""
    plain = build(family)
    model = copy.deepcopy(plain)
    expected = use(plain, batch(padded=False))
    expected.backward()
    with engine_of(model, head_chunk=7):
        loss = use(model, batch(padded=False))
        loss.backward()
        assert_close((loss.detach(), gradients(model)), (expected.detach(), gradients(plain)), tolerance=4e-6)


def test_logits_are_those_of_the_model():
    plain = build("gemma2")
    model = copy.deepcopy(plain)
    with engine_of(model, head_chunk=7):
        logits = model(**batch()).logits
        expected = plain(**batch()).logits
        assert (logits.shape, logits.dtype, logits.ndim, logits.device) == (
            expected.shape, expected.dtype, expected.ndim, expected.device,
        )  # fmt: skip
        assert logits.requires_grad
        assert len(logits) == 3
        assert "LazyLogits" in repr(logits), "printing an output must not compute the logits"
        torch.testing.assert_close(logits + 0, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(logits.detach().numpy(), expected.detach().numpy(), rtol=1e-6, atol=1e-6)
        assert logits[0, 0, 0].item() == pytest.approx(expected[0, 0, 0].item(), rel=1e-5)


def test_nothing_is_recorded_without_gradients():
    model = build("llama")
    with engine_of(model, head_chunk=7):
        out = model(**batch())
        with torch.no_grad():
            doubled = out.logits * 2
        assert not doubled.requires_grad
        assert type(doubled) is torch.Tensor


def test_evaluation_has_plain_logits(chunked: list[int]):
    model = build("llama").eval()
    with engine_of(model, head_chunk=7), torch.no_grad():
        assert type(model(**batch()).logits) is torch.Tensor
    assert chunked == []


def test_logits_read_after_a_step_raise_or_use_the_old_weights():
    """Logits read late are those of the weights of their forward, or an error."""
    model = build("llama")
    with engine_of(model, head_chunk=7) as engine:
        optimizer = engine.optimizer(lr=0.1)
        with torch.no_grad():
            expected = model(**batch()).logits
        out = model(**batch())
        out.loss.backward()
        optimizer.step()
        try:
            with torch.no_grad():
                late = out.logits.clone()
        except UnsupportedCall:
            return
        torch.testing.assert_close(late, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("computed", [True, False])
def test_outputs_can_be_pickled_and_copied(computed: bool):
    model = build("llama")
    with engine_of(model, head_chunk=7):
        out = model(**batch())
        with torch.no_grad():
            expected = out.logits.clone()
        if computed:
            out.logits.sum()
        again = pickle.loads(pickle.dumps(out))
        assert torch.equal(again.logits.detach(), expected)
        assert torch.equal(again.loss.detach(), out.loss.detach())
        detached = copy.deepcopy(out.logits.detach())
        assert torch.equal(detached, expected)


def test_deepcopy_behaves_as_for_plain_logits():
    """PyTorch refuses to deep-copy a tensor that has a graph."""
    plain = build("llama")
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(plain(**batch()))
    model = build("llama")
    with engine_of(model, head_chunk=7):
        with pytest.raises(RuntimeError, match="deepcopy"):
            copy.deepcopy(model(**batch()))
        with torch.no_grad():
            out = model(**batch())
        assert torch.equal(copy.deepcopy(out).logits, out.logits)


def test_saved_with_torch(tmp_path: Path):
    model = build("llama")
    with engine_of(model, head_chunk=7):
        out = model(**batch())
        torch.save(out.logits, tmp_path / "logits.pt")
        again = torch.load(tmp_path / "logits.pt")
        torch.testing.assert_close(again.detach(), (out.logits + 0).detach(), rtol=0, atol=0)


# ---- loss-only evaluation


@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gptj"])
def test_a_loss_without_logits(family: str, inference: Any):
    """The loss has the bits of the training loss and computes one chunk of logits at a time, also before training."""
    model = build(family).eval()
    with engine_of(model, head_chunk=7) as engine:
        with inference(), engine.loss_only():
            model(**batch())
            with LargestLogits(zoo.VOCAB, zoo.HIDDEN) as seen:
                out = model(**batch(1))
        assert seen.rows == 7
        assert not out.loss.requires_grad
        assert torch.equal(out.loss, model(**batch(1)).loss.detach())
        with torch.no_grad():
            expected = model(**batch(1))
        assert type(expected.logits) is torch.Tensor, "loss_only must end with its block"
        torch.testing.assert_close(out.loss, expected.loss, rtol=ROUNDING, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_logits_read_after_a_loss_only_forward(precision: str):
    model = build("gemma2").eval()
    with engine_of(model, head_chunk=7, precision=precision) as engine:
        with torch.no_grad():
            expected = model(**batch()).logits
            with engine.loss_only():
                out = model(**batch())
        assert isinstance(out.logits, LazyLogits)
        assert not out.logits.requires_grad
        assert isinstance(out.logits.float(), LazyLogits)
        assert not (out.logits * 2).requires_grad
        assert torch.equal(out.logits.float() + 0, expected.float())
        assert torch.equal(out.logits.detach(), expected)
        assert not out.logits.argmax(-1).requires_grad


def test_a_loss_of_logits_without_a_graph_has_none():
    model = build("llama").eval()
    with engine_of(model, head_chunk=7) as engine:
        with torch.no_grad(), engine.loss_only():
            out = model(**batch())
        loss = model.loss_function(out.logits, batch()["labels"], zoo.VOCAB)
        assert torch.equal(loss, out.loss)
        assert not loss.requires_grad


def test_loss_only_can_be_nested():
    model = build("llama").eval()
    with engine_of(model, head_chunk=7) as engine, torch.no_grad(), engine.loss_only():
        with engine.loss_only():
            model(**batch())
        assert isinstance(model(**batch()).logits, LazyLogits)


def test_an_error_ends_loss_only():
    model = build("llama").eval()
    with engine_of(model, head_chunk=7) as engine:
        with pytest.raises(ValueError, match="inside"), engine.loss_only():
            raise ValueError("inside")
        with torch.no_grad():
            assert type(model(**batch()).logits) is torch.Tensor


def test_gradients_are_computed_inside_loss_only():
    model = build("llama")
    with engine_of(model, head_chunk=7) as engine, engine.loss_only():
        model(**batch()).loss.backward()
        assert any(gradient is not None for gradient in gradients(model).values())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("metrics", [False, True])
def test_evaluation_of_a_trainer(tmp_path: Path, metrics: bool, bf16: bool):
    """Loss and metrics are those of transformers. All logits exist at once only if metrics need them."""
    metrics_of, rows = [], []
    for kind in (mt.Trainer, transformers.Trainer):
        mt.init(head_chunk=5)
        trainer = kind(
            model=small.llama(), args=small.arguments(tmp_path, per_device_eval_batch_size=4, bf16=bf16),
            train_dataset=small.rows(), eval_dataset=small.rows(8),
            compute_metrics=(lambda seen: {"sum": float(seen.predictions.sum())}) if metrics else None,
        )  # fmt: skip
        trainer.evaluate()  # the check of the first batch
        with LargestLogits(trainer.model.config.vocab_size, trainer.model.config.hidden_size) as seen:
            metrics_of.append(trainer.evaluate())
        rows.append(seen.rows)
    tolerance = 1e-2 if bf16 else ROUNDING
    for name in ("eval_loss", *(["eval_sum"] if metrics else [])):
        assert metrics_of[0][name] == pytest.approx(metrics_of[1][name], rel=tolerance, abs=tolerance)
    assert rows[0] == rows[1] if metrics else rows[0] == 5 < rows[1]


# ---- with a Trainer


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_label_smoothing_through_a_trainer(tmp_path: Path, smoothing: float, chunked: list[int]):
    """Chunk by chunk, and the run is that of transformers."""
    runs = []
    for kind in (mt.Trainer, transformers.Trainer):
        mt.init(head_chunk=5)
        options = {"label_smoothing_factor": smoothing, "gradient_accumulation_steps": 2}
        trainer = kind(model=small.llama(), args=small.arguments(tmp_path, **options), train_dataset=small.rows())
        trainer.train()
        runs.append(trainer)
    assert small.losses(runs[0]) == pytest.approx(small.losses(runs[1]), abs=small.LOSSES)
    assert small.drift(small.snapshot(runs[0].model), small.snapshot(runs[1].model)) < small.WEIGHTS
    assert len(chunked) == 8
    assert all(count > 1 for count in chunked)


def test_smoothed_evaluation_of_a_trainer(tmp_path: Path):
    losses = []
    for kind in (mt.Trainer, transformers.Trainer):
        mt.init(head_chunk=5)
        arguments = small.arguments(tmp_path, label_smoothing_factor=0.1, prediction_loss_only=True)
        trainer = kind(model=small.llama(), args=arguments, eval_dataset=small.rows(8))
        with LargestLogits(trainer.model.config.vocab_size, trainer.model.config.hidden_size) as seen:
            losses.append(trainer.evaluate()["eval_loss"])
        assert seen.rows == (5 if kind is mt.Trainer else 64)
    assert losses[0] == pytest.approx(losses[1], abs=small.LOSSES)


def test_smoothing_divides_the_chunks_of_a_fused_loss(chunked: list[int]):
    """What it computes instead of the fused kernel takes more memory per token."""
    model, values = build("llama"), batch()
    with engine_of(model, head_chunk=8) as engine:
        head = engine._step.head
        assert head is not None
        head.fused, sizes = True, []
        plain = _ChunkedCall.chunk

        def spy(self: Any, weights: Any, hidden: torch.Tensor, start: int) -> torch.Tensor:
            sizes.append(len(hidden))
            return plain(self, weights, hidden, start)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_ChunkedCall, "chunk", spy)
            for smoothing in (0.0, 0.1):
                logits = model(**{name: value for name, value in values.items() if name != "labels"}).logits
                head.chunked(logits, values["labels"], None, -100, smoothing).backward()
                assert max(sizes) == (2 if smoothing else 8)
                sizes.clear()


# ---- memory


class LargestLogits(TorchDispatchMode):
    """The largest number of rows of any tensor with one column per vocabulary entry, from any operation."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self._vocabulary, self._hidden = vocabulary, hidden
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if not isinstance(tensor, torch.Tensor) or isinstance(tensor, LazyLogits) or tensor.ndim < 2:
                continue
            # A transposed weight has as many rows as the hidden state has features.
            if tensor.shape[-1] == self._vocabulary and tensor.shape[0] != self._hidden:
                self.rows = max(self.rows, tensor.shape[:-1].numel())
        return result


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "gptj"])
def test_no_more_than_a_chunk_of_logits_exists(family: str):
    """In forward and backward, including gradients of logits. The batch has 60 tokens and a chunk has 7."""
    rows = {}
    for chunk in (7, UNCHUNKED):
        model = build(family)
        with engine_of(model, head_chunk=chunk):
            model(**batch()).loss.backward()  # the check of the first batch reads up to 64 tokens of one row
            with LargestLogits(zoo.VOCAB, zoo.HIDDEN) as seen:
                model(**batch(1)).loss.backward()
            rows[chunk] = seen.rows
    assert rows == {7: 7, UNCHUNKED: TOKENS}


def test_the_head_is_called_with_one_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch):
    """The calls together cover each row once."""
    rows: list[int] = []
    linear = F.linear

    def spy(x: torch.Tensor, weight: torch.Tensor, *args: Any) -> torch.Tensor:
        if weight.shape[0] == zoo.VOCAB:
            rows.append(x.shape[:-1].numel())
        return linear(x, weight, *args)

    model = build("llama")
    with engine_of(model, head_chunk=7):
        model(**batch()).loss.backward()
        monkeypatch.setattr(F, "linear", spy)
        model(**batch(1)).loss.backward()
    assert rows == [7] * 8 + [4]


def test_a_window_computes_one_chunk_per_micro_batch():
    """Micro-batches of a window pass the head one after the other, each in chunks."""
    model = build("llama")
    with engine_of(model, head_chunk=7) as engine:
        model(**batch()).loss.backward()
        alive: list[int] = []

        def task(seed: int) -> None:
            with LargestLogits(zoo.VOCAB, zoo.HIDDEN) as seen:
                model(**batch(seed)).loss.backward()
            alive.append(seen.rows)

        engine.window([lambda seed=seed: task(seed) for seed in range(3)])
        assert alive == [7, 7, 7]


# ---- the check of the first batch, and models whose head is not chunked


def test_a_mismatch_is_announced_and_the_models_own_loss_is_used(monkeypatch: pytest.MonkeyPatch, announced: Any):
    expected = loss_and_grads("llama", UNCHUNKED)
    loss = Head.chunked
    monkeypatch.setattr(Head, "chunked", lambda self, *args: loss(self, *args) * 1.01)
    got = loss_and_grads("llama", 7)
    assert differences(list(got), list(expected)) == []
    assert sum("differs from the model's own loss" in line for line in announced.messages) == 1


def test_the_check_waits_for_labels(monkeypatch: pytest.MonkeyPatch, announced: Any):
    """A row without labels cannot be compared, because both losses are NaN. The first batch with labels is compared."""
    loss = Head.chunked
    monkeypatch.setattr(Head, "chunked", lambda self, *args: loss(self, *args) * 1.01)
    model = build("llama")
    with engine_of(model, head_chunk=7):
        unlabelled = batch(padded=False)
        unlabelled["labels"][0] = -100
        model(**unlabelled)
        data = batch(padded=False)
        got = model(**data).loss
        assert sum("differs from the model's own loss" in line for line in announced.messages) == 1
    plain = build("llama")
    torch.testing.assert_close(got.detach(), plain(**data).loss.detach(), rtol=ROUNDING, atol=0)


def test_a_match_is_silent(announced: Any):
    loss_and_grads("gemma2", 7)
    assert not [line for line in announced.messages if "chunk" in line]


def test_the_check_runs_once(monkeypatch: pytest.MonkeyPatch):
    checks: list[int] = []
    own_loss = transformers.loss.loss_utils.ForCausalLMLoss
    model = build("llama")
    with engine_of(model, head_chunk=7) as engine:
        monkeypatch.setattr(
            engine._step.head, "model_loss", lambda *args, **kwargs: checks.append(1) or own_loss(*args, **kwargs)
        )
        for seed in range(3):
            model(**batch(seed)).loss.backward()
    assert checks == [1]


def test_a_custom_loss_function_is_not_chunked(chunked: list[int]):
    def custom_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
        return loss_of(logits, labels) * 2 + logits.square().mean()

    plain = build("llama")
    plain.loss_function = custom_loss
    model = copy.deepcopy(plain)
    expected = plain(**batch(padded=False)).loss
    expected.backward()
    with engine_of(model, head_chunk=7):
        out = model(**batch(padded=False))
        assert type(out.logits) is torch.Tensor
        out.loss.backward()
        assert_close((out.loss.detach(), gradients(model)), (expected.detach(), gradients(plain)))
    assert chunked == []


def test_a_loss_function_set_after_attaching_is_used():
    model = build("llama")
    with engine_of(model, head_chunk=7):
        model.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()
        loss = model(**batch()).loss
        loss.backward()
        expected = build("llama")(**batch()).logits.square().mean()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=ROUNDING, atol=0)
        assert gradients(model)["lm_head.weight"].abs().max() > 0


def test_release_restores_the_models_own_loss():
    model = build("llama")
    own_loss = model.loss_function
    engine = engine_of(model, head_chunk=7)
    assert model.loss_function is not own_loss
    engine.release()
    assert model.loss_function is own_loss
    assert type(model(**batch()).logits) is torch.Tensor


class TwoHeads(LlamaForCausalLM):
    """A second head on the hidden state, with a loss of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.second_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> Any:
        kwargs.pop("use_cache", None)
        hidden = self.model(input_ids=input_ids, use_cache=False, **kwargs).last_hidden_state
        one = self.loss_function(self.lm_head(hidden), labels, self.config.vocab_size)
        two = self.loss_function(self.second_head(hidden), labels.flip(1), self.config.vocab_size)
        return one + 0.3 * two


class Mtp(TwoHeads):
    """Multi-token prediction: one head is called on hidden states of two depths, each with a loss."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> Any:
        kwargs.pop("use_cache", None)
        hidden = self.model(input_ids=input_ids, use_cache=False, **kwargs).last_hidden_state
        one = self.loss_function(self.lm_head(hidden), labels, self.config.vocab_size)
        further = torch.tanh(hidden[:, :-1] + hidden[:, 1:])
        two = self.loss_function(self.lm_head(further), labels[:, 1:], self.config.vocab_size)
        return one + 0.3 * two + self.second_head(hidden).square().mean()


class Mixed(TwoHeads):
    """A loss on the sum of two heads' logits."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> Any:
        kwargs.pop("use_cache", None)
        hidden = self.model(input_ids=input_ids, use_cache=False, **kwargs).last_hidden_state
        return self.loss_function(self.lm_head(hidden) + self.second_head(hidden), labels, self.config.vocab_size)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [TwoHeads, Mtp, Mixed])
def test_more_than_one_head(kind: Any, tied: bool, windowed: bool):
    torch.manual_seed(0)
    plain = kind(AutoConfig.for_model("llama", **zoo.ZOO["llama"].config, tie_word_embeddings=tied)).train()
    model = copy.deepcopy(plain)
    data = {name: batch(padded=False)[name] for name in ("input_ids", "labels")}
    expected = plain(**data)
    expected.backward()
    with engine_of(model, head_chunk=7) as engine:

        def task() -> torch.Tensor:
            loss = model(**data)
            loss.backward()
            return loss.detach()

        (loss,) = engine.window([task]) if windowed else [task()]
        assert_close((loss, gradients(model)), (expected.detach(), gradients(plain)), tolerance=4e-6)
