"""Learning-rate schedules that DeepSpeed 0.19.8 does not have, as its own class of them: same steps, same resume."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.lr_schedules import WarmupLR
from torch.optim import Optimizer


class WarmupStableDecayLR(WarmupLR):
    """Rise to the optimizer's rates, stay there, and fall in a straight line to 0 over the last steps.

    ``total_num_steps``: optimizer steps of the run. ``decay_ratio``: the share of them in which the rate falls, in
    (0, 1]; where rise and fall would overlap, the smaller rate holds. ``warmup``: DeepSpeed's parameters of
    ``WarmupLR``. As with DeepSpeed's schedules, ``step()`` is called after a step and sets the rates of the next.

    The shape is that of Hu et al. (2024, arXiv 2404.06395, "WSD"); what it gains here: docs/quality.md.
    """

    def __init__(self, optimizer: Optimizer, total_num_steps: int, decay_ratio: float, **warmup: Any) -> None:
        self.total_num_steps, self.decay_ratio = total_num_steps, decay_ratio
        super().__init__(optimizer, **warmup)

    def _get_gamma(self) -> float:
        left = max(0, self.total_num_steps - self.last_batch_iteration)
        return float(min(super()._get_gamma(), left / (self.decay_ratio * self.total_num_steps)))
