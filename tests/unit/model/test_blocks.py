"""Which modules become blocks, in models of different structure."""

import pytest
import torch
from tests.parity import zoo
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from megatrain.errors import NothingToStream, UnsupportedModel
from megatrain.model import transformers_api
from megatrain.model.blocks import find_blocks


class Marked(GradientCheckpointingLayer):
    def __init__(self, *children):
        super().__init__()
        self.own = nn.Linear(2, 2)
        self.parts = nn.ModuleList(children)


class Holder(nn.Module):
    """A module with the given children and parameters."""

    def __init__(self, **members):
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)


def linears(count=2):
    return nn.ModuleList(nn.Linear(2, 2) for _ in range(count))


def names_and_kinds(model):
    return [(item.name, "loose" if item.loose else "layer" if item.layer else "rest") for item in find(model)]


def find(model):
    return find_blocks(model, transformers_api.load())


def assert_complete(model):
    """Every parameter is in a block, and no block is inside another."""
    items = find(model)
    covered = {id(parameter) for item in items for _, parameter in item.parameters()}
    assert covered == {id(parameter) for parameter in model.parameters()}
    modules_of_blocks = [item.module for item in items if not item.loose]
    for module in modules_of_blocks:
        assert not any(part is other for part in module.modules() for other in modules_of_blocks if other is not module)


def test_marked_layers_and_remaining_modules():
    model = Holder(embed=nn.Embedding(5, 2), body=nn.ModuleList([Marked(), Marked()]), head=nn.Linear(2, 5))
    assert names_and_kinds(model) == [("embed", "rest"), ("body.0", "layer"), ("body.1", "layer"), ("head", "rest")]
    assert_complete(model)


def test_the_outermost_of_nested_marked_layers():
    model = Holder(body=nn.ModuleList([Marked(Marked(), Marked()), Marked()]))
    assert names_and_kinds(model) == [("body.0", "layer"), ("body.1", "layer")]
    assert_complete(model)


def test_one_marked_layer_is_enough():
    assert names_and_kinds(Holder(only=Marked())) == [("only", "layer")]


def test_a_repeated_list_without_marks():
    model = Holder(first=nn.Linear(2, 2), blocks=linears(3))
    assert names_and_kinds(model) == [
        ("first", "rest"),
        ("blocks.0", "layer"),
        ("blocks.1", "layer"),
        ("blocks.2", "layer"),
    ]
    assert_complete(model)


def test_the_outermost_of_nested_lists():
    model = Holder(blocks=nn.ModuleList(Holder(inner=linears()) for _ in range(2)))
    assert names_and_kinds(model) == [("blocks.0", "layer"), ("blocks.1", "layer")]
    assert_complete(model)


def test_lists_of_several_kinds():
    """Members of a class that repeats are layers. Other members are not."""
    model = Holder(blocks=nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2)]))
    assert names_and_kinds(model) == [("blocks.0", "layer"), ("blocks.1", "rest"), ("blocks.2", "layer")]
    assert_complete(model)


def test_members_without_parameters_are_not_blocks():
    model = Holder(blocks=nn.ModuleList([nn.Linear(2, 2), nn.ReLU(), nn.ReLU(), nn.Linear(2, 2)]))
    assert names_and_kinds(model) == [("blocks.0", "layer"), ("blocks.3", "layer")]


def test_lists_beside_marked_layers():
    """Lists inside a marked layer are not split. Other repeated lists are streamed."""
    model = Holder(body=nn.ModuleList([Marked(linears()), Marked()]), towers=linears())
    assert names_and_kinds(model) == [
        ("body.0", "layer"),
        ("body.1", "layer"),
        ("towers.0", "layer"),
        ("towers.1", "layer"),
    ]
    assert_complete(model)


def test_a_list_member_that_contains_marked_layers_is_split():
    stages = nn.ModuleList(Holder(down=nn.Linear(2, 2), layers=nn.ModuleList([Marked(), Marked()])) for _ in range(2))
    model = Holder(stages=stages)
    assert names_and_kinds(model) == [
        ("stages.0.down", "rest"),
        ("stages.0.layers.0", "layer"),
        ("stages.0.layers.1", "layer"),
        ("stages.1.down", "rest"),
        ("stages.1.layers.0", "layer"),
        ("stages.1.layers.1", "layer"),
    ]
    assert_complete(model)


