"""Print every error message and notice of the source on one page: `python -m tests.messages`.

Messages are found in the syntax tree: calls of an exception class, and of `announce`, `warn` and `renamed`. Fields of
f-strings are shown by name, as `{name}`. Below each message are the texts that its fields can have, where the source
contains them: constants, local variables, and arguments from other functions.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent, wrap

SOURCE = Path(__file__).parents[1] / "src" / "megatrain"
NOTICES = ("announce", "warn", "renamed")
Scope = ast.Module | ast.FunctionDef


@dataclass
class Message:
    file: str
    line: int
    kind: str
    """The exception class, or the function that prints the notice."""
    text: str
    parts: dict[str, list[str]] = field(default_factory=dict)
    """Field → its possible texts."""


def find(root: Path = SOURCE) -> list[Message]:
    trees = {path: ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}
    errors = exceptions(trees.values())
    found: list[Message] = []
    passed: dict[str, dict[str, int]] = {}
    """Function → those of its parameters that appear in a message, with their positions."""
    for path, tree in trees.items():
        for scopes, call in calls(tree):
            kind = name_of(call.func)
            if kind in errors or kind in NOTICES:
                found.append(message(str(path.relative_to(root)), kind, call, scopes))
                for name, position in parameters(call, scopes).items():
                    passed.setdefault(scopes[-1].name, {})[name] = position  # type: ignore[union-attr]
    for path, tree in trees.items():
        for _, call in calls(tree):
            places = passed.get(name_of(call.func), {})
            given = {name: argument(call, name, position) for name, position in places.items()}
            if texts := {shown(value): name for name, value in given.items() if value is not None and has_text(value)}:
                text = "; ".join(f"{name} = {value}" for value, name in texts.items())
                found.append(Message(str(path.relative_to(root)), call.lineno, f"{name_of(call.func)}(...)", text))
    return sorted(found, key=lambda each: (each.file, each.line))


def exceptions(trees: object) -> set[str]:
    """Names of all exception classes: the built-in ones and those defined in the source."""
    names = {
        name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)
    }
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]  # type: ignore[attr-defined]
    while more := {c.name for c in classes if c.name not in names and {name_of(base) for base in c.bases} & names}:
        names |= more
    return names


def calls(tree: ast.AST, scopes: tuple[Scope, ...] = ()) -> Iterator[tuple[tuple[Scope, ...], ast.Call]]:
    """Yield every call with the module and functions that enclose it."""
    scopes = (*scopes, tree) if isinstance(tree, ast.Module | ast.FunctionDef) else scopes
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield scopes, node
        yield from calls(node, scopes)


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def message(file: str, kind: str, call: ast.Call, scopes: tuple[Scope, ...]) -> Message:
    # Other classes take one text, with or without numbers. The text of an OSError is its second argument.
    several = kind == "renamed" or (kind in vars(builtins) and issubclass(getattr(builtins, kind), OSError))
    made = Message(file, call.lineno, kind, " → ".join(map(shown, call.args if several else call.args[:1])))
    waiting = list(call.args)
    while waiting:
        for node in ast.walk(waiting.pop()):
            if isinstance(node, ast.Name) and node.id not in made.parts:
                values = [value for value in assigned(node.id, scopes) if has_text(value)]
                if values:
                    made.parts[node.id] = list(dict.fromkeys(map(shown, values)))
                    waiting += values
    return made


def assigned(name: str, scopes: tuple[Scope, ...]) -> list[ast.expr]:
    """The values assigned to a variable in the innermost scope that assigns it."""
    for scope in reversed(scopes):
        values = []
        for node in ast.walk(scope) if isinstance(scope, ast.FunctionDef) else scope.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                value = getattr(node, "value", None)
                pairs = [(target, value)]
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs = list(zip(target.elts, value.elts, strict=False))
                values += [value for one, value in pairs if value and isinstance(one, ast.Name) and one.id == name]
        if values:
            return values
    return []


def parameters(call: ast.Call, scopes: tuple[Scope, ...]) -> dict[str, int]:
    """Parameters of the enclosing function that appear unchanged in the message, with their positions."""
    function = scopes[-1]
    if not isinstance(function, ast.FunctionDef):
        return {}
    names = [arg.arg for arg in (*function.args.args, *function.args.kwonlyargs) if arg.arg not in ("self", "cls")]
    fields = [node.value for arg in call.args for node in ast.walk(arg) if isinstance(node, ast.FormattedValue)]
    used = {name_of(value) for value in (*call.args, *fields) if isinstance(value, ast.Name)}
    return {name: position for position, name in enumerate(names) if name in used}


def argument(call: ast.Call, name: str, position: int) -> ast.expr | None:
    named = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    return named or (call.args[position] if position < len(call.args) else None)


def has_text(node: ast.expr) -> bool:
    """Whether the expression contains words, not only a name or a number."""
    texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return any(any(map(str.isalpha, text)) for text in texts)


def shown(node: ast.expr) -> str:
    """The expression as a user would read it; parts that are not text are shown as {source}."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(shown, node.values))
    if isinstance(node, ast.FormattedValue):
        return (
            shown(node.value) if isinstance(node.value, ast.Constant | ast.IfExp) else f"{{{ast.unparse(node.value)}}}"
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return shown(node.left) + shown(node.right)
    if isinstance(node, ast.IfExp):
        return f"<{shown(node.body)}|{shown(node.orelse)}>"
    if isinstance(node, ast.NamedExpr):
        return shown(node.value)
    return f"{{{ast.unparse(node)}}}"


def page(messages: list[Message]) -> str:
    lines: list[str] = []
    for number, each in enumerate(messages):
        if number == 0 or messages[number - 1].file != each.file:
            lines += ["", f"## {each.file}"]
        lines += [f"{each.line}: {each.kind}", indent("\n".join(wrap(each.text or "(no text)", 112)), "    ")]
        for name, texts in each.parts.items():
            lines += [indent("\n".join(wrap(f"{name} = {text}", 104)), "        ") for text in texts]
    return "\n".join(lines).lstrip()


if __name__ == "__main__":
    print(page(find()))
