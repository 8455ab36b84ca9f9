"""Stored parameters behave like ordinary parameters, and every write reaches the store."""

import copy
import io
import threading

import numpy as np
import pytest
import torch
from tests.tiny import Stack, differences, engine_of, inputs, roles
from torch import nn

from megatrain.errors import MegaTrainError
from megatrain.store.parameter import StoreTensor
from megatrain.store.split import join
from megatrain.stream.lanes import ThreadLanes


@pytest.fixture(params=["fp32", "bf16"])
def pair(request):
    """A model attached to an engine, and a plain copy of it."""
    plain = Stack()
    model = copy.deepcopy(plain)
    if request.param == "bf16":
        plain, model = plain.bfloat16(), model.bfloat16()
    engine = engine_of(model, precision=request.param)
    yield model, plain
    engine.close()


def stored(parameter):
    """The bytes in the store, read without the tensor subclass."""
    segment = parameter.slab.layout.segments[parameter.segment]
    return parameter.slab.weight[segment.offset : segment.end].view(segment.shape).clone()


def assert_same(model, plain):
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(stored(ours), theirs), name
        assert torch.equal(ours.detach() + 0, theirs), name


# ---- reading


def test_shape_dtype_and_kind(pair):
    model, plain = pair
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(ours, nn.Parameter)
        assert (ours.shape, ours.stride(), ours.dtype, ours.device) == (
            theirs.shape,
            theirs.stride(),
            theirs.dtype,
            theirs.device,
        )
        assert ours.requires_grad
        assert ours.is_leaf
        assert ours.numel() == theirs.numel()
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())


def test_repr_shows_values():
    model = Stack()
    with engine_of(model):
        with torch.no_grad():
            model.gain.fill_(0.125)
        assert repr(model.gain).startswith("Parameter(")
        assert "0.1250" in repr(model.gain)
        assert "StoreTensor(" in repr(model.gain.detach())


def test_conversion_to_python_numbers(pair):
    model, plain = pair
    ours, theirs = model.entry.weight, plain.entry.weight
    assert ours.tolist() == theirs.tolist()
    assert ours[0, 1].item() == theirs[0, 1].item()
    assert float(ours[2, 3].detach()) == float(theirs[2, 3].detach())
    assert [row.sum().item() for row in ours] == [row.sum().item() for row in theirs]
    assert f"{ours[0, 0].detach():.3f}" == f"{theirs[0, 0].detach():.3f}"
    assert len(ours) == len(theirs)


def test_numpy():
    model = Stack()
    expected = model.entry.weight.detach().numpy().copy()
    with engine_of(model):
        assert np.array_equal(model.entry.weight.detach().numpy(), expected)
        assert np.array_equal(model.entry.weight.detach().cpu().numpy(), expected)
        assert np.array_equal(np.asarray(model.entry.weight.detach()), expected)
        assert np.asarray(model.entry.weight.detach(), dtype=np.float64).dtype == np.float64


def test_comparisons(pair):
    model, plain = pair
    ours, theirs = model.layers[0].scale, plain.layers[0].scale
    assert torch.equal(ours, theirs)
    assert torch.allclose(ours, theirs)
    assert bool((ours == theirs).all())
    assert (ours > 0).tolist() == (theirs > 0).tolist()
    assert not torch.equal(ours, model.layers[1].scale)
    assert ours is model.layers[0].scale
    assert len({ours, model.layers[0].scale, model.layers[1].scale}) == 2


def test_arithmetic_gives_plain_tensors(pair):
    model, plain = pair
    with torch.no_grad():
        assert type(model.gain * 2) is torch.Tensor
        assert torch.equal(model.gain * 2, plain.gain * 2)
        assert torch.equal(
            inputs(0).to(plain.gain.dtype) @ model.entry.weight.t(),
            inputs(0).to(plain.gain.dtype) @ plain.entry.weight.t(),
        )
        assert torch.equal(
            torch.cat([model.gain, model.layers[0].scale]), torch.cat([plain.gain, plain.layers[0].scale])
        )
        assert type(model.gain.clone()) is torch.Tensor


# ---- writing

