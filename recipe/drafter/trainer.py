"""The drafter's training loop. It reads like the algorithm; everything that only reports lives in `reporter.py`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from recipe.drafter.checkpoint import Checkpoints
from recipe.drafter.feed import Feed
from recipe.drafter.objective import Objective
from recipe.errors import RunError
from recipe.roles.engine import gradient_norm, learning_rate
from recipe.roles.worlds import sum_over_world


class Reporter(Protocol):
    """What the loop tells the outside. Only the leader's does anything."""

    def step(self, step: int, facts: StepFacts) -> None: ...
    def flush(self, step: int, sums: dict[str, tuple[float, float]]) -> None: ...
    def event(self, text: str) -> None: ...
    def saving(self) -> None: ...


class StepFacts:
    """Numbers of one optimizer step: wall seconds, seconds waited for the ring, tokens over all ranks, norm, rate."""

    def __init__(self, seconds: float, waited_s: float, tokens: int, gnorm: float, lr: float, skipped: bool) -> None:
        self.seconds, self.waited_s, self.tokens = seconds, waited_s, tokens
        self.gnorm, self.lr, self.skipped = gnorm, lr, skipped


class Diverged(RunError):
    """Too many non-finite steps in a row; ``step`` is the last of them."""

    def __init__(self, step: int, message: str) -> None:
        super().__init__(message)
        self.step = step


class Trainer:
    """One drafter rank.

    Args:
        engine: DeepSpeed engine around the drafter.
        embedding, head: the target's, frozen, [V, H] each.
        scale: drafter ranks x accumulation; with it a sum-loss becomes the exact global mean (deepspeed.md §3).
        moved: called with (phase, step, steps) after every step and before a save, for the watchdog.
    """

    def __init__(
        self,
        engine: Any,
        feed: Feed,
        objective: Objective,
        embedding: Tensor,
        head: Tensor,
        checkpoints: Checkpoints | None,
        reporter: Reporter,
        *,
        scale: int,
        log_every: int,
        save_every: int,
        max_skipped: int,
        moved: Callable[[str, int, int], None],
    ) -> None:
        self.engine, self.feed, self.objective = engine, feed, objective
        self.embedding, self.head, self.checkpoints, self.reporter = embedding, head, checkpoints, reporter
        self.scale, self.log_every, self.save_every, self.max_skipped = scale, log_every, save_every, max_skipped
        self.moved = moved
        self.device = embedding.device
        self._window: dict[str, Tensor] = {}
        self._step: dict[str, Tensor] = {}
        self._skipped_in_a_row = 0

    def run(self, first_step: int) -> None:
        """Train from ``first_step`` to the end of the schedule, then save."""
        steps = self.feed.schedule.total_steps
        for step in range(first_step, steps):
            started, waited = time.monotonic(), self.feed.waited_s
            weight, tokens = self._global_weight(step)  # before any forward
            for batch in self.feed.micro_batches(step):
                hidden = self.engine(batch, self.embedding)
                sums = self.objective.sums(hidden, batch, self.head)
                self.engine.backward(sums.loss_sum * (self.scale / weight))
                self.engine.step()
                self._collect(sums.metrics)
            self._finish_step(step + 1, started, self.feed.waited_s - waited, tokens)
            if (step + 1) % self.log_every == 0 or step + 1 == steps:
                self._flush(step + 1)
            if self.checkpoints is not None and ((step + 1) % self.save_every == 0 or step + 1 == steps):
                self.moved("saving", step + 1, steps)
                self.reporter.saving()
                self.checkpoints.save(self.engine, step + 1)
            self.moved("training", step + 1, steps)

    def _global_weight(self, step: int) -> tuple[float, int]:
        """Supervised weight and tokens of the whole step over all drafter ranks: one sum, one exact denominator."""
        planned = self.feed.plan(step)
        own = [sum(self.objective.supervised_weight(p) for p in planned), float(sum(p.tokens for p in planned))]
        weight, tokens = sum_over_world(own, self.device)
        return max(weight, 1e-12), int(tokens)

    def _collect(self, metrics: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Add numerators and denominators of this micro-batch to the step's, without a device sync."""
        for name, pair in metrics.items():
            added = torch.stack([part.double() for part in pair])
            self._step[name] = self._step[name] + added if name in self._step else added

    def _finish_step(self, step: int, started: float, waited_s: float, tokens: int) -> None:
        norm = gradient_norm(self.engine)
        skipped = math.isnan(norm)
        for name, sums in self._step.items():
            # A skipped step's sums are not finite; they would hide the good steps of the window.
            sums = torch.zeros_like(sums) if skipped else sums
            self._window[name] = self._window[name] + sums if name in self._window else sums
        self._step.clear()
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        facts = StepFacts(time.monotonic() - started, waited_s, tokens, norm, learning_rate(self.engine), skipped)
        self.reporter.step(step, facts)
        if skipped:
            self.reporter.event(f"step {step} skipped: non-finite gradients ({self._skipped_in_a_row} in a row)")
        if self._skipped_in_a_row > self.max_skipped:
            message = f"{self._skipped_in_a_row} steps in a row had non-finite gradients, the last is step {step}"
            raise Diverged(step, message)

    def _flush(self, step: int) -> None:
        names = sorted(self._window)
        local = torch.stack([self._window[name] for name in names]).flatten().tolist()
        summed = sum_over_world(local, self.device)
        self._window.clear()
        pairs = zip(summed[::2], summed[1::2], strict=True)
        self.reporter.flush(step, dict(zip(names, pairs, strict=True)))
