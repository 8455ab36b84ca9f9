"""Policies do not change results: store = recompute = offload bitwise, alone and mixed.

Compared are the losses, every gradient of every step, the norms, and all roles of all slabs after the last step.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.invariant.test_equal_runs import layers_of
from tests.parity import zoo
from tests.tiny import differences, engine_of, gradients, roles
from torch import nn

import megatrain as mt
from megatrain.compute.rebind import Rebinder, _unchanged
from megatrain.errors import UnsupportedCall
from megatrain.model.blocks import find_blocks
from megatrain.model.transformers_api import load

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_dropout": 0.1},
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "zamba2": {"attention_dropout": 0.1},
    "qwen3_moe": {"output_router_logits": True, "router_aux_loss_coef": 0.1, "attention_dropout": 0.1},
    "gemma3n_text": {"attention_dropout": 0.1},
    "smollm3": {"tie_word_embeddings": True, "attention_dropout": 0.1},
}
"""Plain; tied with dropout in four modules; weights shared by layers; an auxiliary loss; shared keys and values, inputs
per layer; tied, with rotary positions in some layers only.
"""

OTHERS = ("store", "offload")
STEPS = 2
LENGTH = 20
"""Long enough for `offload` to move hidden states to RAM."""

Step = Callable[[nn.Module, int], list[torch.Tensor]]
MIXTURES: dict[str, dict[str, str]] = {
    "layers": {"*layers.0": "store", "*layers.1": "offload", "*h.0": "store", "*h.1": "offload"},
    "around": {"*layers.*": "recompute", "*h.*": "recompute", "*embed*": "offload", "*norm*": "store", "*": "store"},
    "every second": {"*0": "offload", "*2": "store", "*4": "offload"},
}


def two_micro_batches(model: nn.Module, step: int, family: str = "llama") -> list[torch.Tensor]:
    """The second micro-batch is padded."""
    losses = []
    for micro in range(2):
        torch.manual_seed(100 * step + micro)
        loss = model(**zoo.batch(family, 2 * step + micro, length=LENGTH, padded=micro == 1)).loss
        (loss / 2).backward()
        losses.append(loss.detach())
    return losses


def train(
    family: str,
    policy: Any,
    *,
    step: Step | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
    **more: Any,
) -> list[Any]:
    model = zoo.build(family, **FAMILIES[family])
    if prepare is not None:
        prepare(model)
    engine = engine_of(model, **{"precision": "fp32", "policy": policy, **more})
    optimizer = engine.optimizer(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    seen: list[Any] = []
    for number in range(STEPS):
        seen += step(model, number) if step is not None else two_micro_batches(model, number, family)
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(optimizer.grad_norm)
    seen.append(roles(engine))
    seen.append(torch.get_rng_state())
    engine.close()
    return seen


@pytest.fixture(scope="module")
def recomputed() -> Any:
    """The same run under `recompute`, on inline lanes."""
    known: dict[Any, list[Any]] = {}

    def of(family: str, **how: Any) -> list[Any]:
        torch.set_num_threads(1)
        key = (family, *how.items())
        if key not in known:
            known[key] = train(family, "recompute", **how)
        return known[key]

    return of


def assert_equal(left: list[Any], right: list[Any]) -> None:
    found = differences(left, right)
    assert found == [], f"{len(found)} differences, the first at {found[0]}"


@pytest.mark.parametrize("policy", OTHERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_policies_are_equal(family: str, precision: str, policy: str, recomputed: Any):
    # This fails if a recompute does not replay random numbers, if a handle of `store` loses its offset, or if an
    # offloaded tensor is restored with its rows in another order.
    assert_equal(train(family, policy, precision=precision), recomputed(family, precision=precision))


def test_the_runs_draw_random_numbers(recomputed: Any):
    """Otherwise equality would prove nothing about them."""
    dry = train("gpt2", "recompute", prepare=lambda model: model.eval() and None)
    assert differences(dry[:2], recomputed("gpt2", precision="fp32")[:2]) != []


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("family", ["llama", "gpt2", "zamba2", "gemma3n_text"])
def test_mixtures_are_equal(family: str, mixture: str, recomputed: Any):
    lanes = "threads" if mixture == "layers" else "sync"
    names = [spec.label for spec in find_blocks(zoo.build(family, **FAMILIES[family]), load())]
    # A pattern that matches nothing is refused.
    policy = {pattern: how for pattern, how in MIXTURES[mixture].items() if fnmatch.filter(names, pattern)}
    assert len({*policy.values()}) > 1
    assert_equal(train(family, policy, lanes=lanes), recomputed(family, precision="fp32"))


def test_the_first_matching_pattern_chooses_the_policy():
    model = zoo.build("llama")
    engine = engine_of(model, policy={"model.layers.0": "store", "model.layers.*": "offload"})
    chosen = {block.name: engine.memory_limit.policies[block.name] for block in engine.blocks}
    assert chosen["model.layers.0"] == "store", "the first pattern that matches counts"
    assert chosen["model.layers.1"] == chosen["model.layers.2"] == "offload"
    assert {chosen[name] for name in chosen if "layers" not in name} == {"recompute"}
    engine.close()


@pytest.mark.parametrize("lanes", ["sync", "threads"])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("policy", OTHERS)
@pytest.mark.parametrize("family", ["llama", "zamba2"])
def test_slots(family: str, policy: str, slots: int, lanes: str, recomputed: Any):
    """The default is 3. With one slot, every handle of `store` is bound to a slot that held other layers in between."""
    got = train(family, policy, precision="bf16", slots=slots, lanes=lanes)
    assert_equal(got, recomputed(family, precision="bf16"))


# ---- ways to run a step


def autocast_step(model: nn.Module, step: int) -> list[torch.Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(step)
        loss = model(**zoo.batch("llama", step, length=LENGTH)).loss
    loss.backward()
    return [loss.detach()]


def two_forwards_one_backward(model: nn.Module, step: int) -> list[torch.Tensor]:
    torch.manual_seed(step)
    first = model(**zoo.batch("llama", 2 * step, length=LENGTH)).loss
    second = model(**zoo.batch("llama", 2 * step + 1, length=LENGTH + 3)).loss
    (first * 0.25 + second).backward()
    return [first.detach(), second.detach()]


def older_graph_first(model: nn.Module, step: int) -> list[torch.Tensor]:
    """Two graphs are alive; the older one is differentiated first."""
    torch.manual_seed(step)
    losses = [model(**zoo.batch("llama", 2 * step + micro, length=LENGTH)).loss for micro in range(2)]
    for loss in losses:
        loss.backward()
    return [loss.detach() for loss in losses]


def evaluation_between(model: nn.Module, step: int) -> list[torch.Tensor]:
    """Inference uses the slots between a forward and its backward."""
    torch.manual_seed(step)
    loss = model(**zoo.batch("llama", step, length=LENGTH)).loss
    with torch.no_grad():
        looked = model(**zoo.batch("llama", 50 + step, length=LENGTH)).loss
    loss.backward()
    return [loss.detach(), looked]


def own_loss(model: nn.Module, step: int) -> list[torch.Tensor]:
    """Hidden states of every layer enter the loss, so blocks get gradients of several outputs."""
    torch.manual_seed(step)
    output = model(**zoo.batch("llama", step, length=LENGTH), output_hidden_states=True)
    loss = output.logits.float().square().mean() + sum(h.square().mean() for h in output.hidden_states)
    loss.backward()
    return [loss.detach()]


@pytest.mark.parametrize("policy", OTHERS)
@pytest.mark.parametrize(
    "step", [autocast_step, two_forwards_one_backward, older_graph_first, evaluation_between, own_loss]
)
def test_ways_to_run(step: Step, policy: str, recomputed: Any):
    for lanes in ("sync", "threads"):
        assert_equal(train("llama", policy, step=step, lanes=lanes), recomputed("llama", step=step))


def freeze_middle(model: nn.Module) -> None:
    layers_of(model)[1].requires_grad_(False)


def freeze_embedding(model: nn.Module) -> None:
    model.get_input_embeddings().requires_grad_(False)


def freeze_matrices(model: nn.Module) -> None:
    for parameter in layers_of(model).parameters():
        parameter.requires_grad_(parameter.ndim == 1)


@pytest.mark.parametrize("policy", OTHERS)
@pytest.mark.parametrize("prepare", [freeze_middle, freeze_embedding, freeze_matrices])
def test_frozen(prepare: Any, policy: str, recomputed: Any):
    expected = recomputed("llama", prepare=prepare)
    grads = next(entry for entry in expected if isinstance(entry, dict))
    assert any(g is None for g in grads.values())
    assert any(g is not None for g in grads.values())
    assert_equal(train("llama", policy, prepare=prepare), expected)


# ---- exceptions and misuse


@contextlib.contextmanager
def failing(layer: nn.Module, when: str) -> Iterator[None]:
    """The layer's attention raises in its forward, or when a gradient reaches it in the backward."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if when == "forward":
            raise ZeroDivisionError("inside a block")

        def refuse(_: torch.Tensor) -> None:
            raise ZeroDivisionError("inside a block")

        output[0].register_hook(refuse)

    handle = layer.self_attn.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def interrupted(model: nn.Module, when: str) -> None:
    loss = model(**zoo.batch("llama", 77, length=LENGTH)).loss
    if when == "between":
        raise ZeroDivisionError("in the user's code")
    loss.backward()


