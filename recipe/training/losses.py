"""Whether a resumed run goes on where it was, told from its loss: of the first log window ever, and of the last one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipe.training.checkpoint import ResumeMismatch

LEARNED = 0.25  # share of the first loss that must be gone before the rule can tell anything


class Losses:
    """``saved``: what `to_json` gave to the checkpoint that the run goes on from, empty for a new run. ``setting``:
    what the loss depends on besides the drafter; losses under another setting are not compared.

    A window's loss is noisy, and its data are others than before. What no noise does is to undo half of all that was
    learned: a window that is nearer to the untrained drafter's loss than to the saved one is not of the saved drafter.
    """

    def __init__(self, setting: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        self.setting = dict(setting)
        comparable = saved.get("setting") == self.setting
        self.first: float | None = saved.get("first") if comparable else None
        self.last: float | None = saved.get("last") if comparable else None
        self._unproven = self.last is not None

    def add(self, total: float, weight: float) -> None:
        """One log window, over all ranks. Raises ResumeMismatch on all of them alike."""
        if not weight > 0:
            return
        loss = total / weight
        if self._unproven and self.first is not None and self.last is not None:
            middle = (self.first + self.last) / 2
            if self.first - self.last > LEARNED * abs(self.first) and not loss < middle:
                raise ResumeMismatch(
                    f"the loss is {loss:.4f} after the resume and was {self.last:.4f} when the checkpoint was saved; "
                    f"it began with {self.first:.4f}: this is not the drafter that was saved, or a setting undoes it"
                )
        self._unproven = False
        self.first = loss if self.first is None else self.first
        self.last = loss

    def to_json(self) -> dict[str, Any]:
        return {"first": self.first, "last": self.last, "setting": self.setting}
