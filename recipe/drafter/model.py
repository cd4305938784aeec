"""The DFlash drafter: a small Qwen3-shaped stack whose blocks attend to the projected taps of the target.

Symbols: C rows of the packed context, A blocks, B rows of a block, H hidden size, k taps, N/M query/key-value heads,
D head size. Parameter names are the z-lab checkpoint's; embedding and head belong to the target and are passed in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipe.drafter.attention import TILE, Attend, EagerAttention, FlexAttention, Visibility
from recipe.drafter.batch import MicroBatch
from recipe.drafter.config import SLIDING, DrafterConfig
from recipe.drafter.pieces import RMSNorm, SwiGLU, embed, fused, norm_rotate
from recipe.drafter.rotary import RotaryTables

Tables = tuple[Tensor, Tensor]


class BlockAttention(nn.Module):
    """Queries come from the block; keys and values from context and block through one shared pair of projections."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        h, q, kv = config.hidden_size, config.num_attention_heads * self.head_dim, config.num_key_value_heads
        self.q_proj = nn.Linear(h, q, bias=config.attention_bias)
        self.k_proj = nn.Linear(h, kv * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(h, kv * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(q, h, bias=config.attention_bias)
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.head_dim)

    def forward(self, x: Tensor, context: Tensor, block_rope: Tables, context_rope: Tables, attend: Attend) -> Tensor:
        """x [A·B, H] (layer-normed), context [C, H] (not layer-normed) -> [A·B, H]."""
        turn, q_norm, k_norm = fused(norm_rotate, x), self.q_norm, self.k_norm
        q = turn(self._heads(self.q_proj(x)), q_norm.weight, q_norm.variance_epsilon, *block_rope)
        block_k = turn(self._heads(self.k_proj(x)), k_norm.weight, k_norm.variance_epsilon, *block_rope)
        context_k = turn(self._heads(self.k_proj(context)), k_norm.weight, k_norm.variance_epsilon, *context_rope)
        block_v, context_v = self._heads(self.v_proj(x)), self._heads(self.v_proj(context))
        out = attend(q, context_k, context_v, block_k, block_v)
        return self.o_proj(out.reshape(x.shape[0], -1))


class DrafterLayer(nn.Module):
    """Pre-norm residual layer. The context is never updated: every layer sees the same one."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = SwiGLU(config.qwen3())
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, block_rope: Tables, context_rope: Tables, attend: Attend) -> Tensor:
        """x [A·B, H], context [C, H] -> [A·B, H]."""
        x = x + self.self_attn(self.input_layernorm(x), context, block_rope, context_rope, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashDrafter(nn.Module):
    """``attention``: "flex" (GPU), "eager" (exact, any device) or "auto" (flex where the batch is on a GPU)."""

    def __init__(self, config: DrafterConfig, attention: Literal["auto", "flex", "eager"] = "auto") -> None:
        super().__init__()
        self.config, self.attention = config, attention
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = RotaryTables(config)

    @torch.no_grad()
    def initialize(self, seed: int, std: float = 0.02) -> DFlashDrafter:
        """Fresh weights, the same for a seed on every rank and device: matrices N(0, std), norms 1, biases 0."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                drawn = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
                parameter.copy_(drawn)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        return self

    def context(self, taps: Sequence[Tensor]) -> Tensor:
        """taps k x [C, H] -> [C, H]: ``hidden_norm(fc(concatenation))`` without ever forming the k·H features."""
        total: Tensor | None = None
        for tap, weight in zip(taps, self.fc.weight.split(self.config.hidden_size, dim=1), strict=True):
            tap = tap.to(weight.dtype)
            total = F.linear(tap, weight) if total is None else torch.addmm(total, tap, weight.t())
        assert total is not None
        return self.hidden_norm(total)

    def forward(self, batch: MicroBatch, embedding: Tensor) -> Tensor:
        """The normed hidden state of every block row.

        Args:
            batch: a micro-batch on this module's device.
            embedding: the target's frozen token embedding [V, H].

        Returns:
            [A·B, H]; rows of padded blocks are finite and meaningless.
        """
        a, b = len(batch.host.anchors), self.config.block_size
        flex = self.attention == "flex" or (self.attention == "auto" and batch.input_ids.is_cuda)
        context = self.context(batch.taps)
        rows = embed(self.block_ids(batch), embedding, self.config.input_embedding_scale)
        x = rows.to(context.dtype).view(a * b, -1)
        positions, context_positions = batch.block_positions(b).view(-1), batch.position_ids
        seen = batch.visibility(b)
        if flex:
            extra = -a % (TILE // math.gcd(TILE, b))
            x, positions = F.pad(x, (0, 0, 0, extra * b)), F.pad(positions, (0, extra * b))
            missing = -len(context) % TILE
            context, context_positions = F.pad(context, (0, 0, 0, missing)), F.pad(context_positions, (0, missing))
            seen = seen.padded(extra, missing)
        attend = self._attention_by_layer(seen, flex, x)
        block_rope, context_rope = (
            tuple(table.to(x.dtype) for table in self.rotary(at)) for at in (positions, context_positions)
        )
        for layer, look in zip(self.layers, attend, strict=True):
            x = layer(x, context, block_rope, context_rope, look)
        hidden = self.norm(x[: a * b])
        # Nothing but padding: keep fc in the graph, so that every rank has a gradient for every parameter.
        return hidden if batch.host.keep.any() else hidden + 0.0 * context.sum()

    def block_ids(self, batch: MicroBatch) -> Tensor:
        """int64 [A, B]: the anchor's token, then mask ids."""
        ids = torch.full(
            (len(batch.anchors), self.config.block_size),
            self.config.mask_token_id,
            dtype=torch.int64,
            device=batch.anchors.device,
        )
        anchors = batch.input_ids[batch.anchors]
        ids[:, 0] = torch.where(batch.keep, anchors, ids[:, 0])
        return ids

    def _attention_by_layer(self, seen: Visibility, flex: bool, x: Tensor) -> list[Attend]:
        """One mask for each kind of layer, shared by its layers."""
        built: dict[tuple[int | None, bool], Attend] = {}
        kinds = []
        for kind, causal in zip(self.config.layer_types, self.config.in_block_causal, strict=True):
            key = (self.config.sliding_window if kind == SLIDING else None, causal)
            if key not in built:
                if flex:
                    built[key] = FlexAttention.build(seen, *key, device=x.device)
                else:
                    built[key] = EagerAttention.build(seen, *key, dtype=x.dtype, device=x.device)
            kinds.append(built[key])
        return kinds
