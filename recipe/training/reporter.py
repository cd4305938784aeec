"""What a run says: log line, metrics, status, profile, GPU samples, wandb. Only the leader has one that speaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from recipe.config import RunConfig
from recipe.engine.engine import peak_memory_bytes
from recipe.ring import Ring
from recipe.tell.disk import DiskTrouble
from recipe.tell.logline import TrainLog, format_line
from recipe.tell.metrics import Metrics
from recipe.tell.profile import Profile, Verdict
from recipe.tell.run_dir import RunDir
from recipe.tell.status_writer import StatusWriter
from recipe.training.trainer import StepFacts

COUNTED = (
    "skipped", "nonfinite_taps", "nonfinite_weights", "nonfinite_losses", "nonfinite_gradients", "unmoved", "barren",
    "empty_steps",
)  # fmt: skip


class SilentReporter:
    """For every rank but the leader."""

    def step(self, step: int, facts: StepFacts) -> None: ...

    def flush(self, step: int, sums: dict[str, tuple[float, float]]) -> None: ...

    def event(self, text: str) -> None: ...

    def count(self, **counts: int) -> None: ...

    def warn(self, text: str) -> None: ...

    def saving(self) -> None: ...


class RunReporter:
    """The leader's. ``epoch_of(step)`` and ``ring`` fill the fields that the loop does not know."""

    def __init__(
        self,
        run_dir: RunDir,
        config: RunConfig,
        log: TrainLog,
        status: StatusWriter,
        ring: Ring,
        device: torch.device,
        *,
        first_step: int,
        steps: int,
        epoch_of: Callable[[int], int],
        log_metrics: Callable[[dict[str, Any]], None],
        gpu_window: Callable[[], list[dict[str, Any]]],
        trouble: DiskTrouble,
    ) -> None:
        ours = config.dflash
        self.config, self.log, self.status, self.ring, self.device = config, log, status, ring, device
        self.steps, self.epoch_of, self.log_metrics, self.gpu_window = steps, epoch_of, log_metrics, gpu_window
        self.metrics = Metrics(run_dir, steps, resume_step=first_step if first_step else None, trouble=trouble)
        self.profile = Profile(
            ours.run.profile_interval,
            producers=len(ours.layout.target_gpus) // ours.layout.target_tp,
        )
        self._waited_s = 0.0
        self.last: dict[str, Any] = {}
        self.totals: dict[str, int] = {}
        self.warnings: list[str] = []
        self._started, self._first = time.monotonic(), first_step
        self._watch_ring()

    def step(self, step: int, facts: StepFacts) -> None:
        self.metrics.step(facts.seconds, facts.waited_s, facts.tokens, facts.skipped)
        self.metrics.gauge(lr=facts.lr, gnorm=facts.gnorm)
        self._waited_s += facts.waited_s
        verdict = self._watch_ring()
        if verdict is not None:
            self.log.event(verdict.line())
        self._note_status(step)

    def _note_status(self, step: int) -> None:
        seconds = (time.monotonic() - self._started) / max(step - self._first, 1)
        side = self.profile.latest.waiting_side if self.profile.latest else None
        self.status.training(
            step, self.steps, self.last.get("loss"), self.last.get("tokens_per_s"), seconds * (self.steps - step), side
        )

    def flush(self, step: int, sums: dict[str, tuple[float, float]]) -> None:
        self.metrics.add({name: pair[0] for name, pair in sums.items()}, {name: pair[1] for name, pair in sums.items()})
        most = self.config.dflash.ring.max_depth
        depth = min(round(self.ring.stats().depth_tokens / self.config.dflash.data.token_budget), most)
        gpus = self.gpu_window()
        self.last = self.metrics.flush(
            step,
            ring=(depth, most),
            mem=peak_memory_bytes(self.device),
            epoch=self.epoch_of(step - 1),
            **({"gpu": gpus} if gpus else {}),
        )
        self.log.line(format_line(self.last, COUNTED))
        self._note_status(step)
        self.log_metrics(self.last)

    def event(self, text: str) -> None:
        self.log.event(text)

    def count(self, **counts: int) -> None:
        """Events for metrics.jsonl and, where they are not zero, for the log line."""
        self.metrics.count(**counts)
        for name, number in counts.items():
            self.totals[name] = self.totals.get(name, 0) + number

    def warn(self, text: str) -> None:
        """Something that the run is not to be called done without."""
        self.warnings.append(text)
        self.log.event(f"warning: {text}")

    def saving(self) -> None:
        self.status.phase("saving")

    def bottleneck(self) -> Verdict:
        """The slower side over the whole training."""
        return self.profile.total()

    def _watch_ring(self) -> Verdict | None:
        """Targets: seconds without room in the ring. Drafters: seconds that this one's training stood still for it (the
        ring's own count also holds waits of the reading ahead, which cost nothing)."""
        return self.profile.update(self.ring.stats().producer_wait_s, self._waited_s)


class StartUp(threading.Thread):
    """Shows, once a second while the run starts, what the slowest rank is doing, on screen and in the status."""

    def __init__(self, phases: Callable[[], dict[int, dict[str, Any]]], log: TrainLog, status: StatusWriter) -> None:
        super().__init__(name="start-up", daemon=True)
        self._phases, self._log, self._status = phases, log, status
        self._stop_event = threading.Event()
        self._said = ""

    def run(self) -> None:
        while not self._stop_event.wait(1.0):
            self._say(self._phases())

    def stop(self) -> None:
        self._stop_event.set()
        self.join()

    def _say(self, phases: dict[int, dict[str, Any]]) -> None:
        busy = [phase for phase in phases.values() if phase["phase"] not in ("ready", "producing", "filling")]
        if not busy:
            return
        slowest = min(busy, key=lambda phase: phase["done"] / phase["total"] if phase["total"] else 0.0)
        counted = f" {slowest['done']}/{slowest['total']}" if slowest["total"] else ""
        self._status.phase(slowest["phase"], slowest["done"] or None, slowest["total"] or None)
        note = f" {slowest['note']}" if slowest.get("note") else ""
        text = f"{slowest['phase']}{counted}{note} ({len(busy)} of {len(phases)} ranks)"
        if text != self._said:
            self._said = text
            self._log.event(text)
