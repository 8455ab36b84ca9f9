"""Replays sequences of weight accesses through a model of a memory tier, with four ways to prefetch.

    PYTHONPATH=src python -m benchmarks.replay --synthetic
    PYTHONPATH=src python -m benchmarks.accesses out && PYTHONPATH=src python -m benchmarks.replay out/*.jsonl

nothing      copies start when they are needed
static       the order of the first period, followed from wherever it matches
learned      megatrain.stream.predict
clairvoyant  the true future, which no predictor can know

A tier has a latency, a rate and a number of buffers, and copies one slab after another. All four use the same buffers:
the nearest uses that a prediction names are copied first, unless the engine asks for a higher confidence in that tier,
and the least recently used buffer is refilled. "After two periods" leaves out what every predictor must see once.
`benchmarks.accesses` records traces of real runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from megatrain.stream.ahead import LOOK_AHEAD
from megatrain.stream.fetch import READ_CONFIDENCE
from megatrain.stream.predict import BOUNDARY, LEAST_CONFIDENCE, Expected, Predictor


@dataclass(frozen=True)
class Event:
    """One use of some slabs, and the compute that follows it."""

    use: Hashable
    seconds: float = 0.0
    slabs: tuple[int, ...] = ()


@dataclass
class Trace:
    """What a run used, in order. The use `BOUNDARY` is an optimizer step."""

    name: str
    events: list[Event]
    sizes: dict[int, int]
    """Bytes by slab."""
    period: int
    """Events of the first period, which the static list repeats."""
    frozen: frozenset[int] = frozenset()
    """Slabs that a step does not change."""

    @property
    def periodic(self) -> bool:
        """Whether it repeats its first period exactly."""
        uses = [event.use for event in self.events]
        return uses[self.period :] == uses[: -self.period]


@dataclass(frozen=True)
class Tier:
    """A link from one kind of memory to the next."""

    name: str
    latency: float
    bytes_per_second: float
    buffers: int
    confidence: float = LEAST_CONFIDENCE
    """How likely a use must be for a prefetch."""


TIERS = (
    Tier("RAM to VRAM", 10e-6, 50e9, 3),
    Tier("RAM to VRAM, 5 buffers", 10e-6, 50e9, 5),
    Tier("disk to RAM", 200e-6, 4e9, 3, READ_CONFIDENCE),
    Tier("disk to RAM, 6 buffers", 200e-6, 4e9, 6, READ_CONFIDENCE),
)


# ---- predictors


class Guess(Protocol):
    def record(self, use: Hashable) -> None: ...
    def upcoming(self) -> Iterable[Expected]: ...


class Nothing:
    def record(self, use: Hashable) -> None:
        pass

    def upcoming(self) -> Iterable[Expected]:
        return ()


class Static(Nothing):
    """Keeps the first uses as a list, and follows it from then on. A use that is not next is looked up from there."""

    def __init__(self, length: int) -> None:
        self._length, self._uses, self._at, self._lost = length, list[Hashable](), -1, True

    def record(self, use: Hashable) -> None:
        count = len(self._uses)
        if count < self._length:
            self._uses.append(use)
            self._at, self._lost = count, count + 1 < self._length
            return
        found = (at % count for at in range(self._at + 1, self._at + 1 + count) if self._uses[at % count] == use)
        at = next(found, None)
        self._lost = at is None
        self._at = self._at if at is None else at

    def upcoming(self) -> Iterator[Expected]:
        count = len(self._uses)
        if not self._lost:
            yield from _distinct(self._uses[at % count] for at in range(self._at + 1, self._at + 1 + count))


class Clairvoyant(Nothing):
    """Knows the whole sequence."""

    def __init__(self, uses: Sequence[Hashable]) -> None:
        self._uses, self._at = uses, 0

    def record(self, use: Hashable) -> None:
        self._at += 1

    def upcoming(self) -> Iterator[Expected]:
        return _distinct(itertools.islice(self._uses, self._at, None))


def _distinct(uses: Iterable[Hashable]) -> Iterator[Expected]:
    seen: set[Hashable] = set()
    for use in itertools.takewhile(lambda use: use != BOUNDARY, uses):
        if use not in seen:
            seen.add(use)
            yield Expected(use, 1.0)


def guesses(trace: Trace) -> dict[str, Callable[[], Guess]]:
    uses = [event.use for event in trace.events]
    return {
        "nothing": Nothing,
        "static": lambda: Static(trace.period),
        "learned": Predictor,
        "clairvoyant": lambda: Clairvoyant(uses),
    }


# ---- the simulation


@dataclass
class Result:
    seconds: float = 0.0
    """Of compute and stalls, after the periods that are left out."""
    stalled: float = 0.0
    arrived: int = 0
    late: int = 0
    missed: int = 0


@dataclass
class Buffers:
    """Slabs in the faster tier: when each is there, and when it was used last."""

    trace: Trace
    tier: Tier
    ready: dict[int, float] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    """By slab, the order of its last use or copy."""
    clock: Iterator[int] = field(default_factory=itertools.count)
    link_free: float = 0.0

    def start(self, slab: int, now: float, keep: set[int], needed: bool = False) -> None:
        """Start a copy, if a buffer that holds nothing in `keep` can be refilled. One that is needed takes another
        buffer otherwise, as in stream/fetch.py."""
        if len(self.ready) >= self.tier.buffers:
            evictable = [held for held in self.ready if held not in keep]
            if not evictable and not needed:
                return
            for held in sorted(evictable, key=self.used.__getitem__)[:1]:
                del self.ready[held]
        self.link_free = max(now, self.link_free) + self.trace.sizes[slab] / self.tier.bytes_per_second
        self.ready[slab] = self.link_free + self.tier.latency
        self.used[slab] = next(self.clock)

    def prefetch(self, guess: Guess, slabs_of: dict[Hashable, tuple[int, ...]], now: float, keep: set[int]) -> None:
        for use, confidence in itertools.islice(guess.upcoming(), self.tier.buffers - 1):
            for slab in slabs_of.get(use, ()):
                keep.add(slab)
                if slab not in self.ready and confidence >= self.tier.confidence:
                    self.start(slab, now, keep)


def replay(trace: Trace, tier: Tier, guess: Guess, skip: int = 0) -> Result:
    """Run a trace; the first `skip` events are not counted."""
    buffers, result, now, began = Buffers(trace, tier), Result(), 0.0, 0.0
    slabs_of: dict[Hashable, tuple[int, ...]] = {event.use: event.slabs for event in trace.events}
    for index, event in enumerate(trace.events):
        if index == skip:
            result, began = Result(), now
        guess.record(event.use)
        if event.use == BOUNDARY:
            buffers.ready = {slab: at for slab, at in buffers.ready.items() if slab in trace.frozen}
        keep, there = {*event.slabs}, now
        for slab in event.slabs:
            if slab not in buffers.ready:
                result.missed += 1
                buffers.start(slab, now, keep, needed=True)
            elif buffers.ready[slab] > now:
                result.late += 1
            else:
                result.arrived += 1
            buffers.used[slab] = next(buffers.clock)
            there = max(there, buffers.ready[slab])
        buffers.prefetch(guess, slabs_of, now, keep)
        result.stalled += there - now
        now = there + event.seconds
    result.seconds = now - began
    return result


def microseconds_per_access(trace: Trace, ahead: int, repeats: int = 5) -> float:
    """CPU time of recording an access and asking for the next ones; the best, because other load only slows it down."""
    best = float("inf")
    for _ in range(repeats):
        predictor, start = Predictor(), time.thread_time()
        for event in trace.events:
            predictor.record(event.use)
            for _ in itertools.islice(predictor.upcoming(), ahead):
                pass
        best = min(best, time.thread_time() - start)
    return best / len(trace.events) * 1e6


# ---- synthetic traces, with the times of a 7B model on one GPU

LAYERS = 28
LAYER_BYTES, EMBEDDING_BYTES = 466_000_000, 1_090_000_000
FORWARD, BACKWARD, DECODE, STEP = 8e-3, 24e-3, 0.2e-3, 5e-3
"""Seconds per layer for 8,192 tokens, per layer and token of decoding, and of an optimizer step on the host."""


class Model:
    """Blocks of a model: an embedding, layers, a head."""

    def __init__(self, name: str = "", first_slab: int = 0, layers: int = LAYERS) -> None:
        self.name, self.first, self.count = name, first_slab, layers + 2
        self.sizes = {first_slab + i: LAYER_BYTES for i in range(1, layers + 1)}
        self.sizes |= {first_slab: EMBEDDING_BYTES, first_slab + layers + 1: EMBEDDING_BYTES}

    def use(self, phase: str, block: int, seconds: float) -> Event:
        return Event((self.name + phase, block), seconds, (self.first + block,))

    def forward(self, scale: float = 1.0, depth: int | None = None) -> list[Event]:
        return [self.use("forward", block, FORWARD * scale) for block in self.path(depth)]

    def backward(self, scale: float = 1.0, depth: int | None = None) -> list[Event]:
        return [self.use("backward", block, BACKWARD * scale) for block in reversed(self.path(depth))]

    def inference(self, seconds: float = FORWARD, depth: int | None = None) -> list[Event]:
        return [self.use("inference", block, seconds) for block in self.path(depth)]

    def train(self, scale: float = 1.0, depth: int | None = None) -> list[Event]:
        return [*self.forward(scale, depth), *self.backward(scale, depth), Event(BOUNDARY, STEP)]

    def path(self, depth: int | None) -> list[int]:
        """The embedding, the first `depth` layers (all: None), and the head."""
        last = self.count - 1
        return [*range(last if depth is None else 1 + depth), last]


def synthetic() -> list[Trace]:
    model, teacher, deep, chance = Model(), Model("teacher ", 100), Model("deep ", 200, layers=1000), random.Random(0)
    train, evaluate, step = model.train(), model.inference(), Event(BOUNDARY, STEP)
    accumulate = model.forward() + model.backward()

    def decode(fewest: int, most: int) -> list[Event]:
        return model.inference() + model.inference(DECODE) * (chance.randint(fewest, most) - 1)

    def drop_layers() -> list[Event]:
        dropped = {block for block in range(1, LAYERS + 1) if chance.random() < 0.1}
        return [event for event in train if not dropped.intersection(event.slabs)]

    runs: dict[str, list[list[Event]]] = {
        "training": [train] * 20,
        "training 1,000 layers": [deep.train()] * 4,
        "accumulation of 4": [[*accumulate * 4, step]] * 10,
        "window of 8": [[*(event for event in accumulate for _ in range(8)), step]] * 10,
        "evaluation every 5 steps": [train * 5 + evaluate * 3] * 6,
        "generation of 20 tokens every 4 steps": [train * 4 + decode(20, 20)] * 6,
        "teacher, then student": [teacher.inference() + train] * 15,
        "two batch shapes": [train + model.train(0.3)] * 12,
        "two depths in turn": [train + model.train(depth=14)] * 12,
        "generation of 5 to 60 tokens, then training": [decode(5, 60) + train * 2 for _ in range(20)],
        "5 to 40 tokens, teacher, training": [decode(5, 40) + teacher.inference() + train for _ in range(20)],
        "early exit at a random layer": [model.train(depth=chance.randint(8, LAYERS)) for _ in range(60)],
        "layer drop of 10%": [drop_layers() for _ in range(60)],
        "the same, evaluation every 5 steps": [drop_layers() + (evaluate if i % 5 == 4 else []) for i in range(60)],
        "random permutations": [[*chance.sample(evaluate, len(evaluate)), step] for _ in range(60)],
    }
    sizes = model.sizes | teacher.sizes | deep.sizes
    return [Trace(name, [*itertools.chain(*periods)], sizes, len(periods[0])) for name, periods in runs.items()]


# ---- recorded traces


def read(path: Path) -> Trace:
    """A trace that `benchmarks.accesses` wrote."""
    with path.open() as file:
        lines = [json.loads(line) for line in file]
    starts: list[float] = []
    events: list[Event] = []
    period = 0
    for (phase, block, seconds), group in itertools.groupby(
        lines, lambda line: (line["phase"], line.get("block"), line["seconds"])
    ):
        if phase == "period":
            period = period or len(events)
            continue
        use = BOUNDARY if phase == BOUNDARY else (phase, block)
        events.append(Event(use, 0.0, tuple(line["slab"] for line in group if "slab" in line)))
        starts.append(seconds)
    for index, (start, end) in enumerate(itertools.pairwise(starts)):
        events[index] = replace(events[index], seconds=max(0.0, end - start))
    if not events:
        raise SystemExit(f"{path} has no accesses; record it with benchmarks.accesses.")
    slabs = [line for line in lines if "slab" in line]
    frozen = frozenset(line["slab"] for line in slabs if not line["trained"])
    return Trace(path.stem, events, {line["slab"]: line["bytes"] for line in slabs}, period or len(events), frozen)


# ---- command line


def table(trace: Trace, tier: Tier) -> Iterator[str]:
    yield f"  {tier.name}: {tier.bytes_per_second / 1e9:.3g} GB/s, {tier.latency * 1e6:g} us, {tier.buffers} buffers"
    for name, guess in guesses(trace).items():
        whole, later = replay(trace, tier, guess()), replay(trace, tier, guess(), skip=2 * trace.period)
        yield (
            f"    {name:<12} stalled {whole.stalled:9.3f} s of {whole.seconds:9.3f}   arrived {whole.arrived:6} "
            f"late {whole.late:6} missed {whole.missed:6}   after two periods {later.stalled:9.3f} s"
        )


def tiers_like(trace: Trace) -> list[Tier]:
    """Links that need half as long for all copies as compute takes, as long, and four times as long."""
    copied = sum(trace.sizes[slab] for event in trace.events for slab in event.slabs)
    rate = copied / max(1e-6, sum(event.seconds for event in trace.events))
    return [Tier(f"{share:g} x compute", 10e-6, rate / share, 3) for share in (0.5, 1, 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="files that benchmarks.accesses wrote")
    parser.add_argument("--synthetic", action="store_true", help="sequences with the times of a 7B model")
    arguments = parser.parse_args()
    if not arguments.traces and not arguments.synthetic:
        parser.error("name trace files, or pass --synthetic")
    traces = [(read(path), True) for path in arguments.traces]
    for trace, recorded in [*traces, *((made, False) for made in (synthetic() if arguments.synthetic else ()))]:
        two, most = (microseconds_per_access(trace, ahead) for ahead in (2, LOOK_AHEAD))
        print(f"{trace.name}: {len(trace.events)} accesses, {two:.1f} us each, {most:.1f} us with {LOOK_AHEAD} ahead")
        for tier in tiers_like(trace) if recorded else TIERS:
            print("\n".join(table(trace, tier)))


if __name__ == "__main__":
    main()
