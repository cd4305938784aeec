"""The whole run as a pure function of its settings: who produces which batch when, who trains on which entry when.

Both roles build the same `Schedule`, so nothing about order has to be communicated, timing changes nothing, and a
resumed run continues with exactly what the interrupted one would have done.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from recipe.config.deepspeed_keys import RunConfig
from recipe.data.delivery import Delivery, plan_delivery
from recipe.data.plan import plan_epoch

ROW_BITS = 40


def entry_id(epoch: int, row: int) -> int:
    """The ring's name for one sequence in one pass of the target."""
    return epoch << ROW_BITS | row


def token_checksum(input_ids: np.ndarray) -> int:
    """Ties an entry to its tokens, so that a drafter notices taps of other tokens than its row's. 32 bits."""
    return zlib.crc32(np.ascontiguousarray(input_ids, dtype=np.int64).tobytes())


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
        drafters: drafter ranks on each node.
        accumulation: micro-batches a rank contributes to one optimizer step.
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
        nodes: int,
        drafters: int,
        accumulation: int,
        max_steps: int | None = None,
    ) -> None:
        self.lengths, self.seed, self.epochs, self.reuse = lengths, seed, epochs, reuse
        self.token_budget, self.max_batch_size, self.min_ready = token_budget, max_batch_size, min_ready
        self.nodes, self.drafters, self.accumulation = nodes, drafters, accumulation
        self.batches = lru_cache(maxsize=2 * nodes)(self._batches)
        self.delivery = lru_cache(maxsize=2 * nodes)(self._delivery)
        self.steps_of_epoch = [self._count_steps(epoch) for epoch in range(epochs)]
        self.first_step_of_epoch = np.concatenate([[0], np.cumsum(self.steps_of_epoch)])
        every = int(self.first_step_of_epoch[-1])
        self.total_steps = every if max_steps is None else min(every, max_steps)

    @classmethod
    def of(cls, config: RunConfig, lengths: np.ndarray, nodes: int) -> Schedule:
        """The schedule of a resolved config on rows of these lengths; the same on every rank."""
        ours = config.dflash
        return cls(
            lengths,
            seed=ours.run.seed,
            epochs=ours.run.epochs,
            reuse=ours.ring.reuse,
            token_budget=ours.data.token_budget,
            max_batch_size=ours.data.max_batch_size,
            min_ready=ours.ring.min_ready,
            nodes=nodes,
            drafters=len(ours.layout.drafter_gpus),
            accumulation=config.gradient_accumulation_steps,
            max_steps=ours.run.max_steps,
        )

    def _batches(self, epoch: int, node: int) -> list[np.ndarray]:
        plan = plan_epoch(self.lengths, self.seed, epoch, self.token_budget, self.max_batch_size, self.nodes)
        return plan.batches(node)

    def _delivery(self, epoch: int, node: int) -> Delivery:
        return plan_delivery(
            self.batches(epoch, node), self.lengths, self.seed, epoch, self.reuse, self.min_ready, self.token_budget
        )

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches that one node contributes to an optimizer step."""
        return self.drafters * self.accumulation

    def _count_steps(self, epoch: int) -> int:
        longest = max(len(self.delivery(epoch, node)) for node in range(self.nodes))
        return -(-longest // self.micro_batches_per_step)

    def locate(self, step: int) -> tuple[int, int]:
        """Epoch of an optimizer step, and its index within that epoch."""
        epoch = int(np.searchsorted(self.first_step_of_epoch, step, side="right")) - 1
        return epoch, step - int(self.first_step_of_epoch[epoch])

    def micro_batch(self, step: int, node: int, drafter: int, index: int) -> MicroBatchPlan:
        """What drafter ``drafter`` of ``node`` trains on in its ``index``-th micro-batch of ``step``."""
        epoch, within = self.locate(step)
        place = within * self.micro_batches_per_step + index * self.drafters + drafter
        delivery = self.delivery(epoch, node)
        if place >= len(delivery):
            empty = np.empty(0, dtype=np.int64)
            return MicroBatchPlan(epoch, empty, empty)
        return MicroBatchPlan(epoch, *delivery.micro_batch(place))

    def production(self, first_step: int, node: int) -> Iterator[ProductionBatch]:
        """The target batches of ``node`` from ``first_step`` to the end of the run, in order.

        A batch is produced in its original composition even when only some of its rows are still needed: another
        composition would round differently, and resumed must equal uninterrupted. Batches nobody needs are skipped.
        """
        sequence = 0
        for epoch in range(self.epochs):
            start = int(self.first_step_of_epoch[epoch])
            stop = min(int(self.first_step_of_epoch[epoch + 1]), self.total_steps)
            if stop <= first_step or start >= self.total_steps:
                continue
            uses = self._uses(epoch, node, max(first_step - start, 0), stop - start)
            for rows in self.batches(epoch, node):
                if uses[rows].any():
                    yield ProductionBatch(sequence, epoch, rows, uses[rows])
                    sequence += 1

    def _uses(self, epoch: int, node: int, first: int, stop: int) -> np.ndarray:
        """Deliveries of each row between two steps of an epoch, int array [rows]."""
        delivery = self.delivery(epoch, node)
        begin, end = (min(step * self.micro_batches_per_step, len(delivery)) for step in (first, stop))
        rows = delivery.rows[delivery.starts[begin] : delivery.starts[end]]
        return np.bincount(rows, minlength=len(self.lengths))

    def peak_pages(self, page_tokens: int) -> int:
        """The most ring pages that any node needs at once; a ring of fewer could deadlock."""
        return max(
            self.delivery(epoch, node).peak_pages(page_tokens, self.drafters)
            for epoch in range(self.epochs)
            for node in range(self.nodes)
        )
