"""Numbers of the log window: numerators and denominators are summed over all its micro-batches and divided once."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe.tell.disk import DiskTrouble, Lines
from recipe.tell.run_dir import RunDir, write_atomic


def ratio(numerator: float, denominator: float) -> float | None:
    """The quotient; None for 0/0 (nothing was measured). NaN and infinities come out as what they are."""
    if denominator == 0:
        return None if numerator == 0 else math.copysign(math.inf, numerator) if not math.isnan(numerator) else math.nan
    return numerator / denominator


class Metrics:
    """Collects one window after the other and appends each to metrics.jsonl (one JSON object a line).

    Sums must already cover all ranks; one process owns the file. ``resume_step`` drops records of later steps, which
    the resumed run will write again, and a last line that a crash cut short.
    """

    def __init__(
        self, run_dir: RunDir, steps: int, resume_step: int | None = None, trouble: DiskTrouble | None = None
    ) -> None:
        self._path = run_dir.metrics_jsonl
        self.steps = steps
        trouble = trouble or DiskTrouble()
        known = read_metrics(self._path)
        if resume_step is not None:
            known = [record for record in known if record.get("step", 0) <= resume_step]
            with trouble.survived(self._path.name):
                write_atomic(self._path, "".join(json.dumps(record) + "\n" for record in known))
        self._lines = Lines(self._path, trouble)
        self._skipped_total = sum(count_of(record, "skipped") for record in known)
        self._reset()

    def _reset(self) -> None:
        self._numerators: dict[str, float] = defaultdict(float)
        self._denominators: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)
        self._gauges: dict[str, Any] = {}
        self._window_steps = 0
        self._seconds = self._wait_seconds = 0.0
        self._tokens = 0

    def add(self, numerators: Mapping[str, float], denominators: Mapping[str, float]) -> None:
        """Sums of one micro-batch or step, for example ``{"loss": 812.5}`` over ``{"loss": 441.0}``.

        Raises KeyError if a numerator has no denominator.
        """
        for key, value in numerators.items():
            self._denominators[key] += float(denominators[key])
            self._numerators[key] += float(value)

    def step(self, seconds: float, wait_seconds: float, tokens: int, skipped: bool = False) -> None:
        """One optimizer step: wall seconds (waiting included), seconds waited for the ring, tokens over all ranks."""
        self._window_steps += 1
        self._seconds += seconds
        self._wait_seconds += wait_seconds
        self._tokens += tokens
        self._counts["skipped"] += int(skipped)

    def count(self, **counts: int) -> None:
        """Events that are summed over the window (``nonfinite_taps=1``)."""
        for key, value in counts.items():
            self._counts[key] += value

    def gauge(self, **values: Any) -> None:
        """Values whose last one counts: ``lr``, ``gnorm``, ``ring=(ready, most)``, ``mem`` (bytes), ``epoch``."""
        self._gauges.update(values)

    @property
    def skipped_total(self) -> int:
        """Skipped steps of the whole run, those before a resume included, up to the last flush."""
        return self._skipped_total

    def flush(self, step: int, **values: Any) -> dict[str, Any]:
        """Divide, append to metrics.jsonl, start a new window; returns the record. ``values`` as in `gauge`.

        Keys: step, steps, loss, tau_est, acc@1…, lr, gnorm, ms, wait_ms, tokens_per_s, ring, mem, skipped, epoch, time.
        """
        self.gauge(**values)
        record: dict[str, Any] = {"step": step, "steps": self.steps, "loss": None, "tau_est": None}
        record.update({key: ratio(value, self._denominators[key]) for key, value in self._numerators.items()})
        record.update(self._gauges)
        milliseconds = ratio(1000 * self._seconds, self._window_steps)
        record.update(
            ms=milliseconds,
            wait_ms=ratio(1000 * self._wait_seconds, self._window_steps),
            tokens_per_s=ratio(self._tokens, self._seconds),
            **{"skipped": 0, **self._counts},
            time=time.time(),
        )
        self._skipped_total += self._counts["skipped"]
        self._reset()
        self._append(record)
        return record

    def evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        """A line of its own, with the keys ``eval_…``: real decoding ends some steps after the one that it measures."""
        self._append({"step": step, **{f"eval_{key}": value for key, value in values.items()}, "time": time.time()})

    def _append(self, record: Mapping[str, Any]) -> None:
        self._lines.write(json.dumps(record) + "\n")  # the log line shows the numbers too


def count_of(record: Mapping[str, Any], key: str) -> int:
    """A record's count, 0 where there is none or something that is no count."""
    value = record.get(key)
    return value if type(value) is int and value >= 0 else 0


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All records of a metrics.jsonl that have a step; a line that a crash cut short, or that something else wrote, is
    left out, a missing file is empty. Other values are as they stand in the file, of whatever type."""
    records = []
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and type(step := record.get("step")) is int and 0 <= step < 2**63:
            records.append(record)
    return records
