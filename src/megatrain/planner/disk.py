"""Which bytes of a decision are on disk, and the staging buffers in RAM through which they pass.

Blocks go there in one order: layers from the last one, then the other blocks from the last one. Resident blocks never
do. To make a decision fit, frozen weights go first, as they are only read; then residuals and moments, which move once
per step; then gradients of a step of one window (other sums stay in RAM); then weights that train, which are read for
every use. The search then replaces states of some blocks by gradients of others where a step becomes faster
(`Search._with_gradients_instead`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatrain.geometry import DISK_STAGING_SLOTS, disk_staging_slots, staging_bytes
from megatrain.planner.arrays import Ints
from megatrain.planner.decision import RESIDENT, STREAMED, Decision, Decisions

KINDS = FROZEN, BESIDE, ALONE = tuple(range(3))
"""Kinds of slabs: frozen; trained, in a block that has frozen ones too; trained, in a block without. A block that is
named in `weights_on_disk` for its frozen weights has its others there too if its states are."""
TRAINED = (BESIDE, ALONE)
STAGED = ("weights", "states", "gradients")
"""What has rings of staging buffers."""
ON_DISK = ("disk_frozen", "disk_blocks", "disk_gradients", "disk_weights")
"""Fields of a decision, in the order in which state goes to disk to make a decision fit."""
Taken = tuple[Ints, Ints]
"""How many layers are taken, from the last one, and how many of the other blocks."""


@dataclass(frozen=True)
class SlabBytes:
    """Bytes of a slab's weights, and of its residual and moments in whole pages."""

    weights: int
    states: int
    kind: int


