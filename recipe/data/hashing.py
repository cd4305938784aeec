"""A counter-based generator: random numbers as a function of their coordinates, the same in every numpy version."""

from __future__ import annotations

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def mix_word(value: int) -> int:
    """splitmix64's output function of one 64-bit word (a bijection)."""
    value &= _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def key_of(*words: int) -> int:
    """One 64-bit key from several integers; their order matters."""
    key = 0
    for word in words:
        key = mix_word((key + _GOLDEN) ^ mix_word(int(word) + _GOLDEN))
    return key


def hash64(key: int, counters: np.ndarray) -> np.ndarray:
    """uint64 hashes of ``counters`` under ``key``. For one key this is a bijection: distinct counters never collide."""
    # In place on one copy: at 10⁷ counters each temporary would cost 80 MB.
    x = counters.astype(np.uint64)
    x += np.uint64(1)
    x *= np.uint64(_GOLDEN)
    x += np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x
