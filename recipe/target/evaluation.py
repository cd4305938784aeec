"""When the target evaluates: between two batches of its production, and after the last one, until nothing is asked.

Only the first replica of node 0 does. Its first rank looks for a request before it reserves the pages of a batch and
says so in the control store; the other ranks of the replica get their page lists only after that, so all of them find
the same word at the same batch. What is produced, and in which order, is not touched: training is the same with and
without evaluation.

A long evaluation is cut into slices between batches, so that nobody waits too long. Each batch earns a slice of time,
and each answer spends what it took; time in which the ring was full anyway is earned too. So all that evaluation adds
to the production of one optimizer step is `SHARE` of `ring.timeout_s`, and one answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from recipe.agreement.evaluations import Evaluations

SHARE = 0.25
POLL_S = 0.1


class Evaluator(Protocol):
    """Decodes with this rank's part of the target; built above this package (`recipe.decode.in_loop`)."""

    def begin(self, step: int, folder: Path) -> None:
        """The first rank: take up the drafter of ``step``."""

    def work(self, seconds: float) -> dict[str, Any] | None:
        """The first rank: decode for about ``seconds``; the result when it is complete, or ``not_finite``: where logits
        were not, after which nothing more can be measured."""

    def follow(self) -> None:
        """The others: take part in one `work` of the first rank."""


class EvaluationTurns:
    """One rank of the replica that evaluates.

    Args:
        first: whether this is the replica's first rank; ``alone``: whether it is the only one.
        budget_s: seconds of evaluation while the batches of one optimizer step, ``batches`` on this node, are produced.
        tick: called while waiting.
    """

    def __init__(
        self,
        mail: Evaluations,
        evaluator: Evaluator,
        first: bool,
        alone: bool,
        budget_s: float,
        batches: int,
        tick: Callable[[], None],
    ) -> None:
        self.mail, self.evaluator, self.first, self.alone = mail, evaluator, first, alone
        self.budget_s, self.slice_s, self.tick = budget_s, budget_s / batches, tick
        self._earned_s, self._asked_at = self.slice_s, 0.0
        self._step: int | None = None
        self._due = False

    def announce(self, sequence: int) -> None:
        """Before the pages of batch ``sequence`` are reserved: is there something to evaluate?"""
        self._asked_at = time.monotonic()
        if self.first:
            self._earned_s = min(self._earned_s + self.slice_s, self.budget_s)
            self._due = self._earned_s > 0 and self._something_to_do()
            if self._due and not self.alone:
                self.mail.call_others(str(sequence))

    def take(self, sequence: int) -> None:
        """After the reservation and before the batch is computed: evaluate for a slice if that was announced."""
        if self.first and self._due:
            began = time.monotonic()
            self._earned_s = min(self._earned_s + began - self._asked_at, self.budget_s)
            self._work(self._earned_s)
            self._earned_s -= time.monotonic() - began
        elif not self.first and self.mail.called(str(sequence)):
            self.evaluator.follow()

    def serve(self) -> None:
        """After the last batch: evaluate until the drafters ask for nothing more."""
        turn = 0
        while not (self.mail.all_answered() if self.first else self.mail.dismissed()):
            due = self._something_to_do() if self.first else self.mail.called(f"end/{turn}")
            if not due:
                self.tick()
                time.sleep(POLL_S)
                continue
            if self.first:
                if not self.alone:
                    self.mail.call_others(f"end/{turn}")
                self._work(self.budget_s)
            else:
                self.evaluator.follow()
            turn += 1
        if self.first:
            self.mail.dismiss()

    def _something_to_do(self) -> bool:
        return self._step is not None or self.mail.waiting() is not None

    def _work(self, seconds: float) -> None:
        if self._step is None:
            self._step = self.mail.waiting()
            assert self._step is not None
            self.evaluator.begin(self._step, self.mail.weights(self._step))
        record = self.evaluator.work(seconds)
        if record is not None:
            self.mail.answer({"step": self._step, **record})
            self._step = None
