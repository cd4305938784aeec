"""Block attention: which context rows and which block rows a query sees, as an exact CPU path and as FlexAttention.

A query row (block i, offset o) sees the context rows ``lower[i] <= j < upper[i]`` and the rows of its own block.
``upper`` is the anchor's packed row: strictly before it, because when drafting the anchor's own features do not exist
yet. ``lower`` is the first row of the anchor's document. As documents are contiguous, this one interval expresses
"same document and earlier". A sliding layer also needs ``anchor + o - j < window``. A padded block has
``lower == upper``: no context, only itself, so that its softmax is finite.

Symbols: C context rows, A blocks, B rows of a block, N query heads, M key/value heads, D head size.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

TILE = 128
EAGER_BLOCK_ROWS = 128


@dataclass(frozen=True)
class Visibility:
    """What the blocks of a micro-batch may see, on the host. ``lower``, ``upper``: int64 [A], packed context rows."""

    lower: np.ndarray
    upper: np.ndarray
    block_size: int
    context_rows: int

    def padded(self, blocks: int, rows: int) -> Visibility:
        """With so many more blocks (which see no context) and so many more context rows (which nobody sees)."""
        nothing = np.full(blocks, self.context_rows, np.int64)
        lower, upper = (np.concatenate([x, nothing]) for x in (self.lower, self.upper))
        return Visibility(lower, upper, self.block_size, self.context_rows + rows)

    def dense(self, window: int | None, causal: bool) -> Tensor:
        """bool [A·B, C + A·B], True = visible. The definition in full: for tests and small inputs."""
        rows = np.arange(len(self.lower) * self.block_size)
        block, offset = rows // self.block_size, rows % self.block_size
        j = np.arange(self.context_rows)
        context = (j >= self.lower[block, None]) & (j < self.upper[block, None])
        if window is not None:
            context &= self.upper[block, None] + offset[:, None] - j < window
        own = block[:, None] == block[None, :]
        if causal:
            own &= offset[:, None] >= offset[None, :]
        return torch.from_numpy(np.concatenate([context, own], axis=1))


Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(q [A·B,N,D], context k, v [C,M,D], block k, v [A·B,M,D]) -> [A·B,N,D]."""


@dataclass
class _Chunk:
    """Consecutive blocks of one document with one mask. ``context``: rows within the document; mask: additive."""

    blocks: int
    start: int
    stop: int
    mask: Tensor | None


