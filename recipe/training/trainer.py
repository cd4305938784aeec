"""The drafter's training loop. It reads like the algorithm; everything that only reports lives in `reporter.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from recipe.engine.engine import MasterSample, gradient_norm, learning_rate, step_was_skipped
from recipe.engine.worlds import gather_over_world, sum_over_world
from recipe.errors import RunError
from recipe.objective.objective import Objective
from recipe.training.checkpoint import Checkpoints, SaveFailed
from recipe.training.feed import Feed
from recipe.training.health import Health, as_pairs, causes, counts
from recipe.training.losses import Losses
from recipe.training.tally import Tally, outcome


class Reporter(Protocol):
    """What the loop tells the outside. Only the leader's does anything."""

    def step(self, step: int, facts: StepFacts) -> None: ...
    def flush(self, step: int, sums: dict[str, tuple[float, float]]) -> None: ...
    def event(self, text: str) -> None: ...
    def count(self, **counts: int) -> None: ...
    def warn(self, text: str) -> None: ...
    def saving(self) -> None: ...


class StepFacts(NamedTuple):
    """Numbers of one optimizer step: wall seconds, seconds waited for the ring, tokens over all ranks, gradient norm,
    the learning rate it was made with, and whether it was skipped."""

    seconds: float
    waited_s: float
    tokens: int
    gnorm: float
    lr: float
    skipped: bool


class StepTotals(NamedTuple):
    """Of one step over all drafter ranks, known before any forward: supervised weight (the loss's denominator), tokens,
    entries in which nothing is supervised two tokens running. A weight of 0: nothing to learn in this step."""

    weight: float
    tokens: int
    barren: int


class Diverged(RunError):
    """Too many non-finite steps, weights that are not finite, or a run that trained nothing; ``step`` is the last."""

    def __init__(self, step: int, message: str) -> None:
        super().__init__(message)
        self.step = step


