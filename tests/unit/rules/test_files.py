"""Files are changed only through `megatrain.files`, so that every change can be observed; checked in the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src" / "megatrain"

CHANGES = {
    "write_text", "write_bytes", "mkdir", "makedirs", "unlink", "rmdir", "rmtree", "symlink_to", "hardlink_to",
    "symlink", "copyfile", "copy2", "copytree", "fsync",
}  # fmt: skip
AMBIGUOUS = {"replace", "rename", "renames", "link", "move", "truncate", "touch"}
"""Other objects have methods of these names too."""

# Measures with temporary files, and deletes them.
EXEMPT = {"files.py", "hardware/measure.py"}


def changes(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        counted = CHANGES | AMBIGUOUS if owner in ("os", "shutil") else CHANGES
        if owner != "files" and node.func.attr in counted:
            yield node.lineno, node.func.attr


def test_files_are_changed_in_one_place():
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name not in EXEMPT:
            found += [f"{name}:{line}: {what}" for line, what in changes(path.read_text())]
    assert not found, "\n" + "\n".join(found)


def test_the_check_finds_changes():
    for source in ("path.write_text('')", "os.rename(a, b)", "shutil.rmtree(a)", "Path(a).mkdir()", "os.fsync(0)"):
        assert list(changes(source)), source
    for source in ("text.replace('a', 'b')", "files.rename(a, b)", "dataclasses.replace(a)", "native.touch(a, 1, 1)"):
        assert not list(changes(source)), source
