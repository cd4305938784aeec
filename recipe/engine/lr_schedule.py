"""Learning-rate schedules that DeepSpeed 0.19.8 does not have, as its own class of them: same steps, same resume."""

from __future__ import annotations

import math
from typing import Any

from deepspeed.runtime.lr_schedules import WarmupLR
from torch.optim import Optimizer


class WarmupStableDecayLR(WarmupLR):
    """Rise to the optimizer's rates, stay there, and fall to 0 over the last steps.

    ``total_num_steps``: optimizer steps of the run. ``decay_ratio``: the share of them in which the rate falls, in
    (0, 1]; where rise and fall would overlap, the smaller rate holds. ``decay_type``: "linear", or "1-sqrt", which
    falls fast at first. ``warmup``: DeepSpeed's parameters of ``WarmupLR``. As with DeepSpeed's, ``step()`` is
    called after a step and sets the rates of the next.

    The shape is that of Hu et al. (2024, arXiv 2404.06395, "WSD"), 1-sqrt that of Hägele et al. (2024, arXiv
    2405.18392); what it gains here: docs/quality.md.
    """

    def __init__(
        self, optimizer: Optimizer, total_num_steps: int, decay_ratio: float, decay_type: str, **warmup: Any
    ) -> None:
        self.total_num_steps, self.decay_ratio, self.decay_type = total_num_steps, decay_ratio, decay_type
        super().__init__(optimizer, **warmup)

    def _get_gamma(self) -> float:
        left = max(0, self.total_num_steps - self.last_batch_iteration)
        share = min(1.0, left / (self.decay_ratio * self.total_num_steps))
        if self.decay_type == "1-sqrt":
            share = 1.0 - math.sqrt(1.0 - share)
        return float(min(super()._get_gamma(), share))
