"""Which side of the ring waits for the other, in per cent of the time, and what to do about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Side = Literal["target", "drafter", "balanced"]
_NOTICEABLE = 10.0  # per cent: less waiting than this, or a smaller difference, is called balanced


@dataclass(frozen=True)
class Verdict:
    """``bottleneck`` is the slower side: the other one waits for it. Percentages are means over that side's ranks."""

    bottleneck: Side
    target_wait_pct: float
    drafter_wait_pct: float
    window_s: float

    @property
    def waiting_side(self) -> Literal["target", "drafter", "neither"]:
        """The side that waits, as the status names it."""
        return {"target": "drafter", "drafter": "target", "balanced": "neither"}[self.bottleneck]  # type: ignore[return-value]

    @property
    def advice(self) -> str:
        """One plain sentence."""
        last = f"of the last {self.window_s:.0f} s"
        if self.bottleneck == "target":
            return (
                f"drafters waited {self.drafter_wait_pct:.0f} % {last} for the target: "
                "raise ring.reuse or give the target more GPUs"
            )
        if self.bottleneck == "drafter":
            return (
                f"the target waited {self.target_wait_pct:.0f} % {last} for the drafters: "
                "lower ring.reuse or give the drafters more GPUs"
            )
        return f"neither side waited noticeably longer than the other in the last {self.window_s:.0f} s"

    def line(self) -> str:
        """The profile line of the log."""
        numbers = f"target_wait={self.target_wait_pct:.0f}% drafter_wait={self.drafter_wait_pct:.0f}%"
        return f"profile bottleneck={self.bottleneck} {numbers}: {self.advice}"


def verdict(
    producer_wait_s: float, consumer_wait_s: float, window_s: float, producers: int = 1, consumers: int = 1
) -> Verdict:
    """Judge a window. Waits are seconds, summed over ``producers`` target ranks and ``consumers`` drafter ranks."""
    if window_s <= 0:
        return Verdict("balanced", 0.0, 0.0, 0.0)
    target = min(100.0, max(0.0, 100 * producer_wait_s / (window_s * producers)))
    drafter = min(100.0, max(0.0, 100 * consumer_wait_s / (window_s * consumers)))
    side: Side = "balanced"
    if max(target, drafter) >= _NOTICEABLE and abs(target - drafter) >= _NOTICEABLE:
        side = "target" if drafter > target else "drafter"
    return Verdict(side, target, drafter, window_s)


class Profile:
    """Turns the ring's growing wait counters into a verdict every ``interval_s`` seconds, and one over the run."""

    def __init__(
        self, interval_s: float, producers: int = 1, consumers: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval, self._producers, self._consumers, self._clock = interval_s, producers, consumers, clock
        self._first: tuple[float, float, float] | None = None
        self._last = self._newest = (0.0, 0.0, 0.0)
        self.latest: Verdict | None = None

    def update(self, producer_wait_s: float, consumer_wait_s: float) -> Verdict | None:
        """Hand in the totals so far; returns a verdict when an interval has ended (never with ``interval_s`` 0).

        The first call starts the clock, so call it when training starts: filling the ring is not the drafters' fault.
        """
        self._newest = (self._clock(), producer_wait_s, consumer_wait_s)
        if self._first is None:
            self._first = self._last = self._newest
            return None
        if not self._interval or self._newest[0] - self._last[0] < self._interval:
            return None
        self.latest = self._between(self._last)
        self._last = self._newest
        return self.latest

    def total(self) -> Verdict:
        """The verdict from the first to the latest `update`, for the end of the run."""
        return self._between(self._first or self._newest)

    def _between(self, start: tuple[float, float, float]) -> Verdict:
        seconds, produced, consumed = (new - old for new, old in zip(self._newest, start, strict=True))
        return verdict(produced, consumed, seconds, self._producers, self._consumers)
