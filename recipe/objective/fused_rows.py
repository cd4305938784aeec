"""One Triton kernel for what a row needs of its logits: losses, and the error that goes back through the frozen head.

torch in pieces reads and writes the logits about fifteen times; this reads them twice and writes the error once, in the
head's dtype. All arithmetic is fp32. `loss.py` holds the same in torch, which is the definition and the CPU's path.

Symbols: n rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
LOWEST = -1e30  # finite, so that (LOWEST - x) * 0 is 0 in the first block


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    logits, teacher, labels, losses, error, hard_error, count, width, inverse_temperature, soft_weight,
    SOFT: tl.constexpr, WRITE: tl.constexpr, WRITE_HARD: tl.constexpr, BLOCK: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """A program a row. ``losses``: fp32 [4, n]: cross-entropy, mixed, correct, entropy."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    teacher += row * width
    label = tl.load(labels + row)
    picked = tl.load(logits + label)
    # Running maxima and, relative to them, running sums; every new maximum rescales what has been summed.
    top, total = tl.full((), LOWEST, tl.float32), tl.full((), 0.0, tl.float32)
    soft_top, soft_total = tl.full((), LOWEST, tl.float32), tl.full((), 0.0, tl.float32)
    overlap, spread = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(logits + column, mask=inside, other=LOWEST)
        new_top = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.where(inside, tl.exp(x - new_top), 0.0), 0)
        if SOFT:
            t = tl.load(teacher + column, mask=inside, other=LOWEST) * inverse_temperature
            new_soft = tl.maximum(soft_top, tl.max(tl.where(inside, t, LOWEST), 0))
            scale = tl.exp(soft_top - new_soft)
            weight = tl.where(inside, tl.exp(t - new_soft), 0.0)
            overlap = (overlap + (top - new_top) * soft_total) * scale
            overlap += tl.sum(tl.where(inside, weight * (x - new_top), 0.0), 0)
            spread = (spread + (soft_top - new_soft) * soft_total) * scale
            spread += tl.sum(tl.where(inside, weight * (t - new_soft), 0.0), 0)
            soft_total = soft_total * scale + tl.sum(weight, 0)
            soft_top = new_soft
        top = new_top
    cross_entropy = tl.log(total) - (picked - top)
    tl.store(losses + row, cross_entropy)
    tl.store(losses + 2 * count + row, (picked >= top).to(tl.float32))
    if SOFT:
        entropy = tl.log(soft_total) - spread / soft_total
        divergence = tl.log(total) - overlap / soft_total - entropy
        tl.store(losses + count + row, soft_weight * divergence + (1.0 - soft_weight) * cross_entropy)
        tl.store(losses + 3 * count + row, entropy)
    if WRITE:
        error += row * width
        hard_error += row * width
        hard_part = 1.0 - soft_weight if SOFT else 1.0
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < width
            p = tl.exp(tl.load(logits + column, mask=inside, other=LOWEST) - top) / total
            is_label = (column == label).to(tl.float32)
            if WRITE_HARD:
                tl.store(hard_error + column, (p - is_label).to(hard_error.dtype.element_ty), mask=inside)
            away = p - hard_part * is_label
            if SOFT:
                t = tl.load(teacher + column, mask=inside, other=LOWEST) * inverse_temperature
                away -= soft_weight * tl.exp(t - soft_top) / soft_total
            tl.store(error + column, away.to(error.dtype.element_ty), mask=inside)


def fused_rows(
    logits: Tensor,
    teacher_logits: Tensor | None,
    labels: Tensor,
    temperature: float,
    soft_weight: float,
    dtype: torch.dtype,
    wanted: bool,
    need_both: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The same as `loss.rows_in_torch`: fp32 [4, n] losses, error [n, V] and hard error [n, V] in ``dtype``.

    Args:
        logits: contiguous fp32 [n, V]; ``teacher_logits`` the same, or None.
        labels: int64 [n].
        wanted: form the error at all; ``need_both``: that of the cross-entropy too.
    """
    count, width = logits.shape
    soft = teacher_logits is not None
    losses = torch.zeros(4, count, dtype=torch.float32, device=logits.device)
    error = torch.empty(count, width, dtype=dtype, device=logits.device) if wanted else None
    hard = torch.empty_like(error) if error is not None and soft and need_both else None
    _rows[(count,)](
        logits, teacher_logits if soft else logits, labels, losses,
        logits if error is None else error, logits if hard is None else hard,
        count, width, 1.0 / temperature, soft_weight,
        SOFT=soft, WRITE=wanted, WRITE_HARD=hard is not None, BLOCK=BLOCK, LOWEST=LOWEST, num_warps=8,
    )  # fmt: skip
    return losses, error, hard
