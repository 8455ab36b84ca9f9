"""The user's optimizer: like `torch.optim.AdamW`, with exact clipping; steps with non-finite gradients are skipped."""

import copy
import io
import math

import pytest
import torch
from tests.tiny import Stack, differences, engine_of, inputs, roles
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau

from megatrain.errors import CheckpointError, NonFiniteGradients, SettingsError
from megatrain.optim.schedule import MAX_SKIPPED_IN_A_ROW
from megatrain.stream.lanes import ThreadLanes

LANES = {"sync": lambda: "sync", "threads": lambda: ThreadLanes(seed=2, max_delay=2e-4)}


@pytest.fixture(params=LANES.values(), ids=LANES.keys())
def lanes(request):
    return request.param()


class Pair:
    """One model under the engine and one in plain PyTorch, trained side by side."""

    def __init__(self, lanes="sync", groups=None, **options):
        self.plain = Stack()
        self.model = copy.deepcopy(self.plain)
        self.engine = engine_of(self.model, lanes=lanes)
        groups = groups or (lambda model: list(model.parameters()))
        ours = {"max_grad_norm": options.pop("max_grad_norm", None)}
        self.clip = ours["max_grad_norm"]
        self.ours = self.engine.optimizer(groups(self.model), **options, **ours)
        self.theirs = torch.optim.AdamW(groups(self.plain), **{"weight_decay": 0.01, **options}, foreach=False)

    def step(self, seed, skip=(), scale=1.0):
        for model, optimizer in ((self.model, self.ours), (self.plain, self.theirs)):
            optimizer.zero_grad()
            (model(inputs(seed), skip=skip).square().mean() * scale).backward()
            if model is self.plain and self.clip is not None:
                self.norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()

    def check(self):
        for (name, ours), (_, theirs) in zip(self.model.named_parameters(), self.plain.named_parameters(), strict=True):
            torch.testing.assert_close(ours.detach() + 0, theirs.detach(), rtol=1e-5, atol=1e-6, msg=name)
        self.engine.close()


def two_groups(model):
    scales = [p for name, p in model.named_parameters() if "scale" in name]
    others = [p for name, p in model.named_parameters() if "scale" not in name]
    return [{"params": scales, "lr": 0.05, "weight_decay": 0.5}, {"params": others, "betas": (0.5, 0.9), "eps": 1e-4}]


def test_it_is_an_optimizer():
    pair = Pair(lr=0.1)
    assert isinstance(pair.ours, torch.optim.Optimizer)
    assert "megatrain" in repr(pair.ours)
    assert set(pair.ours.defaults) == {"lr", "betas", "eps", "weight_decay"}


def test_steps_equal_torch(lanes):
    pair = Pair(lanes, lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2)
    for seed in range(5):
        pair.step(seed)
    pair.check()


def test_groups_inside_one_slab(lanes):
    pair = Pair(lanes, groups=two_groups, lr=0.01)
    for seed in range(5):
        pair.step(seed)
    pair.check()


def test_a_parameter_without_gradient_neither_decays_nor_counts(lanes):
    pair = Pair(lanes, lr=0.05, weight_decay=0.5)
    for seed, skip in enumerate([(), (1,), (1, 2), (), (0,)]):
        pair.step(seed, skip)
    state = pair.ours.state_dict()["state"]
    numbers = {id(p): i for i, p in enumerate(pair.model.parameters())}
    assert state[numbers[id(pair.model.layers[1].scale)]]["step"] == 3
    assert state[numbers[id(pair.model.layers[0].scale)]]["step"] == 4
    assert state[numbers[id(pair.model.gain)]]["step"] == 5
    pair.check()


def test_a_parameter_outside_every_group_is_not_updated():
    pair = Pair(groups=lambda model: [model.layers[0].scale, model.gain], lr=0.1)
    before = pair.model.layers[0].shift.detach() + 0
    for seed in range(3):
        pair.step(seed)
    assert torch.equal(pair.model.layers[0].shift.detach() + 0, before)
    pair.check()


