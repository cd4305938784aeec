"""The whole run as a pure function of its settings: who produces which batch when, who trains on which entry when.

Both roles build the same `Schedule`, so nothing about order has to be communicated, timing changes nothing, and a
resumed run continues with exactly what the interrupted one would have done. A run may be resumed on other drafters
(`World`): whatever was not delivered by then is delivered once by the new ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from recipe.config.deepspeed_keys import RunConfig
from recipe.data.delivery import Delivery, plan_delivery
from recipe.data.plan import EpochPlan, plan_epoch

ROW_BITS = 40


def entry_id(epoch: int, row: int) -> int:
    """The ring's name for one sequence in one pass of the target."""
    return epoch << ROW_BITS | row


def token_checksum(input_ids: np.ndarray) -> int:
    """Ties an entry to its tokens, so that a drafter notices taps of other tokens than its row's. 32 bits."""
    return zlib.crc32(np.ascontiguousarray(input_ids, dtype=np.int64).tobytes())


@dataclass(frozen=True)
class World:
    """Who trains from optimizer step ``since`` on: ``drafters`` ranks on each of ``nodes`` nodes, each contributing
    ``accumulation`` micro-batches to a step."""

    since: int
    nodes: int
    drafters: int
    accumulation: int

    @property
    def width(self) -> int:
        """Micro-batches that one node contributes to an optimizer step."""
        return self.drafters * self.accumulation


@dataclass(frozen=True)
class Part:
    """What is planned at once: an epoch, or, after a change of the number of nodes, what ``rest_of`` had left of it
    when each of its nodes had delivered ``taken`` micro-batches."""

    epoch: int
    nodes: int
    rest_of: Part | None = None
    taken: int = 0


@dataclass(frozen=True)
class Stretch:
    """Steps [first, stop) of one part under one world; ``position``: micro-batches a node had delivered before."""

    part: Part
    world: World
    first: int
    stop: int
    position: int

    def micro_batches_before(self, step: int) -> int:
        """Micro-batches of the part that a node has delivered when ``step`` begins."""
        return self.position + (step - self.first) * self.world.width


@dataclass(frozen=True)
class MicroBatchPlan:
    """One packed row: ``rows[i]`` is delivered for the ``reuses[i]``-th time. Empty when a rank has no data left."""

    epoch: int
    rows: np.ndarray
    reuses: np.ndarray


@dataclass(frozen=True)
class ProductionBatch:
    """One right-padded target batch; ``uses[i]`` deliveries of row i are still to come (0: computed, not published)."""

    sequence: int
    epoch: int
    rows: np.ndarray
    uses: np.ndarray