@pytest.mark.parametrize("lanes", ["sync", "threads"])
@pytest.mark.parametrize("when", ["forward", "between", "backward"])
@pytest.mark.parametrize("policy", ["recompute", *OTHERS])
def test_the_step_after_an_exception_is_bitwise(policy: str, when: str, lanes: str, recomputed: Any):
    def step(model: nn.Module, number: int) -> list[torch.Tensor]:
        broken = contextlib.nullcontext() if when == "between" else failing(layers_of(model)[1], when)
        with pytest.raises(ZeroDivisionError), broken:
            interrupted(model, when)
        for parameter in model.parameters():
            parameter.grad = None
        return two_micro_batches(model, number)

    assert_equal(train("llama", policy, step=step, lanes=lanes), recomputed("llama", precision="fp32"))


@pytest.mark.parametrize("lanes", ["sync", "threads"])
@pytest.mark.parametrize("policy", ["recompute", *OTHERS])
def test_forwards_without_backward_do_not_leak(policy: str, lanes: str):
    """Host memory after 60 abandoned forwards is the same as after 10."""
    model = zoo.build("llama")
    engine = engine_of(model, policy=policy, lanes=lanes)
    two_micro_batches(model, 0)
    held = []
    for number in range(60):
        loss = model(**zoo.batch("llama", number, length=LENGTH)).loss
        del loss
        if number % 10 == 9:
            gc.collect()
            held.append(engine._memory.allocated_bytes)
    assert held[-1] == held[0], f"{held[-1] - held[0]} bytes of host memory leaked in 50 forwards"
    # Memory reused from abandoned graphs must not belong to a live one.
    alive = model(**zoo.batch("llama", 0, length=LENGTH)).loss
    for number in range(3):
        model(**zoo.batch("llama", 10 + number, length=LENGTH))
    for parameter in model.parameters():
        parameter.grad = None
    alive.backward()
    got = gradients(model)
    engine.close()
    fresh = zoo.build("llama")
    with engine_of(fresh):
        fresh(**zoo.batch("llama", 0, length=LENGTH)).loss.backward()
        assert differences(got, gradients(fresh)) == []


