"""Numbers that have gone wrong: noticed in the step where it happens, before the optimizer applies it, and named.

No device sync is added: a micro-batch whose taps or loss hold NaN or inf is multiplied by NaN, so the global gradient
norm, which every rank knows before the optimizer acts, is not finite and all ranks skip the step together. Only then is
looked for the cause: taps by entry and layer, weights, losses by micro-batch, gradients by parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from recipe.data.schedule import entry_id
from recipe.drafter.anchors import EntryKey

MOST_LINES = 6  # findings of one kind that a rank tells of one step


class Located(Protocol):
    """A planned micro-batch: its entries, and their places in the packed row."""

    @property
    def keys(self) -> Sequence[EntryKey]: ...
    @property
    def spans(self) -> Sequence[tuple[int, int]]: ...


@dataclass(frozen=True)
class Finding:
    """``kind``: taps, weights, losses or gradients (what metrics count); ``text`` names the thing."""

    kind: str
    text: str


class Health:
    """One rank's.

    Args:
        module: the drafter.
        streams: names of what a row of the ring carries, in order (``tap of layer 3``, ``last hidden state``).
        bad_gradients: returns and forgets the parameters whose gradients were not finite in a skipped step.
    """

    def __init__(self, module: nn.Module, streams: Sequence[str], bad_gradients: Callable[[], list[str]]) -> None:
        self.module, self.streams, self.bad_gradients = module, list(streams), bad_gradients
        self._seen: list[tuple[Located, Tensor | None, Tensor]] = []

    def factor(self, where: Located, row_sums: Tensor | None, loss: Tensor) -> Tensor:
        """1, or NaN when the micro-batch is not to be used; a scalar on the device.

        ``row_sums`` fp32 [streams, C]: sum over the features of each row as it came from the ring, None without rows.
        """
        loss = loss.detach()
        self._seen.append((where, row_sums, loss))
        total = loss if row_sums is None else loss + row_sums.sum()
        return 1.0 + 0.0 * total

    def step_done(self) -> None:
        """The step was good: forget its numbers."""
        self._seen.clear()

    def diagnose(self) -> list[Finding]:
        """What is not finite on this rank in the step that was skipped; `causes` tells reasons from consequences."""
        gradients = _some("gradients", [f"gradient of {name}" for name in self.bad_gradients()])
        found = [*self._bad_taps(), *self._bad_weights(), *self._bad_losses(), *gradients]
        self._seen.clear()
        return found

    def weights_are_finite(self) -> bool:
        """Working weights, the same on every rank. One sync."""
        return bool(torch.stack([torch.isfinite(p).all() for p in self.module.parameters()]).all())

    def _bad_taps(self) -> list[Finding]:
        lines = []
        for where, row_sums, _ in self._seen:
            if row_sums is None:
                continue
            bad = (~torch.isfinite(row_sums)).cpu()
            for key, (start, stop) in zip(where.keys, where.spans, strict=True):
                for stream in bad[:, start:stop].any(1).nonzero().flatten().tolist():
                    lines.append(f"{self.streams[stream]} of {_entry(key)}")
        return _some("taps", lines)

    def _bad_weights(self) -> list[Finding]:
        parameters = self.module.named_parameters()
        return _some("weights", [f"weight {name}" for name, value in parameters if not torch.isfinite(value).all()])

    def _bad_losses(self) -> list[Finding]:
        lines = []
        for index, (where, _, loss) in enumerate(self._seen):
            value = float(loss)
            if not torch.isfinite(loss):
                entries = ", ".join(_entry(key) for key in where.keys[:4]) + (", …" if len(where.keys) > 4 else "")
                lines.append(f"loss ({value}) of micro-batch {index} with {entries or 'no entry'}")
        return _some("losses", lines)


def causes(found: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Of the (kind, text) pairs of all ranks those that explain the rest: taps, weights, else losses, else gradients.

    A NaN tap on one rank is a NaN gradient on every other.
    """
    for kinds in (("taps", "weights"), ("losses",), ("gradients",)):
        chosen = [pair for kind in kinds for pair in found if pair[0] == kind]
        if chosen:
            return chosen
    return []


def counts(findings: Sequence[Sequence[str]]) -> dict[str, int]:
    """``nonfinite_taps=2`` and so on, from (kind, text) pairs of all ranks."""
    return {f"nonfinite_{kind}": number for kind, number in Counter(kind for kind, _ in findings).items()}


def _entry(key: EntryKey) -> str:
    return f"entry {entry_id(key.epoch, key.row)} (epoch {key.epoch}, row {key.row}, use {key.reuse})"


def _some(kind: str, lines: list[str]) -> list[Finding]:
    found = [Finding(kind, line) for line in lines[:MOST_LINES]]
    if len(lines) > MOST_LINES:
        found.append(Finding(kind, f"{len(lines) - MOST_LINES} more {kind}, each"))
    return found


def as_pairs(who: str, findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """(kind, text with the rank's name), for the other ranks."""
    return [(finding.kind, f"{finding.text} is not finite on {who}") for finding in findings]
