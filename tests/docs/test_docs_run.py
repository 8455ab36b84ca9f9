"""Every code block and command of README.md, CONTRIBUTING.md and docs/ is run here or by another test."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from tests import forked
from tests.docs import blocks
from tests.docs.blocks import TAGS, Block, blocks_of, python_of
from typer.testing import CliRunner

from megatrain.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_CONVERTED: set[str] = set()
"""Pages whose blocks are not run yet."""
CONVERTED = [page for page in PAGES if page.name not in NOT_CONVERTED]

MAKE_TARGETS = {
    "setup": (".ci/run", "make check"),
    "native": (".ci/run", "make check"),
    "check": (".ci/run", "make check"),
    "test": (".ci/run", "make test"),
    "demo": ("tests/unit/cli/test_demo.py", "def test_demo("),
    "wheel": ("Makefile", "wheel: setup"),
    "gpu-test": ("Makefile", "gpu-test:"),
}
"""Make targets that pages may name, each with a file that runs the same work and a text in that file."""
ELSEWHERE = {
    r"cmake -S \. -B build && cmake --build build": ("Makefile", "cmake -S . -B build && cmake --build build"),
    r"pip install dist/megatrain-\S+": ("Makefile", "wheel: setup"),
}
"""Other commands that are not run here, because they build or install MegaTrain itself."""
COPIED, LINKED = ("examples", "docs"), ("src", "benchmarks", "build", "csrc", "CMakeLists.txt", "Makefile")


def name(page: Path) -> str:
    return page.name


def pages_with(tag: str, *, gpu: bool) -> list[Path]:
    tags = ("console", "bash") if tag == "commands" else (tag,)
    return [
        page for page in CONVERTED if any(b.tag in tags and b.gpu == gpu for b in blocks_of(page.read_text()))
    ]  # fmt: skip


@pytest.fixture
def shell(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A writable copy of the source tree, and an environment for commands in it."""
    tree, programs = tmp_path / "tree", tmp_path / "bin"
    programs.mkdir()
    for program, call in {"python": sys.executable, "megatrain": f"{sys.executable} -m megatrain"}.items():
        (programs / program).write_text(f'#!/bin/sh\nexec {call} "$@"\n')
        (programs / program).chmod(0o755)
    tree.mkdir()
    for folder in COPIED:
        if (ROOT / folder).exists():
            shutil.copytree(ROOT / folder, tree / folder)
    for item in LINKED:
        (tree / item).symlink_to(ROOT / item)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    return tree, environment


# ---- the page


@pytest.mark.parametrize("page", CONVERTED, ids=name)
def test_every_fence_has_a_known_tag(page: Path) -> None:
    wrong = [f"{page.name}:{block.line - 1}: {block.tag!r}" for block in blocks_of(page.read_text())
             if block.tag not in TAGS]  # fmt: skip
    assert not wrong, f"a fence is tagged {', '.join(TAGS)} (see tests/docs/blocks.py): {wrong}"
    empty = [block.line for block in blocks_of(page.read_text()) if block.tag == "console" and not block.commands()]
    assert not empty, f"console blocks without a command are text: lines {empty}"


def test_page_lists_are_current() -> None:
    assert {page.name for page in PAGES} >= NOT_CONVERTED
    assert not (blocks.SETUP / "README.py").exists(), "the README must run without setup code"
    assert {setup.stem for setup in blocks.SETUP.glob("*.py")} <= {page.stem for page in PAGES}


# ---- Python


def run_python(page: Path, directory: Path) -> None:
    """In a forked child, for which torch and transformers are imported already."""

    def work() -> str:
        os.chdir(directory)
        try:
            blocks.main(page, False)
        except BaseException:
            return traceback.format_exc()
        return ""

    ended = forked.run(work)
    assert ended.value == "", ended


