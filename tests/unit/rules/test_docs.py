"""The docs stay true: the tree, the settings, the errors, the links."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from megatrain import errors
from megatrain.settings import Debug, Settings

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
TOUR = (ROOT / "docs" / "architecture.md").read_text()
README_LINES = 150
ENTRY = re.compile(r"^( *)(\S+)(?:  +(\S.*))?$")
SOURCES = (".py", ".cpp", ".h")
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def section(text: str, title: str) -> str:
    """What stands under a heading, up to the next one of its level."""
    _, found, rest = text.partition(f"\n## {title}\n")
    assert found, f"there is no section {title!r}"
    return rest.partition("\n## ")[0]


def listed(tree: str) -> dict[str, str]:
    """Path → annotation of every line of the tree; folders end with a slash and indent what is in them by two."""
    folders: list[str] = []
    found = {}
    for line in tree.strip("\n").splitlines():
        match = ENTRY.match(line)
        assert match, f"not a line of the tree: {line!r}"
        indent, name, note = match.groups()
        folders = folders[: len(indent) // 2]
        path = "".join([*folders, name])
        assert path not in found, f"{path} is in the tree twice"
        found[path] = note or ""
        if name.endswith("/"):
            folders.append(name)
    return found


def tree() -> dict[str, str]:
    return listed(section(TOUR, "The tree").split("```")[1].removeprefix("text"))


def real() -> set[str]:
    """Source files as the tree names them: a package's `__init__.py` is the folder's own line."""
    found = set()
    for folder in ("src/megatrain", "csrc"):
        for path in (ROOT / folder).rglob("*"):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix in SOURCES:
                inside = path.name == "__init__.py" and name != "src/megatrain/__init__.py"
                found.add(name.removesuffix("__init__.py") if inside else name)
    return found


def test_every_file_is_in_the_tree():
    missing = sorted(real() - tree().keys())
    assert not missing, f"docs/architecture.md lacks {missing}"


def test_everything_in_the_tree_is_there():
    gone = sorted(path for path in tree() if not (ROOT / path).exists())
    assert not gone, f"docs/architecture.md names {gone}"


def test_every_line_of_the_tree_says_something():
    silent = [path for path, note in tree().items() if not note and path.count("/") > 2]
    assert not silent


def test_settings_table():
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (.+) \|$", section(README, "Settings"), re.MULTILINE)
    shown = {name: default for name, default, _ in rows}
    assert shown == {field.name: repr(field.default) for field in dataclasses.fields(Settings)}


def test_every_setting_has_a_row_of_what_entry_points_do_with_it():
    page, debugging = (ROOT / "docs" / "settings.md").read_text().split("\n## Debugging\n")
    found = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", debugging, re.MULTILINE))
    assert found == {field.name: repr(field.default) for field in dataclasses.fields(Debug)}
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", page, re.MULTILINE)
    assert [name for name, _ in rows] == [field.name for field in dataclasses.fields(Settings)]
    assert all(len(cells.split(" | ")) == 3 for _, cells in rows)


def test_errors_list():
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    lines = re.findall(r"`(\w+)`: ", section(README, "Errors you may meet"))
    assert len(lines) == len(set(lines))
    assert set(lines) == classes


def test_readme_is_short():
    assert len(README.splitlines()) < README_LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
    broken = [target for target in targets if not (page.parent / target).exists()]
    assert not broken


def test_the_tree_is_read_as_it_is_meant():
    assert listed("a/\n  b.py  first\n  c/  second\n    d.py  third\ne.h  fourth\n") == {
        "a/": "", "a/b.py": "first", "a/c/": "second", "a/c/d.py": "third", "e.h": "fourth"
    }  # fmt: skip