WRITES = {
    "in place": lambda m: m.gain.mul_(0.5),
    "copy_": lambda m: m.gain.copy_(torch.arange(8.0)),
    "by detach": lambda m: m.gain.detach().add_(1),
    "by data": lambda m: m.gain.data.add_(1),
    "data set": lambda m: setattr(m.gain, "data", torch.arange(8.0).to(m.gain.dtype)),
    "element": lambda m: m.gain.__setitem__(3, 5.0),
    "slice": lambda m: m.entry.weight.__setitem__((slice(1, 3), slice(None, None, 2)), 5.0),
    "mask": lambda m: m.entry.weight.__setitem__(m.entry.weight > 0, 0.0),
    "row view": lambda m: m.entry.weight[2].zero_(),
    "transposed view": lambda m: m.entry.weight.t()[1].fill_(2.0),
    "view": lambda m: m.entry.weight.view(-1)[10:20].neg_(),
    "split views": lambda m: m.entry.weight.split(4)[1].mul_(3),
    "unbound views": lambda m: m.entry.weight.unbind(1)[2].mul_(3),
    "diagonal": lambda m: m.entry.weight.diagonal().fill_(1.0),
    "out": lambda m: torch.add(m.gain.detach(), 1, out=m.gain.detach()),
    "foreach": lambda m: torch._foreach_mul_([p.detach() for p in m.parameters()], 0.25),
    "foreach lists": lambda m: torch._foreach_add_([m.gain.detach()], [m.layers[0].scale.detach()]),
    "lerp (moving average)": lambda m: m.gain.lerp_(m.layers[0].scale, 0.5),
    "clamp": lambda m: m.entry.weight.clamp_(-0.1, 0.1),
    "index_copy_": lambda m: m.entry.weight.index_copy_(
        0, torch.tensor([0, 2]), torch.ones(2, 8, dtype=m.gain.dtype)
    ),
    "init.constant_": lambda m: nn.init.constant_(m.gain, 0.5),
    "init.zeros_": lambda m: nn.init.zeros_(m.entry.bias),
    "init.eye_": lambda m: nn.init.eye_(m.entry.weight),
    "init.normal_": lambda m: nn.init.normal_(m.entry.weight),
    "init.uniform_": lambda m: nn.init.uniform_(m.entry.weight),
    "init.xavier_uniform_": lambda m: nn.init.xavier_uniform_(m.entry.weight),
    "init.kaiming_normal_": lambda m: nn.init.kaiming_normal_(m.entry.weight),
    "init.trunc_normal_": lambda m: nn.init.trunc_normal_(m.entry.weight),
    "reset_parameters": lambda m: m.entry.reset_parameters(),
    "to_vector and back": lambda m: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(m.parameters()) * 2, m.parameters()
    ),
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_reaches_only_its_elements_of_the_store(write, pair):
    model, plain = pair
    before = [p.detach().clone() for p in plain.parameters()]
    for target in (model, plain):
        torch.manual_seed(1)
        with torch.no_grad():
            write(target)
    assert any(not torch.equal(a, b) for a, b in zip(before, plain.parameters(), strict=True))
    assert_same(model, plain)


def test_a_forward_uses_what_was_written(pair):
    model, plain = pair
    x = inputs(0).to(plain.gain.dtype)
    model(x)
    for target in (model, plain):
        with torch.no_grad():
            target.layers[1].scale.fill_(0.5)
            target.gain.data[0] = 9.0
    assert torch.equal(model(x), plain(x))


def test_load_state_dict(pair):
    model, plain = pair
    other = {name: value + 1 for name, value in plain.state_dict().items()}
    plain.load_state_dict(other)
    model.load_state_dict(other)
    assert_same(model, plain)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**other, "gain": torch.ones(3)})


def test_a_write_sets_the_split_master_exactly():
    """A write replaces the low half of the old master; the low halves of its neighbours stay."""
    model = Stack()
    exact = model.layers[0].shift.detach().clone()
    with engine_of(model, precision="bf16"):
        scale, shift = model.layers[0].scale, model.layers[0].shift
        assert scale.slab.residual.any()
        with torch.no_grad():
            scale[2:5].fill_(1.5)
        master = join(scale.slab.weight, scale.slab.residual)
        assert master[2:5].tolist() == [1.5] * 3
        segment = shift.slab.layout.segments[shift.segment]
        assert torch.equal(master[segment.offset : segment.end], exact)


def test_data_of_another_shape_is_refused(pair):
    model, plain = pair
    with pytest.raises(MegaTrainError, match="resize the model before"):
        model.gain.data = torch.ones(9)
    assert_same(model, plain)


