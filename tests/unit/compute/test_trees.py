"""Nested structures are flattened to tensors and rebuilt."""

from collections import OrderedDict, UserDict, namedtuple

import pytest
import torch

from megatrain.compute.trees import containers, entries_of, flatten_tensors, update_entries

Point = namedtuple("Point", ["x", "y"])
A, B, C = (torch.full((2,), float(i)) for i in range(3))


class Shared(UserDict):
    pass


TREES = {
    "tensor": (A, [A]),
    "none": (None, []),
    "no tensors": ({"a": 1, "b": "text", "c": None}, []),
    "tuple": ((A, 1, B), [A, B]),
    "nested": ({"x": [A, (B, None)], "y": {"z": C}}, [A, B, C]),
    "namedtuple": (Point(A, Point(1, B)), [A, B]),
    "ordered dict": (OrderedDict(b=A, a=B), [A, B]),
    "the same twice": ((A, A), [A, A]),
    "user dict": (Shared(x=A, y=[B]), [A, B]),
    "user dict in a list": ([Shared(x=A), B], [A, B]),
    "empty": (((), [], {}, Shared()), []),
}


def same(left, right):
    if isinstance(left, torch.Tensor):
        return left is right
    if type(left) is not type(right):
        return False
    if isinstance(left, dict | UserDict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@pytest.mark.parametrize(("tree", "tensors"), TREES.values(), ids=TREES.keys())
def test_flatten_and_unflatten(tree, tensors):
    tensors_of_tree, spec = flatten_tensors(tree)
    assert len(tensors_of_tree) == len(tensors)
    assert all(a is b for a, b in zip(tensors_of_tree, tensors, strict=True))
    assert same(spec.unflatten(tensors_of_tree), tree)


def test_unflatten_with_other_tensors():
    tensors_of_tree, spec = flatten_tensors({"x": (A, "kept", B)})
    assert same(spec.unflatten([B, C]), {"x": (B, "kept", C)})
    with pytest.raises(ValueError):
        spec.unflatten(tensors_of_tree[:1])


def test_the_spec_holds_no_tensor():
    _, spec = flatten_tensors((A, {"x": B}))
    assert not any(isinstance(leaf, torch.Tensor) for leaf in spec.leaves)


@pytest.mark.parametrize("make", [dict, Shared], ids=["dict", "user dict"])
def test_containers_are_new_objects(make):
    original = make(x=A)
    tensors_of_tree, spec = flatten_tensors((original, [A]))
    rebuilt, items = spec.unflatten([*tensors_of_tree])
    rebuilt["y"] = B
    items.append(B)
    assert list(original) == ["x"]
    assert type(rebuilt) is make


def test_containers_by_position_or_name():
    shared, plain, listed = Shared(), {}, []
    tensors_of_tree = containers((A, shared, listed), {"states": plain, "x": A, "n": 3})
    assert tensors_of_tree == {1: shared, 2: listed, "states": plain}
    assert tensors_of_tree["states"] is plain
    assert tensors_of_tree[2] is listed


def test_entries_are_updated():
    listed, plain = [A], {"x": A}
    update_entries(listed, {0: B, 1: C})
    update_entries(plain, {"x": B, "y": C})
    assert entries_of(listed) == {0: B, 1: C}
    assert entries_of(plain) == {"x": B, "y": C}
    assert entries_of(Shared(x=A)) == {"x": A}
