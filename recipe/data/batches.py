"""A node's target batches as two arrays: 10⁷ rows make 3·10⁵ batches, too many for as many Python objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

BLOCK = 1 << 16  # values that are worked on at once, so that they stay in the cache


class Batches(Sequence[np.ndarray]):
    """Row ids of each batch in production order; batch b is ``rows[starts[b]:starts[b + 1]]``, a view.

    Args:
        rows: int [n], the rows of all batches one after the other.
        starts: int64 [batches + 1].
    """

    def __init__(self, rows: np.ndarray, starts: np.ndarray) -> None:
        self.rows, self.starts = rows, starts

    @classmethod
    def of(cls, batches: Sequence[np.ndarray]) -> Batches:
        """The same batches in this form."""
        if isinstance(batches, cls):
            return batches
        starts = np.zeros(len(batches) + 1, dtype=np.int64)
        np.cumsum([len(rows) for rows in batches], out=starts[1:])
        return cls(np.concatenate(batches) if len(batches) else np.zeros(0, dtype=np.int64), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...

    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        return self.rows[self.starts[index] : self.starts[index + 1]]

    def sizes(self) -> np.ndarray:
        """int64 [batches]: rows of each."""
        return np.diff(self.starts)


def row_type(count: int) -> type[np.signedinteger]:
    """The smallest of int32 and int64 that holds the numbers of ``count`` rows (or batches)."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


def take(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """``values[index]``; numpy is twice as fast with int64 numbers, which would be too large to keep."""
    taken = np.empty(len(index), dtype=values.dtype)
    for start in range(0, len(index), BLOCK):
        taken[start : start + BLOCK] = values[index[start : start + BLOCK].astype(np.int64)]
    return taken
