"""The one place that says what a member of the DFlash family changes, in training, in decoding and in export.

DFlash is the only one. A variant whose anchor slot predicts too (DSpark), whose labels are shifted, or whose drafts are
chosen one after the other adds a class here; model surgery (extra heads, in-block convolutions) is a subclass of
``DFlashDrafter`` that the class names in ``architecture``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from recipe.choice import most_likely
from recipe.drafter.batch import HostLayout
from recipe.drafter.config import ARCHITECTURE


@dataclass(frozen=True)
class BlockTargets:
    """What each slot of each block learns, on the host.

    ``label_rows`` int64 [A, B]: packed row of the slot's label (clamped into the row where there is none).
    ``supervised`` bool [A, B]: the slot carries weight. ``first_draft``: the first slot that drafts a token.
    """

    label_rows: np.ndarray
    supervised: np.ndarray
    first_draft: int


class Variant(Protocol):
    """Training: ``targets``. Decoding: ``drafts_per_block``, ``draft``. Export: ``architecture``, ``own_tensors``."""

    architecture: str
    own_tensors: tuple[str, ...]

    def targets(self, layout: HostLayout, block_size: int) -> BlockTargets: ...

    def drafts_per_block(self, block_size: int) -> int: ...

    def draft(self, hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor: ...


class DFlash:
    """Unshifted labels: slot o predicts the token at anchor + o, slot 0 is known and predicts nothing."""

    architecture = ARCHITECTURE
    own_tensors: tuple[str, ...] = ()

    def targets(self, layout: HostLayout, block_size: int) -> BlockTargets:
        """Supervised = real block, offset > 0, inside the anchor's document, and the label token is supervised."""
        offset = np.arange(block_size)
        rows = layout.anchors[:, None] + offset
        inside = rows < layout.stops[:, None]
        rows = np.where(inside, rows, 0)
        supervised = layout.keep[:, None] & inside & (offset > 0) & layout.loss_mask[rows]
        return BlockTargets(rows, supervised, first_draft=1)

    def drafts_per_block(self, block_size: int) -> int:
        """vLLM's ``num_speculative_tokens``; SGLang counts the anchor too."""
        return block_size - 1

    def draft(self, hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
        """hidden [B, H] of one block -> int64 [B-1] drafts: all at once, each the most likely token, or NO_TOKEN."""
        return most_likely(logits(hidden[1:]))


DFLASH = DFlash()
