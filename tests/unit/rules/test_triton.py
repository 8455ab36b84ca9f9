"""Triton launches on the current device, which may be another one than that of the tensors."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "src" / "megatrain"
FILES = sorted(SOURCE.rglob("*_triton.py"))


def launches(tree: ast.AST) -> set[int]:
    """Lines of `kernel[grid](...)`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {call.lineno for call in calls if isinstance(call.func, ast.Subscript)}


def guarded(tree: ast.AST) -> set[int]:
    """Those inside `with torch.cuda.device(...)`."""
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.With)]
    guards = [b for b in blocks if any(ast.unparse(i.context_expr).startswith("torch.cuda.device(") for i in b.items)]
    return {line for guard in guards for line in launches(guard)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernels_are_launched_on_the_device_of_their_tensors(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert launches(tree)
    assert launches(tree) == guarded(tree)
