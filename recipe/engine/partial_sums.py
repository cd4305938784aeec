"""Collectives of a tensor-parallel group that leave nothing to the order in which ranks add: same bits on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional


def gather_columns(own: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """All ranks' ``own`` [..., sizes[rank]] side by side -> [..., sum of sizes], in rank order, in ``own``'s dtype."""
    if len(sizes) == 1:
        return own
    widest = max(sizes)
    rows = functional.pad(own, (0, widest - own.shape[-1])).reshape(-1, widest)  # collectives want equal parts
    parts = rows.new_empty(len(sizes), *rows.shape)
    _gather(parts.flatten(0, 1), rows, group)
    whole = torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)
    return whole.view(*own.shape[:-1], whole.shape[-1])


def sum_rounded_once(partial: torch.Tensor, group: dist.ProcessGroup | None, dtype: torch.dtype) -> torch.Tensor:
    """The sum of all ranks' ``partial`` [..., H] (float32), rounded to ``dtype`` when it is complete.

    Each rank receives and adds up one share of the rows in float32, and sends it on in ``dtype``. For bf16 that is 1.5
    times the bytes of an all-reduce in bf16; one in float32 would be twice, for the same result.
    """
    size = 1 if group is None else dist.get_world_size(group)
    shape, rows = partial.shape, partial.reshape(-1, partial.shape[-1])
    count = rows.shape[0]
    if size == 1:
        return partial.to(dtype)
    if _over_host(rows, group):  # gloo scatters CPU tensors only
        dist.all_reduce(rows, group=group)
        return rows.to(dtype).view(shape)
    rows = functional.pad(rows, (0, 0, 0, -count % size))
    share = rows.new_empty(rows.shape[0] // size, rows.shape[1])
    _newer_name("reduce_scatter_single", "reduce_scatter_tensor")(share, rows, group=group)
    total = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    _gather(total, share.to(dtype), group)
    return total[:count].view(shape)


def _over_host(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Ranks that share a GPU talk through gloo."""
    return tensor.is_cuda and dist.get_backend(group) == "gloo"


def _newer_name(new: str, old: str) -> Any:
    """torch 2.13 renamed two collectives and warns of the old names."""
    return getattr(dist, new, None) or getattr(dist, old)


def _gather(total: torch.Tensor, share: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """``share`` of all ranks, joined along the rows, into the contiguous ``total``."""
    into = _newer_name("all_gather_single", "all_gather_into_tensor")
    if not _over_host(share, group):
        into(total, share, group=group)
        return
    on_host = torch.empty(total.shape, dtype=total.dtype)
    into(on_host, share.cpu(), group=group)
    total.copy_(on_host)
