"""Adding up tensor-parallel ranks' products in float32, rounded once to the model's dtype: what one GPU would do.

A bf16 matrix product accumulates in float32 and rounds its result. Cut over ranks it would round once per rank, and
once more for every addition of the all-reduce. Here the ranks' products stay float32 until the sum is complete.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional


def product_in_float32(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """input [..., in] times weight [out, in] transposed -> [..., out] in float32, exact products, no rounding between.

    On a GPU it is the same bf16 kernel with a float32 output; torch has none for the CPU, where both are widened first.
    """
    if input.dtype == torch.float32 or not input.is_cuda:
        return input.float() @ weight.float().T
    rows = torch.mm(input.flatten(0, -2), weight.T, out_dtype=torch.float32)
    return rows.unflatten(0, input.shape[:-1])


def sum_rounded_once(
    partial: torch.Tensor, group: dist.ProcessGroup | None, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of all ranks' ``partial`` [..., H] (float32) plus ``bias`` [H], in ``dtype``, the same bits on each rank.

    Each rank receives and adds up one share of the rows in float32, and sends it on in ``dtype``. For bf16 that is 1.5
    times the bytes of an all-reduce in bf16; one in float32 would be twice, for the same result.
    """
    size = 1 if group is None else dist.get_world_size(group)
    shape, rows = partial.shape, partial.reshape(-1, partial.shape[-1])
    count = rows.shape[0]
    if size == 1:
        return _finish(rows, bias, dtype).view(shape)
    if rows.is_cuda and dist.get_backend(group) == "gloo":  # ranks that share a GPU; gloo scatters CPU tensors only
        dist.all_reduce(rows, group=group)
        return _finish(rows, bias, dtype).view(shape)
    rows = functional.pad(rows, (0, 0, 0, -count % size))
    share = rows.new_empty(rows.shape[0] // size, rows.shape[1])
    _scatter(share, rows, group)
    total = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    _gather(total, _finish(share, bias, dtype), group)
    return total[:count].view(shape)


def _finish(rows: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return (rows if bias is None else rows + bias.float()).to(dtype)


def _newer_name(new: str, old: str) -> Any:
    """torch 2.13 renamed two collectives and warns of the old names."""
    return getattr(dist, new, None) or getattr(dist, old)


def _scatter(share: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    _newer_name("reduce_scatter_single", "reduce_scatter_tensor")(share, rows, group=group)


def _gather(total: torch.Tensor, share: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    _newer_name("all_gather_single", "all_gather_into_tensor")(total, share, group=group)
