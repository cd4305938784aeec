"""Rotary tables that stay exact: computed in fp32 from the config, held where no cast of the module reaches them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from recipe.drafter.config import DrafterConfig


class RotaryTables:
    """cos and sin of positions. Not a module on purpose: ``.to(bfloat16)`` or a DeepSpeed engine would round
    ``inv_freq`` to 8 bits, and the phase error grows with the position."""

    def __init__(self, config: DrafterConfig) -> None:
        self._config = config
        self._by_device: dict[torch.device, Qwen3RotaryEmbedding] = {}

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int64 [n] -> cos, sin, each fp32 [n, 1, D] (the 1 broadcasts over heads)."""
        rotary = self._by_device.get(positions.device)
        if rotary is None:
            # An explicit device: the model itself may be under construction on "meta".
            with torch.device("cpu"):
                rotary = Qwen3RotaryEmbedding(self._config.qwen3())
            rotary = rotary.to(positions.device)
            self._by_device[positions.device] = rotary
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        with torch.no_grad():
            cos, sin = rotary(like, positions[None])
        return cos[0].unsqueeze(1), sin[0].unsqueeze(1)
