"""What the steps of a run came to, and whether a run that has reached its last step has trained anything.

A run that trained nothing ends like one that did: all steps taken, weights finite, a checkpoint, an export. So it is
asked at its end. The tally goes into the checkpoints: a resumed run is judged as if it had never been interrupted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

WINDOW = 100  # steps over which skipped ones are counted

Outcome = Literal["skipped", "rate_0", "empty", "taken"]
"""``rate_0``: as in the first steps of a warm-up. ``empty``: no rank had anything to learn. ``taken``: the rest."""


def outcome(skipped: bool, rate: float, weight: float, norm: float) -> Outcome:
    """Of a step made at a learning ``rate`` with the supervised ``weight`` and the gradient ``norm`` of all ranks.
    Without a gradient weight decay still moves weights, which is no training."""
    return "skipped" if skipped else "rate_0" if rate == 0 else "empty" if weight == 0 or norm == 0 else "taken"


class Tally:
    """The same on every rank, but for ``moved``: steps that changed this rank's part of the weights (and, at first,
    those of all ranks before the resume).

    Args:
        most_skipped: of ``WINDOW`` steps; of fewer, as large a share.
    """

    def __init__(self, most_skipped: int) -> None:
        self.most_skipped = most_skipped
        self.counts: dict[str, int] = {"skipped": 0, "rate_0": 0, "empty": 0, "taken": 0}
        self.moved = 0.0
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._before = (0, 0.0)  # steps, and what they moved on all ranks

    def add(self, kind: Outcome, moved: bool) -> int:
        """Note one step; returns how many of the last ones were skipped."""
        self.counts[kind] += 1
        self.moved += kind == "taken" and moved
        self._recent.append(kind == "skipped")
        return sum(self._recent)

    def too_many_skipped(self) -> bool:
        """In the middle of a run: more than could be allowed whatever follows."""
        return sum(self._recent) > self.most_skipped

    def to_json(self, moved: float) -> dict[str, Any]:
        """For a checkpoint. ``moved``: summed over all ranks."""
        return {**self.counts, "moved": moved, "recent": [int(skipped) for skipped in self._recent]}

    def restore(self, saved: Mapping[str, Any] | None, step: int, first: bool) -> None:
        """Go on from a checkpoint's. None: it is older than the tally, and its steps are believed. ``first``: of the
        ranks, which alone goes on with what all of them had moved."""
        saved = {"taken": step, "moved": step} if saved is None else saved
        self.counts.update({kind: int(saved.get(kind, 0)) for kind in self.counts})
        self.moved = float(saved["moved"]) if first else 0.0
        self._recent.extend(bool(skipped) for skipped in saved.get("recent", ()))
        self._before = (sum(self.counts.values()), float(saved["moved"]))

    def fault(self, moved: float) -> str | None:
        """Why a run with these steps behind it has failed, or None. ``moved``: summed over all ranks."""
        n, late, skipped = sum(self.counts.values()), len(self._recent), sum(self._recent)
        if skipped * WINDOW > self.most_skipped * late:
            limit = f"run.max_skipped_steps allows {self.most_skipped} of {WINDOW}"
            return f"{skipped} of the last {late} steps had numbers that are not finite ({limit})"
        if moved > 0 or self.counts["rate_0"] == n:
            return None
        why = {
            "skipped": "were skipped for numbers that are not finite",
            "rate_0": "had the learning rate 0",
            "empty": "had nothing supervised, or no gradient, on any rank",
            "taken": "changed no weight",
        }
        parts = ", ".join(f"{self.counts[kind]} {text}" for kind, text in why.items() if self.counts[kind])
        return f"nothing was trained: of {n} steps {parts}"

    def warning(self, moved: float) -> str | None:
        """What the user must read beside the word done, or None."""
        n = sum(self.counts.values())
        before, moved_before = self._before
        if n and self.counts["rate_0"] == n:
            return "the learning rate was 0 in every step: nothing was trained"
        if before and n == before:
            return "no step was left to train: the drafter is the checkpoint's"
        if before and moved == moved_before:
            return f"none of the {n - before} steps since the resume changed a weight: the drafter is the checkpoint's"
        return None
