"""`except mt.MegaTrainError` catches everything that MegaTrain raises: every exception class derives from it."""

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatrain as mt
from megatrain import errors

SOURCE = Path(__file__).parents[3] / "src" / "megatrain"
INTERNAL = {"EvaluationCut", "_AllCompiled", "_NothingToLeaveOut", "Stalled", "TransferFailed"}
"""Raised and caught inside MegaTrain: to leave an evaluation when the run must end, a forward, a
compilation, or a transfer that failed or is stalled."""
BUILTIN = {
    name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
}


def foreign(source: str) -> Iterator[str]:
    """Exception classes that derive from built-in ones only."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
            if bases & BUILTIN and not bases - BUILTIN:
                yield node.name


def test_every_exception_derives_from_megatrain_error():
    found = {name for path in SOURCE.rglob("*.py") for name in foreign(path.read_text())}
    assert found == {"MegaTrainError"} | INTERNAL


def test_the_check_finds_foreign_exceptions():
    source = "class A(Exception): ...\nclass B(MegaTrainError, ValueError): ...\nclass C: ...\nclass D(KeyError): ...\n"
    assert list(foreign(source)) == ["A", "D"]


def test_the_public_names_are_the_classes_that_are_raised():
    assert mt.MegaTrainError is errors.MegaTrainError
    assert mt.WindowAborted is errors.WindowAborted
    assert issubclass(mt.Refusal, errors.NotEnoughMemory)
    assert issubclass(mt.WindowAborted, mt.MegaTrainError)


@pytest.mark.parametrize("kind", [TypeError, ValueError, mt.MegaTrainError])
def test_an_unknown_name_is_refused_by_every_entry_point(kind):
    with pytest.raises(kind, match="slotz"):
        mt.init(slotz=2)
    with pytest.raises(kind, match="slotz"):
        mt.Engine(None, slotz=2)
    with pytest.raises(kind, match="slotz"):
        mt.largest_model("h200-128gb", slotz=2)
