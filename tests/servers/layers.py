"""Stand-ins for a server's layers: plain parameters, filled with NaN until a checkpoint's tensor has been put in.

Constructors take what vLLM's and SGLang's take; the loader cuts and checks as theirs do for one GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Stacked(nn.Module):
    """A linear layer made of parts (q, k, v or 0, 1) that a checkpoint holds one by one."""

    def __init__(self, columns: int, parts: dict[Any, int], bias: bool) -> None:
        super().__init__()
        self.parts, rows = parts, sum(parts.values())
        self.input_size = columns
        self.weight = nn.Parameter(torch.full((rows, columns), torch.nan), requires_grad=False)
        self.bias = nn.Parameter(torch.full((rows,), torch.nan), requires_grad=False) if bias else None
        for param in self.parameters():
            param.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, param: torch.Tensor, tensor: torch.Tensor, shard: Any = None) -> None:
        shard = getattr(tensor, "shard_id", shard)  # vLLM marks the tensor, SGLang passes the mark
        start = 0
        for name, rows in self.parts.items():
            if name == shard or (shard is None and len(self.parts) == 1):
                assert tensor.shape == (rows, *param.shape[1:]), (name, tensor.shape, param.shape)
                param.data[start : start + rows] = tensor
                return
            start += rows
        raise AssertionError(f"no part {shard!r} in {list(self.parts)}")


class QKVParallelLinear(Stacked):
    def __init__(self, hidden_size: int, head_size: int, total_num_heads: int, total_num_kv_heads: int, **more: Any):
        kv = total_num_kv_heads * head_size
        super().__init__(hidden_size, {"q": total_num_heads * head_size, "k": kv, "v": kv}, more.get("bias", True))


class MergedColumnParallelLinear(Stacked):
    def __init__(self, input_size: int, output_sizes: list[int], bias: bool = True, **_: Any) -> None:
        super().__init__(input_size, dict(enumerate(output_sizes)), bias)


class PlainLinear(Stacked):
    def __init__(self, input_size: int, output_size: int, bias: bool = True, **_: Any) -> None:
        super().__init__(input_size, {"all": output_size}, bias)


class Table(Stacked):
    """An embedding or a head [V, H]."""

    def __init__(self, rows: int, columns: int, **_: Any) -> None:
        super().__init__(columns, {"all": rows}, bias=False)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.variance_epsilon = eps
        self.weight = nn.Parameter(torch.full((size,), torch.nan), requires_grad=False)


class Nothing(nn.Module):
    """A module without parameters, e.g. the attention kernel; it keeps what it was made with."""

    def __init__(self, *args: Any, **made_with: Any) -> None:
        super().__init__()
        self.made_with = {"args": args, **made_with}


def copy_in(param: torch.Tensor, tensor: torch.Tensor) -> None:
    """What both servers call `default_weight_loader`."""
    assert param.shape == tensor.shape, (param.shape, tensor.shape)
    param.data.copy_(tensor)


def unfilled(model: nn.Module) -> list[str]:
    """Parameters that no tensor has reached."""
    return [name for name, param in model.named_parameters() if param.isnan().any()]
