"""The leading drafter's side of evaluation during training: lay the drafter down, ask, and hand on what comes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from recipe.agreement.evaluations import Evaluations
from recipe.drafter.export_layout import write_folder
from recipe.drafter.model import DFlashDrafter
from recipe.tell.disk import DiskTrouble

DRAFTERS = "drafters to evaluate (eval/)"
POLL_S = 0.2


class EvaluationClerk:
    """Asks after every ``every``-th step and after the last one.

    Args:
        told: called with each answer: step, tau, tau_ci, identical, ties, prompts, seconds, elapsed_s, slices.
        event: a line for the log; ``trouble``: where a full disk is said.
        tick: called while waiting for the last answers.
    """

    def __init__(
        self,
        mail: Evaluations,
        module: DFlashDrafter,
        every: int,
        steps: int,
        told: Callable[[dict[str, Any]], None],
        event: Callable[[str], None],
        trouble: DiskTrouble,
        tick: Callable[[], None],
    ) -> None:
        self.mail, self.module, self.every, self.steps = mail, module, every, steps
        self.told, self.event, self.trouble, self.tick = told, event, trouble, tick

    def start(self, first_step: int) -> None:
        """Before the first step. The step that a run resumes from is asked for again if it was never answered."""
        self.mail.clean()
        if first_step and self._due(first_step) and not self.mail.result(first_step).exists():
            self._ask(first_step)

    def after_step(self, step: int) -> None:
        """``step`` optimizer steps are done."""
        if self._due(step):
            self._ask(step)
        self._collect()

    def finish(self) -> None:
        """Training is over: wait for the answers that are still to come."""
        self.mail.close()
        self._collect()
        if self.mail.outstanding:
            self.event(f"waiting for {self.mail.outstanding} evaluation(s)")
        while self.mail.outstanding:
            self.tick()
            time.sleep(POLL_S)
            self._collect()

    def _due(self, step: int) -> bool:
        return step % self.every == 0 or step == self.steps

    def _ask(self, step: int) -> None:
        config = self.module.config
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.module.state_dict().items()}
        written = False
        with self.trouble.survived(DRAFTERS):
            write_folder(self.mail.weights(step), config.to_dict(), tensors, lambda folder: None)
            written = True
        if written:
            self.mail.ask(step)
        else:
            self.event(f"step {step} is not evaluated")

    def _collect(self) -> None:
        for answer in self.mail.answers():
            self.told(answer)
