"""Uses of a model around its blocks give the same results with the engine as without."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import compare, zoo
from .compare import (
    adopted,
    assert_gradients_match,
    assert_runs_match,
    assert_weights_match,
    backward_in_both,
    engine_adamw,
    gradients_of,
    torch_adamw,
    train,
    train_both,
    weights_of,
)

FAMILIES = ("llama", "gpt2", "gemma2", "qwen3_moe")
"""An untied model, a tied one with biases, a tied one with two kinds of layers, and one with experts."""


def steps(name: str, count: int = compare.STEPS) -> list[list[compare.Batch]]:
    return zoo.windows(name, count)


def without_labels(batch: compare.Batch) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if key != "labels"}


# ---- frozen and tied weights


def freeze(modules: list[nn.Module]) -> None:
    for module in modules:
        module.requires_grad_(False)


@pytest.mark.parametrize("name", FAMILIES)
def test_frozen_embedding(name: str):
    """Layers must get gradients even if nothing before them requires a gradient."""
    model = zoo.build(name, tie_word_embeddings=False)
    freeze([model.get_input_embeddings()])
    before = model.get_input_embeddings().weight.detach().clone()
    reference, ours = train_both(model, steps(name))
    assert len(ours.gradients[0]) == len(ours.weights) - 1
    assert_runs_match(name, reference, ours)
    assert torch.equal(model.get_input_embeddings().weight + 0, before)


@pytest.mark.parametrize("frozen", [(0, 2), (1,), (0, 1)], ids=str)
def test_frozen_layers(frozen: tuple[int, ...]):
    model = zoo.build("llama")
    freeze([model.model.layers[index] for index in frozen])
    before = weights_of(model)
    reference, ours = train_both(model, steps("llama"))
    assert_runs_match("llama", reference, ours)
    for key in before:
        expected_frozen = any(f"layers.{index}." in key for index in frozen)
        assert torch.equal(ours.weights[key], before[key]) == expected_frozen, key


def test_only_the_norms_train():
    """Every block has both frozen and trained parameters."""
    model = zoo.build("qwen3")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    reference, ours = train_both(model, steps("qwen3"))
    assert all("norm" in name for name in ours.gradients[0])
    assert_runs_match("qwen3", reference, ours)


def test_only_the_head_trains():
    """No layer needs a gradient."""
    model = zoo.build("llama")
    freeze([model.model])
    reference, ours = train_both(model, steps("llama"))
    assert set(ours.gradients[0]) == {"lm_head.weight"}
    assert_runs_match("llama", reference, ours)


def test_freezing_after_attaching():
    def scenario(model: nn.Module) -> Tensor:
        freeze([model.model.layers[1]])
        loss = model(**zoo.batch("llama", 0)).loss
        loss.backward()
        return loss.detach()

    backward_in_both("llama", zoo.build("llama"), scenario)


def test_unfreezing_after_attaching():
    def scenario(model: nn.Module) -> Tensor:
        model.model.layers[1].requires_grad_(True)
        loss = model(**zoo.batch("llama", 0)).loss
        loss.backward()
        return loss.detach()

    model = zoo.build("llama")
    freeze([model.model.layers[1]])
    backward_in_both("llama", model, scenario)


def test_weights_and_gradients_changed_by_hand():
    def scenario(model: nn.Module) -> Tensor:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
            model.model.layers[0].mlp.up_proj.weight[3].zero_()
        loss = model(**zoo.batch("llama", 0)).loss
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
        model.model.norm.weight.grad = None
        return loss.detach()

    loss = backward_in_both("llama", zoo.build("llama"), scenario)
    assert loss != zoo.build("llama")(**zoo.batch("llama", 0)).loss


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_tied_embeddings(name: str, tied: bool):
    model = zoo.build(name, tie_word_embeddings=tied)
    plain = deepcopy(model)
    reference = train(plain, torch_adamw(plain), steps(name))
    with adopted(model) as engine:
        ours = train(model, engine_adamw(engine), steps(name))
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert (embedding is head) == tied
        assert torch.equal(embedding + 0, head + 0) == tied
        assert [key for key, _ in model.named_parameters()] == [key for key, _ in plain.named_parameters()]
        assert set(model.state_dict()) == set(plain.state_dict())
    assert_runs_match(name, reference, ours)


# ---- forwards and backwards in any order


@pytest.mark.parametrize("name", FAMILIES)
def test_two_forwards_before_one_backward(name: str):
    def scenario(model: nn.Module) -> list[Tensor]:
        first = model(**zoo.batch(name, 0)).loss
        second = model(**zoo.batch(name, 1, length=13)).loss
        (first + 3 * second).backward()
        return [first.detach(), second.detach()]

    backward_in_both(name, zoo.build(name, **zoo.ZOO[name].dropout), scenario)


def test_backwards_in_the_order_of_the_forwards():
    """Each recompute replays its own random numbers."""

    def scenario(model: nn.Module) -> Tensor:
        first = model(**zoo.batch("gpt2", 0)).loss
        second = model(**zoo.batch("gpt2", 1)).loss
        first.backward()
        second.backward()
        return torch.rand(())

    backward_in_both("gpt2", zoo.build("gpt2", **zoo.ZOO["gpt2"].dropout), scenario)


def test_backward_twice_through_one_graph():
    def scenario(model: nn.Module) -> Tensor:
        loss = model(**zoo.batch("llama", 0)).loss
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.detach()

    backward_in_both("llama", zoo.build("llama"), scenario)


def test_a_forward_without_backward_has_no_effect():
    def scenario(model: nn.Module) -> Tensor:
        model(**zoo.batch("llama", 0)).loss  # noqa: B018
        loss = model(**zoo.batch("llama", 1)).loss
        loss.backward()
        return loss.detach()

    backward_in_both("llama", zoo.build("llama"), scenario)


def test_model_zero_grad_clears():
    def scenario(model: nn.Module) -> None:
        model(**zoo.batch("llama", 0)).loss.backward()
        model.zero_grad()
        assert not gradients_of(model)
        model(**zoo.batch("llama", 1)).loss.backward()

    backward_in_both("llama", zoo.build("llama"), scenario)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_after_an_exception(where: str):
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    def scenario(model: nn.Module) -> Tensor:
        if where == "forward":
            handle = model.model.layers[2].register_forward_pre_hook(fail)
            with pytest.raises(ZeroDivisionError):
                model(**zoo.batch("llama", 0))
            handle.remove()
        else:
            output = model(**zoo.batch("llama", 0), output_hidden_states=True)
            output.hidden_states[1].register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                output.loss.backward()
            model.zero_grad()
        loss = model(**zoo.batch("llama", 1)).loss
        loss.backward()
        return loss.detach()

    backward_in_both("llama", zoo.build("llama"), scenario)


# ---- custom losses


@pytest.mark.parametrize("name", [*FAMILIES, "t5"])
def test_custom_loss_on_logits(name: str):
    def scenario(model: nn.Module) -> Tensor:
        batch = zoo.batch(name, 0)
        inputs = batch if zoo.ZOO[name].encoder_decoder else without_labels(batch)
        logits = model(**inputs).logits
        loss = (logits.logsumexp(-1) * torch.linspace(0, 1, logits.shape[1])).mean() + logits[0, 3, 5].square()
        loss.backward()
        return loss.detach()

    backward_in_both(name, zoo.build(name), scenario)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_on_every_hidden_state(name: str):
    def scenario(model: nn.Module) -> list[Tensor]:
        output = model(**zoo.batch(name, 0), output_hidden_states=True)
        assert len(output.hidden_states) == model.config.num_hidden_layers + 1
        penalty = sum(weight * h.pow(2).mean() for weight, h in enumerate(output.hidden_states, start=1))
        (output.loss + penalty).backward()
        return [output.loss.detach(), *(hidden.detach() for hidden in output.hidden_states)]

    backward_in_both(name, zoo.build(name), scenario)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_on_one_hidden_state_only(name: str):
    """Layers after this hidden state have no gradient, not a gradient of zero."""

    def scenario(model: nn.Module) -> Tensor:
        hidden = model(**without_labels(zoo.batch(name, 0)), output_hidden_states=True).hidden_states[1]
        loss = (hidden * torch.linspace(-1, 1, hidden.shape[-1])).sum()
        loss.backward()
        last = [p for key, p in model.named_parameters() if f".{model.config.num_hidden_layers - 1}." in key]
        assert last
        assert all(parameter.grad is None for parameter in last)
        return hidden.detach()

    backward_in_both(name, zoo.build(name), scenario)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_on_attentions(name: str):
    def scenario(model: nn.Module) -> list[Tensor]:
        output = model(**zoo.batch(name, 0), output_attentions=True)
        assert len(output.attentions) == model.config.num_hidden_layers
        entropy = sum(-(a * (a + 1e-9).log()).sum() for a in output.attentions)
        (output.loss + 0.01 * entropy).backward()
        return [attention.detach() for attention in output.attentions]

    attentions = backward_in_both(name, zoo.build(name, attention="eager"), scenario)
    assert attentions[0].shape == (2, zoo.HEADS, zoo.LENGTH, zoo.LENGTH)


def test_gradient_of_the_input_embeddings():
    embeddings = torch.randn(2, zoo.LENGTH, zoo.HIDDEN, generator=torch.Generator().manual_seed(0))

    def scenario(model: nn.Module) -> Tensor:
        inputs = embeddings.clone().requires_grad_()
        model(inputs_embeds=inputs, labels=zoo.batch("llama", 0)["labels"]).loss.backward()
        assert inputs.grad is not None
        return inputs.grad

    gradient = backward_in_both("llama", zoo.build("llama"), scenario)
    assert gradient.abs().max() > 1e-4


@pytest.mark.parametrize("key", ["lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_penalty_on_a_parameter(key: str):
    def scenario(model: nn.Module) -> Tensor:
        loss = model(**zoo.batch("llama", 0)).loss + 0.1 * model.get_parameter(key).pow(2).sum()
        loss.backward()
        return loss.detach()

    backward_in_both("llama", zoo.build("llama"), scenario)


def test_a_loss_of_a_penalty_only():
    def scenario(model: nn.Module) -> Tensor:
        loss = sum(parameter.square().sum() for parameter in model.model.layers[0].parameters())
        loss.backward()
        return loss.detach()

    backward_in_both("llama", zoo.build("llama"), scenario)


@pytest.mark.parametrize("tied", [True, False])
def test_head_applied_by_hand(tied: bool):
    """Fused losses call the inner model and read the head's weight directly."""

    def scenario(model: nn.Module) -> Tensor:
        hidden = model.model(input_ids=zoo.batch("llama", 0)["input_ids"]).last_hidden_state
        loss = F.linear(hidden, model.lm_head.weight).logsumexp(-1).mean()
        loss.backward()
        return loss.detach()

    backward_in_both("llama", zoo.build("llama", tie_word_embeddings=tied), scenario)