class Overwriting(nn.Module):
    """Overwrites a saved tensor after using it."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raised = x.exp()
        result: torch.Tensor = self.own(raised)
        raised.mul_(2)
        return result


@pytest.mark.parametrize("policy", ["recompute", *OTHERS])
def test_a_saved_tensor_that_is_overwritten_is_refused(policy: str):
    """Autograd refuses this too, but hooks on saved tensors disable its check."""
    model = zoo.build("llama")
    layers_of(model)[1].mlp.up_proj = Overwriting(layers_of(model)[1].mlp.up_proj)
    with engine_of(model, policy=policy):
        loss = model(**zoo.batch("llama", 0, length=LENGTH)).loss
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


@pytest.mark.parametrize("when", ["forward", "between", "backward"])
@pytest.mark.parametrize("policy", ["recompute", *OTHERS])
def test_a_graph_that_no_backward_uses_is_freed(policy: str, when: str):
    """Also if nodes save their own outputs (a norm's rsqrt, a softmax): the hooks must not reference the node."""
    model = zoo.build("llama")
    with engine_of(model, policy=policy):
        two_micro_batches(model, 0)
        counts = []
        for _ in range(3):
            broken = contextlib.nullcontext() if when == "between" else failing(layers_of(model)[1], when)
            with contextlib.suppress(ZeroDivisionError), broken:
                interrupted(model, when)
            for parameter in model.parameters():
                parameter.grad = None
            counts.append(tensors_alive())
        assert counts[-1] == counts[0]


@pytest.mark.parametrize("policy", OTHERS)
def test_memory_with_varying_lengths_is_that_of_the_longest(policy: str):
    """Offloaded inputs reuse buffers of longer ones: memory is that of the longest batch, not the sum."""
    model = zoo.build("llama")
    with engine_of(model, policy=policy) as engine:
        for _ in range(2):
            model(**zoo.batch("llama", 0, length=40)).loss.backward()
        held = engine._memory.allocated_bytes
        for length in range(39, 11, -1):
            model(**zoo.batch("llama", length, length=length)).loss.backward()
        assert engine._memory.allocated_bytes == held


def test_losses_that_are_kept_keep_no_inputs():
    """After its backward, a loss that users still refer to takes no RAM for offloaded inputs."""
    model = zoo.build("llama")
    with engine_of(model, policy="offload") as engine:
        kept, held = [], []
        for number in range(3):
            kept.append(model(**zoo.batch("llama", number, length=40)).loss)
            kept[-1].backward()
            held.append(engine._memory.allocated_bytes)
        assert held[2] == held[1]


@pytest.mark.parametrize("policy", OTHERS)
def test_double_backward_is_refused(policy: str):
    model = zoo.build("llama")
    with engine_of(model, policy=policy):
        loss = model(**zoo.batch("llama", 0, length=LENGTH)).loss
        loss.backward(retain_graph=True)
        with pytest.raises(UnsupportedCall, match=rf"ran twice, and policy '{policy}' keeps"):
            loss.backward()


def test_double_backward_works_under_recompute():
    model = zoo.build("llama")
    with engine_of(model):
        loss = model(**zoo.batch("llama", 0, length=LENGTH)).loss
        loss.backward(retain_graph=True)
        once = gradients(model)
        loss.backward()
        assert differences(gradients(model), {name: g * 2 for name, g in once.items()}) == []


@pytest.mark.parametrize("policy", ["recompute", *OTHERS])
def test_the_gradient_of_an_input_does_not_touch_weights(policy: str):
    """`torch.autograd.grad` with respect to inputs keeps accumulated gradients and adds nothing."""
    plain, model = zoo.build("llama"), zoo.build("llama")
    wanted = []
    for each in (plain, model):
        context = engine_of(each, policy=policy) if each is model else contextlib.nullcontext()
        with context:
            each(**zoo.batch("llama", 0, length=LENGTH)).loss.backward()
            before = gradients(each)
            torch.manual_seed(0)
            x = torch.randn(2, LENGTH, zoo.HIDDEN).requires_grad_()
            output = each(inputs_embeds=x, labels=zoo.batch("llama", 1, length=LENGTH)["labels"])
            wanted += torch.autograd.grad(output.loss, [x])
            assert differences(gradients(each), before) == []
    torch.testing.assert_close(wanted[1], wanted[0], rtol=1e-5, atol=1e-7)


def by_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape)
    optimizer.step()


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        layers_of(model)[1].self_attn.q_proj.weight.mul_(1.5)


