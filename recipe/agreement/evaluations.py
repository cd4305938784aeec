"""Evaluations during training: the leading drafter asks for one, a target replica of its node answers.

The drafter's weights go through the run folder, everything else through the control store. Requests are numbered from 0
and answered in order; no side ever waits for the other one between two steps.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from recipe.watch.store import ControlStore


class Evaluations:
    """Both sides' view. ``folder``: where results and, meanwhile, weights are kept (RUN/eval)."""

    def __init__(self, store: ControlStore, folder: Path) -> None:
        self._store, self.folder = store, folder
        self._asked = self._answered = self._seen = 0

    # -- the drafter's side --------------------------------------------------------------------------------------

    def weights(self, step: int) -> Path:
        """Where the drafter of ``step`` is laid down until it has been evaluated."""
        return self.folder / f".drafter_{step:08d}"

    def result(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.json"

    def clean(self) -> None:
        """Remove drafters that an earlier launch did not come to evaluate."""
        for left in self.folder.glob(".drafter_*"):
            shutil.rmtree(left, ignore_errors=True)

    def ask(self, step: int) -> None:
        """The drafter of ``step`` lies in its folder and can be evaluated."""
        self._store.put(f"evaluation/request/{self._asked}", step)
        self._asked += 1

    def close(self) -> None:
        """Nothing more will be asked."""
        self._store.put("evaluation/closed", self._asked)

    @property
    def outstanding(self) -> int:
        """Requests without an answer that `answers` has handed out."""
        return self._asked - self._seen

    def answers(self) -> list[dict[str, Any]]:
        """Answers that have come since the last call."""
        found = []
        while self._seen < self._asked:
            answer = self._store.peek(f"evaluation/answer/{self._seen}")
            if not isinstance(answer, dict):
                break
            found.append(answer)
            self._seen += 1
        return found

    # -- the target's side ---------------------------------------------------------------------------------------

    def waiting(self) -> int | None:
        """The step of the oldest request that is not answered, or None."""
        step = self._store.peek(f"evaluation/request/{self._answered}")
        return None if step is None else int(step)  # type: ignore[call-overload, no-any-return]

    def all_answered(self) -> bool:
        """Whether nothing is left to do, now or later."""
        return self._store.peek("evaluation/closed") == self._answered

    def answer(self, record: dict[str, Any]) -> None:
        """The oldest request has its result; its weights are not needed any more."""
        self._store.put(f"evaluation/answer/{self._answered}", record)
        shutil.rmtree(self.weights(int(record["step"])), ignore_errors=True)
        self._answered += 1

    # -- between the ranks of the replica that evaluates ---------------------------------------------------------

    def call_others(self, turn: str) -> None:
        """Tell the other ranks of the replica that they are needed at ``turn``, before they can look."""
        self._store.put(f"evaluation/turn/{turn}", True)

    def called(self, turn: str) -> bool:
        return self._store.peek(f"evaluation/turn/{turn}") is not None

    def dismiss(self) -> None:
        """The other ranks of the replica are not needed any more."""
        self._store.put("evaluation/dismissed", True)

    def dismissed(self) -> bool:
        return self._store.peek("evaluation/dismissed") is not None