def test_gradient_of_an_attention_bias():
    """A second tensor that requires a gradient is passed to every block."""
    causal = torch.ones(2, 1, zoo.LENGTH, zoo.LENGTH).tril().log()

    def scenario(model: nn.Module) -> Tensor:
        bias = torch.zeros_like(causal, requires_grad=True)
        model(**zoo.batch("llama", 0), attention_mask=causal + bias).loss.backward()
        assert bias.grad is not None
        return bias.grad

    gradient = backward_in_both("llama", zoo.build("llama", attention="eager"), scenario)
    assert gradient.abs().max() > 1e-5


# ---- hooks


@pytest.mark.parametrize("hooked", ["before", "after"])
@pytest.mark.parametrize("name", FAMILIES)
def test_forward_hook_fires_once_and_sees_the_output(name: str, hooked: str):
    """The hook is registered before or after the engine attaches."""

    def record_outputs(model: nn.Module) -> list[Tensor]:
        seen: list[Tensor] = []
        layers = model.get_decoder().layers if name != "gpt2" else model.transformer.h
        layers[1].register_forward_hook(lambda _, args, output: seen.append(hidden_of(output).detach() + 0))
        return seen

    plain = zoo.build(name)
    expected = record_outputs(plain)
    plain(**zoo.batch(name, 0)).loss.backward()

    model = zoo.build(name)
    seen = record_outputs(model) if hooked == "before" else []
    with adopted(model):
        if hooked == "after":
            seen = record_outputs(model)
        model(**zoo.batch(name, 0)).loss.backward()
        assert len(seen) == len(expected) == 1
        torch.testing.assert_close(seen[0], expected[0], rtol=1e-6, atol=1e-6)
        with torch.no_grad():
            model(**zoo.batch(name, 1))
        assert len(seen) == 2