@pytest.mark.parametrize("page", pages_with("python", gpu=False), ids=name)
def test_python_blocks(page: Path, tmp_path: Path) -> None:
    run_python(page, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("page", pages_with("python", gpu=True), ids=name)
def test_python_blocks_for_a_gpu(page: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, blocks.__file__, str(page), "--gpu"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


# ---- commands


def run_elsewhere(command: str) -> tuple[str, str] | None:
    """The file that runs this command and a text in it, or None if the command is run here."""
    words = shlex.split(command)
    if words[0] == "make":
        target = next(word for word in words[1:] if "=" not in word)
        assert target in MAKE_TARGETS, f"{command!r}: no test is known that runs `make {target}`"
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no target {target!r}"
        return MAKE_TARGETS[target]
    return next((where for pattern, where in ELSEWHERE.items() if re.fullmatch(pattern, command)), None)


def run_commands(page: Path, shell: tuple[Path, dict[str, str]], *, gpu: bool) -> None:
    tree, environment = shell
    for block in blocks_of(page.read_text()):
        for command in block.commands() if gpu or not block.gpu else []:
            elsewhere = run_elsewhere(command)
            if elsewhere is not None:
                file, words = elsewhere
                assert words in (ROOT / file).read_text(), f"{file} has no {words!r}, which stands for {command!r}"
                continue
            done = subprocess.run(["bash", "-c", command], cwd=tree, env=environment, capture_output=True, text=True)
            shown = f"{page.name}:{block.line}: {command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
            assert done.returncode == block.exit_code, f"exit code {done.returncode}, not {block.exit_code}: {shown}"


@pytest.mark.parametrize("page", pages_with("commands", gpu=False), ids=name)
def test_commands(page: Path, shell: tuple[Path, dict[str, str]]) -> None:
    run_commands(page, shell, gpu=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("page", pages_with("commands", gpu=True), ids=name)
def test_commands_for_a_gpu(page: Path, shell: tuple[Path, dict[str, str]]) -> None:
    run_commands(page, shell, gpu=True)


# ---- commands in sentences


def missing_from(command: str) -> list[str]:
    """The make targets, modules, scripts and options of a command that do not exist."""
    words = [word for word in shlex.split(command.partition(" > ")[0]) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    program, *rest = words
    options = [word.partition("=")[0] for word in rest if word.startswith("--")]
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return [word for word in rest if word not in targets and not word.startswith("-") and "=" not in word]
    if program == "megatrain" or rest[:2] == ["-m", "megatrain"]:
        commands = [word for word in rest if word not in ("-m", "megatrain")]
        help_result = CliRunner().invoke(app, [*commands[:1], "--help"], env={"COLUMNS": "200"})
        return [*(commands[:1] if help_result.exit_code else []), *(o for o in options if o not in help_result.output)]
    if rest[:1] == ["-m"]:
        spec = importlib.util.find_spec(rest[1])
        if spec is None or spec.origin is None:
            return rest[1:2]
        return [option for option in options if f'"{option}"' not in Path(spec.origin).read_text()]
    return [word for word in rest[:1] if not (ROOT / word).exists()]


INLINE = re.compile(r"`((?:[A-Z_]+=\S+ )*(?:make|megatrain|(?:\.venv/bin/)?python) [^`]+)`")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_in_sentences_exist(page: Path) -> None:
    text = page.read_text()
    for block in blocks_of(text):
        text = text.replace(block.text, "\n")
    wrong = {" ".join(quoted.split()): missing_from(" ".join(quoted.split())) for quoted in INLINE.findall(text)}
    assert not {command: missing for command, missing in wrong.items() if missing}


# ---- the reader of blocks


def test_blocks_are_parsed() -> None:
    page = (
        "```python\na = 1\n```\n<!-- gpu -->\n```console\n$ megatrain \\\n  doctor  # all\nfine\n$ ls\n```\n"
        "<!-- exit 3 -->\n````bash\n# nothing\nmegatrain plan x\n```\n````\n<!-- gpu -->\n\n```\n```\n"
    )
    assert blocks_of(page) == [
        Block("python", 2, "a = 1\n", False, 0),
        Block("console", 6, "$ megatrain \\\n  doctor  # all\nfine\n$ ls\n", True, 0),
        Block("bash", 13, "# nothing\nmegatrain plan x\n```\n", False, 3),
        Block("", 20, "\n", False, 0),
    ]
    assert [block.commands() for block in blocks_of(page)[:2]] == [[], ["megatrain doctor", "ls"]]
    with pytest.raises(ValueError, match="line 2 is never closed"):
        blocks_of("a\n```python\nb\n")


def test_python_keeps_line_numbers_and_skips_gpu_blocks() -> None:
    page = "a\n```python\nb = 1\n```\n<!-- gpu -->\n```python\nc = 2\n```\n"
    assert python_of(page, gpu=False).splitlines() == ["", "", "b = 1", "", "", "", "", ""]
    assert python_of(page, gpu=True).splitlines()[6] == "c = 2"


def test_a_failing_block_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("x\n\n```python\nvalue = 1\n```\n\n```python\nassert value == 2\n```\n")
    with pytest.raises(AssertionError, match=r'page.md", line 8'):
        run_python(page, tmp_path)


def test_commands_that_fail_or_are_unknown_fail(tmp_path: Path, shell: tuple[Path, dict[str, str]]) -> None:
    page = tmp_path / "page.md"
    for command, words in (("false", "exit code 1"), ("make nothing", "no test is known")):
        page.write_text(f"```bash\n{command}\n```\n")
        with pytest.raises(AssertionError, match=words):
            run_commands(page, shell, gpu=False)
    page.write_text(
        '<!-- exit 1 -->\n```bash\nfalse\n```\n```console\n$ python -c \'open("made", "w")\'\n$ ls made\n```\n'
    )
    run_commands(page, shell, gpu=False)


def test_wrong_commands_in_sentences_are_detected() -> None:
    right = ("make test", "megatrain demo --steps 3", "python -m megatrain demo", "python src/megatrain/__main__.py",
             "PYTHONPATH=src python -m benchmarks.adamw", "make test ARGS=x")  # fmt: skip
    wrong = ("make tset", "megatrain dmeo", "megatrain demo --stpes 3", "python -m benchmarks.none", "python no.py",
             "python -m benchmarks.step --none")  # fmt: skip
    assert not [command for command in right if missing_from(command)]
    assert not [command for command in wrong if not missing_from(command)]
