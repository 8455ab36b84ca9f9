"""The code blocks of a Markdown page, and a runner for its Python: `python tests/docs/blocks.py PAGE [--gpu]`.

Tags that a fence may have:

- `python`: executed. The blocks of a page run in order in one namespace and one process, in an empty directory.
- `console`: lines that start with "$ " are commands and are run; the others show output.
- `bash`: every line is a command (a backslash continues it, "#" starts a comment) and is run.
- `text`: not run.

An HTML comment right before a fence adds a condition. `<!-- gpu -->`: run only with CUDA. `<!-- exit 3 -->`: the
commands of the block exit with status 3.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

TAGS = ("python", "console", "bash", "text")
FENCE = re.compile(r"^ *(`{3,}|~{3,})\s*(.*?)\s*$")
MARKER = re.compile(r"^ *<!-- *(?:(gpu)|exit (\d+)) *-->$")
SETUP = Path(__file__).parent / "setup"


@dataclass(frozen=True)
class Block:
    tag: str
    line: int  # of the first line inside the fence, from 1
    text: str
    gpu: bool
    exit_code: int

    def commands(self) -> list[str]:
        """The shell commands of the block."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.tag == "console":
            lines = [line.strip()[2:] for line in lines if line.strip().startswith("$ ")]
        elif self.tag != "bash":
            lines = []
        stripped = (re.sub(r"(^|\s)#.*$", "", line) for line in lines)
        return [re.sub(r"\s+", " ", line).strip() for line in stripped if line.strip()]


def blocks_of(page: str) -> list[Block]:
    """All fenced blocks. A fence that is not closed raises ValueError."""
    all_blocks: list[Block] = []
    lines = page.splitlines()
    fence, tag, start = "", "", 0
    for number, line in enumerate(lines, 1):
        match = FENCE.match(line)
        if not fence and match:
            fence, tag, start = match[1], match[2], number
        elif fence and match and match[1].startswith(fence) and not match[2]:
            gpu, code = _markers(lines[: start - 1])
            all_blocks.append(Block(tag, start + 1, "\n".join(lines[start : number - 1]) + "\n", gpu, code))
            fence = ""
    if fence:
        raise ValueError(f"the fence in line {start} is never closed")
    return all_blocks


def _markers(before: list[str]) -> tuple[bool, int]:
    gpu, code = False, 0
    for line in reversed(before):
        match = MARKER.match(line)
        if match is None:
            break
        gpu, code = gpu or match[1] is not None, int(match[2] or code)
    return gpu, code


def python_of(page: str, *, gpu: bool) -> str:
    """The page's Python, each line at its line number in the page, so tracebacks show the line of the page."""
    lines = [""] * len(page.splitlines())
    for block in blocks_of(page):
        if block.tag == "python" and (gpu or not block.gpu):
            for offset, line in enumerate(block.text.splitlines()):
                lines[block.line - 1 + offset] = line
    return "\n".join(lines) + "\n"


def main(page: Path, gpu: bool) -> None:
    namespace = {"__name__": "__main__", "__file__": str(page)}
    setup = SETUP / f"{page.stem}.py"
    if setup.exists():
        exec(compile(setup.read_text(), str(setup), "exec"), namespace)
    exec(compile(python_of(page.read_text(), gpu=gpu), str(page), "exec"), namespace)


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--gpu" in sys.argv)