def test_sequential_is_the_last_resort():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert names_and_kinds(model) == [("0", "layer"), ("2", "layer")]
    inside = Holder(blocks=nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)))
    assert names_and_kinds(inside) == [("blocks.0", "layer"), ("blocks.1", "layer")]


def test_remaining_parameters_go_to_their_topmost_owner():
    """A module with parameters of its own is one block with its children. A module without is split."""
    owner = Holder(weight=nn.Parameter(torch.zeros(2)), child=nn.Linear(2, 2))
    model = Holder(opened=Holder(a=nn.Linear(2, 2), b=nn.Linear(2, 2)), owner=owner, blocks=linears())
    assert names_and_kinds(model)[:3] == [("opened.a", "rest"), ("opened.b", "rest"), ("owner", "rest")]
    assert_complete(model)


def test_loose_parameters_around_layers():
    model = Holder(table=nn.Parameter(torch.zeros(3)), blocks=linears())
    assert names_and_kinds(model) == [("", "loose"), ("blocks.0", "layer"), ("blocks.1", "layer")]
    (loose, *_) = find(model)
    assert [name for name, _ in loose.parameters()] == ["table"]
    assert_complete(model)


def test_tied_parameters_are_listed_under_every_name():
    embed, head = nn.Embedding(5, 2), nn.Linear(2, 5, bias=False)
    head.weight = embed.weight
    model = Holder(embed=embed, blocks=linears(), head=head)
    assert [name for name, _ in names_and_kinds(model)] == ["embed", "blocks.0", "blocks.1", "head"]
    items = find(model)
    assert items[0].parameters()[0][1] is items[-1].parameters()[0][1]
    inner = nn.Linear(2, 2, bias=False)
    shared = Holder(a=inner, b=inner)
    (item, _) = find(Holder(blocks=nn.ModuleList([shared, Holder(a=nn.Linear(2, 2), b=nn.Linear(2, 2))])))
    assert [name for name, _ in item.parameters()] == ["a.weight", "b.weight"]


def test_a_module_used_under_two_names_is_one_block():
    layer = nn.Linear(2, 2)
    model = Holder(blocks=nn.ModuleList([layer, nn.Linear(2, 2), layer]))
    assert names_and_kinds(model) == [("blocks.0", "layer"), ("blocks.1", "layer")]
    assert_complete(model)


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
        Holder(blocks=nn.ModuleList([nn.Linear(2, 2)])),
        Holder(blocks=nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)])),
        Holder(blocks=nn.ModuleList([nn.ReLU(), nn.ReLU()]), other=nn.Linear(2, 2)),
    ],
    ids=["linear", "sequential", "list of one", "list of two kinds", "list without parameters"],
)
def test_without_repeated_layers_all_parameters_are_loose(model):
    blocks = find(model)
    assert blocks
    assert all(block.loose for block in blocks)
    assert_complete(model)


def test_a_model_without_parameters_is_refused():
    with pytest.raises(NothingToStream, match="no parameters"):
        find(nn.ReLU())


def test_weights_on_meta_are_refused_by_name():
    with torch.device("meta"):
        model = Holder(blocks=linears())
    with pytest.raises(UnsupportedModel, match=r"blocks\.0\.weight is on the meta device"):
        find(model)


def test_a_dtype_that_cannot_be_trained_is_refused_unless_frozen():
    model = Holder(blocks=linears())
    model.blocks[1].double()
    with pytest.raises(UnsupportedModel, match=r"blocks\.1\.weight is torch\.float64"):
        find(model)
    model.blocks[1].requires_grad_(False)
    assert len(find(model)) == 2


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen3_moe", "zamba2"])
def test_architectures_are_covered(name):
    model = zoo.build(name)
    assert_complete(model)
    layers = [item for item in find(model) if item.layer]
    assert len(layers) >= 2
    assert all("layers." in item.name or ".h." in item.name for item in layers)