SCHEDULERS = {
    "lambda": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: CosineAnnealingLR(o, T_max=4),
    "one cycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=8, cycle_momentum=True),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0, factor=0.5),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_schedulers(make, lanes):
    pair = Pair(lanes, lr=0.05)
    schedules = [make(pair.ours), make(pair.theirs)]
    rates = []
    for seed in range(5):
        pair.step(seed)
        for schedule in schedules:
            schedule.step(*([1.0] if isinstance(schedule, ReduceLROnPlateau) else []))
        rates.append(pair.ours.param_groups[0]["lr"])
        assert pair.ours.param_groups[0]["lr"] == pair.theirs.param_groups[0]["lr"]
    assert len(set(rates)) > 2
    pair.check()


def test_a_learning_rate_changed_after_step_counts_for_the_next(lanes):
    pair = Pair(lanes, lr=0.05)
    for seed in range(4):
        pair.step(seed)
        for optimizer in (pair.ours, pair.theirs):
            optimizer.param_groups[0]["lr"] *= 0.1
            optimizer.param_groups[0]["weight_decay"] = 0.3
    pair.check()


def test_a_tensor_as_learning_rate(lanes):
    pair = Pair(lanes, lr=torch.tensor(0.05))
    for seed in range(3):
        pair.step(seed)
        for optimizer in (pair.ours, pair.theirs):
            optimizer.param_groups[0]["lr"].mul_(0.5)
    pair.check()


def test_add_param_group():
    pair = Pair(groups=lambda model: list(model.layers.parameters()), lr=0.05)
    pair.step(0)
    for model, optimizer in ((pair.model, pair.ours), (pair.plain, pair.theirs)):
        optimizer.add_param_group({"params": [model.gain, *model.entry.parameters()], "lr": 0.01})
    for seed in range(1, 4):
        pair.step(seed)
    pair.check()
    with pytest.raises(ValueError, match="more than one parameter group"):
        pair.ours.add_param_group({"params": [pair.model.gain]})


def test_parameters_of_another_model_are_refused():
    pair = Pair(lr=0.1)
    with pytest.raises(SettingsError, match="does not belong"):
        pair.engine.optimizer(list(Stack().parameters()))


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1e-8}, {"weight_decay": -0.1}, {"max_grad_norm": 0.0}],
    ids=str,
)
def test_impossible_options_are_refused(options):
    pair = Pair(lr=0.1)
    with pytest.raises(SettingsError):
        pair.engine.optimizer(**options)


def test_closure(lanes):
    pair = Pair(lanes, lr=0.05)
    for model, optimizer in ((pair.model, pair.ours), (pair.plain, pair.theirs)):

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(inputs(0)).square().mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure) for _ in range(3)]
        assert losses[2] < losses[0]
    pair.check()


def test_hooks_around_a_step():
    pair = Pair(lr=0.1)
    seen = []
    pair.ours.register_step_pre_hook(lambda *_: seen.append("before"))
    pair.ours.register_step_post_hook(lambda *_: seen.append("after"))
    pair.step(0)
    assert seen == ["before", "after"]


# ---- clipping and norms


def test_max_grad_norm_equals_clipping_by_torch(lanes):
    pair = Pair(lanes, lr=0.05, max_grad_norm=0.5)
    clipped = []
    for seed, scale in enumerate([1.0, 1e-3, 100.0, 1.0]):
        pair.step(seed, scale=scale)
        assert pair.ours.grad_norm == pytest.approx(pair.norm.item(), rel=1e-5)
        clipped.append(pair.ours.grad_norm > 0.5)
    assert set(clipped) == {True, False}
    pair.check()


def test_grad_norm_before_any_step():
    pair = Pair(lr=0.1)
    with pytest.raises(SettingsError, match="no step"):
        _ = pair.ours.grad_norm


def test_engine_grad_norm_is_of_what_is_accumulated(lanes):
    pair = Pair(lanes, lr=0.1)
    for seed in range(3):
        for model in (pair.model, pair.plain):
            model(inputs(seed)).square().mean().backward()
        exact = torch.cat([p.grad.double().flatten() for p in pair.plain.parameters()]).norm().item()
        assert pair.engine.grad_norm() == pytest.approx(exact, rel=1e-6)
    pair.ours.step()
    assert pair.ours.grad_norm == pytest.approx(exact, rel=1e-6)
    pair.engine.close()


