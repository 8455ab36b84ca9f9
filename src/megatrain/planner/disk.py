"""Which bytes of a decision are on disk, and the staging buffers in RAM through which they pass.

Blocks go there in one order: layers from the last one, then the other blocks from the last one. Resident blocks never
do. Frozen weights go first, as they are only read; then residuals and moments, which move once per step; then weights
that train, which are read for every use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatrain.geometry import DISK_STAGING_SLOTS, group_by_size
from megatrain.planner.arrays import Ints
from megatrain.planner.decision import RESIDENT, Decision, Decisions

KINDS = FROZEN, BESIDE, ALONE = tuple(range(3))
"""Kinds of slabs: frozen; trained, in a block that has frozen ones too; trained, in a block without. A block that is
named in `weights_on_disk` for its frozen weights has its others there too if its states are."""
TRAINED = (BESIDE, ALONE)
Taken = tuple[Ints, Ints]
"""How many layers are taken, from the last one, and how many of the other blocks."""


@dataclass(frozen=True)
class SlabBytes:
    """Bytes of a slab's weights, and of its residual and moments in whole pages."""

    weights: int
    states: int
    kind: int


class DiskSums:
    """Sums of a number per block, over the blocks that are taken."""

    def __init__(self, values: Sequence[float], layers: Sequence[int], others: Sequence[int]) -> None:
        self._layers: npt.NDArray[Any] = np.cumsum([0, *(values[i] for i in reversed(layers))])
        self._others: npt.NDArray[Any] = np.cumsum([0, *(values[i] for i in reversed(others))])

    def of(self, taken: Taken) -> npt.NDArray[Any]:
        sums: npt.NDArray[Any] = self._layers[taken[0]] + self._others[taken[1]]
        return sums