def test_the_optimizer_sees_writes():
    weights = {}
    for lanes in ("sync", ThreadLanes(seed=0)):
        model = Stack()
        with engine_of(model, lanes=lanes) as engine:
            optimizer = engine.optimizer(lr=0.1)
            for step in range(3):
                model(inputs(step)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    model.layers[1].scale.fill_(float(step))
            weights[str(lanes)[:4]] = {k: v + 0 for k, v in model.state_dict().items()}
        assert weights[str(lanes)[:4]]["layers.1.scale"].tolist() == [2.0] * 8
    (first, second) = weights.values()
    assert all(torch.equal(first[name], second[name]) for name in first)


# ---- gradients


def backward(*models):
    for model in models:
        model(inputs(0).to(model.gain.dtype)).sum().backward()


def test_grad_is_none_until_there_is_one(pair):
    model, plain = pair
    assert all(p.grad is None for p in model.parameters())
    backward(model, plain)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
        assert (ours.grad.shape, ours.grad.dtype) == (theirs.grad.shape, theirs.grad.dtype)
        assert ours.grad.is_leaf


def test_setting_grad_to_none_drops_it_and_the_next_replaces_it(pair):
    model, plain = pair
    backward(model, plain)
    for target in (model, plain):
        target.layers[0].scale.grad = None
        del target.layers[1].shift.grad
        assert target.layers[0].scale.grad is None
        assert target.layers[0].shift.grad is not None
    backward(model, plain)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


GRADIENT_CHANGES = {
    "assigned": lambda m: setattr(m.gain, "grad", torch.arange(8.0).to(m.gain.dtype)),
    "assigned where there was none": lambda m: setattr(m.layers[0].scale, "grad", torch.ones(8, dtype=m.gain.dtype)),
    "in place": lambda m: m.gain.grad.mul_(0.5),
    "element": lambda m: m.entry.weight.grad.__setitem__((0, 0), 7.0),
    "operator": lambda m: setattr(m.gain, "grad", m.gain.grad + 1),
    "zeroed": lambda m: m.gain.grad.zero_(),
    "data": lambda m: m.gain.grad.data.mul_(2),
    "detach": lambda m: m.gain.grad.detach().mul_(2),
    "foreach": lambda m: torch._foreach_mul_([p.grad for p in m.parameters() if p.grad is not None], 0.5),
    "clip_grad_value_": lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01),
}


@pytest.mark.parametrize("change", GRADIENT_CHANGES.values(), ids=GRADIENT_CHANGES.keys())
def test_a_changed_gradient_is_what_the_optimizer_uses(change):
    """Compared with a plain model, changed by hand. The first moment after one step shows the gradient."""
    plain = Stack()
    model = copy.deepcopy(plain)
    with engine_of(model) as engine:
        optimizer = engine.optimizer(lr=0.0, betas=(0.0, 0.5), weight_decay=0.0)
        for target in (model, plain):
            target(inputs(0), skip=(0,)).sum().backward()
            with torch.no_grad():
                change(target)
        for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            assert theirs.grad is None or torch.equal(ours.grad, theirs.grad), name
        norm = torch.cat([p.grad.double().flatten() for p in plain.parameters() if p.grad is not None]).norm()
        assert engine.grad_norm() == pytest.approx(norm.item(), rel=1e-12)
        optimizer.step()
        state = optimizer.state_dict()["state"]
        for number, theirs in enumerate(plain.parameters()):
            assert (number in state) == (theirs.grad is not None)
            if theirs.grad is not None:
                assert torch.equal(state[number]["exp_avg"], theirs.grad)


@pytest.mark.parametrize("tier", ["ram", "held_gradients", "resident"])
def test_a_gradient_that_is_changed_after_a_step_is_not_what_the_step_uses(tier):
    """The update may still be pending."""
    results = []
    for lanes in ("sync", ThreadLanes(seed=0, max_delay=5e-3)):
        model = Stack()
        with engine_of(model, lanes=lanes, **({} if tier == "ram" else {tier: ("*",)})) as engine:
            optimizer = engine.optimizer(lr=0.1)
            model(inputs(0)).sum().backward()
            optimizer.step()
            for parameter in model.parameters():
                parameter.grad.zero_()
            results.append(roles(engine))
    assert differences(*results) == []


def test_clip_grad_norm(pair):
    model, plain = pair
    backward(model, plain)
    ours, theirs = (nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, plain))
    assert torch.equal(ours, theirs)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_a_gradient_of_another_shape_is_refused(pair):
    model, _ = pair
    with pytest.raises(MegaTrainError, match="shape"):
        model.gain.grad = torch.ones(3)
    assert model.gain.grad is None


def test_views_have_no_gradient_of_their_own(pair):
    model, plain = pair
    backward(model, plain)
    assert model.gain.detach().grad is None
    assert model.gain.data.grad is None
    with pytest.raises(MegaTrainError, match="parameter itself"):
        model.gain.detach().grad = torch.ones(8)


