"""Each block is one autograd node. Its inputs, outputs, side effects and errors are those of plain PyTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.tiny import WIDTH, Layer, Stack, differences, engine_of, gradients, inputs, roles, same_bits
from torch import nn

from megatrain.errors import MegaTrainError, UnsupportedCall
from megatrain.stream.lanes import ThreadLanes

TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}


class Model(nn.Module):
    """Three layers of one class and the function that calls them."""

    def __init__(self, layer, walk, depth=3):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer() for _ in range(depth))
        self.walk = walk

    def forward(self, x):
        return self.walk(self.layers, x)


def compare(layer, walk, *, x=None, settings=None, steps=2):
    """Compare outputs, gradients of weights and input, and buffers with a plain copy of the model, for some steps."""
    plain = Model(layer, walk)
    model = copy.deepcopy(plain)
    with engine_of(model, **(settings or {})):
        for step in range(steps):
            seen = []
            for each in (plain, model):
                x_in = (inputs(step) if x is None else x.clone()).requires_grad_()
                out = each(x_in)
                out.square().sum().backward()
                seen.append((out.detach(), x_in.grad))
            torch.testing.assert_close(seen[1][0], seen[0][0], **TOLERANCE)
            torch.testing.assert_close(seen[1][1], seen[0][1], **TOLERANCE)
            compare_gradients(model, plain)
            for (name, ours), (_, theirs) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
                torch.testing.assert_close(ours, theirs, msg=name, **TOLERANCE)
    return plain


def compare_gradients(model, plain):
    ours, theirs = gradients(model), gradients(plain)
    for name, expected in theirs.items():
        assert (ours[name] is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(ours[name], expected, **TOLERANCE)


def call_in_order(layers, x):
    for layer in layers:
        x = layer(x)
    return x


# ---- outputs of a block


def test_outputs_changed_in_place_by_the_model():
    def walk(layers, x):
        for layer in layers:
            x = layer(x)
            x += 1
            x.mul_(0.5)
        return x

    compare(Layer, walk)


def test_outputs_changed_in_place_through_a_view():
    def walk(layers, x):
        for layer in layers:
            x = layer(x)
            x[:, 0] = 0.0
        return x

    compare(Layer, walk)


class Doubles(Layer):
    """Changes its input in place if it needs no gradient; otherwise autograd refuses."""

    def forward(self, x):
        return super().forward(x if x.requires_grad else x.mul_(2))


@pytest.mark.parametrize("policy", ["recompute", "offload", "store"])
def test_an_input_changed_in_place_by_the_block_is_refused_unless_its_graph_is_stored(policy):
    plain = Stack(layer=Doubles)
    plain.entry.requires_grad_(False)
    model = copy.deepcopy(plain)
    with engine_of(model, policy=policy):
        if policy != "store":
            with pytest.raises(UnsupportedCall, match=r"layers\.0 changed an input in place"):
                model(inputs(0))
            return
        for each in (plain, model):
            each(inputs(0)).square().sum().backward()
        for name, expected in gradients(plain).items():
            found = gradients(model)[name]
            assert found is expected is None or same_bits(found, expected), name


class Identity(Layer):
    def forward(self, x):
        return x


def test_returns_its_input():
    plain = compare(Identity, call_in_order)
    assert all(p.grad is None for p in plain.parameters())


class InputAndOutput(Layer):
    """Returns its input and an output computed from it."""

    def forward(self, x):
        return x, super().forward(x)


def test_returns_its_input_and_another_tensor():
    def walk(layers, x):
        for layer in layers:
            same, other = layer(x)
            x = same + 0.5 * other
        return x

    compare(InputAndOutput, walk)


class ReturnsWeights(Layer):
    """Returns a weight and a slice of a weight: views of a slot that is soon refilled."""

    def forward(self, x):
        return super().forward(x), self.scale, self.shift[2:5]


@pytest.mark.parametrize("slots", [1, 3])
def test_returns_views_of_its_weights(slots):
    def walk(layers, x):
        kept = []
        for layer in layers:
            x, scale, part = layer(x)
            kept.append((scale, part))
        return x * sum(scale for scale, _ in kept) + torch.cat([part for _, part in kept])[:WIDTH]

    compare(ReturnsWeights, walk, settings={"slots": slots})


def test_views_of_weights_under_no_grad():
    def walk(layers, x):
        kept = []
        for layer in layers:
            x, scale, part = layer(x)
            kept += [scale, part]
        return torch.cat([x.flatten(), *kept])

    plain = Model(ReturnsWeights, walk)
    model = copy.deepcopy(plain)
    with engine_of(model, slots=1), torch.no_grad():
        assert torch.equal(model(inputs(0)), plain(inputs(0)))


class MixedOutputs(Layer):
    """Returns integers, booleans, None, strings and nested structures. Only floats have gradients."""

    def forward(self, x):
        y = super().forward(x)
        return {
            "y": (y, None),
            "order": y.argsort(),
            "positive": y > 0,
            "note": ["text", 3, {"twice": 2 * y}],
            "constant": torch.ones(3),
        }


def test_structures_integers_and_none():
    def walk(layers, x):
        for layer in layers:
            out = layer(x)
            assert out["y"][1] is None
            assert out["order"].dtype == torch.int64
            assert not out["order"].requires_grad
            assert out["positive"].dtype == torch.bool
            assert out["note"][:2] == ["text", 3]
            assert not out["constant"].requires_grad
            x = out["y"][0].gather(1, out["order"]) + out["note"][2]["twice"] * out["positive"]
        return x

    compare(MixedOutputs, walk)


class Twice(Layer):
    def forward(self, x):
        y = super().forward(x)
        return y, y


def test_returns_one_tensor_twice():
    def walk(layers, x):
        for layer in layers:
            first, second = layer(x)
            x = first + second.sin()
        return x

    compare(Twice, walk)


def test_an_unused_output():
    def walk(layers, x):
        for layer in layers:
            x, _ = layer(x)
        return x

    compare(Twice, walk)


# ---- inputs of a block


class Several(Layer):
    def forward(self, x, y, *, options):
        return x * self.scale + y * options["z"][0] + self.shift, y.cos()


def test_gradients_of_several_inputs():
    def walk(layers, x):
        y, z = x.sin(), x.exp()
        for layer in layers:
            x, y = layer(x, y, options={"z": [z], "flag": True})
        return x + y

    compare(Several, walk)


def test_the_same_input_twice():
    def walk(layers, x):
        for layer in layers:
            x, _ = layer(x, x, options={"z": (x,)})
        return x

    compare(Several, walk)


def test_inputs_without_gradient():
    def walk(layers, x):
        constant = torch.linspace(0, 1, WIDTH)
        for layer in layers:
            x, _ = layer(x.detach(), constant, options={"z": [constant]})
        return x

    plain = Model(Several, walk)
    model = copy.deepcopy(plain)
    with engine_of(model):
        for each in (plain, model):
            each(inputs(0)).square().sum().backward()
        compare_gradients(model, plain)
        assert sum(p.grad is not None for p in plain.parameters()) == 2


class Sharing(Layer):
    """Adds, changes and reads entries of dicts and lists that are passed from layer to layer."""

    def forward(self, x, shared, history):
        y = super().forward(x)
        if "sum" in shared:
            y = y + 0.1 * shared["sum"]
        shared["sum"] = shared.get("sum", 0) + y
        shared[f"layer {len(history)}"] = y.sin()
        history.append(y)
        return y


def test_entries_of_dicts_and_lists():
    def walk(layers, x):
        shared, history = {"start": x}, []
        for layer in layers:
            x = layer(x, shared, history)
        assert list(shared) == ["start", "sum", "layer 0", "layer 1", "layer 2"]
        assert len(history) == 3
        return x + shared["sum"] + shared["layer 1"] * history[0] + shared["start"]

    compare(Sharing, walk)


# ---- buffers that a block writes


class Normed(Layer):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return super().forward(self.norm(x))


def test_running_statistics_advance_once_per_forward():
    plain = compare(Normed, call_in_order, x=inputs(0, rows=6))
    assert plain.layers[0].norm.num_batches_tracked == 2


class Counter(Layer):
    """Its output depends on a buffer that it changes in place or replaces."""

    replace = False

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.ones(()))

    def forward(self, x):
        y = super().forward(x) * self.count.clone()
        if self.replace:
            self.count = self.count * 0.5
        else:
            self.count.mul_(0.5)
        return y


class Replacing(Counter):
    replace = True


@pytest.mark.parametrize("layer", [Counter, Replacing])
def test_a_buffer_is_replayed_as_the_forward_saw_it(layer):
    def walk(layers, x):
        return call_in_order(layers, x) + call_in_order(layers, 2 * x)

    plain = compare(layer, walk)
    assert plain.layers[0].count == 0.5**4


# ---- graphs


class Table(nn.Module):
    """Keeps a table for the largest number of rows so far, as RoPE does: a buffer, and its length in an attribute."""

    def __init__(self, grows):
        super().__init__()
        self.lin, self.grows, self.rows = nn.Linear(WIDTH, WIDTH), grows, 0
        self.register_buffer("table", torch.zeros(0 if grows else 8), persistent=False)

    def forward(self, x):
        if len(x) > self.rows:
            self.rows = len(x)
            table = torch.arange(len(x) if self.grows else 8) / len(x)
            self.register_buffer("table", table, persistent=False)
        return x + torch.tanh(self.lin(x) * self.table[: len(x), None])


@pytest.mark.parametrize("policy", ["recompute", "offload", "store"])
@pytest.mark.parametrize("grows", [False, True])
def test_a_recompute_sees_the_attributes_that_belong_to_buffers(grows, policy):
    plain = Stack(layer=lambda: Table(grows))
    model = copy.deepcopy(plain)
    with engine_of(model, policy=policy):
        for rows in (2, 5, 3):
            for each in (plain, model):
                each(inputs(0, rows)).square().sum().backward()
        for name, expected in gradients(plain).items():
            assert same_bits(gradients(model)[name], expected), name
        assert [layer.rows for layer in model.layers] == [5, 5, 5]


def test_backward_twice_through_one_graph():
    plain = Stack()
    model = copy.deepcopy(plain)
    with engine_of(model):
        for each in (plain, model):
            loss = each(inputs(0)).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        compare_gradients(model, plain)


def test_a_layer_used_several_times_in_one_forward():
    def walk(layers, x):
        for _ in range(3):
            x = layers[0](layers[1](x))
        return layers[2](x)

    compare(Layer, walk)


def test_autograd_grad_of_the_input():
    plain = Stack()
    model = copy.deepcopy(plain)
    with engine_of(model):
        slopes = []
        for each in (plain, model):
            x = inputs(0).requires_grad_()
            slopes += torch.autograd.grad(each(x).square().sum(), [x])
        torch.testing.assert_close(slopes[1], slopes[0], **TOLERANCE)


@pytest.mark.parametrize("change", ["step", "write"])
def test_weights_changed_between_forward_and_backward_are_refused(change):
    """The gradient would be that of other weights, so it is refused as in PyTorch. The engine stays usable."""
    plain = Stack()
    model = copy.deepcopy(plain)
    with engine_of(model) as engine:
        optimizer = engine.optimizer(lr=0.0, weight_decay=0.0)
        late = model(inputs(1)).sum()
        if change == "step":
            model(inputs(0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with torch.no_grad():
                model.layers[1].scale.mul_(1.0)
        with pytest.raises(MegaTrainError, match="changed between"):
            late.backward()
        optimizer.zero_grad()
        for each in (plain, model):
            each(inputs(2)).sum().backward()
        compare_gradients(model, plain)


def test_an_unused_graph_leaves_nothing_behind():
    plain = Stack()
    model = copy.deepcopy(plain)
    with engine_of(model):
        for seed in range(3):
            model(inputs(seed))
        for each in (plain, model):
            each(inputs(7)).sum().backward()
        compare_gradients(model, plain)


def test_gradient_hooks_on_parameters():
    plain = Stack()
    model = copy.deepcopy(plain)
    with engine_of(model):
        seen = []
        for each in (plain, model):
            each.layers[0].scale.register_hook(lambda g: g * 2)
            each.layers[1].shift.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad + 0))
            each(inputs(0)).sum().backward()
        compare_gradients(model, plain)
        assert len(seen) == 2
        torch.testing.assert_close(seen[1], seen[0], **TOLERANCE)


# ---- errors in a block


class Raising(Layer):
    """Calls `trap`, which may raise, in the forward and in the recompute."""

    trap = None

    def forward(self, x):
        y = F.dropout(super().forward(x), 0.3, self.training)
        if Raising.trap is not None:
            Raising.trap(self)
        return y


def clean_run(lanes="sync"):
    model = Stack(layer=Raising)
    with engine_of(model, lanes=lanes) as engine:
        optimizer = engine.optimizer(lr=0.1)
        losses = train(model, optimizer)
        return losses, roles(engine)


def train(model, optimizer):
    losses = []
    for seed in range(3):
        torch.manual_seed(seed)
        loss = model(inputs(seed)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("lanes", ["sync", "threads", "delayed"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("phase", ["forward", "backward", "evaluation"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_exception_leaves_a_usable_engine(layer, phase, error, lanes, monkeypatch):
    """After `zero_grad` the run is bitwise equal to one without the exception."""
    expected = clean_run()
    model = Stack(layer=Raising)
    made = ThreadLanes(seed=1, max_delay=3e-4) if lanes == "delayed" else lanes
    with engine_of(model, lanes=made, slots=2) as engine:
        optimizer = engine.optimizer(lr=0.1)

        def trap(module):
            if module is model.layers[layer]:
                raise error("in a layer")

        def attempt():
            if phase == "evaluation":
                monkeypatch.setattr(Raising, "trap", staticmethod(trap))
                with torch.no_grad():
                    model(inputs(50))
            if phase == "forward":
                monkeypatch.setattr(Raising, "trap", staticmethod(trap))
            loss = model(inputs(50)).sum()
            monkeypatch.setattr(Raising, "trap", staticmethod(trap))
            before.append(torch.get_rng_state())
            loss.backward()

        before = []
        with pytest.raises(error, match="in a layer"):
            attempt()
        if phase == "backward":
            assert torch.equal(torch.get_rng_state(), before[0]), "a failed recompute must restore the generator"
        monkeypatch.setattr(Raising, "trap", None)
        optimizer.zero_grad()
        losses = train(model, optimizer)
        assert differences((losses, roles(engine)), expected) == []
        pins = [slot.pins for ring in engine._step.fetcher._rings.values() for slot in ring.slots]
        assert not any(pins)


def test_an_exception_in_a_backward_hook():
    expected = clean_run()
    model = Stack(layer=Raising)
    with engine_of(model) as engine:
        optimizer = engine.optimizer(lr=0.1)
        out = model(inputs(3))
        out.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
        optimizer.zero_grad()
        assert differences((train(model, optimizer), roles(engine)), expected) == []
