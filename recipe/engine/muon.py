"""What DeepSpeed's Muon does to a step's gradients, put right; made for DeepSpeed 0.19.8 under ZeRO-2.

Its arithmetic is kept: every rank holds whole matrices' gradients and momentum, orthogonalises, and applies its part of
the update (tests/numerics/test_drafter_muon.py). Four things around it are not what a config asks for:

* ``gradient_clipping`` is applied to the orthogonalised update, whose norm is always large: the rate shrinks
  a hundredfold. Without clipping, the first gradients of a fresh drafter, a hundred times the later ones, stay in the
  momentum for a hundred steps. Here all gradients are clipped by their one norm before they enter any moment.
* The norm that it reports is the update's, about the same in every step. Here it is the gradients'.
* In bf16 it adds up micro-batches, and keeps its momentum, in bf16, whatever ``data_types.grad_accum_dtype`` says.
* In bf16 with fp32 accumulation the gradient of a norm that lies before a matrix in a bucket is dropped: the two are
  reduced together, and the norm's fp32 buffer, filled elsewhere than the matrix's, is forgotten. Here all take one way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class GradientsBeforeMuon:
    """Stands between a ZeRO-2 optimizer's gradients and its Muon. ``clip``: largest norm of all gradients together,
    matrices' and norms', 0 for none. Every rank of the drafter world must make one: it communicates once a step.
    """

    def __init__(self, optimizer: Any, clip: float) -> None:
        self.optimizer, self.clip = optimizer, clip
        self._norm = torch.tensor(math.nan)  # of the step that is ending
        self._complete: dict[int, Callable[[], Any]] = {}  # what is left to do, by parameter group
        self._gradients: list[tuple[Sequence[Tensor], list[Tensor]]] = []
        self._whole_gradients, self._orthogonalise = optimizer.get_all_grad_tensors, optimizer.get_flat_partition
        optimizer._use_compact_grad_partition_buffer = lambda group_idx: False
        optimizer.get_all_grad_tensors = self._in_the_accumulation_dtype
        optimizer.get_flat_partition = self._once_all_are_complete
        optimizer.scaled_global_norm = lambda: self._norm  # before clipping; DeepSpeed asks for it once a step

    def _in_the_accumulation_dtype(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        return [gradient.to(dtype) for gradient in self._whole_gradients(parameters, dtype)]

    def _once_all_are_complete(
        self, parameters: Sequence[Tensor], *rest: Any, param_group_idx: int, **named: Any
    ) -> Any:
        """DeepSpeed calls this when a step's gradients of one group are complete, for one group after the other. One
        norm needs them all, so the groups before the last get what they are given here when the last one comes."""
        gradients = self.optimizer.all_grad_tensors[param_group_idx] or []
        self._gradients.append((parameters, gradients))

        def finish() -> Any:
            self.optimizer.all_grad_tensors[param_group_idx] = gradients
            return self._orthogonalise(parameters, *rest, param_group_idx=param_group_idx, **named)

        self._complete[param_group_idx] = finish
        if len(self._complete) < len(self.optimizer.bit16_groups):
            return []
        self._clip()
        for group, work in self._complete.items():
            self.optimizer.averaged_gradients[group] = work()
            self.optimizer.all_grad_tensors[group] = None
        self._complete.clear()
        return self.optimizer.averaged_gradients[param_group_idx]

    def _clip(self) -> None:
        squares = torch.zeros((), device=self.optimizer.single_partition_of_fp32_groups[0].device)
        for parameters, gradients in self._gradients:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                squares += _owned(parameter, gradient).float().square().sum()
        dist.all_reduce(squares)
        self._norm = squares.sqrt()
        if self.clip:
            factor = (self.clip / (self._norm + 1e-6)).clamp(max=1.0)
            # A bad gradient stays as it is, and the only bad one: it is named later, and the step is skipped.
            factor = torch.where(torch.isfinite(squares), factor, 1.0)
            for _, gradients in self._gradients:
                for gradient in gradients:
                    gradient.mul_(factor)
        self._gradients.clear()


def _owned(parameter: Any, gradient: Tensor) -> Tensor:
    """The part of a whole matrix's gradient that this rank's partition holds; another rank holds the rest."""
    part = parameter._hp_mapping.lp_fragment_address
    return gradient.flatten()[part.start : part.start + part.numel]