def test_gradient_of_a_parameter_used_outside_any_block(pair):
    model, plain = pair
    for target in (model, plain):
        (target.layers[1].scale.sum() + target.gain.square().sum()).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert theirs.grad is None or torch.equal(ours.grad, theirs.grad)


def test_autograd_grad_of_a_parameter_used_outside_any_block():
    model = Stack()
    with engine_of(model):
        (gradient,) = torch.autograd.grad(model.gain.square().sum(), [model.gain])
        assert torch.equal(gradient, 2 * (model.gain.detach() + 0))
        assert model.gain.grad is None


# ---- copies and files


def test_state_dict_is_current_right_after_a_step():
    """On slow lanes: reading waits for the update."""
    results = []
    for lanes in ("sync", ThreadLanes(seed=3, max_delay=5e-3)):
        model = Stack()
        with engine_of(model, lanes=lanes) as engine:
            before = {name: value.clone() for name, value in model.state_dict().items()}
            optimizer = engine.optimizer(lr=0.1)
            model(inputs(0)).sum().backward()
            optimizer.step()
            after = {name: value.clone() for name, value in model.state_dict().items()}
        assert not any(torch.equal(before[name], after[name]) for name in before)
        results.append(after)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_saved_state_dict_is_plain(pair):
    model, plain = pair
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert all(type(value) is torch.Tensor for value in loaded.values())
    plain.load_state_dict(loaded)
    assert_same(model, plain)
    assert len(file.getvalue()) < 100_000


def test_saved_parameter_is_plain(pair):
    model, plain = pair
    file = io.BytesIO()
    torch.save(model.gain, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is nn.Parameter
    assert torch.equal(loaded, plain.gain)


def test_a_model_cannot_be_deep_copied_but_its_state_can(pair):
    model, plain = pair
    for thing in (model, model.gain, model.layers[0]):
        with pytest.raises(MegaTrainError, match="cannot be deep-copied"):
            copy.deepcopy(thing)
    kept = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.gain.zero_()
    assert torch.equal(kept["gain"], plain.gain)
    assert not isinstance(kept["gain"], StoreTensor)


def test_state_dict_values_are_views_of_the_store(pair):
    model, plain = pair
    state, expected = model.state_dict(), plain.state_dict()
    with torch.no_grad():
        model.gain.fill_(3.0)
        plain.gain.fill_(3.0)
    assert torch.equal(state["gain"], expected["gain"])


def test_frozen_and_unfrozen():
    model = Stack()
    with engine_of(model):
        model.layers[0].scale.requires_grad_(False)
        backward(model)
        assert model.layers[0].scale.grad is None
        assert model.layers[0].shift.grad is not None
        model.layers[0].scale.requires_grad_(True)
        backward(model)
        assert model.layers[0].scale.grad is not None


def test_frozen_before_the_engine_and_unfrozen_later():
    plain = Stack()
    plain.layers[0].requires_grad_(False)
    model = copy.deepcopy(plain)
    with engine_of(model) as engine:
        model.layers[0].requires_grad_(True)
        plain.layers[0].requires_grad_(True)
        optimizer = engine.optimizer(lr=0.1)
        reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
        for _ in range(2):
            backward(model, plain)
            for one in (optimizer, reference):
                one.step()
                one.zero_grad()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.detach() + 0, theirs.detach(), rtol=1e-5, atol=1e-6)


# ---- interrupted


def test_a_gradient_left_by_an_interrupted_backward_is_dropped():
    """Ctrl-C arrives after autograd has added the gradient and before the store takes it."""
    model = Stack()
    with engine_of(model) as engine:
        optimizer = engine.optimizer(lr=0.1)
        torch.Tensor.grad.__set__(model.gain, torch.ones_like(model.gain))
        optimizer.zero_grad()
        (2 * model.gain).sum().backward()
        assert torch.equal(model.gain.grad.clone(), torch.full((8,), 2.0))


def test_a_slab_that_is_fetched_while_it_is_written_is_fetched_again():
    model = Stack()
    with engine_of(model):
        plain = torch.Tensor.copy_
        seen = []

        def copy_(self, values, **options):
            if not seen:
                # Another thread runs the model during the write.
                seen.append(True)
                thread = threading.Thread(target=lambda: model(inputs(0)))
                thread.start()
                thread.join()
            return plain(self, values, **options)

        torch.Tensor.copy_ = copy_
        try:
            with torch.no_grad():
                model.layers[1].scale.fill_(0.0)
                model.layers[1].shift.fill_(0.0)
        finally:
            torch.Tensor.copy_ = plain
        with torch.no_grad():
            assert torch.equal(model.layers[1](inputs(0)), inputs(0))
