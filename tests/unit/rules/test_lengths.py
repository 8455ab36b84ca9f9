"""Modules have fewer than 400 lines, and functions fit a screen."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src" / "megatrain"
MODULE_LINES = 400
FUNCTION_LINES = 60


def test_modules_are_short():
    lengths = {path: len(path.read_text().splitlines()) for path in sorted(SOURCE.rglob("*.py"))}
    long = [f"{path.relative_to(SOURCE)}: {n} lines" for path, n in lengths.items() if n > MODULE_LINES]
    assert lengths
    assert not long, "\n" + "\n".join(long)


def test_functions_are_short():
    long = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > FUNCTION_LINES:
                    long.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {node.name} has {lines} lines")
    assert not long, "\n" + "\n".join(long)
