"""Anchors: which positions of a micro-batch open a block. Pure functions of (seed, epoch, row, reuse index)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ANCHORS, NOISE = 0, 1


class EntryKey(NamedTuple):
    """What randomness depends on: never on timing, rank or the other sequences of a micro-batch."""

    epoch: int
    row: int
    reuse: int = 0


def generator(seed: int, key: EntryKey, purpose: int) -> np.random.Generator:
    """A counter-based generator (Philox) for one entry and purpose; equal arguments give equal streams everywhere."""
    entropy = (seed, purpose, key.epoch, key.row, key.reuse)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


def candidates(loss_mask: np.ndarray) -> np.ndarray:
    """Positions t of one document with loss_mask[t] and loss_mask[t+1]: the anchor and its first draft supervised.

    Blocks that run past the document's end are allowed; their tail carries no weight.
    """
    mask = np.asarray(loss_mask, dtype=bool)
    return np.flatnonzero(mask[:-1] & mask[1:])


def shares(available: Sequence[int], total: int) -> list[int]:
    """Split ``total`` anchors over sequences by water-filling: an equal share each, at most what each one has.

    What short sequences leave goes to the longer ones; an indivisible rest goes to those with most candidates (ties:
    the earlier sequence). Sums to min(total, sum(available)).
    """
    given = [0] * len(available)
    left = min(total, sum(available))
    while left:
        open_ = [i for i, have in enumerate(available) if have > given[i]]
        share = left // len(open_)
        if share == 0:
            for i in sorted(open_, key=lambda i: (-available[i], i))[:left]:
                given[i] += 1
            break
        for i in open_:
            more = min(share, available[i] - given[i])
            given[i] += more
            left -= more
    return given


def plan_anchors(
    loss_masks: Sequence[np.ndarray], keys: Sequence[EntryKey], max_anchors: int, seed: int
) -> list[np.ndarray]:
    """Sorted anchor positions (document-local, int64) of each sequence; at most ``max_anchors`` over all of them.

    An entry's anchors are the first n of its own seeded permutation of candidates, so a larger share only adds some.
    """
    choices = [candidates(mask) for mask in loss_masks]
    counts = shares([len(choice) for choice in choices], max_anchors)
    return [
        np.sort(generator(seed, key, ANCHORS).permutation(choice)[:count]).astype(np.int64)
        for choice, key, count in zip(choices, keys, counts, strict=True)
    ]
