"""Numbers that go wrong on order, inside a rank that the fork server started: `POISON` says which, where and when.

As in `death.py`, the product has no hooks for this: its own functions are wrapped before `main` runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch


def prepare(orders: list[dict[str, Any]]) -> None:
    """Each order: ``{"ranks": [0], "what": "tap", …}``; ranks that are not named are left alone."""
    for order in orders:
        if int(os.environ["LOCAL_RANK"]) in order["ranks"]:
            KINDS[order["what"]](order)


def tap(order: dict[str, Any]) -> None:
    """Overwrite one value of ``stream`` in the ring pages of ``entries`` (None: all), before they are published."""
    from recipe.ring import Ring

    original = Ring.commit

    def commit(self: Ring, write: Any) -> None:
        if order.get("entries") is None or write.entry_id in order["entries"]:
            self.pages[write.pages[0], order["stream"], 0, 3] = float(order["value"])
        original(self, write)

    Ring.commit = commit  # type: ignore[method-assign]


def at_steps(order: dict[str, Any], act: Callable[[Any], None]) -> None:
    """Call ``act(trainer)`` at the beginning of each of ``steps``."""
    from recipe.training.trainer import Trainer

    original = Trainer._totals

    def totals(self: Trainer, step: int) -> Any:
        if step + 1 in order["steps"]:
            act(self)
        return original(self, step)

    Trainer._totals = totals  # type: ignore[method-assign]


def weight(order: dict[str, Any]) -> None:
    """One element of a parameter becomes NaN on this rank."""

    def act(trainer: Any) -> None:
        with torch.no_grad():
            dict(trainer.engine.module.named_parameters())[order["name"]].view(-1)[0] = float("nan")

    at_steps(order, act)


def loss(order: dict[str, Any]) -> None:
    """The loss of the step's next micro-batch becomes infinite."""
    from recipe.objective.objective import LossSums, Objective

    due: list[int] = []
    at_steps(order, lambda trainer: due.append(1))
    original = Objective.sums

    def sums(self: Objective, *args: Any) -> LossSums:
        result = original(self, *args)
        if due:
            due.pop()
            return LossSums(result.loss_sum * float("inf"), result.metrics)
        return result

    Objective.sums = sums  # type: ignore[method-assign]


def gradient(order: dict[str, Any]) -> None:
    """Taps, loss and weights are fine, and still a gradient is NaN: one parameter's, in one step."""
    due: list[int] = []

    def act(trainer: Any) -> None:
        due.append(1)
        parameter = dict(trainer.engine.module.named_parameters())[order["name"]]
        parameter.register_hook(lambda value: value * float("nan") if due and due.pop() else value)

    at_steps(order, act)


def frozen(order: dict[str, Any]) -> None:
    """The optimizer does nothing in these steps."""

    def act(trainer: Any) -> None:
        inner = trainer.engine.optimizer.optimizer
        original = inner.step

        def once(*args: Any, **kwargs: Any) -> None:
            inner.step = original

        inner.step = once

    at_steps(order, act)


KINDS = {"tap": tap, "weight": weight, "loss": loss, "gradient": gradient, "frozen": frozen}