def by_data(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weight = layers_of(model)[1].self_attn.q_proj.weight
    weight.data = torch.zeros(weight.shape)


@pytest.mark.parametrize("change", [by_step, by_hand, by_data])
@pytest.mark.parametrize("policy", ["recompute", *OTHERS])
def test_weights_changed_before_the_backward_are_refused(policy: str, change: Any):
    """With `store`, handles would be bound to the new weights while the rest of the graph has the old ones."""
    # This fails without `check_versions`.
    model = zoo.build("llama")
    with engine_of(model, policy=policy) as engine:
        optimizer = engine.optimizer(lr=1e-2)
        loss = model(**zoo.batch("llama", 0, length=LENGTH)).loss
        change(model, optimizer)
        with pytest.raises(UnsupportedCall, match="changed between a forward and its backward"):
            loss.backward()
        optimizer.zero_grad()
        model(**zoo.batch("llama", 1, length=LENGTH)).loss.backward()
        assert all(g is not None for g in gradients(model).values())


# ---- where tensors are kept


def block_nodes(loss: torch.Tensor) -> list[Any]:
    """The nodes of blocks in the outer graph."""
    found, waiting = {}, [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = None
            waiting += [following for following, _ in node.next_functions]
    return [node for node in found if "BlockNode" in node.name()]


def test_offload_keeps_no_hidden_state_on_the_device():
    """What the outer graph saves does not grow with depth. Under `recompute` it grows by one input per layer."""
    largest = {}
    for policy in ("recompute", *OTHERS):
        model = zoo.build("llama", num_hidden_layers=5)
        with engine_of(model, policy=policy):
            loss = model(**zoo.batch("llama", 0, length=LENGTH)).loss
            nodes = block_nodes(loss)
            assert len(nodes) == 7, "embedding, five layers and the last norm"
            saved = [max((t.numel() for t in node.saved_tensors if t is not None), default=0) for node in nodes]
            largest[policy] = sorted(saved)
            loss.backward()
    hidden = 2 * LENGTH * zoo.HIDDEN
    assert largest["recompute"][1:] == [hidden] * 6
    # Masks and rotary tables that layers share stay on the device; hidden states do not.
    assert max(largest["offload"]) < hidden
    assert max(largest["store"]) == 0, "the inner graph keeps what it needs"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_store_keeps_no_weights(family: str, monkeypatch: pytest.MonkeyPatch):
    """A copy of a weight in the saved graph would give the right gradients but would not fit."""
    kept: list[torch.Tensor] = []
    handles: list[Any] = []
    pack = Rebinder._pack

    def spy(self: Rebinder, tensor: torch.Tensor) -> Any:
        packed = pack(self, tensor)
        if packed.func is _unchanged:
            kept.append(packed.args[0])
        else:
            handles.append(packed)
        return packed

    monkeypatch.setattr(Rebinder, "_pack", spy)
    model = zoo.build(family)
    matrices = {shape for p in model.parameters() if p.ndim == 2 for shape in (p.shape, p.shape[::-1])}
    with engine_of(model, policy="store", slots=1):
        model(**zoo.batch(family, 0, length=LENGTH)).loss.backward()
    assert len(handles) >= 3 * 4, "at least the matrices of every layer"
    assert kept, "activations are kept"
    assert not [t.shape for t in kept if t.shape in matrices]


@pytest.mark.parametrize("policy", OTHERS)
def test_threads_end_with_the_engine(policy: str):
    before = set(threading.enumerate())
    model = zoo.build("llama")
    with mt.Engine(model, device="cpu", policy=policy, debug=mt.Debug(lanes="threads")):
        two_micro_batches(model, 0)
    assert set(threading.enumerate()) <= before