class DiskLedger:
    """Bytes on disk and in staging buffers, of many decisions at once."""

    def __init__(
        self,
        blocks: Sequence[Sequence[SlabBytes]],
        residuals: Sequence[int],
        moments: Sequence[int],
        layers: Sequence[int],
        others: Sequence[int],
        heads: Sequence[int],
    ) -> None:
        self._blocks, self._layers, self._others = blocks, layers, others
        self._states = [DiskSums(role, layers, others) for role in (residuals, moments)]
        self.has_frozen = any(slab.kind == FROZEN for slabs in blocks for slab in slabs)
        self._weights, self._weights_backward = (
            [
                self._sums(
                    lambda i, slab, kind=kind, left_out=left_out: (
                        slab.weights * (slab.kind == kind and i not in left_out)
                    )
                )
                for kind in KINDS
            ]
            for left_out in ((), heads)
        )
        self._alike = sorted({*(slab for slabs in blocks for slab in slabs)}, key=lambda slab: -slab.weights)
        """Distinct slabs. Layers are mostly alike, so these are few."""
        self._counts = [self._sums(lambda _, slab, one=one: slab == one) for one in self._alike]
        self._staging: dict[bytes, tuple[int, int]] = {}

    def _sums(self, number: Any) -> DiskSums:
        values = [sum(number(index, slab) for slab in slabs) for index, slabs in enumerate(self._blocks)]
        return DiskSums(values, self._layers, self._others)

    def order(self, resident: bool | int, layers: int) -> list[int]:
        """All blocks that can be on disk, in the order in which they go there."""
        return [*self._layers[layers:][::-1], *([] if resident else self._others[::-1])]

    def placed(self, decision: Decision) -> tuple[list[int], list[int]]:
        """The blocks with states on disk, and those with weights there."""
        order = self.order(decision.other_blocks == RESIDENT, decision.resident_layers)
        frozen, alone = (
            max(decision.disk_frozen, decision.disk_weights),
            min(decision.disk_blocks, decision.disk_weights),
        )
        weights = [
            index
            for rank, index in enumerate(order)
            if rank < (frozen if any(slab.kind == FROZEN for slab in self._blocks[index]) else alone)
            and self._blocks[index]
        ]
        return sorted(order[: decision.disk_blocks]), sorted(weights)

    def taken(self, chosen: Decisions, blocks: Ints) -> Taken:
        """The first `blocks` blocks, as far as there are so many."""
        layers = len(self._layers) - chosen.resident_layers
        others = np.clip(blocks - layers, 0, len(self._others))
        return np.minimum(blocks, layers), np.where(chosen.other_blocks == RESIDENT, 0, others)

    def weights(self, chosen: Decisions, kinds: Sequence[int] = KINDS) -> Ints:
        """Bytes of weights on disk."""
        return self.weights_among(chosen, len(self._layers), True, kinds)

    def weights_among(
        self, chosen: Decisions, layers: Any, others: Any, kinds: Sequence[int] = KINDS, backward: bool = False
    ) -> Ints:
        """The same in the last `layers` layers and, where `others`, in the other blocks. `backward`: without the head,
        which computes its gradients in the forward."""
        total, counts = np.zeros(len(chosen), np.int64), weight_counts(chosen)
        for kind in kinds:
            taken = self.taken(chosen, counts[kind])
            sums = (self._weights_backward if backward else self._weights)[kind]
            total += sums.of((np.minimum(taken[0], layers), np.where(others, taken[1], 0)))
        return total

    def accounts(self, chosen: Decisions) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Bytes of weights, residuals and moments on disk, and of staging buffers in RAM for weights and for states."""
        zero = np.zeros(len(chosen), np.int64)
        found = np.array([zero] * 5)
        used = np.flatnonzero((chosen.disk_blocks > 0) | (chosen.disk_frozen > 0) | (chosen.disk_weights > 0))
        if len(used):
            some = chosen.take(used)
            taken = self.taken(some, some.disk_blocks)
            residuals, moments = (role.of(taken) for role in self._states)
            found[:, used] = [self.weights(some), residuals, moments, *self._staged(some, taken)]
        weights, residuals, moments, staged_weights, staged_states = found
        return weights, residuals, moments, staged_weights, staged_states

    def written(self, decision: Decision) -> int:
        """Bytes that a step writes: what is on disk, less frozen weights."""
        chosen = Decisions.of([decision])
        _, residuals, moments, _, _ = self.accounts(chosen)
        return int((self.weights(chosen, TRAINED) + residuals + moments)[0])

    def _staged(self, chosen: Decisions, states: Taken) -> Ints:
        """Staging buffers for weights, and for states. They depend on how many slabs of each size there are, and more
        than fill a ring count as that many."""
        taken = [self.taken(chosen, count) for count in weight_counts(chosen)]
        columns = [count.of(taken[slab.kind]) for slab, count in zip(self._alike, self._counts, strict=True)]
        columns += [count.of(states) for count in self._counts]
        rows = np.ascontiguousarray(np.minimum(np.array(columns).T, DISK_STAGING_SLOTS).astype(np.uint8))
        keys = rows.view(np.dtype((np.void, rows.shape[1])))[:, 0]
        _, first, where = np.unique(keys, return_index=True, return_inverse=True)
        sizes = []
        for row in rows[first]:
            key = row.tobytes()
            if key not in self._staging:
                self._staging[key] = self._staging_bytes(row.tolist())
            sizes.append(self._staging[key])
        staged: Ints = np.array(sizes, np.int64).T[:, where]
        return staged

    def _staging_bytes(self, counts: Sequence[int]) -> tuple[int, int]:
        """The buffers that stream/disk_weights.py and stream/disk.py allocate."""
        kinds = len(self._alike)
        each = [*zip(self._alike, counts[:kinds], counts[kinds:], strict=True)]
        weights = states = 0
        for ring in group_by_size([one for one in each if one[1]], lambda one: one[0].weights):
            weights += min(DISK_STAGING_SLOTS, sum(count for _, count, _ in ring)) * ring[0][0].weights
        for ring in group_by_size([one for one in each if one[2]], lambda one: one[0].weights):
            # Frozen slabs have no states, but count as members of a ring.
            if any(slab.kind != FROZEN for slab, _, _ in ring):
                largest = max(slab.states + slab.weights * (there > 0) for slab, there, _ in ring)
                states += min(DISK_STAGING_SLOTS, sum(count for _, _, count in ring)) * largest
        return weights, states

    def freeing(self, chosen: Decisions, over: Ints) -> Decisions:
        """Decisions with the least on disk that frees `over` bytes of RAM, or else with what frees most."""
        needy = np.flatnonzero(over > 0)
        columns = {name: np.zeros_like(over) for name in ("disk_frozen", "disk_blocks", "disk_weights")}
        if not len(needy):
            return chosen.replace(**columns)
        groups, member = np.unique(
            2 * chosen.resident_layers[needy] + (chosen.other_blocks[needy] == RESIDENT), return_inverse=True
        )
        paths = [self._path(int(group) % 2, int(group) // 2) for group in groups]
        every = Decisions(**{name: np.concatenate([path[name] for path in paths]) for name in paths[0]})
        weights, residuals, moments, *staged = self.accounts(every)
        freed = weights + residuals + moments - sum(staged)
        start = 0
        for number, path in enumerate(paths):
            stop = start + len(path["disk_blocks"])
            most = np.maximum.accumulate(freed[start:stop])
            members = needy[member == number]
            steps = np.searchsorted(most, np.minimum(over[members], most[-1]))
            for name, column in columns.items():
                column[members] = path[name][steps]
            start = stop
        return chosen.replace(**columns)

    def _path(self, resident: int, layers: int) -> dict[str, Ints]:
        """What goes to disk, block by block: frozen weights, states, weights that train."""
        count = len(self.order(resident, layers))
        stages = ("disk_frozen", "disk_blocks", "disk_weights")[not self.has_frozen :]
        step = np.arange(len(stages) * count + 1)
        path = {name: np.clip(step - number * count, 0, count) for number, name in enumerate(stages)}
        placement = {"other_blocks": RESIDENT * resident, "resident_layers": layers, "disk_frozen": 0}
        return {name: np.full_like(step, value) for name, value in placement.items()} | path


def weight_counts(chosen: Decisions) -> tuple[Ints, Ints, Ints]:
    """How many blocks, in the order in which they go to disk, have their weights of each kind there."""
    named = np.maximum(chosen.disk_frozen, chosen.disk_weights)
    return named, np.minimum(chosen.disk_blocks, named), np.minimum(chosen.disk_blocks, chosen.disk_weights)