class Trainer:
    """One drafter rank.

    Args:
        engine: DeepSpeed engine around the drafter.
        embedding, head: the target's, frozen, [V, H] each.
        checkpoints: None for a dry run, which is judged by its numbers alone.
        health: looks for numbers that are not finite; ``who`` is this rank's name in what it finds.
        tally: of the steps before ``first_step``, and of those to come.
        losses: what tells whether a resumed run goes on where it was.
        scale: drafter ranks x accumulation; with it a sum-loss becomes the exact global mean (docs/deepspeed.md).
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
        health: Health,
        tally: Tally,
        *,
        who: str,
        scale: int,
        log_every: int,
        save_every: int,
        losses: Losses,
        moved: Callable[[str, int, int], None],
    ) -> None:
        self.engine, self.feed, self.objective = engine, feed, objective
        self.embedding, self.head, self.checkpoints, self.reporter = embedding, head, checkpoints, reporter
        self.scale, self.log_every, self.save_every = scale, log_every, save_every
        self.moved, self.health, self.tally, self.losses, self.who = moved, health, tally, losses, who
        self.device = embedding.device
        self._window: dict[str, Tensor] = {}
        self._step: dict[str, Tensor] = {}
        self._masters = MasterSample(engine)
        self._unmoved = 0
        self._cause = ""

    def run(self, first_step: int) -> None:
        """Train from ``first_step`` to the end of the schedule, then save. Raises Diverged, on all ranks together."""
        steps = self.feed.schedule.total_steps
        if first_step >= steps:
            self._judge(steps)
        for step in range(first_step, steps):
            started, waited = time.monotonic(), self.feed.waited_s
            totals, rate = self._totals(step), learning_rate(self.engine)  # before any forward
            for planned, batch, row_sums in self.feed.micro_batches(step):
                hidden = self.engine(batch, self.embedding)
                sums = self.objective.sums(hidden, batch, self.head)
                fit = self.health.factor(planned, row_sums, sums.loss_sum)
                self.engine.backward(sums.loss_sum * (fit * (self.scale / max(totals.weight, 1e-12))))
                self.engine.step()
                self._collect(sums.metrics)
            self._finish_step(step + 1, started, self.feed.waited_s - waited, totals, rate)
            if (step + 1) % self.log_every == 0 or step + 1 == steps:
                self._flush(step + 1)
            if step + 1 == steps:
                self._judge(steps)
            if self.checkpoints is not None and ((step + 1) % self.save_every == 0 or step + 1 == steps):
                self._save(self.checkpoints, step + 1, steps)
            self.moved("training", step + 1, steps)

    def _totals(self, step: int) -> StepTotals:
        """One sum over all drafter ranks gives the one exact denominator, and what a step is counted by."""
        planned = self.feed.plan(step)
        own = [
            sum(self.objective.supervised_weight(p) for p in planned),
            float(sum(p.tokens for p in planned)),
            float(sum(p.barren for p in planned)),
        ]
        weight, tokens, barren = sum_over_world(own, self.device)
        if weight == 0:
            self.reporter.count(empty_steps=1)
        return StepTotals(weight, int(tokens), int(barren))

    def _collect(self, metrics: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Add numerators and denominators of this micro-batch to the step's, without a device sync."""
        for name, pair in metrics.items():
            added = torch.stack([part.double() for part in pair])
            self._step[name] = self._step[name] + added if name in self._step else added

    def _finish_step(self, step: int, started: float, waited_s: float, totals: StepTotals, rate: float) -> None:
        norm = gradient_norm(self.engine)
        skipped = step_was_skipped(self.engine)
        for name, sums in self._step.items():
            # A skipped step's sums are not finite; they would hide the good steps of the window.
            sums = torch.zeros_like(sums) if skipped else sums
            self._window[name] = self._window[name] + sums if name in self._window else sums
        self._step.clear()
        facts = StepFacts(time.monotonic() - started, waited_s, totals.tokens, norm, rate, skipped)
        self.reporter.step(step, facts)
        self.reporter.count(barren=totals.barren)
        kind, moved = outcome(skipped, rate, totals.weight, norm), self._masters.moved()
        of_late = self.tally.add(kind, moved)
        if skipped:
            self._name_what_is_wrong(step, of_late)
        else:
            self.health.step_done()
        self._unmoved += kind == "taken" and not moved

    def _name_what_is_wrong(self, step: int, of_late: int) -> None:
        """Every rank looks, the leader tells. More than ``max_skipped`` of the last steps, or weights that are not
        finite, which no later step can mend, end the run. Raises Diverged on all ranks."""
        found = causes(gather_over_world(as_pairs(self.who, self.health.diagnose())))
        self.reporter.count(**counts(found))
        self.reporter.event(f"step {step} skipped, nothing was changed ({of_late} skipped of late)")
        for _, text in found:
            self.reporter.event(f"step {step}: {text}")
        self._cause = cause = found[0][1] if found else "the gradient norm is not finite"
        if self.tally.too_many_skipped():
            raise Diverged(step, f"{of_late} of the last steps had numbers that are not finite; step {step}: {cause}")
        if any(kind == "weights" for kind, _ in found):
            raise Diverged(step, f"step {step}: {cause}")

    def _save(self, checkpoints: Checkpoints, step: int, steps: int) -> None:
        """A disk that is full now may not be at the next save: only the last one has to succeed."""
        self.moved("saving", step, steps)
        self.reporter.saving()
        self._refuse_bad_weights(step)
        trained = {"steps": self.tally.to_json(self._moved_on_all_ranks()), "losses": self.losses.to_json()}
        try:
            checkpoints.save(self.engine, step, trained)
        except SaveFailed as error:  # on all ranks
            if step == steps:
                raise
            again = min(step + self.save_every - step % self.save_every, steps)
            self.reporter.event(f"warning: {error}; training goes on, and step {again} is to be saved")

    def _refuse_bad_weights(self, step: int) -> None:
        """A checkpoint that could not be used must not push out one that can."""
        if not self.health.weights_are_finite():
            raise Diverged(step, f"weights are not finite after step {step}: it is not saved")

    def _judge(self, step: int) -> None:
        """After the last step and before it is saved: a resume then begins with steps that can still be good."""
        if self.checkpoints is None:
            return self._refuse_bad_weights(step)
        moved = self._moved_on_all_ranks()
        fault, warning = self.tally.fault(moved), self.tally.warning(moved)
        if fault is not None:
            raise Diverged(step, "; ".join(filter(None, [fault, self._cause])))
        if warning is not None:
            self.reporter.warn(warning)

    def _moved_on_all_ranks(self) -> float:
        return sum_over_world([self.tally.moved], self.device)[0]

    def _flush(self, step: int) -> None:
        names = sorted(self._window)
        local = torch.stack([self._window[name] for name in names]).flatten().tolist()
        *summed, unmoved = sum_over_world([*local, float(self._unmoved)], self.device)
        self._window.clear()
        self._unmoved = 0
        if unmoved:
            self.reporter.count(unmoved=int(unmoved))
            self.reporter.event(f"weights did not change in {unmoved:.0f} step(s) x rank(s) up to step {step}")
        pairs = dict(zip(names, zip(summed[::2], summed[1::2], strict=True), strict=True))
        self.reporter.flush(step, pairs)
        self.losses.add(*pairs.get("loss", (0.0, 0.0)))
