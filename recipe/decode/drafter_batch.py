"""The drafter for a batch of sequences: one forward for all of them, though their contexts differ in length.

A position of a sequence is its slot in the cache, so rows of different lengths need no shifting: each row writes its
own slots, and a mask hides what is not its own. What pads a row is written to one slot behind all others, which nobody
reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from recipe.decode.drafter_cache import IncrementalDrafter, rms_norm, rotated
from recipe.decode.kernels import for_any_length
from recipe.decode.speculative import BlockProposer
from recipe.drafter.config import SLIDING
from recipe.drafter.pieces import embed as embed_scaled


class BatchProposer(Protocol):
    """Proposes drafts for all sequences of a batch together."""

    def propose(
        self, taps: Sequence[torch.Tensor], given: Sequence[int], anchors: Sequence[int], counts: Sequence[int]
    ) -> torch.Tensor:
        """Drafts int64 [n, max(counts)]; of row i the first ``counts[i]`` mean something. ``taps``: k × [n, c, H], of
        which the first ``given[i]`` rows of sequence i are new."""

    def drop(self, stay: Sequence[int]) -> None:
        """Only the sequences ``stay`` go on, in this order."""


class BatchBlockProposer:
    """`BlockProposer` for n sequences of at most ``max_length`` positions, block included."""

    def __init__(self, proposer: BlockProposer, n: int, max_length: int) -> None:
        self.proposer = proposer
        self.drafter = BatchDrafter(proposer.drafter, n, max_length)

    def propose(
        self, taps: Sequence[torch.Tensor], given: Sequence[int], anchors: Sequence[int], counts: Sequence[int]
    ) -> torch.Tensor:
        embed, head, variant = self.proposer.embed, self.proposer.head, self.proposer.variant
        config = self.drafter.alone.config
        block = torch.tensor(
            [[anchor] + [config.mask_token_id] * max(counts) for anchor in anchors], device=embed.device
        )
        sizes = [1 + count for count in counts]
        rows = embed_scaled(block, embed, config.input_embedding_scale)
        hidden = self.drafter.forward(taps, given, rows, sizes)
        return torch.stack([variant.draft(one, lambda rows: functional.linear(rows, head)) for one in hidden.to(head)])

    def drop(self, stay: Sequence[int]) -> None:
        self.drafter.drop(stay)


class BatchDrafter:
    """``alone``: the drafter of one sequence, whose weights are used and whose cache is not."""

    def __init__(self, alone: IncrementalDrafter, n: int, max_length: int) -> None:
        self.alone, config = alone, alone.config
        shape = (config.num_hidden_layers, n, max_length + 1, config.num_key_value_heads, config.head_dim)
        # Zeros: a slot that a mask hides is multiplied by zero, and must not hold a NaN.
        self.keys = torch.zeros(shape, dtype=alone.dtype, device=alone.device)
        self.values = torch.zeros_like(self.keys)
        self.lengths = torch.zeros(n, dtype=torch.int64, device=alone.device)

    def drop(self, stay: Sequence[int]) -> None:
        chosen = torch.tensor(stay, device=self.lengths.device)
        self.keys, self.values = self.keys[:, chosen], self.values[:, chosen]
        self.lengths = self.lengths[chosen]

    @for_any_length
    @torch.inference_mode()
    def forward(
        self, taps: Sequence[torch.Tensor], given: Sequence[int], block: torch.Tensor, sizes: Sequence[int]
    ) -> torch.Tensor:
        """Append the first ``given[i]`` rows of ``taps`` (k × [n, c, H]) to context i, then run its block: the first
        ``sizes[i]`` of ``block`` embeddings [n, b, H]. Returns [n, b, H] after the final norm; rows behind a size mean
        nothing."""
        alone, device = self.alone, self.lengths.device
        context = alone.project_taps(taps)
        c, b = context.shape[1], block.shape[1]
        new, size = torch.tensor([list(given), list(sizes)], device=device)
        steps = torch.arange(max(c, b), device=device)
        starts = self.lengths + new
        positions = torch.cat([self.lengths[:, None] + steps[:c], starts[:, None] + steps[:b]], dim=1)
        real = torch.cat([steps[:c] < new[:, None], steps[:b] < size[:, None]], dim=1)
        slots = torch.where(real, positions, self.keys.shape[2] - 1)
        cos, sin = (table.to(alone.dtype).view(*positions.shape, 1, -1) for table in alone.rotary(positions.flatten()))
        ends = starts + size
        visible = torch.arange(int(ends.max()), device=device) < ends[:, None]
        hidden = block.to(alone.dtype)
        for layer in range(alone.config.num_hidden_layers):
            mask = self._mask(layer, visible, positions[:, c:])
            hidden = self._layer(layer, context, hidden, cos, sin, slots, mask)
        self.lengths = starts
        return rms_norm(hidden, alone.weights["norm.weight"], alone.config.rms_norm_eps)

    def _layer(
        self,
        layer: int,
        context: torch.Tensor,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        alone, (n, b, _) = self.alone, hidden.shape
        normed = alone.input_norm(layer, hidden)
        both = torch.cat([context, normed], dim=1)
        rows = torch.arange(n, device=slots.device)[:, None]
        self.keys[layer][rows, slots] = rotated(alone.project(layer, "k", both), cos, sin)
        self.values[layer][rows, slots] = alone.project(layer, "v", both)
        queries = rotated(alone.project(layer, "q", normed), cos[:, -b:], sin[:, -b:])
        end = mask.shape[-1]
        mixed = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            self.keys[layer, :, :end].transpose(1, 2),
            self.values[layer, :, :end].transpose(1, 2),
            attn_mask=mask,
            scale=alone.config.head_dim**-0.5,
            enable_gqa=True,
        )
        return alone.after_attention(layer, hidden, mixed.transpose(1, 2).reshape(n, b, -1))

    def _mask(self, layer: int, visible: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """bool [n, 1, b, end], true where visible; `IncrementalDrafter._mask` for each row."""
        config = self.alone.config
        sliding, causal = config.layer_types[layer] == SLIDING, config.in_block_causal[layer]
        mask = visible[:, None, None]
        key, query = torch.arange(visible.shape[1], device=visible.device), queries[:, None, :, None]
        if sliding and config.sliding_window is not None:
            mask = mask & (query - key < config.sliding_window)
        return (mask & (key <= query) if causal else mask).expand(-1, -1, queries.shape[1], -1)


def pad(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """n × [c_i, H] -> [n, max c, H]."""
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
