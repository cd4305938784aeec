"""What the drafter minimises: a weighted sum over block rows, and the numbers to report, all as sums.

The trainer divides once: ``loss = loss_sum · world · accumulation / global_weight``, where the weight is known before
the forward pass. It is the sum of exp(-(o-1)/gamma) over supervised slots (loss "dflash"), or their number ("dpace",
whose own weights depend on the forward pass). The acceptance term shares that denominator.

Symbols: A blocks, B slots, R supervised slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from recipe.config.schema import Objective as ObjectiveSection
from recipe.drafter.batch import HostLayout, MicroBatch
from recipe.drafter.config import default_gamma
from recipe.drafter.variant import DFLASH, BlockTargets, Variant
from recipe.objective.loss import RowLosses, row_losses

Ratio = tuple[Tensor, Tensor]


class Weighable(Protocol):
    """A micro-batch, or one that is planned but has no taps yet: its integers are enough for its weight."""

    @property
    def host(self) -> HostLayout: ...


@dataclass(frozen=True)
class LossSums:
    """``loss_sum``: scalar to backpropagate after scaling. ``metrics``: name -> (numerator, denominator), detached
    fp32 scalars that may be added over micro-batches and ranks before the one division."""

    loss_sum: Tensor
    metrics: dict[str, Ratio]


class Objective:
    """The configured objective for one block size. ``variant`` decides slots and labels."""

    def __init__(self, section: ObjectiveSection, block_size: int, variant: Variant = DFLASH) -> None:
        self.section, self.block_size, self.variant = section, block_size, variant
        self.gamma = section.gamma or default_gamma(block_size)

    def _slot_weights(self, targets: BlockTargets) -> np.ndarray:
        """float64 [A, B]: what a slot counts for in the denominator; zero where nothing is supervised."""
        if self.section.loss == "dpace":
            return targets.supervised.astype(np.float64)
        offset = np.arange(self.block_size) - targets.first_draft
        return targets.supervised * np.exp(-offset / self.gamma)

    def supervised_weight(self, batch: Weighable) -> float:
        """The micro-batch's share of the denominator. Host arithmetic: no forward pass, no device sync."""
        return float(self._slot_weights(self.variant.targets(batch.host, self.block_size)).sum())

    def sums(self, hidden: Tensor, batch: MicroBatch, head: Tensor) -> LossSums:
        """The objective of a micro-batch.

        Args:
            hidden: [A·B, H] from the drafter.
            batch: the micro-batch, on the same device; with soft labels it carries ``last_hidden``.
            head: the target's frozen head [V, H].
        """
        targets = self.variant.targets(batch.host, self.block_size)
        weights = self._slot_weights(targets)
        flat = np.flatnonzero(targets.supervised)
        at, rows, slot_weight = (
            torch.from_numpy(x).to(hidden.device, non_blocking=True)
            for x in (flat, targets.label_rows.reshape(-1)[flat], weights.reshape(-1)[flat].astype(np.float32))
        )
        losses = self._row_losses(hidden.index_select(0, at), batch, head, rows)
        grid = _Grid(at, targets.supervised.shape)
        weighted = losses.mixed * (self._dpace_weights(losses, grid) if self.section.loss == "dpace" else slot_weight)
        loss = weighted.sum()
        accepted = None
        if self.section.acceptance_weight > 0:
            accepted = _expected_prefix(losses.cross_entropy, grid)
            loss = loss - self.section.acceptance_weight * accepted
        if len(flat) == 0:
            loss = loss + 0.0 * hidden.sum()  # keeps the graph, so that this rank has gradients (of zero) as well
        metrics = self._metrics(loss, accepted, losses, grid, targets, float(weights.sum()))
        return LossSums(loss, metrics)

    def _row_losses(self, rows: Tensor, batch: MicroBatch, head: Tensor, label_rows: Tensor) -> RowLosses:
        labels, teacher = batch.input_ids[label_rows], None
        if self.section.soft_labels and self.section.soft_weight > 0:
            if batch.last_hidden is None:
                raise ValueError("soft labels need the target's last hidden state in the micro-batch")
            # The target's opinion on a token is its state one position earlier, which is in the same document.
            teacher = batch.last_hidden.index_select(0, label_rows - 1)
        return row_losses(
            rows,
            head,
            labels,
            teacher,
            temperature=self.section.temperature,
            soft_weight=self.section.soft_weight,
            need_both=self.section.acceptance_weight > 0,
        )

    def _dpace_weights(self, losses: RowLosses, grid: _Grid) -> Tensor:
        """[R], detached: how much of the expected accepted prefix hangs on each slot, with smoothed confidence."""
        alpha = self.section.dpace_alpha
        smoothed = (1 - alpha) * torch.exp(-losses.cross_entropy.detach()) + alpha
        prefix = grid.spread(smoothed, fill=1.0).cumprod(1) * grid.spread(torch.ones_like(smoothed), fill=0.0)
        return grid.gather(prefix.flip(1).cumsum(1).flip(1))

    def _metrics(
        self,
        loss: Tensor,
        accepted: Tensor | None,
        losses: RowLosses,
        grid: _Grid,
        targets: BlockTargets,
        weight: float,
    ) -> dict[str, Ratio]:
        """Accuracy by draft position over supervised slots; tau_est over blocks that are supervised throughout."""
        first = targets.first_draft
        counts, whole = targets.supervised[:, first:].sum(0), targets.supervised[:, first:].all(1)
        correct = grid.spread(losses.correct, fill=0.0)[:, first:]
        prefix = 1.0 + correct.cumprod(1).sum(1)
        device = prefix.device
        mask = torch.from_numpy(whole).to(device, prefix.dtype, non_blocking=True)
        known = [weight, whole.sum(), targets.supervised.sum(), targets.supervised.any(1).sum(), *counts]
        # One copy for all denominators: each single number would be a blocking one.
        below = torch.tensor([float(x) for x in known], dtype=losses.correct.dtype).to(device, non_blocking=True)
        metrics = {"loss": (loss.detach(), below[0]), "tau_est": ((prefix * mask).sum(), below[1])}
        hits = correct.sum(0)
        metrics |= {f"acc@{k + 1}": (hits[k], below[4 + k]) for k in range(len(counts))}
        if losses.entropy is not None:
            metrics["target_entropy"] = (losses.entropy.sum(), below[2])
        if accepted is not None:
            metrics["expected_prefix"] = (accepted.detach(), below[3])
        return metrics


@dataclass(frozen=True)
class _Grid:
    """Between values of supervised slots [R] and the blocks' grid [A, B]."""

    at: Tensor
    shape: tuple[int, ...]

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """[A, B] with ``fill`` in slots that are not supervised. Differentiable."""
        grid = torch.full((self.shape[0] * self.shape[1],), fill, dtype=values.dtype, device=values.device)
        return grid.index_put((self.at,), values).view(self.shape)

    def gather(self, grid: Tensor) -> Tensor:
        """[R] from [A, B]."""
        return grid.reshape(-1).index_select(0, self.at)


def _expected_prefix(cross_entropy: Tensor, grid: _Grid) -> Tensor:
    """Expected number of accepted drafts, summed over blocks: the sum over k of the product of the first k label
    probabilities. Slots that are not supervised neither count nor break the prefix."""
    counted = grid.spread(torch.ones_like(cross_entropy), fill=0.0)
    prefix = torch.exp(grid.spread(-cross_entropy, fill=0.0).cumsum(1))
    return (prefix * counted).sum()
