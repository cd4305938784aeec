"""The drafter while it decodes: the training model's mathematics, one block at a time over a cache of its context.

The context enters a layer only through that layer's key and value projections, so its keys (normed and rotated) and
values are kept and never computed again. The block's own keys and values are written behind them for the moment of one
forward and overwritten by the next: they never become context.

Works on the parameters under their z-lab names (docs/algorithm.md), from a module or from a state dict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from recipe.decode.kernels import for_any_length
from recipe.drafter.config import SLIDING, DrafterConfig
from recipe.drafter.rotary import RotaryTables
from recipe.errors import RunError


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Qwen3's norm over the last axis: statistics in fp32, the weight applied in the input's dtype."""
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(hidden.dtype)


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``heads`` [..., heads, head_dim] rotated by ``cos``/``sin`` [..., 1, head_dim]."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


class IncrementalDrafter:
    """``weights``: its tensors by z-lab name, all on one device and of one dtype."""

    def __init__(self, config: DrafterConfig, weights: Mapping[str, torch.Tensor]) -> None:
        self.config, self.weights = config, weights
        self.dtype, self.device = weights["fc.weight"].dtype, weights["fc.weight"].device
        parts = self.weights["fc.weight"].shape[1] // len(config.target_layer_ids)
        self.fc_parts = self.weights["fc.weight"].split(parts, dim=1)
        self.rotary = RotaryTables(config)
        self.length = 0
        self.keys = self.values = torch.empty(0)

    @classmethod
    def of_module(cls, module: nn.Module) -> IncrementalDrafter:
        """Over the live parameters of a DFlashDrafter: what it learns later is seen here."""
        tensors = {name: parameter.detach() for name, parameter in module.named_parameters()}
        return cls(module.config, tensors)

    def begin(self, max_length: int) -> None:
        """Forget the context; room for ``max_length`` positions, the block's included."""
        shape = (self.config.num_hidden_layers, self.config.num_key_value_heads, max_length, self.config.head_dim)
        self.keys = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.values = torch.empty_like(self.keys)
        self.length = 0

    @for_any_length
    @torch.inference_mode()
    def forward(self, taps: list[torch.Tensor], block: torch.Tensor) -> torch.Tensor:
        """Append ``taps`` (k × [n, H]) to the context, then run ``block`` embeddings [b, H] at the positions after it.

        Returns the hidden states [b, H] after the final norm. The context keeps the n rows and not the block.
        """
        context = self.project_taps(taps)
        n, b = len(context), len(block)
        if self.length + n + b > self.keys.shape[2]:
            raise RunError(f"the drafter's cache has {self.keys.shape[2]} positions, {self.length + n + b} are needed")
        positions = torch.arange(self.length, self.length + n + b, device=self.device)
        cos, sin = (table.to(self.dtype) for table in self.rotary(positions))
        hidden = block.to(self.dtype)
        for layer in range(self.config.num_hidden_layers):
            hidden = self._layer(layer, context, hidden, cos, sin)
        self.length += n
        return rms_norm(hidden, self.weights["norm.weight"], self.config.rms_norm_eps)

    def project_taps(self, taps: Sequence[torch.Tensor]) -> torch.Tensor:
        """k × [..., H] -> [..., H]: the projection of each tap summed up (that of their concatenation), then normed."""
        total = functional.linear(taps[0].to(self.dtype), self.fc_parts[0])
        for tap, part in zip(taps[1:], self.fc_parts[1:], strict=True):
            total = total + functional.linear(tap.to(self.dtype), part)
        return rms_norm(total, self.weights["hidden_norm.weight"], self.config.rms_norm_eps)

    def input_norm(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, self.weights[f"layers.{layer}.input_layernorm.weight"], self.config.rms_norm_eps)

    def project(self, layer: int, name: str, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., heads, head_dim] by one of the projections; q and k normed per head."""
        prefix = f"layers.{layer}.self_attn.{name}"
        out = functional.linear(hidden, self.weights[f"{prefix}_proj.weight"], self.weights.get(f"{prefix}_proj.bias"))
        out = out.view(*hidden.shape[:-1], -1, self.config.head_dim)
        return out if name == "v" else rms_norm(out, self.weights[f"{prefix}_norm.weight"], self.config.rms_norm_eps)

    def _layer(
        self, layer: int, context: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        normed = self.input_norm(layer, hidden)
        b, end = len(hidden), self.length + len(context) + len(hidden)
        both = torch.cat([context, normed])  # the context is not layer-normed: the same C enters every layer
        keys, values = self.keys[layer], self.values[layer]
        keys[:, self.length : end] = rotated(self.project(layer, "k", both), cos, sin).transpose(0, 1)
        values[:, self.length : end] = self.project(layer, "v", both).transpose(0, 1)
        queries = rotated(self.project(layer, "q", normed), cos[-b:], sin[-b:]).transpose(0, 1)
        mixed = functional.scaled_dot_product_attention(
            queries[None],
            keys[None, :, :end],
            values[None, :, :end],
            attn_mask=self._mask(layer, b, end),
            scale=self.config.head_dim**-0.5,
            enable_gqa=True,
        )[0]
        return self.after_attention(layer, hidden, mixed.transpose(0, 1).reshape(b, -1))

    def after_attention(self, layer: int, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """A layer's output [..., H] from its input and what its attention has mixed [..., heads · head_dim]."""
        prefix = f"layers.{layer}."
        output = self.weights[prefix + "self_attn.o_proj.weight"], self.weights.get(prefix + "self_attn.o_proj.bias")
        hidden = hidden + functional.linear(mixed, *output)
        normed = rms_norm(hidden, self.weights[prefix + "post_attention_layernorm.weight"], self.config.rms_norm_eps)
        gate, up, down = (self.weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return hidden + functional.linear(
            functional.silu(functional.linear(normed, gate)) * functional.linear(normed, up), down
        )

    def _mask(self, layer: int, b: int, end: int) -> torch.Tensor | None:
        """bool [b, end], true where visible; None when a query sees everything (a full bidirectional layer).

        A sliding layer sees the ``sliding_window`` last positions, the query's own included.
        """
        sliding = self.config.layer_types[layer] == SLIDING
        window, causal = self.config.sliding_window if sliding else None, self.config.in_block_causal[layer]
        if window is None and not causal:
            return None
        key = torch.arange(end, device=self.device)
        query = key[-b:, None]
        visible = torch.ones(b, end, dtype=torch.bool, device=self.device)
        if window is not None:
            visible &= query - key < window  # a window is never smaller than a block: ahead it cuts nothing
        return visible & (key <= query) if causal else visible