def hidden_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_forward_hook_that_changes_the_output(name: str):
    def scenario(model: nn.Module) -> Tensor:
        layers = model.get_decoder().layers if name != "gpt2" else model.transformer.h

        def double(module: nn.Module, args: Any, output: Any) -> Any:
            return output * 2 if isinstance(output, Tensor) else (output[0] * 2, *output[1:])

        handle = layers[1].register_forward_hook(double)
        changed = model(**zoo.batch(name, 0)).loss
        changed.backward()
        handle.remove()
        unchanged = model(**zoo.batch(name, 0)).loss
        assert changed != unchanged
        return changed.detach()

    backward_in_both(name, zoo.build(name), scenario)


def test_forward_pre_hook_that_changes_the_input():
    def scenario(model: nn.Module) -> Tensor:
        model.model.layers[2].register_forward_pre_hook(lambda _, args: (args[0] + 0.5, *args[1:]))
        loss = model(**zoo.batch("llama", 0)).loss
        loss.backward()
        return loss.detach()

    loss = backward_in_both("llama", zoo.build("llama"), scenario)
    assert loss != zoo.build("llama")(**zoo.batch("llama", 0)).loss


# ---- evaluation and generation


@pytest.mark.parametrize("name", zoo.ALL)
def test_evaluation(name: str):
    """Evaluation with and without gradients matches and does not change later training."""
    model = zoo.build(name, **zoo.ZOO[name].dropout)
    batch = zoo.batch(name, 5, padded=True)
    plain = deepcopy(model)
    plain.eval()
    with torch.no_grad():
        expected = plain(**batch).logits
    expected_with_grad = plain(**batch).logits.detach()
    plain.train()
    reference = train(plain, torch_adamw(plain), steps(name, 1))

    with adopted(model) as engine:
        model.eval()
        with torch.no_grad():
            logits = model(**batch).logits
        assert not logits.requires_grad
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(model(**batch).logits.detach(), expected_with_grad, rtol=1e-6, atol=1e-6)
        model.train()
        ours = train(model, engine_adamw(engine), steps(name, 1))
    assert_runs_match(name, reference, ours)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3_moe", "gpt_oss", "mamba2", "t5", "bart"])