@dataclass(frozen=True)
class BlockBytes:
    """The slabs of a block, and its bytes by role. `gradients`: in the dtype of the weights; 0 if they stay in RAM, as
    those of a tied slab do."""

    slabs: Sequence[SlabBytes]
    residuals: int
    moments: int
    gradients: int
    frozen_residuals: int = 0
    """Of frozen weights: on disk if these are, or the states of the block."""


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
        blocks: Sequence[BlockBytes],
        layers: Sequence[int],
        others: Sequence[int],
        heads: Sequence[int],
        *,
        accumulation: int,
        transit: int = 0,
    ) -> None:
        """`accumulation`: micro-batches of a step, or more than a window can have if no gradient may go to disk.
        `transit`: RAM that transfers take while anything is on disk."""
        self._layers, self._others, self._accumulation, self._transit = layers, others, accumulation, transit
        self._blocks = blocks
        self._states = [
            DiskSums(role, layers, others)
            for role in ([block.residuals for block in blocks], [block.moments for block in blocks])
        ]
        self._frozen_residuals = DiskSums([block.frozen_residuals for block in blocks], layers, others)
        self._gradients = DiskSums([block.gradients for block in blocks], layers, others)
        self.has_frozen = any(slab.kind == FROZEN for block in blocks for slab in block.slabs)
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
        self._alike = sorted({slab for block in blocks for slab in block.slabs}, key=lambda slab: -slab.weights)
        """Distinct slabs. Layers are mostly alike, so these are few."""
        self._counts = [self._sums(lambda _, slab, one=one: slab == one) for one in self._alike]
        self._state_counts = [
            self._sums(lambda _, slab, one=one: slab == one and slab.kind != FROZEN) for one in self._alike
        ]
        self._gradient_counts = [
            self._sums(lambda i, slab, one=one: slab == one and slab.kind != FROZEN and blocks[i].gradients > 0)
            for one in self._alike
        ]
        self._staging: dict[bytes, tuple[int, ...]] = {}
        self._gains: Ints | None = None

    def _sums(self, number: Any) -> DiskSums:
        values = [sum(number(i, slab) for slab in block.slabs) for i, block in enumerate(self._blocks)]
        return DiskSums(values, self._layers, self._others)

    def order(self, resident: bool | int, layers: int) -> list[int]:
        """All blocks that can be on disk, in the order in which they go there."""
        return [*self._layers[layers:][::-1], *([] if resident else self._others[::-1])]

    def placed(self, decision: Decision) -> dict[str, list[int]]:
        """The blocks that each list of a plan names."""
        order = self.order(decision.other_blocks == RESIDENT, decision.resident_layers)
        frozen, alone = (
            max(decision.disk_frozen, decision.disk_weights),
            min(decision.disk_blocks, decision.disk_weights),
        )
        weights = [
            index
            for rank, index in enumerate(order)
            if rank < (frozen if any(slab.kind == FROZEN for slab in self._blocks[index].slabs) else alone)
            and self._blocks[index].slabs
        ]
        layers, others = (int(taken[0]) for taken in self._gradients_taken(Decisions.of([decision])))
        last = [*self._layers[::-1][:layers], *self._others[::-1][:others]]
        return {
            "on_disk": sorted(order[: decision.disk_blocks]),
            "weights_on_disk": sorted(weights),
            "gradients_on_disk": sorted(index for index in last if self._blocks[index].gradients),
        }

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

    def gradient_count(self, chosen: Decisions) -> Ints:
        """How many blocks, in the order in which they go to disk, have their gradients there unless they are held."""
        one_window = chosen.first_window >= self._accumulation
        return np.minimum(chosen.disk_blocks, chosen.disk_gradients) * one_window

    def _gradients_taken(self, chosen: Decisions) -> Taken:
        layers, others = self.taken(chosen, self.gradient_count(chosen))
        in_ram = len(self._layers) - chosen.held_gradients
        return np.minimum(layers, in_ram), np.where(chosen.other_blocks == STREAMED, others, 0)

    def gradients(self, chosen: Decisions) -> Ints:
        """Bytes of gradients on disk."""
        return self._gradients.of(self._gradients_taken(chosen))

    def frozen_residuals(self, chosen: Decisions) -> Ints:
        """Bytes of residuals of frozen weights on disk."""
        count = np.maximum(chosen.disk_blocks, weight_counts(chosen)[FROZEN])
        nbytes: Ints = self._frozen_residuals.of(self.taken(chosen, count))
        return nbytes

    def accounts(self, chosen: Decisions) -> tuple[Ints, Ints]:
        """Bytes on disk: weights, residuals, moments and gradients. Bytes of RAM that they take: staging buffers for
        weights, states and gradients, and what is in transit."""
        on_disk, in_ram = np.zeros((4, len(chosen)), np.int64), np.zeros((4, len(chosen)), np.int64)
        used = np.flatnonzero((chosen.disk_blocks > 0) | (chosen.disk_frozen > 0) | (chosen.disk_weights > 0))
        if len(used):
            some = chosen.take(used)
            states, gradients = self.taken(some, some.disk_blocks), self._gradients_taken(some)
            residuals, moments = (role.of(states) for role in self._states)
            residuals = residuals + self.frozen_residuals(some)
            on_disk[:, used] = [self.weights(some), residuals, moments, self._gradients.of(gradients)]
            weights = [self.taken(some, count) for count in weight_counts(some)]
            counts = [count.of(weights[slab.kind]) for slab, count in zip(self._alike, self._counts, strict=True)]
            counts += [count.of(states) for count in self._state_counts]
            counts += [count.of(gradients) for count in self._gradient_counts]
            in_ram[:, used] = [*self._staged(counts), np.full(len(used), self._transit)]
        return on_disk, in_ram

    def written(self, decision: Decision) -> int:
        """Bytes that a step writes: what is on disk, less frozen weights and their residuals."""
        chosen = Decisions.of([decision])
        frozen = self.weights(chosen, (FROZEN,)) + self.frozen_residuals(chosen)
        return int((self.accounts(chosen)[0].sum(axis=0) - frozen)[0])

    def _staged(self, counts: Sequence[Ints]) -> Ints:
        """Staging buffers, `STAGED` × decisions, by how many of each distinct slab have weights, states and gradients
        on disk. More than fill a ring count as that many."""
        rows = np.ascontiguousarray(np.minimum(np.array(counts).T, DISK_STAGING_SLOTS).astype(np.uint8))
        keys = rows.view(np.dtype((np.void, rows.shape[1])))[:, 0]
        _, first, where = np.unique(keys, return_index=True, return_inverse=True)
        sizes = []
        for row in rows[first]:
            key = row.tobytes()
            if key not in self._staging:
                self._staging[key] = self._staging_bytes(row.reshape(len(STAGED), -1).tolist())
            sizes.append(self._staging[key])
        staged: Ints = np.array(sizes, np.int64).T[:, where]
        return staged

    def _staging_bytes(self, counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The buffers that stream/disk_weights.py, stream/disk.py and stream/disk_gradients.py allocate."""
        weights = [slab.weights for slab in self._alike]
        # A weight on disk is staged for the update too, with the states.
        with_weights = [
            slab.states + slab.weights * (count > 0) for slab, count in zip(self._alike, counts[0], strict=True)
        ]
        return tuple(
            staging_bytes(
                [each for each in zip(self._alike, some, sizes, strict=True) if each[1]],
                disk_staging_slots,
                size=lambda each: each[0].weights,
                nbytes=lambda each: each[2],
                count=lambda each: each[1],
            )
            for some, sizes in zip(counts, (weights, with_weights, weights), strict=True)
        )

    def freeing(self, chosen: Decisions, over: Ints) -> Decisions:
        """Decisions with the least on disk that frees `over` bytes of RAM, or else with what frees most."""
        needy = np.flatnonzero(over > 0)
        columns = {name: np.zeros_like(over) for name in ON_DISK}
        if not len(needy):
            return chosen.replace(**columns)
        some, over = chosen.take(needy), over[needy]
        gains, stage = self._gradient_stages(some)
        most_gained = np.array([gain[-1] for gain in gains])[stage]
        groups, member = np.unique(2 * some.resident_layers + (some.other_blocks == RESIDENT), return_inverse=True)
        paths = [self._path(int(group) % 2, int(group) // 2) for group in groups]
        on_disk, in_ram = self.accounts(
            Decisions(**{name: np.concatenate([path[name] for path in paths]) for name in paths[0]})
        )
        freed = on_disk.sum(axis=0) - in_ram.sum(axis=0)
        left = np.zeros_like(over)
        """What gradients must free."""
        start = 0
        for number, path in enumerate(paths):
            stop = start + len(path["disk_blocks"])
            # Gradients go between states and weights that train.
            middle = start + int(np.argmax(path["disk_blocks"]))
            before, after = (
                np.maximum.accumulate(freed[part]) for part in (slice(start, middle + 1), slice(middle, stop))
            )
            members = np.flatnonzero(member == number)
            most = after[-1] + most_gained[members]
            wanted = np.minimum(over[members], np.maximum(before[-1], most))
            enough = wanted <= before[-1]
            later = middle - start + np.searchsorted(after, wanted - most_gained[members])
            steps = np.where(enough, np.searchsorted(before, wanted), later)
            for name in path.keys() & columns.keys():
                columns[name][needy[members]] = path[name][steps]
            left[members] = np.where(enough, 0, wanted - after[0])
            start = stop
        for number, gain in enumerate(gains):
            members = np.flatnonzero(stage == number)
            count = np.searchsorted(gain, np.minimum(left[members], gain[-1]))
            layers = len(self._layers) - some.held_gradients[members]
            skipped = some.held_gradients[members] - some.resident_layers[members]
            columns["disk_gradients"][needy[members]] = count + skipped * (count > layers)
        return chosen.replace(**columns)

    def _path(self, resident: int, layers: int) -> dict[str, Ints]:
        """What goes to disk, block by block: frozen weights, states, weights that train."""
        count = len(self.order(resident, layers))
        stages = ("disk_frozen", "disk_blocks", "disk_weights")[not self.has_frozen :]
        step = np.arange(len(stages) * count + 1)
        path = {name: np.clip(step - number * count, 0, count) for number, name in enumerate(stages)}
        placement = {"other_blocks": RESIDENT * resident, "resident_layers": layers, "disk_frozen": 0}
        return {name: np.full_like(step, value) for name, value in placement.items()} | path

    def _gradient_stages(self, chosen: Decisions) -> tuple[list[Ints], Ints]:
        """What the first gradients free at most, by how many there are, if all states are on disk: distinct lists, and
        which of them applies to each decision."""
        if self._gains is None:
            layers, others = np.indices((len(self._layers) + 1, len(self._others) + 1)).reshape(2, -1)
            none = [np.zeros_like(layers)] * (2 * len(self._alike))
            staged = self._staged([*none, *(count.of((layers, others)) for count in self._gradient_counts)]).sum(axis=0)
            gains = self._gradients.of((layers, others)) - staged
            self._gains = gains.reshape(len(self._layers) + 1, -1)
        in_ram = len(self._layers) - chosen.held_gradients
        keys = (2 * in_ram + (chosen.other_blocks == STREAMED)) * (chosen.first_window >= self._accumulation)
        distinct, stage = np.unique(keys, return_inverse=True)
        table = self._gains
        stages = [
            [*table[: key // 2 + 1, 0], *table[key // 2, 1:][: None if key % 2 else 0]] for key in map(int, distinct)
        ]
        return [np.maximum.accumulate(gains) for gains in stages], stage


def weight_counts(chosen: Decisions) -> tuple[Ints, Ints, Ints]:
    """How many blocks, in the order in which they go to disk, have their weights of each kind there."""
    named = np.maximum(chosen.disk_frozen, chosen.disk_weights)
    return named, np.minimum(chosen.disk_blocks, named), np.minimum(chosen.disk_blocks, chosen.disk_weights)
