"""MegaTrain beside other ways to train the same model on the same GPU.

    PYTHONPATH=src python -m benchmarks.peers 1.5b-12 --peers ours,zero3 --resume peers.jsonl --budget 500
    PYTHONPATH=src python -m benchmarks.peers [ROW ...] [--peers NAMES] --table peers.jsonl
    PYTHONPATH=src python -m benchmarks.peers [ROW ...] [--peers NAMES] --picture peers.jsonl docs/peers.svg

A row (`benchmarks/peer_rows.py`) names the shape, the micro-batches, the sequence length and MegaTrain's `max_vram_gb`.
Every peer trains all parameters of a model of that shape with random weights, on random tokens, with AdamW and clipping
at 1.0:

- ours: `mt.Trainer` with its own plan, compiled. FP32 master.
- eager, stored, compiled, compiled-layers: plain PyTorch with everything on the GPU; eager with gradient checkpointing,
  the others without. BF16 weights and moments, no FP32 master: less work and less exact. `compiled` compiles the whole
  model with its loss, `compiled-layers` each layer.
- zero-infinity: DeepSpeed with the optimizer in files (NVMe) and the parameters in pinned RAM; gradient checkpointing.
- zero3, zero2: DeepSpeed with the optimizer in pinned RAM, zero3 with the parameters too; gradient checkpointing.
- fsdp2: `fully_shard` with `CPUOffloadPolicy`, FP32 parameters, products in BF16; gradient checkpointing.
- zero3-stored, zero2-stored, fsdp2-stored: the same without checkpointing, where the GPU has room for it.
- upstream: `--upstream-command`, run in the folder `--upstream` with the row as JSON in the variable PEERS_ROW. The
  last line of its output is a JSON object with `all_seconds`, and with `vram_gib` and `config` if it knows them.

`max_vram_gb` and `max_ram_gb` bind MegaTrain alone; the other peers may use the whole machine. Rows with "-disk", whose
`max_ram_gb` is too small for the states, and the peer zero-infinity need `--offload-dir`. A row with "-width" has as
many layers as ZeRO-3 with offload can train in this machine's RAM, at 25 bytes per parameter beside 8 GiB.

Each peer runs in a process of its own with a time limit of its own. A peer that fails gives a record with the reason. A
finished pair of row and peer is appended to the file of `--resume`, and skipped by the next call with that file; a pair
that would exceed the budget is left for the next call.

Seconds are the median of the steps after three untimed ones, from the end of one on the GPU to the end of the next; no
peer waits for its loss. TFLOP/s = 6 × the matrix parameters that a token uses × tokens ÷ seconds. Attention's TFLOP/s
are a second figure. Recomputation, padding and inactive experts are not counted. VRAM is the peak that PyTorch's
allocator reserved plus what the driver reports beyond it, so nothing else may run on the GPU. RAM is the peak of
RssAnon + RssShmem. What moved to and from drives is counted by MegaTrain for itself, and by the kernel for the others.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peer_report import HEADER, line, picture, selected, table
from benchmarks.peer_rows import ROWS, Row, flops, row_of
from benchmarks.peer_steps import PEERS, STANDARD, device, run
from benchmarks.resumable import dated, read
from benchmarks.row import WARM
from benchmarks.step import GIB, resident_ram
from megatrain.hardware.inventory import available_ram

Records = dict[tuple[str, str], dict[str, Any]]
POLL = 0.1
SPARE = GIB
"""A peer is ended when less RAM than this is available, before the system ends something else."""
PR_SET_PDEATHSIG = 1
PATIENCE, LEAST = 3.0, 120.0
"""The time limit of a peer: so many times the estimate, and at least so many seconds."""


@dataclass
class Ended:
    """How the process of a peer ended."""

    output: str
    errors: str
    reason: str | None
    """Why it has no result. None: it exited by itself."""
    out_of_time: bool
    ram_gib: float


def expected(row: Row, peer: str, steps: int) -> float:
    """Estimated seconds of a pair; most take less."""
    known, billions = PEERS[peer], row.described().parameters / 1e9
    on_disk = peer == "ours" and row.max_ram_gb is not None
    updating = PEERS["zero-infinity"].updating if on_disk else known.updating
    step = sum(flops(row)) / known.tflops / 1e12 + updating * billions
    return known.starting + known.placing * billions + step * (steps + WARM)


def watched(command: list[str], environment: dict[str, str], folder: Path | None, limit: float) -> Ended:
    """Run a command. End it when its time is up or the machine's RAM is used up."""
    reason, out_of_time, peak = None, False, 0.0
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=output, stderr=errors, env=environment, cwd=folder, process_group=0)
        try:
            while reason is None and process.poll() is None:
                peak = max(peak, _ram_of(process.pid))
                if time.monotonic() - began > limit:
                    reason, out_of_time = f"stopped after {limit:.0f} s", True
                elif (free := available_ram()) < SPARE:
                    reason = f"out of RAM: {peak:.1f} GiB used, {free / GIB:.1f} GiB available"
                time.sleep(POLL)
        finally:
            # Also what it started itself, and on Ctrl-C.
            _end(process)
        if reason is None and process.returncode < 0:
            reason = f"ended by {signal.Signals(-process.returncode).name} at {peak:.1f} GiB of RAM"
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read())
    return Ended(*texts, reason, out_of_time, peak)


