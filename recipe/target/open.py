"""The one door to a target: by its shard plan where its model type has one, else by DeepSpeed's AutoTP with a check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from recipe.model_files.shapes import TargetShape
from recipe.target.architectures import ARCHITECTURES
from recipe.target.loader import LoadProgress, load_target
from recipe.target.logits import refuse_changed_logits
from recipe.target.shard_plan import ShardPlan
from recipe.target.stock import load_stock
from recipe.target.verify import no_exact_sums

if TYPE_CHECKING:
    from deepspeed import InferenceEngine
    from torch.distributed import ProcessGroup


def open_target(
    path: str,
    shape: TargetShape,
    tp: int,
    tp_rank: int,
    group: ProcessGroup | None,
    device: str | torch.device,
    dtype: torch.dtype,
    taps: Sequence[int],
    need_last_hidden: bool,
    progress: Callable[[LoadProgress], None] | None = None,
    revision: str | None = None,
    exact_sums: bool = False,
) -> InferenceEngine:
    """``load_target`` for every model type that transformers knows. ``progress`` is called for planned types only.

    ``exact_sums``: no sum is split over ranks (`ShardPlan`); AutoTP cannot do so.

    Raises ConfigError also when soft labels are asked of a model that changes its logits behind the head: its
    probabilities cannot be had from last hidden state and head alone.
    """
    if need_last_hidden:
        refuse_changed_logits(shape)
    if shape.model_type in ARCHITECTURES:
        plan = ShardPlan.build(shape, tp, exact_sums)
        return load_target(path, shape, plan, tp_rank, group, device, dtype, taps, need_last_hidden, progress, revision)
    if tp > 1 and exact_sums:
        raise no_exact_sums(shape)
    return load_stock(path, shape, tp, group, device, dtype, taps, need_last_hidden, revision)
