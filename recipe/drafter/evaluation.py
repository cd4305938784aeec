"""The leading drafter's side of evaluation during training: lay the drafter down, ask, and hand on what comes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from safetensors import SafetensorError

from recipe.drafter.model import DFlashDrafter
from recipe.evaluations import Evaluations
from recipe.export_layout import write_folder

POLL_S = 0.2


class EvaluationClerk:
    """Asks after every ``every``-th step and after the last one.

    Args:
        told: called with each answer: step, tau, tau_ci, identical, ties, prompts, seconds, elapsed_s, slices.
        event: a line for the log.
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
        tick: Callable[[], None],
    ) -> None:
        self.mail, self.module, self.every, self.steps = mail, module, every, steps
        self.told, self.event, self.tick = told, event, tick

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
        try:
            write_folder(self.mail.weights(step), config.to_dict(), tensors, lambda folder: None)
        except (OSError, SafetensorError) as error:  # a full disk must not end training
            self.event(f"step {step} is not evaluated: its drafter cannot be written ({error})")
            return
        self.mail.ask(step)

    def _collect(self) -> None:
        for answer in self.mail.answers():
            self.told(answer)
