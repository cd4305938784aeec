"""Cross-entropy and KL through the frozen head, without the vocabulary in memory.

The head has no gradient, so a row's gradient with respect to its hidden state is known as soon as its logits are: it is
formed in the forward pass, chunk by chunk, and the logits are thrown away. Each row keeps its *unscaled* gradient; the
backward pass only multiplies it by the coefficient that the row's loss got. So weights may depend on the probabilities
of a whole block (D-PACE, acceptance length) in one single pass over the head.

Symbols: R rows that carry weight, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = {"cuda": 2**28, "cpu": 2**22}


class RowLosses(NamedTuple):
    """Per row, [R], fp32 (float64 for float64 inputs).

    ``cross_entropy``: -log p(label). ``mixed``: the share s of KL to the teacher plus 1 - s of cross-entropy (equal to
    cross_entropy without a teacher). ``correct``: the label is the most likely token (0 or 1). ``entropy``: of the
    teacher, or None.
    """

    cross_entropy: Tensor
    mixed: Tensor
    correct: Tensor
    entropy: Tensor | None


def row_losses(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    teacher: Tensor | None = None,
    *,
    temperature: float = 1.0,
    soft_weight: float = 1.0,
    need_both: bool = False,
    chunk_elements: int | None = None,
) -> RowLosses:
    """Losses of rows through the frozen head; differentiable in ``hidden`` alone.

    Args:
        hidden: [R, H], the drafter's normed output.
        head: [V, H], frozen.
        labels: int64 [R].
        teacher: [R, H], the target's normed last hidden state at the position that predicts the label, or None.
        temperature: of the teacher's distribution (the drafter's is never scaled; towards 0 the labels become hard).
        soft_weight: share s of KL(teacher || drafter) in ``mixed``.
        need_both: with a teacher, keep the gradient of ``cross_entropy`` beside that of ``mixed``; without it
            ``cross_entropy`` is detached.
        chunk_elements: logits alive at once (V x rows); peak extra memory is a few times this, whatever R is.

    Softmax in fp32; the matmuls run in the head's dtype, with fp32 logits.
    """
    limit = chunk_elements or CHUNK_ELEMENTS.get(hidden.device.type, 2**24)
    rows = max(1, limit // head.shape[0])
    ce, mixed, correct, entropy = _FrozenHead.apply(
        hidden, head.detach(), labels, teacher, temperature, soft_weight, need_both, rows
    )
    return RowLosses(ce, ce if teacher is None else mixed, correct, None if teacher is None else entropy)


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        teacher: Tensor | None,
        temperature: float,
        soft_weight: float,
        need_both: bool,
        rows: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count, wide = len(hidden), torch.float64 if hidden.dtype == torch.float64 else torch.float32
        losses = torch.empty(4, count, dtype=wide, device=hidden.device)
        wanted, soft = bool(ctx.needs_input_grad[0]), teacher is not None
        gradient = torch.empty_like(hidden) if wanted else None
        hard_gradient = torch.empty_like(hidden) if wanted and need_both and soft else None
        reduce = _rows_of(hidden, wide)
        for start in range(0, count, rows):
            at = slice(start, min(start + rows, count))
            logits = _logits(hidden[at], head)
            teacher_logits = None if teacher is None else _logits(teacher[at].to(hidden.dtype), head)
            losses[:, at], error, hard_error = reduce(
                logits, teacher_logits, labels[at], temperature, soft_weight, head.dtype, wanted, need_both
            )
            del logits, teacher_logits  # before the next chunk's are made
            if gradient is not None and error is not None:
                gradient[at] = _toward(error, head, hidden.dtype)
            if hard_gradient is not None and hard_error is not None:
                hard_gradient[at] = _toward(hard_error, head, hidden.dtype)
        ce, mixed, correct, entropy = losses.unbind()
        ctx.save_for_backward(gradient, hard_gradient)
        ctx.soft = teacher is not None
        silent = [correct, entropy]
        if teacher is None:
            silent.append(mixed)
        elif hard_gradient is None:
            silent.append(ce)
        ctx.mark_non_differentiable(*silent)
        return ce, mixed, correct, entropy

    @staticmethod
    def backward(ctx: Any, grad_ce: Tensor, grad_mixed: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradient, hard_gradient = ctx.saved_tensors
        outer = grad_mixed if ctx.soft else grad_ce
        result = gradient * outer[:, None].to(gradient.dtype)
        if hard_gradient is not None:
            result.addcmul_(hard_gradient, grad_ce[:, None].to(gradient.dtype))
        return result, None, None, None, None, None, None, None


def _logits(hidden: Tensor, head: Tensor) -> Tensor:
    """[n, V] with fp32 (or float64) accumulation *and* result: bf16 logits would cost 1e-2 of a nat a row."""
    if head.dtype in (torch.float32, torch.float64):
        return hidden.to(head.dtype) @ head.t()
    if hidden.is_cuda:
        return torch.mm(hidden.to(head.dtype), head.t(), out_dtype=torch.float32)
    return hidden.float() @ head.t().float()


def _toward(error: Tensor, head: Tensor, dtype: torch.dtype) -> Tensor:
    """error [n, V] @ head [V, H] in the head's dtype on GPU, in fp32 on CPU (where bf16 is no faster)."""
    if error.is_cuda:
        return (error.to(head.dtype) @ head).to(dtype)
    return (error @ head.to(error.dtype)).to(dtype)


