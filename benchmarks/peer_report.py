"""Results of `benchmarks.peers` as a Markdown table and as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from benchmarks.peer_steps import PEERS
from benchmarks.resumable import place

Record = dict[str, Any]
HEADER = (
    "| peer | seconds | tokens/s | TFLOP/s | attention TFLOP/s | VRAM, GiB | RAM, GiB | disk, GB/s read + written "
    "| seconds ÷ MegaTrain's |\n|---|---|---|---|---|---|---|---|---|"
)
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 900, 216, 196, 58, 34
BAR, PITCH, GAP = 16, 22, 34
STYLE = """<style>
.back { fill: #ffffff } text { fill: #1f2328 } .quiet { fill: #59636e } .ours { fill: #0072b2 } .other { fill: #a3adb8 }
@media (prefers-color-scheme: dark) {
.back { fill: #0d1117 } text { fill: #f0f6fc } .quiet { fill: #9198a1 } .ours { fill: #56b4e9 } .other { fill: #4d5763 }
}
</style>"""


def line(record: Record, ours: Record | None) -> str:
    """A row of the table."""
    label = PEERS[record["peer"]].label
    memory = ["" if record.get(name) is None else f"{record[name]:.1f}" for name in ("vram_gib", "ram_gib")]
    if "failed" in record:
        reason = textwrap.shorten(record["failed"].replace("|", "\\|"), 160)
        return f"| {label} | {reason} | | | | | {memory[1]} | | |"
    against = "" if ours is None or "failed" in ours else f"{record['seconds'] / ours['seconds']:.2f}×"
    cells = (
        label, f"{record['seconds']:.3g}", f"{record['tokens_per_second']:,.0f}", f"{record['tflops']:.3g}",
        f"{record['attention_tflops']:.2g}", *memory, _disk(record), against,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _disk(record: Record) -> str:
    rates = record.get("disk")
    return "" if rates is None else f"{rates['read']:.2f} + {rates['written']:.2f}"


def grouped(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Every row with its records, in the order of `PEERS`. A peer's record serves all rows with the same work."""
    titles = {record["title"]: record["work"] for record in records if record["peer"] == "ours"}
    titles |= {record["work"]: record["work"] for record in records if record["work"] not in titles.values()}
    for title, work in titles.items():
        found = {r["peer"]: r for r in records if r["work"] == work and (r["peer"] != "ours" or r["title"] == title)}
        yield title, [found[name] for name in PEERS if name in found]


def selected(records: Sequence[Record], rows: Sequence[str], peers: Sequence[str]) -> list[Record]:
    """The records of some rows and peers; none named: of all."""
    works = {record["work"] for record in records if not rows or record["row"] in rows}
    return [
        record
        for record in records
        if (not peers or record["peer"] in peers)
        and (not rows or record["row"] in rows or (record["peer"] != "ours" and record["work"] in works))
    ]


def table(records: Sequence[Record]) -> str:
    parts = []
    for title, members in grouped(records):
        ours = next((record for record in members if record["peer"] == "ours"), None)
        parts += [f"### {title}", "", HEADER, *(line(record, ours) for record in members), ""]
        if ours is not None and ours.get("lanes"):
            parts += ["| lane | busy, s | compute waited, s | GB/s |", "|---|---|---|---|"]
            parts += [_lane(name, lane) for name, lane in ours["lanes"].items()]
            parts.append("")
    places = dict.fromkeys(place(record) for record in records if "failed" not in record)
    notes = dict.fromkeys(
        f"{PEERS[record['peer']].label}: {record['config']['numerics']}."
        for record in records
        if "numerics" in record.get("config", {})
    )
    return "\n".join([*parts, *(f"- {text}" for text in (*notes, *places)), ""])


def _lane(name: str, lane: dict[str, float]) -> str:
    rate = f"{lane['gb_per_s']:.1f}" if "gb_per_s" in lane else ""
    return f"| {name} | {lane['busy']:.3f} | {lane['waited']:.3f} | {rate} |"


def picture(records: Sequence[Record]) -> str:
    """Bars of TFLOP/s, one group per row, as SVG text for light and dark pages."""
    groups = list(grouped(records))
    if not groups:
        raise SystemExit("there are no results to draw.")
    most = max((record["tflops"] for record in records if "failed" not in record), default=1.0)
    scale = (WIDTH - LEFT - RIGHT) / most
    parts, y = [], TOP
    for title, members in groups:
        ours = next((r for r in members if r["peer"] == "ours" and "failed" not in r), None)
        parts.append(f'<text x="12" y="{y + 12}" font-weight="bold">{escape(title)}</text>')
        y += PITCH
        for record in members:
            parts.append(_bar(record, ours, y, scale))
            y += PITCH
        y += GAP - PITCH
    gpus = ", ".join(dict.fromkeys(record["gpu"] for record in records if "gpu" in record))
    title = f"TFLOP/s of whole training steps, {gpus}"
    caption = "Longer is faster. Caps on memory bind MegaTrain alone; the others may use the whole machine."
    foot = "Plain PyTorch: everything on the GPU, BF16 weights and moments, no FP32 master. The others have one."
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12" '
        f'viewBox="0 0 {WIDTH} {y + BOTTOM}">',
        STYLE,
        f'<rect class="back" width="{WIDTH}" height="{y + BOTTOM}"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="12" y="40" class="quiet">{caption}</text>',
        *parts,
        f'<text x="12" y="{y + 14}" class="quiet">{foot}</text>',
    ]
    return "\n".join([*parts, "</svg>", ""])


def _bar(record: Record, ours: Record | None, y: int, scale: float) -> str:
    label = f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(PEERS[record["peer"]].label)}</text>'
    if "failed" in record:
        memory = any(word in record["failed"] for word in ("out of RAM", "OutOfMemory", "out of memory"))
        text = "out of memory" if memory else "failed"
        return f'{label}<text x="{LEFT + 4}" y="{y + 12}" class="quiet">{text}</text>'
    width = record["tflops"] * scale
    shown = f"{record['tflops']:.0f} TFLOP/s, {record['seconds']:.2f} s"
    if ours is not None and ours is not record:
        shown += f", {record['seconds'] / ours['seconds']:.2f}×"
    kind = "ours" if record["peer"] == "ours" else "other"
    return (
        f'{label}<rect class="{kind}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>'
        f'<text x="{LEFT + width + 6:.1f}" y="{y + 12}">{shown}</text>'
    )
