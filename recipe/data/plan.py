"""The order of an epoch as pure functions of (seed, epoch): target batches per node, and their delivery to drafters.

Integer arithmetic only, so every rank, machine and numpy version computes the same plan; nothing is ever communicated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recipe.data.batches import BLOCK, Batches, row_type, take
from recipe.data.delivery import Delivery, plan_delivery
from recipe.data.hashing import hash64, key_of
from recipe.errors import ConfigError

__all__ = ["Delivery", "EpochPlan", "plan_delivery", "plan_epoch"]

# Rows that are sorted by length together. Larger: less padding; smaller: batches nearer to a random sample. With 4,096
# rows a batch of 64 spans 1.6 % of the length distribution, and the reservoir of `plan_delivery` mixes batches anyway.
WINDOW_ROWS = 4096
_ROW_STREAM, _BATCH_STREAM = 1, 2


@dataclass(frozen=True)
class EpochPlan:
    """Target batches of all nodes. Batch b of the epoch is ``rows[starts[b]:starts[b + 1]]``, longest row first."""

    rows: np.ndarray  # int32[n] (int64 beyond 2³¹), a permutation of all rows
    starts: np.ndarray  # int64[batches + 1]
    node_batches: tuple[np.ndarray, ...]  # per node: its batch numbers in production order
    padding: float  # share of padded positions, 0 to 1

    @property
    def nodes(self) -> int:
        return len(self.node_batches)

    def batches(self, node: int) -> Batches:
        """Row ids of each batch of ``node``, in production order."""
        order = self.node_batches[node]
        begins = self.starts[order]
        starts = np.zeros(len(order) + 1, dtype=np.int64)
        np.cumsum(self.starts[order + 1] - begins, out=starts[1:])
        places = np.repeat(begins - starts[:-1], np.diff(starts))
        places += np.arange(len(places))
        return Batches(self.rows[places], starts)


def plan_epoch(
    lengths: np.ndarray, seed: int, epoch: int, token_budget: int, max_batch_size: int, nodes: int = 1
) -> EpochPlan:
    """Cut all rows into right-padded batches with n·longest ≤ ``token_budget`` and n ≤ ``max_batch_size``.

    ``lengths``: tokens of each row, int [n]. Rows are shuffled, sorted by length within windows, cut, and the batches
    shuffled again. Nodes get disjoint batches: counts differ by at most one, tokens by at most about one batch.
    Raises ConfigError when there is no row or a row is longer than the budget.
    """
    lengths = np.asarray(lengths)
    n = len(lengths)
    _check(lengths, token_budget, max_batch_size, nodes)
    rows = _shuffled(n, key_of(seed, epoch, _ROW_STREAM))
    rows, sizes = _sort_windows(rows, lengths)
    starts = _cut(sizes, token_budget, max_batch_size)
    counts = np.diff(starts)
    longest = sizes[starts[:-1]].astype(np.int64)
    tokens = np.add.reduceat(sizes, starts[:-1], dtype=np.int64)
    shuffled = hash64(key_of(seed, epoch, _BATCH_STREAM), np.arange(len(counts), dtype=np.uint64))
    padded = int((counts * longest).sum())
    return EpochPlan(rows, starts, _deal(tokens, shuffled, nodes), 1.0 - int(tokens.sum()) / padded)


def _check(lengths: np.ndarray, token_budget: int, max_batch_size: int, nodes: int) -> None:
    if min(token_budget, max_batch_size, nodes) < 1:
        raise ConfigError(
            "dflash.data",
            (token_budget, max_batch_size, nodes),
            "budget, batch size and nodes must be ≥ 1",
            "raise them",
        )
    if len(lengths) == 0:
        raise ConfigError("dflash.data.path", 0, "there is no row to train on", "prepare data with usable rows")
    if int(lengths.min()) < 1:
        raise ConfigError("dflash.data.path", int(lengths.argmin()), "this row is empty", "prepare the data again")
    if int(lengths.max()) > token_budget:
        raise ConfigError(
            "dflash.data.token_budget",
            token_budget,
            f"row {int(lengths.argmax())} alone has {int(lengths.max())} tokens",
            "raise token_budget, or prepare the data with a smaller --max-seq-len",
        )


def _shuffled(n: int, key: int) -> np.ndarray:
    """A permutation of n rows. Values that carry the row number are sorted: many times faster than argsort."""
    row_bits = np.uint64(n.bit_length())
    keys = np.empty(n, dtype=np.uint64)
    for start in range(0, n, BLOCK):  # in pieces that stay in the cache
        rows = np.arange(start, min(start + BLOCK, n), dtype=np.uint64)
        hashed = hash64(key, rows)
        hashed >>= row_bits
        hashed <<= row_bits
        hashed |= rows
        keys[start : start + BLOCK] = hashed
    keys.sort()
    keys &= (np.uint64(1) << row_bits) - np.uint64(1)
    return keys.astype(row_type(n))


def _sort_windows(rows: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort each window by falling length (ties stay in shuffled order), in place; returns rows and their lengths."""
    sizes = take(lengths, rows)
    place_bits = WINDOW_ROWS.bit_length() - 1
    longest = int(sizes.max())
    kind = np.uint32 if longest < 1 << (32 - place_bits) else np.uint64
    place = np.arange(WINDOW_ROWS, dtype=kind)
    for start in range(0, len(rows), WINDOW_ROWS):
        window = slice(start, start + WINDOW_ROWS)
        key = (longest - sizes[window]).astype(kind)
        key <<= kind(place_bits)
        key |= place[: len(key)]
        key.sort()
        order = (key & kind(WINDOW_ROWS - 1)).astype(np.int64)
        rows[window] = rows[window][order]
        sizes[window] = sizes[window][order]
    return rows, sizes


def _cut(sizes: np.ndarray, token_budget: int, max_batch_size: int) -> np.ndarray:
    """Starts of the batches. All windows advance together, one batch a step, because a window knows its next cut at
    once: its first remaining row is its longest."""
    n = len(sizes)
    cursor = np.arange(0, n, WINDOW_ROWS, dtype=np.int64)
    end = np.minimum(cursor + WINDOW_ROWS, n)
    found = []
    while len(cursor):
        found.append(cursor)
        cursor = np.minimum(cursor + np.minimum(token_budget // sizes[cursor], max_batch_size), end)
        alive = cursor < end
        cursor, end = cursor[alive], end[alive]
    starts = np.concatenate([*found, np.array([n], dtype=np.int64)])
    starts.sort()
    return starts


def _deal(tokens: np.ndarray, shuffled: np.ndarray, nodes: int) -> tuple[np.ndarray, ...]:
    """Deal batches over nodes like cards sorted by value, back and forth, then order each node's hand at random."""
    by_size = np.lexsort((shuffled, -tokens))
    turn, seat = np.divmod(np.arange(len(by_size)), nodes)
    seat = np.where(turn % 2 == 0, seat, nodes - 1 - seat)
    hands = []
    for node in range(nodes):
        hand = by_size[seat == node]
        hands.append(hand[np.argsort(shuffled[hand])])
    return tuple(hands)