def test_generate(name: str):
    """Greedy generation with a cache and left padding matches and does not change later training."""
    model = zoo.build(name)
    plain = deepcopy(model)
    expected, reference = train_generate_train(name, plain, torch_adamw(plain))
    with adopted(model) as engine:
        generated, ours = train_generate_train(name, model, engine_adamw(engine))
        assert torch.equal(generated, expected)
    torch.testing.assert_close(ours.losses, reference.losses, rtol=1e-5, atol=1e-5)
    assert_weights_match(name, reference, ours)


def train_generate_train(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Tensor, compare.Run]:
    """The generated tokens, and the training before and after as one run."""
    first = train(model, optimizer, steps(name, 2))
    prompt = without_labels(zoo.batch(name, 9, padded=True))
    prompt = {key: value[::2] for key, value in prompt.items()}  # the left-padded row and the full one
    model.eval()
    output = model.generate(
        **prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False, return_dict_in_generate=True
    )
    model.train()
    if name in ("llama", "gpt2", "qwen3_moe"):
        assert output.past_key_values.get_seq_length() == zoo.LENGTH + 12 - 1
    second = train(model, optimizer, steps(name, 2))
    run = replace(
        second,
        losses=first.losses + second.losses,
        logits=first.logits + second.logits,
        gradients=first.gradients + second.gradients,
    )
    return output.sequences, run


def test_packed_documents_do_not_attend_to_each_other():
    """Two documents in one row are separated only by their positions.

    Plain transformers needs `use_cache=False` for this. The engine always trains without a cache."""
    name, cut = "llama", 8
    batch = zoo.batch(name, 0)
    positions = torch.cat([torch.arange(cut), torch.arange(zoo.LENGTH - cut)]).expand(2, -1)
    packed = {**batch, "position_ids": positions}

    model = zoo.build(name)
    plain = deepcopy(model)
    expected = plain(**packed, use_cache=False)
    expected.loss.backward()
    alone = plain(input_ids=batch["input_ids"][:, cut:]).logits
    torch.testing.assert_close(expected.logits[:, cut:], alone, rtol=1e-5, atol=1e-5)

    with adopted(model):
        output = model(**packed)
        output.loss.backward()
        torch.testing.assert_close(output.logits, expected.logits, rtol=1e-6, atol=1e-6)
        assert_gradients_match(name, gradients_of(plain), gradients_of(model))


# ---- clipping and learning rate schedules