def _ram_of(process: int) -> float:
    try:
        return resident_ram(process)
    except (OSError, KeyError):  # it has just ended
        return 0.0


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment_of(peer: str, peer_path: Path | None) -> dict[str, str]:
    found = dict(os.environ)
    if not PEERS[peer].distributed:
        return found
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # One process needs no network.
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        found.setdefault(name, "lo")
    # All peers of a machine share what DeepSpeed compiles.
    found.setdefault("TORCH_EXTENSIONS_DIR", str(Path(tempfile.gettempdir()) / "peers-extensions"))
    found.setdefault("DS_ACCELERATOR", device())
    if peer_path is not None:
        found["PYTHONPATH"] = os.pathsep.join([str(peer_path.resolve()), found.get("PYTHONPATH", "")])
    return found


def command_of(name: str, peer: str, row: Row, args: argparse.Namespace) -> list[str]:
    if peer == "upstream":
        return shlex.split(args.upstream_command)
    layers = [] if row.layers is None else ["--layers", str(row.layers)]
    started = ["--child", peer, "--parent", str(os.getpid()), "--steps", str(args.steps)]
    folder = [] if row.offload_dir is None else ["--offload-dir", row.offload_dir]
    return [sys.executable, "-m", "benchmarks.peers", name, *started, *layers, *folder]


def needs_disk(row: Row, peer: str) -> bool:
    return peer == "zero-infinity" or (peer == "ours" and row.max_ram_gb is not None)


def pair(name: str, peer: str, row: Row, args: argparse.Namespace, limit: float) -> tuple[dict[str, Any], bool]:
    """The record of a pair, and whether it ran out of time."""
    began = time.monotonic()
    # A peer that is ended leaves its files behind.
    with tempfile.TemporaryDirectory(prefix="peers-", dir=args.offload_dir) as scratch:
        if needs_disk(row, peer):
            row = replace(row, offload_dir=scratch)
        environment = environment_of(peer, args.peer_path)
        environment |= {"PEERS_ROW": json.dumps(asdict(row) | {"steps": args.steps})}
        folder = args.upstream if peer == "upstream" else None
        ended = watched(command_of(name, peer, row, args), environment, folder, limit)
    found: dict[str, Any] = {}
    last = ended.output.strip().splitlines()[-1:]
    if ended.reason is None:
        try:
            found = json.loads(last[0]) if last else {}
        except json.JSONDecodeError:
            found = {}
        if not isinstance(found, dict) or not ({"all_seconds", "failed"} & set(found)):
            found = {"failed": f"no result; it ended with: {(ended.errors.strip().splitlines() or ['nothing'])[-1]}"}
    else:
        found = {"failed": ended.reason}
    if "failed" in found:
        found["log"] = ended.errors[-2000:]
    about = {
        "row": name, "peer": peer, "title": row.title(), "work": row.work(), **asdict(row), "tokens": row.tokens,
        "steps": args.steps, **dated(args.commit),
        "wall_s": round(time.monotonic() - began, 1), "limit_s": round(limit), "ram_gib": ended.ram_gib,
    }  # fmt: skip
    return about | rates(row, found) | found, ended.out_of_time


def rates(row: Row, found: dict[str, Any]) -> dict[str, Any]:
    if "failed" in found:
        return {}
    seconds = statistics.median(found["all_seconds"])
    products, attention = flops(row)
    return {
        "seconds": seconds,
        "tokens_per_second": row.tokens / seconds,
        "tflops": products / seconds / 1e12,
        "attention_tflops": attention / seconds / 1e12,
        "matmul_parameters": row.described().matmul_parameters,
        "parameters": row.described().parameters,
    }


def key(record: dict[str, Any]) -> tuple[str, str]:
    """Rows that differ in MegaTrain's settings alone share what the other peers took."""
    return record["title" if record["peer"] == "ours" else "work"], record["peer"]


def records(file: Path) -> Records:
    """The latest record of every pair, in the order of the file."""
    return read(file, key)


