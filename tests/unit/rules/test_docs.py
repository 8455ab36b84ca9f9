"""The docs agree with the source: the tree, the settings, the errors, the links."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
from benchmarks import fit
from tests.docs.blocks import blocks_of
from typer.testing import CliRunner

from megatrain import errors
from megatrain.cli.main import app
from megatrain.planner import Refusal, plan
from megatrain.settings import Debug, Settings

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
TOUR = (ROOT / "docs" / "architecture.md").read_text()
SETTINGS = (ROOT / "docs" / "settings.md").read_text()
PLACEMENT = (ROOT / "docs" / "placement.md").read_text()
README_LINES, SCREEN = 150, 32
PARAGRAPH = 6 * 128
"""Characters of the longest paragraph, about six lines."""
GENERATED = ("architectures.md", "plans.md")
"""Pages written by a program."""
ENTRY = re.compile(r"^( *)(\S+)(?:  +(\S.*))?$")
SOURCES = (".py", ".cpp", ".h")
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def section(text: str, title: str) -> str:
    """The text under a heading, up to the next heading of the same level."""
    _, found, rest = text.partition(f"\n## {title}\n")
    assert found, f"no section {title!r}"
    return rest.partition("\n## ")[0]


def listed(tree: str) -> dict[str, str]:
    """Path → annotation of every line of the tree. Folders end with a slash; their contents are indented by two."""
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
    """Source files as the tree names them: a package's `__init__.py` is the line of its folder."""
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


def test_everything_in_the_tree_exists():
    gone = sorted(path for path in tree() if not (ROOT / path).exists())
    assert not gone, f"docs/architecture.md names {gone}"


def test_every_line_of_the_tree_has_an_annotation():
    silent = [path for path, note in tree().items() if not note and path.count("/") > 2]
    assert not silent


def test_settings_table():
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (.+) \|$", section(SETTINGS, "Settings"), re.MULTILINE)
    shown = {name: default for name, default, _ in rows}
    assert shown == {field.name: repr(field.default) for field in dataclasses.fields(Settings)}


def test_every_setting_has_a_row_in_the_table_of_entry_points():
    fields = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section(SETTINGS, "Debugging"), re.MULTILINE))
    assert fields == {field.name: repr(field.default) for field in dataclasses.fields(Debug)}
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", section(SETTINGS, "Which entry point uses what"), re.MULTILINE)
    assert [name for name, _ in rows] == [field.name for field in dataclasses.fields(Settings)]
    assert all(len(cells.split(" | ")) == 3 for _, cells in rows)


def test_errors_list():
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    lines = re.findall(r"^\| `(\w+)` \| \S", section(SETTINGS, "Errors"), re.MULTILINE)
    assert len(lines) == len(set(lines))
    assert set(lines) == classes


def test_readme_is_short():
    assert len(README.splitlines()) < README_LINES
    long = [part.partition("\n")[0] for part in README.split("\n## ") if len(part.splitlines()) > SCREEN]
    assert not long, f"more than a screen: {long}"


def prose(text: str) -> list[str]:
    """Paragraphs and list items, without code, tables and headings."""
    text = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^( *[-*]|\d+\.) ", r"\n\1 ", text, flags=re.MULTILINE)
    parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return [part for part in parts if part and part[0] not in "|#<"]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=lambda page: page.name)
def test_no_paragraph_is_over_six_lines(page):
    long = [part[:60] for part in prose(page.read_text()) if len(part) > PARAGRAPH]
    assert not long


def test_every_page_is_in_the_tour_and_opens_with_its_purpose():
    pages = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name != "index.md")
    index = (ROOT / "docs" / "index.md").read_text()
    assert pages == sorted(re.findall(r"\]\(([\w-]+\.md)\)", index))
    openings = {name: (ROOT / "docs" / name).read_text().split("\n\n")[1] for name in pages}
    assert not [name for name, opening in openings.items() if not opening.startswith("After this page you")]


def test_the_fit_table_matches_the_planner():
    rows = {card: next(line for line in README.splitlines() if f"**{card} GB card**" in line) for card in fit.CARDS}
    assert rows[24].split(" | ")[1 + fit.RAM.index(64)] == fit.cell(24, 64)  # the other cells take a minute
    assert fit.answer("13B", 24, 64) in README.splitlines()


def shown(page: str) -> tuple[list[str], str]:
    """The arguments of the command in a page's console block, and the output shown there."""
    block = next(block for block in blocks_of((ROOT / page).read_text()) if block.tag == "console")
    (command,) = block.commands()
    return command.split()[1:], block.text.partition("\n")[2]


def test_the_plan_in_the_readme_is_current(monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments, output = shown("README.md")
    assert output == CliRunner().invoke(app, arguments).stdout
    explained = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PLACEMENT, re.MULTILINE)))
    assert set(re.findall(r"^(\w+)  ", output.partition("\nGiB")[2], re.MULTILINE)) <= set(explained)


def test_the_refusal_in_the_docs_is_current(monkeypatch):
    monkeypatch.chdir(ROOT)
    (command, model, option, machine), output = shown("docs/placement.md")
    assert (command, option) == ("plan", "--machine")
    with pytest.raises(Refusal) as refused:
        plan(model, machine=machine)
    assert output.split() == f"megatrain: {refused.value}".split()


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_targets(page):
    links = re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", page.read_text())
    targets = [(page.parent / target if target else page, anchor) for target, anchor in links]
    broken = [target.name for target, _ in targets if not target.exists()]
    broken += [f"{target.name}#{anchor}" for target, anchor in targets if anchor and anchor not in anchors(target)]
    assert not broken


def test_reading_the_tree():
    assert listed("a/\n  b.py  first\n  c/  second\n    d.py  third\ne.h  fourth\n") == {
        "a/": "", "a/b.py": "first", "a/c/": "second", "a/c/d.py": "third", "e.h": "fourth"
    }  # fmt: skip
