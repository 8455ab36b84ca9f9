"""Runs measurements one by one, each in its own process, within a time budget; keeps the finished ones in a file."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

# Checking for a GPU must not initialise CUDA in a process that forks.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
import transformers

import megatrain as mt

Key = TypeVar("Key")
Result = dict[str, Any]
LOADED = ("transformers.models.qwen2.modeling_qwen2", "megatrain.engine.session", "megatrain.engine.planning")
"""Modules that every process needs: they are loaded once, before the first one is forked."""


@dataclass(frozen=True)
class Task:
    name: str
    """What its result is found by in the file."""
    expected: float
    """Estimated seconds."""
    work: Callable[[], Result]
    """Runs in the forked process. May itself call `in_child`, unless it uses CUDA."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", type=Path, help="append finished rows to this file, and skip rows that are in it")
    parser.add_argument("--budget", type=float, default=float("inf"), help="total seconds")
    parser.add_argument("--commit", help="the commit to record, if this is not a git checkout")


def parser_of(description: str | None, names: Iterable[str], steps: int) -> argparse.ArgumentParser:
    """What a benchmark with named rows takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*names]
    parser.add_argument("names", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--steps", type=int, default=steps, help="timed steps, after the warm-up")
    add_options(parser)
    return parser


def results(tasks: Iterable[Task], args: argparse.Namespace) -> Iterator[Result]:
    """The result of every task: from the file, or else of a run within the budget. A failed one has "failed"."""
    began = time.perf_counter()
    for name in LOADED:
        importlib.import_module(name)
    done: dict[str, Result] = {}
    if args.resume is not None:
        args.resume.touch()  # fails now rather than after the first row
        done = read(args.resume, lambda result: result["row"])
    remaining: list[str] = []
    for task in tasks:
        if task.name in done:
            yield done[task.name]
            continue
        started = time.perf_counter()
        if started - began + task.expected > args.budget:
            remaining.append(f"{task.name} (about {task.expected:.0f} s)")
            continue
        result = in_child(lambda task=task: task.work() | here())  # type: ignore[misc]
        result = {"row": task.name} | result
        if "failed" not in result:
            result |= dated(args.commit) | {"wall_s": round(time.perf_counter() - started, 1)}
            if args.resume is not None:
                with args.resume.open("a") as file:
                    print(json.dumps(result), file=file, flush=True)
        yield result
    if remaining:
        print(f"\nLeft for the next call: {'; '.join(remaining)}.")


def read(file: Path, key: Callable[[Result], Key]) -> dict[Key, Result]:
    """The latest result of every key, in the order of the file."""
    found: dict[Key, Result] = {}
    for number, text in enumerate(file.read_text().splitlines(), 1):
        try:
            result = json.loads(text)
            found[key(result)] = result
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise SystemExit(f"line {number} of {file} is not a record ({error!r}); delete it.") from None
    return found


def in_child(work: Callable[[], Result]) -> Result:
    """Run in a process forked before CUDA is used, so that modules are loaded once. If it fails, {"failed": why}."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os.close(reader)
            with os.fdopen(writer, "w") as out:
                out.write(_result(work))
        # Skip the parent's exit handlers.
        sys.stderr.flush()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as source:
        text = source.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return (
        json.loads(text) if text else {"failed": f"it ended with {signal.Signals(-code).name if code else 'no result'}"}
    )


def _result(work: Callable[[], Result]) -> str:
    try:
        return json.dumps(work())
    except BaseException as error:
        traceback.print_exc()
        return json.dumps({"failed": f"{type(error).__name__}: {error}"})


# ---- where and when


def here() -> Result:
    """What a result was measured on, and with."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "cores": len(os.sched_getaffinity(0)),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "megatrain": mt.__version__},
    }


def dated(commit: str | None) -> Result:
    return {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}", "commit": commit or checked_out()}


def place(result: Result) -> str:
    """Both in a line."""
    versions = ", ".join(f"{name} {version}" for name, version in result.get("versions", {}).items())
    return f"{result.get('gpu', 'unknown GPU')}, {result['date'][:10]}, commit {result['commit']}; {versions}"


def print_places(found: Iterable[Result]) -> None:
    print("\n" + "\n".join(dict.fromkeys(f"- {place(result)}" for result in found if "failed" not in result)))


def checked_out() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"