@dataclass
class EagerAttention:
    """Exact attention document by document in chunks of blocks: costs what is visible, not A·B x C.

    Inputs are cut with ``split`` at document borders (its backward is one concatenation; slices would each write a
    gradient of full size), then each chunk is one fused call over its context rows and its own block rows.
    """

    document_rows: list[int]
    document_blocks: list[int]
    chunks: list[list[_Chunk]]
    block_size: int

    @classmethod
    def build(
        cls, seen: Visibility, window: int | None, causal: bool, dtype: torch.dtype, device: torch.device
    ) -> EagerAttention:
        """Cut the blocks into runs with the same document start. Blocks must be sorted (padded ones last)."""
        b, starts = seen.block_size, seen.lower
        cuts = [0, *(np.flatnonzero(starts[1:] != starts[:-1]) + 1).tolist(), len(starts)]
        rows, counts, chunks, covered = [], [], [], 0
        for first, last in itertools.pairwise(cuts):
            stop = max(int(seen.upper[first:last].max()), covered) if last > first else covered
            rows.append(stop - covered)
            counts.append((last - first) * b)
            per = max(1, EAGER_BLOCK_ROWS // b)
            pieces = []
            for lo in range(first, last, per):
                pieces.append(_chunk(seen, lo, min(lo + per, last), covered, window, causal, dtype, device))
            chunks.append(pieces)
            covered = stop
        rows.append(seen.context_rows - covered)
        return cls(rows, counts, chunks, b)

    def __call__(self, q: Tensor, context_k: Tensor, context_v: Tensor, block_k: Tensor, block_v: Tensor) -> Tensor:
        grouped = q.shape[1] != block_k.shape[1]
        out: list[Tensor] = []
        documents = zip(
            self.chunks,
            context_k.split(self.document_rows),
            context_v.split(self.document_rows),
            *(x.split(self.document_blocks) for x in (q, block_k, block_v)),
            strict=False,
        )
        for chunks, ck, cv, qs, ks, vs in documents:
            sizes = [chunk.blocks * self.block_size for chunk in chunks]
            parts = zip(chunks, qs.split(sizes), ks.split(sizes), vs.split(sizes), strict=True)
            for chunk, query, own_k, own_v in parts:
                key = torch.cat([ck[chunk.start : chunk.stop], own_k])
                value = torch.cat([cv[chunk.start : chunk.stop], own_v])
                query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
                result = F.scaled_dot_product_attention(query, key, value, chunk.mask, enable_gqa=grouped)
                out.append(result[0].transpose(0, 1))
        return torch.cat(out)


def _chunk(
    seen: Visibility,
    lo: int,
    hi: int,
    document: int,
    window: int | None,
    causal: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> _Chunk:
    """Blocks lo..hi: the narrowest context interval that all of them need, and the mask over it."""
    lower, upper = seen.lower[lo:hi], seen.upper[lo:hi]
    stop = int(upper.max())
    start = int(lower.min()) if window is None else max(int(lower.min()), int(upper.min()) - window + 1)
    start = min(max(start, document), stop)
    part = Visibility(lower - start, upper - start, seen.block_size, stop - start)
    visible = part.dense(window, causal).to(device)
    mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
    return _Chunk(hi - lo, start - document, stop - document, None if bool(visible.all()) else mask[None, None])


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # Row counts change from micro-batch to micro-batch: one kernel for all of them.
    return torch.compile(flex_attention, dynamic=True)


@dataclass
class FlexAttention:
    """The same attention as one FlexAttention call; C and A·B must be multiples of 128 (the model pads)."""

    block_mask: BlockMask
    kernel: Callable[..., Tensor] = field(repr=False)

    @classmethod
    def build(cls, seen: Visibility, window: int | None, causal: bool, device: torch.device) -> FlexAttention:
        """On CPU the uncompiled (dense) kernel runs: for tests only."""
        from torch.nn.attention.flex_attention import flex_attention

        mask = flex_block_mask(seen, window, causal, device)
        return cls(mask, _compiled_flex() if device.type == "cuda" else flex_attention)

    def __call__(self, q: Tensor, context_k: Tensor, context_v: Tensor, block_k: Tensor, block_v: Tensor) -> Tensor:
        key = torch.cat([context_k, block_k]).transpose(0, 1).unsqueeze(0)
        value = torch.cat([context_v, block_v]).transpose(0, 1).unsqueeze(0)
        query = q.transpose(0, 1).unsqueeze(0)
        out = self.kernel(query, key, value, block_mask=self.block_mask, enable_gqa=q.shape[1] != block_k.shape[1])
        return out[0].transpose(0, 1)


def flex_block_mask(seen: Visibility, window: int | None, causal: bool, device: torch.device) -> BlockMask:
    """The tiles of 128 x 128 that are empty, partial or full, computed from the intervals, and the exact mask inside.

    The intervals give the tile map directly, so no [A·B, C + A·B] grid is evaluated and nothing needs compiling.
    """
    from torch.nn.attention.flex_attention import BlockMask

    b, c, rows = seen.block_size, seen.context_rows, len(seen.lower) * seen.block_size
    if c % TILE or rows % TILE:
        raise ValueError(f"FlexAttention needs lengths that are multiples of {TILE}: context {c}, block rows {rows}")
    some, full = (torch.from_numpy(x) for x in _tiles(seen, window, causal))
    some_count, some_index = _ordered(some & ~full)
    full_count, full_index = _ordered(full)
    lower = torch.from_numpy(seen.lower).to(device, non_blocking=True)
    upper = torch.from_numpy(seen.upper).to(device, non_blocking=True)

    def visible(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        block, offset = query // b, query % b
        context = (key < c) & (key >= lower[block]) & (key < upper[block])
        if window is not None:
            context = context & (upper[block] + offset - key < window)
        own = (key >= c) & ((key - c) // b == block)
        if causal:
            own = own & ((key - c) % b <= offset)
        return context | own

    tables = (x[None, None].to(device, non_blocking=True) for x in (some_count, some_index, full_count, full_index))
    return BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=TILE, mask_mod=visible, seq_lengths=(rows, c + rows))


def _tiles(seen: Visibility, window: int | None, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """bool [query tiles, key tiles] twice: tiles with anything visible, and tiles that are visible throughout."""
    b, c, rows = seen.block_size, seen.context_rows, len(seen.lower) * seen.block_size
    row = np.arange(rows)
    low, high = seen.lower[row // b], seen.upper[row // b]
    if window is not None:
        low = np.minimum(np.maximum(low, high + row % b - window + 1), high)
    empty = low >= high
    tile_low, tile_high = (x.reshape(-1, TILE) for x in (np.where(empty, c, low), np.where(empty, 0, high)))
    start = np.arange(0, c, TILE)
    some = (tile_low.min(1)[:, None] < start + TILE) & (tile_high.max(1)[:, None] > start)
    full = (low.reshape(-1, TILE).max(1)[:, None] <= start) & (high.reshape(-1, TILE).min(1)[:, None] >= start + TILE)
    block = (row // b).reshape(-1, TILE)
    first, last = block.min(1), block.max(1)
    own = (first[:, None] <= last[None, :]) & (last[:, None] >= first[None, :])
    own_full = (first == last)[:, None] & (first[:, None] == first[None, :]) & (last == first)[None, :]
    if causal:
        own_full &= row[::TILE, None] >= row[None, TILE - 1 :: TILE]
    return np.concatenate([some, own], 1), np.concatenate([full & some, own_full], 1)


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Count of True tiles in each row, and the column numbers with those first, as BlockMask wants them."""
    order = torch.argsort(tiles.to(torch.int32), dim=1, descending=True, stable=True)
    return tiles.sum(1).to(torch.int32), order.to(torch.int32)
