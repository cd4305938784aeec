"""Norm, SwiGLU and rotation as one kernel each on a GPU: in eager pieces they read and write the same rows ten times.

The plain functions are the definition and what a CPU runs. Names of parameters stay those of transformers' modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n] over its last axis in fp32, times weight [n] in x's dtype."""
    wide = x.float() if x.dtype != torch.float64 else x
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, D] turned by the tables [n, 1, D], which the caller has cast to x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def embed(ids: Tensor, table: Tensor, scale: float) -> Tensor:
    """int64 [...] -> rows of ``table`` [V, H] times ``scale`` (`DrafterConfig.input_embedding_scale`)."""
    rows = torch.nn.functional.embedding(ids, table)
    return rows if scale == 1.0 else rows * scale


def norm_rotate(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries and keys: `rms_norm` over each head, then `rotate`."""
    return rotate(rms_norm(x, weight, eps), cos, sin)


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Row counts change from micro-batch to micro-batch: one kernel for all of them.
    return torch.compile(function, dynamic=True)


def fused(function: Callable[..., Tensor], x: Tensor) -> Callable[..., Tensor]:
    """``function``, compiled where ``x`` is trained on a GPU. Decoding stays eager: a few rows are not worth it."""
    return _compiled(function) if x.is_cuda and torch.is_grad_enabled() else function


class RMSNorm(Qwen3RMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., n] -> [..., n]."""
        return fused(rms_norm, hidden_states)(hidden_states, self.weight, self.variance_epsilon)


class SwiGLU(Qwen3MLP):
    def forward(self, x: Tensor) -> Tensor:
        """[rows, H] -> [rows, H]. Another activation than silu runs as transformers has it."""
        if self.config.hidden_act != "silu":
            return super().forward(x)
        return self.down_proj(fused(swiglu, x)(self.gate_proj(x), self.up_proj(x)))
