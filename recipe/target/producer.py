"""The target role: run the frozen target over the planned batches and publish its taps in the ring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from recipe.data.rows import Rows
from recipe.data.schedule import ProductionBatch, Schedule, entry_id, token_checksum
from recipe.ring import Ring
from recipe.target.capture import TapCapture
from recipe.target.evaluation import EvaluationTurns
from recipe.target.handoff import Handoff


@dataclass
class ProducerPlace:
    """Where this rank stands among the target ranks of its node."""

    node: int
    replica: int
    replicas: int
    tp_rank: int
    tp: int

    def produces(self, batch: ProductionBatch) -> bool:
        """Whether ``batch`` is this replica's: the batches of a node are dealt out in turn."""
        return batch.sequence % self.replicas == self.replica


class Producer:
    """One rank of one target replica.

    Args:
        progress: called with (batches done, tokens of the last one) after every batch.
        on_error: ends the run when the copy thread fails.
        turns: evaluates between two batches, on the replica that does.
    """

    def __init__(
        self,
        capture: TapCapture,
        ring: Ring,
        rows: Rows,
        schedule: Schedule,
        place: ProducerPlace,
        device: torch.device,
        timeout_s: float,
        progress: Callable[[int, int], None],
        on_error: Callable[[BaseException], None],
        turns: EvaluationTurns | None = None,
    ) -> None:
        self.capture, self.ring, self.rows, self.schedule = capture, ring, rows, schedule
        self.place, self.device, self.timeout_s, self.progress = place, device, timeout_s, progress
        share = range(place.tp_rank, ring.spec.streams, place.tp)
        self.turns = turns
        self.handoff = Handoff(ring, device, share, on_error)

    def run(self, first_step: int) -> None:
        """Produce everything from ``first_step`` to the end of the run, then say that this producer is done."""
        for batch in filter(self.place.produces, self.schedule.production(first_step, self.place.node)):
            input_ids, lengths, checksums = self._pad(batch)
            if self.turns is not None:
                self.turns.announce(batch.sequence)
            writes = self._reserve(batch, lengths, checksums)
            if self.turns is not None:
                self.turns.take(batch.sequence)
            taps = self.capture.capture(input_ids)
            self.handoff.submit(taps, writes)
            del taps
            self.progress(batch.sequence + 1, int(lengths.sum()))
        self.handoff.close()
        if self.place.tp_rank == 0:
            self.ring.finish(self.place.replica)

    def _pad(self, batch: ProductionBatch) -> tuple[torch.Tensor, np.ndarray, list[int]]:
        """Right-padded ids [n, S]. No mask: a causal model's real positions cannot see what comes after them."""
        sequences = [self.rows[int(row)][0] for row in batch.rows]
        lengths = np.array([len(ids) for ids in sequences])
        padded = np.zeros((len(sequences), int(lengths.max())), dtype=np.int64)
        for place, ids in enumerate(sequences):
            padded[place, : len(ids)] = ids
        checksums = [token_checksum(np.asarray(ids)) for ids in sequences]
        return torch.from_numpy(padded).to(self.device), lengths, checksums

    def _reserve(self, batch: ProductionBatch, lengths: np.ndarray, checksums: list[int]) -> list:
        """Pages for every row somebody still needs; the other ranks of the replica get the same ones."""
        needed = [index for index in range(len(batch.rows)) if batch.uses[index]]
        ids = [entry_id(batch.epoch, int(batch.rows[index])) for index in needed]
        if self.place.tp_rank == 0:
            entries = [(i, int(lengths[at]), checksums[at]) for i, at in zip(ids, needed, strict=True)]
            uses = [int(batch.uses[at]) for at in needed]
            writes = self.ring.reserve(batch.sequence, entries, self.place.tp, self.timeout_s, uses)
        else:
            writes = self.ring.join(batch.sequence, ids, self.timeout_s)
        return list(zip(needed, writes, strict=True))