class Schedule:
    """Order of production and of delivery for every node and drafter.

    Args:
        lengths: tokens of each row, int array [rows].
        worlds: the drafters from step 0 on, and after each resume that changed them. Production and delivery of steps
            under the last one can be asked for; the earlier ones say what has been delivered already.
        max_steps: cut the run here, or None for all epochs.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        seed: int,
        epochs: int,
        reuse: int,
        token_budget: int,
        max_batch_size: int,
        min_ready: int,
        worlds: Sequence[World],
        max_steps: int | None = None,
    ) -> None:
        self.lengths, self.seed, self.epochs, self.reuse = lengths, seed, epochs, reuse
        self.token_budget, self.max_batch_size, self.min_ready = token_budget, max_batch_size, min_ready
        self.worlds = tuple(worlds)
        self.world = self.worlds[-1]
        most = 2 * max(world.nodes for world in worlds)
        self._epoch = lru_cache(2)(self._plan_part)
        self._batches = lru_cache(most)(self._plan_batches)
        self._delivery = lru_cache(most)(self._plan_delivery)
        self._left = lru_cache(2)(self._find_left)
        self.stretches = list(self._plan())
        self._starts = [stretch.first for stretch in self.stretches]
        every = self.stretches[-1].stop
        self.total_steps = every if max_steps is None else min(every, max_steps)
        self._max_steps = max_steps

    @classmethod
    def of(cls, config: RunConfig, lengths: np.ndarray, nodes: int, earlier: Sequence[World] = ()) -> Schedule:
        """The schedule of a resolved config on rows of these lengths; the same on every rank.

        ``earlier``: `continued` worlds of a resumed run. Without it: a new run on ``nodes`` nodes.
        """
        ours = config.dflash
        return cls(
            lengths,
            seed=ours.run.seed,
            epochs=ours.run.epochs,
            reuse=ours.ring.reuse,
            token_budget=ours.data.token_budget,
            max_batch_size=ours.data.max_batch_size,
            min_ready=ours.ring.min_ready,
            worlds=earlier or [world_of(config, nodes, 0)],
            max_steps=ours.run.max_steps,
        )

    # -- planning ----------------------------------------------------------------------------------------------

    def _plan(self) -> Iterator[Stretch]:
        step = 0
        for epoch in range(self.epochs):
            part, position = Part(epoch, self._world_at(step)[0].nodes), 0
            while True:
                world, until = self._world_at(step)
                if world.nodes != part.nodes:
                    part, position = Part(epoch, world.nodes, part, position), 0
                    if not self._left(part).any():
                        break
                longest = max(len(self._delivery(part, node)) for node in range(part.nodes))
                steps = -(-(longest - position) // world.width)
                if steps <= 0:
                    break
                stop = step + steps if until is None else min(step + steps, until)
                yield Stretch(part, world, step, stop, position)
                position += (stop - step) * world.width
                step = stop

    def _world_at(self, step: int) -> tuple[World, int | None]:
        """The world of ``step``, and the step at which the next one begins."""
        index = max(i for i, world in enumerate(self.worlds) if world.since <= step)
        return self.worlds[index], self.worlds[index + 1].since if index + 1 < len(self.worlds) else None

    def _find_left(self, part: Part) -> np.ndarray:
        """bool [reuse, rows]: the deliveries that belong to ``part``."""
        if part.rest_of is None:
            return np.ones((self.reuse, len(self.lengths)), dtype=bool)
        left = self._left(part.rest_of).copy()
        for node in range(part.rest_of.nodes):
            before = self._delivery(part.rest_of, node)
            done = slice(0, before.starts[min(part.taken, len(before))])
            left[before.reuse[done], before.rows[done]] = False
        return left

    def _plan_part(self, part: Part) -> tuple[EpochPlan, np.ndarray | None]:
        """The plan of a part, and the rows that its numbers stand for (None: themselves)."""
        rows = None if part.rest_of is None else np.flatnonzero(self._left(part).any(axis=0))
        lengths = self.lengths if rows is None else self.lengths[rows]
        return plan_epoch(lengths, self.seed, part.epoch, self.token_budget, self.max_batch_size, part.nodes), rows

    def _plan_batches(self, part: Part, node: int) -> Sequence[np.ndarray]:
        plan, rows = self._epoch(part)
        return plan.batches(node) if rows is None else [rows[batch] for batch in plan.batches(node)]

    def _plan_delivery(self, part: Part, node: int) -> Delivery:
        wanted = None if part.rest_of is None else self._left(part)
        return plan_delivery(
            self._batches(part, node),
            self.lengths,
            self.seed,
            part.epoch,
            self.reuse,
            self.min_ready,
            self.token_budget,
            wanted,
        )

    # -- what the roles ask ------------------------------------------------------------------------------------

    @property
    def nodes(self) -> int:
        return self.world.nodes

    @property
    def drafters(self) -> int:
        return self.world.drafters

    @property
    def accumulation(self) -> int:
        return self.world.accumulation

    def batches(self, epoch: int, node: int) -> Sequence[np.ndarray]:
        """Row ids of the target batches of a whole epoch on the nodes of now, in production order."""
        return self._batches(Part(epoch, self.nodes), node)

    def at(self, step: int) -> Stretch:
        """The stretch that holds ``step``; the last one for steps behind the end."""
        return self.stretches[max(0, int(np.searchsorted(self._starts, step, side="right")) - 1)]

    def epoch_of(self, step: int) -> int:
        return self.at(step).part.epoch

    def micro_batch(self, step: int, node: int, drafter: int, index: int) -> MicroBatchPlan:
        """What drafter ``drafter`` of ``node`` trains on in its ``index``-th micro-batch of ``step``."""
        stretch = self.at(step)
        place = stretch.micro_batches_before(step) + index * stretch.world.drafters + drafter
        delivery = self._delivery(stretch.part, node)
        if place >= len(delivery):
            empty = np.empty(0, dtype=np.int64)
            return MicroBatchPlan(stretch.part.epoch, empty, empty)
        return MicroBatchPlan(stretch.part.epoch, *delivery.micro_batch(place))

    def production(self, first_step: int, node: int) -> Iterator[ProductionBatch]:
        """The target batches of ``node`` from ``first_step`` to the end of the run, in order.

        A batch is produced in its original composition even when only some of its rows are still needed: another
        composition would round differently, and resumed must equal uninterrupted. Batches nobody needs are skipped.
        """
        sequence = 0
        for part, begin, end in self._ahead(first_step):
            uses = self._uses(part, node, begin, end)
            for rows in self._batches(part, node):
                if uses[rows].any():
                    yield ProductionBatch(sequence, part.epoch, rows, uses[rows])
                    sequence += 1

    def _ahead(self, first_step: int) -> Iterator[tuple[Part, int, int]]:
        """What steps from ``first_step`` on take: the part, and the micro-batches [begin, end) of each node."""
        for stretch in self.stretches:
            first, stop = max(stretch.first, first_step), min(stretch.stop, self.total_steps)
            if first < stop:
                yield stretch.part, stretch.micro_batches_before(first), stretch.micro_batches_before(stop)

    def _uses(self, part: Part, node: int, begin: int, end: int) -> np.ndarray:
        """Deliveries of each row in micro-batches [begin, end) of a part, int array [rows]."""
        delivery = self._delivery(part, node)
        begin, end = min(begin, len(delivery)), min(end, len(delivery))
        rows = delivery.rows[delivery.starts[begin] : delivery.starts[end]]
        return np.bincount(rows, minlength=len(self.lengths))

    def peak_pages(self, page_tokens: int) -> int:
        """The most ring pages that any node needs at once; a ring of fewer could deadlock."""
        parts = {stretch.part: None for stretch in self.stretches if stretch.world == self.world}
        return max(
            self._delivery(part, node).peak_pages(page_tokens, self.drafters)
            for part in parts
            for node in range(part.nodes)
        )

    # -- the learning rate's own count -------------------------------------------------------------------------

    @cached_property
    def rate_steps(self) -> int:
        """Steps over which the learning rate runs: those of a run that has always been in the world of now, so that
        it goes on from the same share of the data after a change of world. Equals ``total_steps`` without one."""
        if len(self.worlds) == 1:
            return self.total_steps
        alone = Part(0, self.nodes)
        longest = [
            max(len(self._delivery(Part(epoch, self.nodes), node)) for node in range(alone.nodes))
            for epoch in range(self.epochs)
        ]
        every = sum(-(-count // self.world.width) for count in longest)
        return every if self._max_steps is None else min(every, self._max_steps)

    def rate_step(self, step: int) -> int:
        """Where ``step`` is on that scale: as far from its end as from the run's."""
        return max(0, self.rate_steps - (self.total_steps - step))


def world_of(config: RunConfig, nodes: int, since: int) -> World:
    """The drafters of a resolved config on ``nodes`` nodes."""
    return World(since, nodes, len(config.dflash.layout.drafter_gpus), config.gradient_accumulation_steps)


def continued(worlds: Sequence[World], now: World) -> list[World]:
    """``worlds`` of a checkpoint, and from ``now.since`` on the world of ``now`` if it is another one."""
    kept = [world for world in worlds if world.since < now.since] or list(worlds[:1])
    same = (kept[-1].nodes, kept[-1].drafters, kept[-1].accumulation) == (now.nodes, now.drafters, now.accumulation)
    return kept if same else [*kept, now]