def _rows_of(hidden: Tensor, wide: torch.dtype) -> Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]:
    """The fused kernel on a GPU, torch elsewhere and for float64."""
    if not hidden.is_cuda or wide == torch.float64:
        return rows_in_torch
    from recipe.objective.fused_rows import fused_rows

    return fused_rows


def rows_in_torch(
    logits: Tensor,
    teacher_logits: Tensor | None,
    labels: Tensor,
    temperature: float,
    soft_weight: float,
    dtype: torch.dtype,
    wanted: bool,
    need_both: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Losses of n rows [4, n] (as in `RowLosses`), and what goes back through the head, [n, V] each or None.

    Overwrites the logits. ``dtype`` is for the fused kernel, which rounds the error to it; here it stays wide.
    """
    label, losses = labels[:, None], torch.zeros(4, len(labels), dtype=logits.dtype, device=logits.device)
    ce, mixed, correct, entropy = losses.unbind()
    logits -= logits.amax(1, keepdim=True)
    picked = logits.gather(1, label)
    correct.copy_(picked[:, 0] >= 0)
    soft = None
    if teacher_logits is not None:
        soft, own = _distribution(teacher_logits, temperature)
        entropy.copy_(own)
        overlap = _row_dot(soft, logits)
    logits.exp_()
    total = logits.sum(1, keepdim=True)
    ce.copy_((total.log() - picked)[:, 0])
    if soft is not None:
        mixed.copy_(soft_weight * (total.log()[:, 0] - overlap - entropy) + (1 - soft_weight) * ce)
    if not wanted:
        return losses, None, None
    logits /= total
    if soft is None:
        return losses, _less_label(logits, label, 1.0), None
    hard = _less_label(logits.clone(), label, 1.0) if need_both else None
    logits.sub_(soft, alpha=soft_weight)
    return losses, _less_label(logits, label, 1.0 - soft_weight), hard


def _less_label(probabilities: Tensor, label: Tensor, amount: float) -> Tensor:
    """Subtract ``amount`` from each row's label column, in place."""
    if amount != 0.0:
        probabilities.scatter_add_(1, label, torch.full_like(label, -amount, dtype=probabilities.dtype))
    return probabilities


def _distribution(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """softmax(logits / temperature) [n, V] and its entropy [n] in nats."""
    if temperature != 1.0:
        logits /= temperature
    logits -= logits.amax(1, keepdim=True)
    soft = logits.exp()
    total = soft.sum(1, keepdim=True)
    soft /= total
    return soft, total.log()[:, 0] - _row_dot(soft, logits)


def _row_dot(left: Tensor, right: Tensor) -> Tensor:
    """Sum over the vocabulary of left * right, [n]. Not a matmul: its running sum loses 1e-4 over 248,320 terms."""
    return (left * right).sum(1)