def test_a_step_without_gradients_changes_nothing():
    pair = Pair(lr=0.1)
    before = roles(pair.engine)
    pair.ours.step()
    assert pair.ours.grad_norm == 0.0
    assert differences(roles(pair.engine), before) == []


def test_zero_grad_drops_gradients(lanes):
    pair = Pair(lanes, lr=0.1)
    for seed in range(2):
        pair.model(inputs(seed)).sum().backward()
    pair.ours.zero_grad()
    assert all(p.grad is None for p in pair.model.parameters())
    pair.ours.zero_grad(set_to_none=False)
    pair.step(5)
    pair.check()


# ---- non-finite gradients


def poison(model, value):
    (model(inputs(0)).sum() * value).backward()


@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_non_finite_gradient_skips_the_step(value, precision, lanes, caplog):
    model = Stack()
    engine = engine_of(model, lanes=lanes, precision=precision)
    optimizer = engine.optimizer(lr=0.1, weight_decay=0.1)
    for seed in range(2):
        model(inputs(seed)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = roles(engine)
    caplog.clear()
    poison(model, value)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert not math.isfinite(optimizer.grad_norm)
    optimizer.zero_grad()
    assert differences(roles(engine), before) == []
    assert engine.counters.skipped_steps == 1
    assert engine.counters.steps == 2
    assert caplog.text.count("step was skipped") == 1
    model(inputs(2)).sum().backward()
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert differences(roles(engine), before) != []
    engine.close()


def test_a_single_bad_element_skips_all_parameters(lanes):
    model = Stack()
    engine = engine_of(model, lanes=lanes)
    optimizer = engine.optimizer(lr=0.1)
    model(inputs(0)).sum().backward()
    before = roles(engine)
    model.gain.grad[3] = math.nan
    optimizer.step()
    assert optimizer.step_was_skipped
    assert differences(roles(engine), before) == []
    engine.close()


def test_ten_skipped_steps_in_a_row_raise_and_training_continues(lanes):
    model = Stack()
    engine = engine_of(model, lanes=lanes)
    optimizer = engine.optimizer(lr=0.1)
    before = roles(engine)

    def bad_steps(count):
        for _ in range(count):
            poison(model, math.nan)
            optimizer.step()
            optimizer.zero_grad()
        engine.synchronize()
        model(inputs(0))

    bad_steps(MAX_SKIPPED_IN_A_ROW - 1)
    with pytest.raises(NonFiniteGradients, match=f"{MAX_SKIPPED_IN_A_ROW} steps in a row"):
        bad_steps(1)
    optimizer.zero_grad()
    assert differences(roles(engine), before) == []
    assert engine.counters.skipped_steps == MAX_SKIPPED_IN_A_ROW

    model(inputs(1)).sum().backward()
    optimizer.step()
    assert not optimizer.step_was_skipped
    engine.synchronize()

    fresh = Stack()
    other = engine_of(fresh)
    clean = other.optimizer(lr=0.1)
    fresh(inputs(1)).sum().backward()
    clean.step()
    assert differences(roles(engine), roles(other)) == []
    engine.close()


def test_a_good_step_resets_the_count_of_skipped_steps(lanes):
    model = Stack()
    engine = engine_of(model, lanes=lanes)
    optimizer = engine.optimizer(lr=0.1)
    for step in range(2 * MAX_SKIPPED_IN_A_ROW):
        if step == MAX_SKIPPED_IN_A_ROW - 1:
            model(inputs(0)).sum().backward()
        else:
            poison(model, math.inf)
        optimizer.step()
        optimizer.zero_grad()
        engine.synchronize()
        if step == 2 * MAX_SKIPPED_IN_A_ROW - 2:
            break
    assert engine.counters.skipped_steps == 2 * MAX_SKIPPED_IN_A_ROW - 2
    engine.close()


# ---- state


def trained(precision="fp32", lanes="sync", steps=3):
    model = Stack()
    engine = engine_of(model, precision=precision, lanes=lanes)
    optimizer = engine.optimizer(two_groups(model), lr=0.02, max_grad_norm=0.5)
    for seed in range(steps):
        optimizer.zero_grad()
        model(inputs(seed), skip=(1,) if seed == 1 else ()).square().mean().backward()
        optimizer.step()
    return model, engine, optimizer


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_dict_into_a_fresh_engine(precision, lanes):
    """Through a file; training then continues bitwise."""
    model, engine, optimizer = trained(precision, lanes)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    fresh, other, restored = trained(precision, steps=1)
    fresh.load_state_dict(saved["model"])
    restored.load_state_dict(saved["optimizer"])
    assert differences(roles(other), roles(engine)) == []
    assert restored.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for seed in range(5, 8):
        for each, each_optimizer in ((model, optimizer), (fresh, restored)):
            each_optimizer.zero_grad()
            each(inputs(seed)).square().mean().backward()
            each_optimizer.step()
    assert differences(roles(other), roles(engine)) == []
    engine.close()


def test_state_dict_has_the_low_bits_of_parameters_without_a_step():
    """Otherwise an FP32 master would be rounded to BF16 when weights and state are put back."""
    model = Stack()
    engine = engine_of(model, precision="bf16")
    optimizer = engine.optimizer(lr=0.1)
    before = roles(engine)
    weights = {name: value + 0 for name, value in model.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    model(inputs(0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert differences(roles(engine), before) == []
    engine.close()


def test_state_dict_right_after_a_step_is_complete():
    """On slow lanes: step counts and moments are those of the last step."""
    counts = []
    for lanes in ("sync", ThreadLanes(seed=1, max_delay=1e-2)):
        _, engine, optimizer = trained(lanes=lanes, steps=2)
        state = optimizer.state_dict()["state"]
        counts.append({number: (entry["step"].item(), entry["exp_avg"].clone()) for number, entry in state.items()})
        engine.close()
    assert differences(counts[0], counts[1]) == []
    assert len(counts[0]) == 9


def test_state_of_torch_adamw_can_be_loaded():
    pair = Pair(lr=0.05)
    for seed in range(2):
        pair.step(seed)
    fresh = Stack()
    fresh.load_state_dict(pair.plain.state_dict())
    engine = engine_of(fresh)
    optimizer = engine.optimizer(lr=0.7)
    optimizer.load_state_dict(pair.theirs.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.05
    for seed in range(2, 5):
        pair.theirs.zero_grad()
        optimizer.zero_grad()
        for model in (pair.plain, fresh):
            model(inputs(seed)).square().mean().backward()
        pair.theirs.step()
        optimizer.step()
    pair.model = fresh
    pair.check()
    engine.close()


def test_our_state_loads_into_torch_adamw():
    model, engine, optimizer = trained()
    plain = Stack()
    plain.load_state_dict({name: value + 0 for name, value in model.state_dict().items()})
    theirs = torch.optim.AdamW(two_groups(plain), lr=0.5)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    first = theirs.param_groups[0]["params"][0]
    assert theirs.state[first]["step"] == 3
    assert torch.equal(theirs.state[first]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    engine.close()


def test_a_state_with_different_groups_is_refused_and_changes_nothing():
    _, engine, optimizer = trained()
    before = roles(engine)
    other = torch.optim.AdamW(Stack().parameters()).state_dict()
    with pytest.raises(CheckpointError, match="same groups"):
        optimizer.load_state_dict(other)
    assert differences(roles(engine), before) == []
    engine.close()


def test_a_second_optimizer_starts_with_fresh_state():
    model, engine, _ = trained()
    weights = {name: value + 0 for name, value in model.state_dict().items()}
    again = engine.optimizer(lr=0.1)
    assert again.state_dict()["state"] == {}
    assert all(torch.equal(model.state_dict()[name] + 0, weights[name]) for name in weights)
    plain = Stack()
    plain.load_state_dict(weights)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for each, optimizer in ((model, again), (plain, theirs)):
        optimizer.zero_grad()
        each(inputs(9)).square().mean().backward()
        optimizer.step()
    for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.detach() + 0, other.detach(), rtol=1e-5, atol=1e-6)
    engine.close()
