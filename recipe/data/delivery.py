"""The reservoir draw as a pure function: which (row, reuse index) is in which micro-batch of a node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from recipe.data.hashing import hash64, key_of
from recipe.errors import ConfigError

_DRAW_STREAM = 3


@dataclass(frozen=True)
class Delivery:
    """Micro-batches of one node in delivery order; number j goes to the node's drafter j mod n.

    Item i is row ``rows[i]`` of target batch ``batch[i]`` delivered for the ``reuse[i]``-th time; micro-batch j holds
    the items ``starts[j]:starts[j + 1]``.
    """

    rows: np.ndarray  # int64[m]
    reuse: np.ndarray  # int64[m]
    batch: np.ndarray  # int64[m]
    starts: np.ndarray  # int64[micro-batches + 1]
    tokens: np.ndarray  # int64[micro-batches]
    target_batches: Sequence[np.ndarray]
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def micro_batch(self, j: int) -> tuple[np.ndarray, np.ndarray]:
        """(row ids, reuse indices) of micro-batch j."""
        part = slice(self.starts[j], self.starts[j + 1])
        return self.rows[part], self.reuse[part]

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return (self.micro_batch(j) for j in range(len(self)))

    @property
    def micro_batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return list(self)

    def needed_batches(self) -> np.ndarray:
        """int64[micro-batches]: how many target batches must be in the ring before micro-batch j can be complete."""
        return np.maximum.accumulate(np.maximum.reduceat(self.batch, self.starts[:-1])) + 1

    def peak_pages(self, page_tokens: int, in_flight: int) -> int:
        """The most pages that are occupied at once, if the producer works ahead no further than it must.

        While micro-batch j is gathered, all batches up to the latest one needed so far are in the ring (batches are
        reserved whole, in order), and the pages of a row whose last use was micro-batch l are back once j > l +
        ``in_flight``. A ring of this many pages can therefore not deadlock; more pages let the producer work ahead.
        """
        in_batch = np.concatenate(self.target_batches)
        pages = -(-self.lengths[in_batch].astype(np.int64) // page_tokens)
        ends = np.cumsum([len(rows) for rows in self.target_batches])
        produced = np.cumsum(pages)[ends[self.needed_batches() - 1] - 1]
        slot = np.repeat(np.arange(len(self)), np.diff(self.starts))
        last_use = np.zeros(len(self.lengths), dtype=np.int64)
        np.maximum.at(last_use, self.rows, slot)
        freed = np.bincount(last_use[in_batch], weights=pages, minlength=len(self)).astype(np.int64).cumsum()
        held = produced.copy()
        if in_flight + 1 < len(self):
            held[in_flight + 1 :] -= freed[: len(self) - in_flight - 1]
        return int(held.max())


def plan_delivery(
    batches: Sequence[np.ndarray],
    lengths: np.ndarray,
    seed: int,
    epoch: int,
    reuse: int,
    min_ready: int,
    token_budget: int,
    wanted: np.ndarray | None = None,
) -> Delivery:
    """Draw every (row, reuse index) once, at random from a reservoir of about ``min_ready`` batches.

    Item keys are `batch index + u`, u uniform in [0, 2·``min_ready``): half of the last 2·min_ready batches wait at any
    time. Sorted by key and cut greedily into micro-batches of at most ``token_budget`` tokens; a row that a micro-batch
    holds already moves to the next one. ``batches``: a node's, from `EpochPlan.batches`; ``lengths``: of all rows;
    ``wanted`` bool [reuse, rows]: the deliveries to make, None for all.
    """
    if len(batches) == 0:
        return _empty(lengths)
    in_batch = np.concatenate(batches).astype(np.int64, copy=False)
    if int(lengths[in_batch].max()) > token_budget:
        longest = int(in_batch[lengths[in_batch].argmax()])
        raise ConfigError("dflash.data.token_budget", token_budget, f"row {longest} alone is longer", "raise it")
    index = np.repeat(np.arange(len(batches), dtype=np.int64), [len(rows) for rows in batches])
    keys = []
    for use in range(reuse):
        # Fixed point with 24 fractional bits. By row, not by position: an entry's draw depends on nothing but itself.
        draw = hash64(key_of(seed, epoch, _DRAW_STREAM, use), in_batch.astype(np.uint64)) >> np.uint64(32)
        keys.append((index.astype(np.uint64) << np.uint64(24)) + (draw * np.uint64(2 * min_ready) >> np.uint64(8)))
    order = np.argsort(np.concatenate(keys), kind="stable")
    del keys
    use_of, place = np.divmod(order, len(in_batch))
    if wanted is not None:
        kept = wanted[use_of, in_batch[place]]
        use_of, place = use_of[kept], place[kept]
    rows, batch = in_batch[place], index[place]
    del place, order
    starts, moved = _cut(rows, lengths, token_budget, distinct=reuse > 1)
    if moved is not None:
        rows, use_of, batch = rows[moved], use_of[moved], batch[moved]
    tokens = np.add.reduceat(lengths[rows].astype(np.int64), starts[:-1])
    return Delivery(rows, use_of, batch, starts, tokens, batches, lengths)


def _empty(lengths: np.ndarray) -> Delivery:
    none = np.zeros(0, dtype=np.int64)
    return Delivery(none, none, none, np.zeros(1, dtype=np.int64), none, [], lengths)


def _cut(rows: np.ndarray, lengths: np.ndarray, budget: int, distinct: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Starts of the micro-batches and, where rows had to move, the new order (positions into ``rows``)."""
    total = np.cumsum(lengths[rows], dtype=np.int64)
    order = np.arange(len(rows)) if distinct else None
    starts, start, before = [0], 0, 0
    while start < len(rows):
        stop = int(np.searchsorted(total, before + budget, side="right"))
        if order is not None:
            held = np.sort(rows[order[start:stop]])
            if (held[1:] == held[:-1]).any():
                stop = _move_repeats(rows, lengths, order, total, start, budget, before)
        starts.append(stop)
        start, before = stop, int(total[stop - 1])
    return np.array(starts, dtype=np.int64), order


def _move_repeats(
    rows: np.ndarray, lengths: np.ndarray, order: np.ndarray, total: np.ndarray, start: int, budget: int, before: int
) -> int:
    """Fill one micro-batch with distinct rows; repeats met on the way go behind it. Mends ``order`` and ``total``."""
    taken: list[int] = []
    repeats: list[int] = []
    seen: set[int] = set()
    room, scan = budget, start
    while scan < len(order):
        item = int(order[scan])
        row = int(rows[item])
        if row in seen:
            repeats.append(item)
        elif lengths[row] <= room:
            taken.append(item)
            seen.add(row)
            room -= int(lengths[row])
        else:
            break
        scan += 1
    order[start:scan] = taken + repeats
    total[start:scan] = before + np.cumsum(lengths[rows[order[start:scan]]], dtype=np.int64)
    return start + len(taken)
