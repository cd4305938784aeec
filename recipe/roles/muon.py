"""What DeepSpeed's Muon does to a step's gradients, put right; made for DeepSpeed 0.19.8 under ZeRO-2.

Its arithmetic is kept: every rank holds whole matrices' gradients and momentum, orthogonalises, and applies its part of
the update (tests/numerics/test_drafter_muon.py). Four things around it are not what a config asks for:

* ``gradient_clipping`` is applied to the orthogonalised update, whose norm is always large: the rate shrinks
  a hundredfold. Without clipping, the first gradients of a fresh drafter, a hundred times the later ones, stay in the
  momentum for a hundred steps. Here the gradients are clipped before they enter the momentum.
* The norm that it reports is the update's, about the same in every step. Here it is the gradients'.
* In bf16 it adds up micro-batches, and keeps its momentum, in bf16, whatever ``data_types.grad_accum_dtype`` says.
* In bf16 with fp32 accumulation the gradient of a norm that lies before a matrix in a bucket is dropped: the two are
  reduced together, and the norm's fp32 buffer, filled elsewhere than the matrix's, is forgotten. Here all take one way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class GradientsBeforeMuon:
    """Stands between a ZeRO-2 optimizer's gradients and its Muon. ``clip``: largest norm of all matrices' gradients
    together, 0 for none; AdamW's part, which divides by its gradients' own size, is not clipped. Every rank of the
    drafter world must make one: it communicates once a step and group.
    """

    def __init__(self, optimizer: Any, clip: float) -> None:
        self.optimizer, self.clip = optimizer, clip
        self._squares: dict[int, Tensor] = {}  # of all ranks, by parameter group, of the step that is ending
        self._whole_gradients, self._orthogonalise = optimizer.get_all_grad_tensors, optimizer.get_flat_partition
        optimizer._use_compact_grad_partition_buffer = lambda group_idx: False
        optimizer.get_all_grad_tensors = self._in_the_accumulation_dtype
        optimizer.get_flat_partition = self._clip_and_orthogonalise
        optimizer.scaled_global_norm = self._norm

    def _in_the_accumulation_dtype(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        return [gradient.to(dtype) for gradient in self._whole_gradients(parameters, dtype)]

    def _clip_and_orthogonalise(
        self, parameters: Sequence[Tensor], *rest: Any, param_group_idx: int, **named: Any
    ) -> Any:
        """DeepSpeed calls this when a step's gradients of one group are complete."""
        gradients = self.optimizer.all_grad_tensors[param_group_idx] or []
        squares = torch.zeros((), device=self.optimizer.single_partition_of_fp32_groups[param_group_idx].device)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            squares += _owned(parameter, gradient).float().square().sum()
        dist.all_reduce(squares)
        self._squares[param_group_idx] = squares
        if self.clip and self.optimizer.optimizer.param_groups[param_group_idx]["use_muon"]:
            factor = (self.clip / (squares.sqrt() + 1e-6)).clamp(max=1.0)
            # A bad gradient stays as it is, and the only bad one: it is named later, and the step is skipped.
            factor = torch.where(torch.isfinite(squares), factor, 1.0)
            for gradient in gradients:
                gradient.mul_(factor)
        return self._orthogonalise(parameters, *rest, param_group_idx=param_group_idx, **named)

    def _norm(self) -> Tensor:
        """Of all gradients before clipping. Takes the place of DeepSpeed's, which asks for it once a step."""
        return torch.stack(list(self._squares.values())).sum().sqrt()


def _owned(parameter: Any, gradient: Tensor) -> Tensor:
    """The part of a whole matrix's gradient that this rank's partition holds; another rank holds the rest."""
    part = parameter._hp_mapping.lp_fragment_address
    return gradient.flatten()[part.start : part.start + part.numel]