def run_pairs(names: list[str], peers: list[str], args: argparse.Namespace) -> None:
    """Run the pairs that are not in the file, within the time budget."""
    began = time.monotonic()
    done: Records = {}
    if args.offload_dir is not None:
        Path(args.offload_dir).mkdir(parents=True, exist_ok=True)
    if args.resume is not None:
        args.resume.touch()  # fails now rather than after the first pair
        done = records(args.resume)
    left = []
    for name in names:
        row = row_of(name, args.layers)
        print(f"\n### {row.title()}\n\n{HEADER}", flush=True)
        for peer in peers:
            pair_key = key({"title": row.title(), "work": row.work(), "peer": peer})
            record = done.get(pair_key)
            if record is None or (args.retry and "failed" in record):
                remaining, estimate = args.budget - (time.monotonic() - began), expected(row, peer, args.steps)
                limit = args.limit or max(LEAST, PATIENCE * estimate)
                if estimate > remaining:
                    left.append(f"{name} {peer} (about {estimate:.0f} s)")
                    continue
                print(f"{name} {peer}: about {estimate:.0f} s, {limit:.0f} at most", file=sys.stderr, flush=True)
                record, out_of_time = pair(name, peer, row, args, min(limit, remaining))
                if out_of_time and remaining < limit:
                    left.append(f"{name} {peer} (took more than {remaining:.0f} s)")
                    continue
                if args.resume is not None:
                    with args.resume.open("a") as file:
                        print(json.dumps(record, default=str), file=file, flush=True)
                done[pair_key] = record
            print(line(record, done.get((row.title(), "ours"))), flush=True)
            if "failed" in record:
                print(record["log"], file=sys.stderr, flush=True)
    if left:
        print(f"\nLeft for the next call: {'; '.join(left)}.")


def child(peer: str, row: Row, steps: int, parent: int) -> None:
    """Print the result of a peer as the last line, and exit at once: a process group may wait for its peers."""
    # If the parent is killed, it cannot end this process, which would go on using the GPU.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    try:
        result = run(peer, row, steps)
    except Exception as error:
        traceback.print_exc()
        result = {"failed": "".join(traceback.format_exception_only(error)).strip().splitlines()[0]}
    print(json.dumps(result, default=str), flush=True)
    sys.stderr.flush()
    os._exit(0)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"rows to run or to show: {', '.join(ROWS)}")
    parser.add_argument("--peers", default="", help=f"comma-separated, of {', '.join(PEERS)}")
    parser.add_argument("--resume", type=Path, help="append finished pairs to this file, and skip pairs that are in it")
    parser.add_argument("--retry", action="store_true", help="run failed pairs of that file again")
    parser.add_argument("--budget", type=float, default=float("inf"), help="total seconds")
    parser.add_argument("--limit", type=float, help="seconds for each peer, instead of a multiple of the estimate")
    parser.add_argument("--steps", type=int, default=5, help=f"timed steps, after {WARM} untimed ones")
    parser.add_argument("--layers", type=int, help="another number of layers than the row has")
    parser.add_argument("--offload-dir", help="a directory on the drive, for peers with state on disk")
    parser.add_argument("--peer-path", type=Path, help="a folder with DeepSpeed, for its peers' PYTHONPATH")
    parser.add_argument("--upstream", type=Path, help="the folder in which --upstream-command runs")
    parser.add_argument("--upstream-command", help="what runs the peer upstream")
    parser.add_argument("--commit", default=None, help="the commit to record, if this is not a git checkout")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the results in the file as Markdown")
    parser.add_argument("--picture", type=Path, nargs=2, metavar=("FILE", "SVG"), help="draw the results in the file")
    parser.add_argument("--child", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.peers = args.peers.split(",") if args.peers else []
    for given, known in ((args.rows, ROWS), (args.peers, PEERS)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
    if "upstream" in args.peers and not args.upstream_command:
        parser.error("the peer upstream needs --upstream-command")
    chosen = args.peers or STANDARD
    on_disk = [name for name in args.rows if any(needs_disk(ROWS[name], peer) for peer in chosen)]
    if on_disk and not (args.offload_dir or args.table or args.picture):
        parser.error(f"peers of {', '.join(on_disk)} keep state on disk: they need --offload-dir")
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    if not (args.rows or args.table or args.picture):
        parser.error("name a row, or use --table or --picture")
    return args


def main() -> None:
    args = parsed()
    if args.child is not None:
        row = replace(row_of(args.rows[0], args.layers), offload_dir=args.offload_dir)
        child(args.child, row, args.steps, args.parent)
    if args.table is not None:
        print(table(selected(list(records(args.table).values()), args.rows, args.peers)))
    if args.picture is not None:
        args.picture[1].write_text(picture(selected(list(records(args.picture[0]).values()), args.rows, args.peers)))
    if args.table is None and args.picture is None:
        run_pairs(args.rows, args.peers or list(STANDARD), args)


if __name__ == "__main__":
    main()