@pytest.mark.parametrize("limit", [0.05, 1e3])
def test_clip_grad_norm(limit: float):
    """`torch.nn.utils.clip_grad_norm_` reads and scales the gradients through the parameters."""

    def scenario(model: nn.Module) -> Tensor:
        model(**zoo.batch("gemma2", 0)).loss.backward()
        return torch.nn.utils.clip_grad_norm_(model.parameters(), limit) + 0

    norm = backward_in_both("gemma2", zoo.build("gemma2"), scenario)
    assert (norm > limit) == (limit < 1)


def test_steps_clipped_by_torch():
    """A constant scale has no effect in Adam, so the limit differs between steps."""
    name = "llama"
    model = zoo.build(name)
    plain = deepcopy(model)
    with adopted(model) as engine:
        for trained, optimizer in ((plain, torch_adamw(plain)), (model, engine_adamw(engine))):
            for seed, limit in enumerate((0.01, 1.0, 0.1, 0.5, 0.02)):
                trained(**zoo.batch(name, seed)).loss.backward()
                torch.nn.utils.clip_grad_norm_(trained.parameters(), limit)
                optimizer.step()
                optimizer.zero_grad()
        assert_close_weights(model, plain)


def assert_close_weights(model: nn.Module, plain: nn.Module) -> None:
    torch.testing.assert_close(weights_of(model), weights_of(plain), rtol=0, atol=compare.WEIGHT)


def test_max_grad_norm_equals_clipping_by_hand():
    """A constant scale has no effect in Adam, so the losses differ in scale and some steps are not clipped."""
    name, limit = "llama", 0.3
    sizes = (1.0, 0.02, 0.5, 0.05, 1.0)
    model = zoo.build(name)
    plain = deepcopy(model)
    reference = torch_adamw(plain)
    with adopted(model) as engine:
        ours = engine_adamw(engine, max_grad_norm=limit)
        clipped = []
        for seed, size in enumerate(sizes):
            (size * plain(**zoo.batch(name, seed)).loss).backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), limit)
            reference.step()
            reference.zero_grad()

            (size * model(**zoo.batch(name, seed)).loss).backward()
            assert float(engine.grad_norm()) == pytest.approx(norm.item(), rel=1e-4)
            clipped.append(bool(norm > limit))
            ours.step()
            ours.zero_grad()
        assert clipped == [True, False, True, False, True]
        assert_close_weights(model, plain)


def test_learning_rate_schedule():
    name = "llama"
    model = zoo.build(name)
    plain = deepcopy(model)
    with adopted(model) as engine:
        optimizers = [(plain, torch_adamw(plain)), (model, engine_adamw(engine))]
        for trained, optimizer in optimizers:
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
            for seed in range(compare.STEPS):
                trained(**zoo.batch(name, seed)).loss.backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        assert_close_weights(model, plain)


# ---- autocast and layer drop


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen3"])
@pytest.mark.parametrize("dropout", [False, True])
def test_autocast(name: str, dropout: bool):
    """FP32 weights with BF16 compute. The backward runs outside autocast, and its recomputes run inside it."""

    def scenario(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(**zoo.batch(name, 0))
        output.loss.backward()
        return output.logits.detach()

    model = zoo.build(name, **(zoo.ZOO[name].dropout if dropout else {}))
    with torch.no_grad():
        full = model(**zoo.batch(name, 0)).logits
    logits = backward_in_both(None, model, scenario)
    assert (logits.float() - full).abs().max() > 1e-4


@pytest.mark.parametrize("seed", range(4))
def test_layer_drop(seed: int):
    """Layers that are skipped at random have no gradient, and dropout in the other layers still matches."""
    dropped: set[str] = set()

    def scenario(model: nn.Module) -> list[Tensor]:
        losses = []
        for batch_seed in range(3):
            model.zero_grad()
            loss = model(**zoo.batch("bart", batch_seed)).loss
            loss.backward()
            losses.append(loss.detach())
        dropped.update(key for key, parameter in model.named_parameters() if parameter.grad is None)
        return losses

    model = zoo.build("bart", encoder_layerdrop=0.5, decoder_layerdrop=0.5, **zoo.ZOO["bart"].dropout)
    backward_in_both("bart", model, scenario, seed=seed)
    assert dropped, "no layer was dropped with this seed"


def test_training_with_layer_drop():
    model = zoo.build("bart", encoder_layerdrop=0.5, decoder_layerdrop=0.5)
    reference, ours = train_both(model, steps("bart"))
    assert any(len(gradients) < len(ours.weights) for gradients in ours.gradients)
    assert_runs_match("bart", reference, ours)
