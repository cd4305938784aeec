"""A micro-batch: one packed row of sequences with its anchors, and what the host must know about it without a sync.

Symbols: C packed rows, A blocks, H hidden size, k taps, T tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from recipe.drafter.anchors import EntryKey
from recipe.drafter.attention import Visibility


@dataclass(frozen=True)
class Tokens:
    """One entry's tokens on the host: int64 [T] and bool [T] (True = supervised)."""

    key: EntryKey
    input_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True)
class HostLayout:
    """The integers of a micro-batch in host memory: masks, weights and counts need no device round trip.

    ``spans``: packed rows (start, stop) of each document. ``anchors`` int64 [A]: packed row of each block's anchor,
    sorted, padded ones (``keep`` False) last. ``starts``, ``stops`` int64 [A]: span of the anchor's document.
    ``loss_mask`` bool [C].
    """

    spans: tuple[tuple[int, int], ...]
    anchors: np.ndarray
    keep: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    loss_mask: np.ndarray

    @classmethod
    def build(
        cls, lengths: Sequence[int], anchors: Sequence[np.ndarray], loss_mask: np.ndarray, slots: int | None
    ) -> HostLayout:
        """``anchors``: document-local positions of each document; ``slots``: pad the blocks to this many."""
        edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        counts = [len(a) for a in anchors]
        starts = np.repeat(edges[:-1], counts)
        rows = np.concatenate([*anchors, np.zeros(0, np.int64)]).astype(np.int64) + starts
        stops = np.repeat(edges[1:], counts)
        # At least one block, so that a micro-batch without anchors still runs the same graph on every rank.
        padding = max(1, slots or 0, len(rows)) - len(rows)
        zeros = np.zeros(padding, np.int64)
        return cls(
            spans=tuple(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)),
            anchors=np.concatenate([rows, zeros]),
            keep=np.arange(len(rows) + padding) < len(rows),
            starts=np.concatenate([starts, zeros]),
            stops=np.concatenate([stops, zeros]),
            loss_mask=np.asarray(loss_mask, dtype=bool),
        )


@dataclass(frozen=True)
class MicroBatch:
    """One packed row. Documents are contiguous and in order; positions are document-local.

    Fields (device tensors): ``input_ids``, ``position_ids``, ``document_ids`` int64 [C]; ``loss_mask`` bool [C];
    ``taps`` k x [C, H]; ``last_hidden`` [C, H] after the target's final norm, or None; ``anchors`` int64 [A] packed
    rows; ``keep`` bool [A]. ``host`` repeats the integers in host memory.
    """

    input_ids: Tensor
    position_ids: Tensor
    document_ids: Tensor
    loss_mask: Tensor
    taps: list[Tensor]
    last_hidden: Tensor | None
    anchors: Tensor
    keep: Tensor
    host: HostLayout

    def visibility(self, block_size: int) -> Visibility:
        """The context interval of each block: its document's rows strictly before the anchor; none if padded."""
        nothing = len(self.host.loss_mask)
        lower = np.where(self.host.keep, self.host.starts, nothing)
        return Visibility(lower, np.where(self.host.keep, self.host.anchors, nothing), block_size, nothing)

    def block_positions(self, block_size: int) -> Tensor:
        """int64 [A, B]: the anchor's document-local position + offset."""
        return self.position_ids[self.anchors, None] + torch.arange(block_size, device=self.anchors.device)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> MicroBatch:
        """The same micro-batch elsewhere; ``dtype`` is that of the taps and the last hidden state."""
        names = ("input_ids", "position_ids", "document_ids", "loss_mask", "anchors", "keep")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        last = None if self.last_hidden is None else self.last_hidden.to(device, dtype, non_blocking=True)
        return replace(
            self, taps=[t.to(device, dtype, non_blocking=True) for t in self.taps], last_hidden=last, **moved
        )


def assemble(
    input_ids: np.ndarray,
    loss_mask: np.ndarray,
    lengths: Sequence[int],
    anchors: Sequence[np.ndarray],
    taps: Sequence[Tensor],
    last_hidden: Tensor | None = None,
    slots: int | None = None,
) -> MicroBatch:
    """A micro-batch with given document-local anchors (one array a document). Raises ValueError on unequal lengths, and
    on features that are not all [C, H] of one width and dtype."""
    rows = sum(lengths)
    features = [*taps, *([] if last_hidden is None else [last_hidden])]
    if any(len(x) != rows for x in (input_ids, loss_mask, *features)):
        raise ValueError(f"a packed row of {rows} tokens needs as many ids, mask values and feature rows")
    kinds = {(*x.shape, x.dtype) for x in features}
    if len(kinds) != 1 or any(x.ndim != 2 for x in features):
        raise ValueError(f"taps and last hidden state must be alike, [{rows}, H] each: {sorted(map(str, kinds))}")
    host = HostLayout.build(lengths, anchors, loss_mask, slots)
    device = taps[0].device

    def put(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    return MicroBatch(
        input_ids=put(input_ids.astype(np.int64)),
        position_ids=put(np.concatenate([np.arange(n) for n in lengths])),
        document_ids=put(np.repeat(np.arange(len(lengths)), lengths)),
        loss_mask=put(host.loss_mask),
        taps=list(taps),
        last_hidden=last_hidden,
        anchors=put(host.anchors),
        keep=put(host.keep),
        host=host,
    )


def blank(taps: int, hidden_size: int, *, last_hidden: bool, dtype: torch.dtype, device: torch.device) -> MicroBatch:
    """A micro-batch of weight zero: what a rank without data contributes, so that all ranks take the same steps."""
    rows = [torch.zeros(1, hidden_size, dtype=dtype, device=device) for _ in range(taps + last_hidden)]
    nothing = np.zeros(1, np.int64)
    return assemble(nothing, nothing, [1], [nothing[:0]], rows[:taps], rows[taps] if last_hidden else None)
