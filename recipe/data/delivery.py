"""The reservoir draw as a pure function: which (row, reuse index) is in which micro-batch of a node."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from recipe.data.batches import Batches, row_type, take
from recipe.data.hashing import hash64, key_of
from recipe.errors import ConfigError

_DRAW_STREAM = 3
_FRACTION_BITS = 24  # of a key of the draw
_WINDOW = 128  # items that are looked at together as Python numbers, which are faster one by one than numpy's
_CHUNK = 4096  # batches that are drawn from at once, so that their keys stay in the cache


@dataclass(frozen=True)
class Delivery:
    """Micro-batches of one node in delivery order; number j goes to the node's drafter j mod n.

    Item i is row ``rows[i]`` of target batch ``batch[i]`` delivered for the ``reuse[i]``-th time; micro-batch j holds
    the items ``starts[j]:starts[j + 1]``.
    """

    rows: np.ndarray  # int32[m] (int64 beyond 2³¹ rows)
    reuse: np.ndarray  # uint8[m] (wider beyond 256 uses)
    batch: np.ndarray  # int32[m]
    starts: np.ndarray  # int64[micro-batches + 1]
    tokens: np.ndarray  # int64[micro-batches]
    target_batches: Batches
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
        0 for a node that nothing is left for.
        """
        if len(self) == 0:
            return 0
        in_batch = self.target_batches.rows
        pages = -(-self.lengths[in_batch].astype(np.int64) // page_tokens)
        produced = np.cumsum(pages)[self.target_batches.starts[self.needed_batches()] - 1]
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
    flat = Batches.of(batches)
    in_batch = flat.rows
    if int(lengths.max()) > token_budget and int(lengths[in_batch].max()) > token_budget:
        longest = int(in_batch[lengths[in_batch].argmax()])
        raise ConfigError("dflash.data.token_budget", token_budget, f"row {longest} alone is longer", "raise it")
    items = np.concatenate(list(_drawn(flat, seed, epoch, reuse, min_ready)))
    use_of, place = np.divmod(items, len(in_batch)) if reuse > 1 else (np.zeros_like(items), items)
    use_of = use_of.astype(np.min_scalar_type(reuse - 1))
    del items
    if wanted is not None:
        kept = wanted[use_of, in_batch[place]]
        use_of, place = use_of[kept], place[kept]
    rows = take(in_batch, place)
    batch = take(np.repeat(np.arange(len(flat), dtype=row_type(len(flat))), flat.sizes()), place)
    del place
    starts, total, moved = _cut(rows, lengths, token_budget, distinct=reuse > 1)
    if moved is not None:
        rows, use_of, batch = rows[moved], use_of[moved], batch[moved]
    tokens = np.diff(total[starts[1:] - 1], prepend=0)
    return Delivery(rows, use_of, batch, starts, tokens, flat, lengths)


def _empty(lengths: np.ndarray) -> Delivery:
    none, start = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    return Delivery(none, none, none, start, none, Batches(none, start), lengths)


def _drawn(flat: Batches, seed: int, epoch: int, reuse: int, min_ready: int) -> Iterator[np.ndarray]:
    """Items in the order of their keys, piece by piece; item = use · rows + place in ``flat.rows``, ties by item.

    A key is never below its batch's index, so once all batches below ``stop`` have been looked at, the keys below
    ``stop`` are all there. They are sorted as words that carry the item in their low bits.
    """
    n = len(flat.rows)
    kind, item_bits = row_type(reuse * n), (reuse * n).bit_length()
    if (_CHUNK + 2 * min_ready).bit_length() + _FRACTION_BITS + item_bits > 64:  # one word cannot hold both
        yield np.argsort(np.concatenate(_keys_of(flat, 0, len(flat), seed, epoch, reuse, min_ready)), kind="stable")
        return
    stop = np.uint64(_CHUNK << _FRACTION_BITS + item_bits)
    waiting = np.zeros(0, dtype=np.uint64)
    for begin in range(0, len(flat) + 2 * min_ready, _CHUNK):
        words = [waiting]
        for use, keys in enumerate(_keys_of(flat, begin, begin + _CHUNK, seed, epoch, reuse, min_ready)):
            keys <<= np.uint64(item_bits)
            first = use * n + int(flat.starts[min(begin, len(flat))])
            keys |= np.arange(first, first + len(keys), dtype=np.uint64)
            words.append(keys)
        word = np.concatenate(words)
        word.sort()
        ready = int(np.searchsorted(word, stop))
        waiting = word[ready:] - stop
        word &= np.uint64((1 << item_bits) - 1)
        yield word[:ready].astype(kind)


def _keys_of(
    flat: Batches, begin: int, stop: int, seed: int, epoch: int, reuse: int, min_ready: int
) -> list[np.ndarray]:
    """For every use the keys of the rows of batches [begin, stop), uint64: fixed point, counted from ``begin``."""
    begin, stop = min(begin, len(flat)), min(stop, len(flat))
    rows = flat.rows[flat.starts[begin] : flat.starts[stop]].astype(np.uint64)
    index = np.arange(stop - begin, dtype=np.uint64) << np.uint64(_FRACTION_BITS)
    index = np.repeat(index, np.diff(flat.starts[begin : stop + 1]))
    keys = []
    for use in range(reuse):
        # By row, not by position: an entry's draw depends on nothing but itself.
        draw = hash64(key_of(seed, epoch, _DRAW_STREAM, use), rows)
        draw >>= np.uint64(32)
        draw *= np.uint64(2 * min_ready)
        draw >>= np.uint64(32 - _FRACTION_BITS)
        draw += index
        keys.append(draw)
    return keys


def _cut(
    rows: np.ndarray, lengths: np.ndarray, budget: int, distinct: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Starts of the micro-batches, tokens up to and with each item, and, where rows may have had to move, the new order
    (positions into ``rows``)."""
    total = np.cumsum(take(lengths, rows), dtype=np.int64)
    order = np.arange(len(rows)) if distinct else None
    sums = memoryview(total.data)  # many times faster for single values than the array
    starts, start, before, most = [0], 0, 0, 64
    while start < len(rows):
        stop = bisect_right(sums, before + budget, start, min(start + most, len(rows)))
        if stop == start + most:
            most *= 2
            continue
        if order is not None:
            held = np.sort(rows[order[start:stop]])
            if (held[1:] == held[:-1]).any():
                stop = _move_repeats(rows, lengths, order, total, start, budget, before)
        starts.append(stop)
        start, before = stop, sums[stop - 1]
    return np.array(starts, dtype=np.int64), total, order


def _move_repeats(
    rows: np.ndarray, lengths: np.ndarray, order: np.ndarray, total: np.ndarray, start: int, budget: int, before: int
) -> int:
    """Fill one micro-batch with distinct rows; repeats met on the way go behind it. Mends ``order`` and ``total``."""
    taken: list[int] = []
    repeats: list[int] = []
    seen: set[int] = set()
    room, scan, full = budget, start, False
    while scan < len(order) and not full:
        window = order[scan : scan + _WINDOW]
        its_rows = rows[window]
        for item, row, length in zip(window.tolist(), its_rows.tolist(), lengths[its_rows].tolist(), strict=True):
            if row in seen:
                repeats.append(item)
            elif length <= room:
                taken.append(item)
                seen.add(row)
                room -= length
            else:
                full = True
                break
            scan += 1
    order[start:scan] = taken + repeats
    total[start:scan] = before + np.cumsum(lengths[rows[order[start:scan]]], dtype=np.int64)
    return start + len(taken)
