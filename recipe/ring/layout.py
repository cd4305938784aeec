"""The bytes of a ring: what one looks like (`RingSpec`) and where every table lies in the mapping (`Layout`).

The file is: one header page (words, run id, abort reason, mutex, event counters), the peer table, the entry tables, the
page tables, and then, aligned to a memory page, the data pages. All tables have a fixed size: nothing grows with a run.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from recipe.errors import ConfigError
from recipe.ring.tickets import Misfit

MAGIC = 0x474E4952_48534C46  # "FLSHRING", read as a little-endian word
VERSION = 1
PAGE_SIZE = 4096
ALIGN = 64  # a cache line: no two tables share one
MAX_PEERS = 256
MAX_PRODUCERS = 62
MAX_PARTS = 1024
RUN_ID_BYTES = 256
REASON_BYTES = 1920
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

# Entry states.
FREE, WRITING, READY, LEASED = range(4)
STATES = ("FREE", "WRITING", "READY", "LEASED")

# Header words (int64). The first ones never change after creation.
(
    W_MAGIC,
    W_VERSION,
    W_BYTES,
    W_STREAMS,
    W_HIDDEN,
    W_DTYPE,
    W_PAGE_TOKENS,
    W_N_PAGES,
    W_MAX_ENTRIES,
    W_REUSE,
    W_PRODUCERS,
    W_VERIFY,
    W_CREATOR_PID,
    W_CREATOR_START,
    W_HOLDER,  # pid that took the mutex last
    W_DIRTY,  # 1 + index of the update under way; 0: the tables are consistent
    W_ABORTED,
    W_REASON_LEN,
    W_NEXT_BATCH,
    W_GENERATION,
    W_FREE_PAGES,
    W_FREE_PAGE_HEAD,
    W_SLOT_HEAD,  # first free slot's place in the circular list of free slots
    W_FREE_SLOTS,
    W_BLOCKED,  # 1: the producer whose turn it is lacks pages or slots
    W_FINISHED,  # bit mask over producers
    W_READY_TOKENS,
    W_DEPTH_TOKENS,
    W_PUBLISHED_TOKENS,
    W_RESERVED,
    W_PUBLISHED,
    W_DELIVERED,
    W_RETIRED,
    W_SPACE_WAIT_NS,
    W_TURN_WAIT_NS,
    W_CONSUMER_WAIT_NS,
    W_STATE0,  # four words: how many entry slots are in each state
) = range(37)
N_WORDS = 64

OFFSET_RUN_ID = N_WORDS * 8
OFFSET_REASON = OFFSET_RUN_ID + RUN_ID_BYTES
OFFSET_MUTEX = 3072
OFFSET_EVENTS = 3328
# Events: what a waiter waits for.
E_SPACE, E_RESERVED, E_READY = range(3)
N_EVENTS = 3

P_FREE, P_ATTACHED = range(2)  # states of a peer slot
_ITEM = {"q": 8, "Q": 8, "i": 4, "I": 4, "h": 2}


def align(value: int, to: int) -> int:
    """``value`` rounded up to a multiple of ``to``."""
    return -(-value // to) * to


@dataclass(frozen=True)
class RingSpec:
    """What a ring holds. A page is ``[streams, page_tokens, hidden]`` of ``dtype``; an entry is a list of pages.

    ``streams``: taps plus the last hidden state if it is kept. ``hidden``: features. ``reuse``: how often each entry is
    delivered. ``max_entries``: entries held at once (``n_pages`` makes it never the limit). Raises ConfigError.
    """

    streams: int
    hidden: int
    dtype: str
    page_tokens: int
    n_pages: int
    max_entries: int
    reuse: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        if self.dtype not in DTYPES:
            raise ConfigError("ring.dtype", self.dtype, f"must be one of {sorted(DTYPES)}", "use bfloat16 or float32")
        upper = {"reuse": 1 << 20, "n_pages": (1 << 31) - 1, "max_entries": (1 << 30) - 1}
        for name in ("streams", "hidden", "page_tokens", "n_pages", "max_entries", "reuse"):
            value = getattr(self, name)
            top = upper.get(name, 1 << 40)
            if not isinstance(value, int) or not 1 <= value <= top:
                raise ConfigError(f"ring.{name}", value, f"must be an integer in 1..{top}", "change the ring's size")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one stream."""
        return self.hidden * self.torch_dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.streams * self.page_tokens * self.row_bytes

    @property
    def bytes(self) -> int:
        """Size of the whole file, tables included."""
        return Layout(self).total

    def pages_for(self, n_tokens: int) -> int:
        """Pages that a sequence of ``n_tokens`` occupies."""
        return -(-n_tokens // self.page_tokens)

    def expect(self, streams: Sequence[torch.Tensor], n_tokens: int) -> None:
        """Raises Misfit unless ``streams`` are one tensor [..., S ≥ n_tokens, hidden] of ``dtype`` for each stream."""
        if len(streams) != self.streams:
            raise Misfit(
                f"a page of the ring has {self.streams} streams (taps and last hidden state), not {len(streams)}"
            )
        for index, tensor in enumerate(streams):
            if tensor.ndim < 2 or tensor.shape[-1] != self.hidden or tensor.shape[-2] < n_tokens:
                found, wanted = list(tensor.shape), f"{n_tokens} tokens of {self.hidden} features"
                raise Misfit(f"stream {index} for the ring is {found} where {wanted} are needed")
            if tensor.dtype != self.torch_dtype:
                raise Misfit(f"stream {index} for the ring is {tensor.dtype}, and the ring holds {self.torch_dtype}")

    def words(self) -> list[int]:
        """The spec as the header words from W_STREAMS on."""
        return [
            self.streams,
            self.hidden,
            list(DTYPES).index(self.dtype),
            self.page_tokens,
            self.n_pages,
            self.max_entries,
            self.reuse,
        ]

    @staticmethod
    def from_words(words: list[int]) -> RingSpec:
        """The inverse of `words`."""
        return RingSpec(words[0], words[1], list(DTYPES)[words[2]], *words[3:7])


class Layout:
    """Offsets of all tables: ``tables[name] = (offset, format, count)``, then ``pages_offset`` and ``total`` bytes."""

    def __init__(self, spec: RingSpec) -> None:
        n, pages = spec.max_entries, spec.n_pages
        self.n_buckets = 1 << (2 * n - 1).bit_length()
        shapes = {
            "peer_pid": ("q", MAX_PEERS),
            "peer_start": ("q", MAX_PEERS),
            "peer_state": ("q", MAX_PEERS),
            "peer_parts": ("q", MAX_PEERS),  # parts that this peer has taken on and not committed
            "bucket": ("i", self.n_buckets),  # hash of the entry id -> first slot of its chain, or -1
            "chain": ("i", n),  # next slot of the same bucket
            "free_slots": ("i", n),  # circular list: the slot that is free for longest is taken first
            "entry_id": ("q", n),
            "tokens": ("q", n),
            "checksum": ("Q", n),
            "state": ("q", n),
            "parts": ("q", n),
            "joined": ("q", n),
            "done": ("q", n),
            "batch": ("q", n),
            "generation": ("q", n),
            "writer": ("q", n),
            "first_page": ("q", n),
            "open_leases": ("q", n),
            "uses": ("q", n),  # deliveries that are due: all of reuse, or what a resumed or cut run still needs
            "leased": ("q", n),  # reuse indices handed out so far
            "released": ("q", n),
            "cells": ("h", n * spec.reuse),  # per (slot, reuse index): 0 free, peer + 1 leased, -1 released
            "page_next": ("i", pages),  # chain of an entry's pages, or of the free pages
            "page_generation": ("q", pages),
            "page_crc": ("I", pages),
        }
        self.tables: dict[str, tuple[int, str, int]] = {}
        offset = PAGE_SIZE
        for name, (fmt, count) in shapes.items():
            self.tables[name] = (offset, fmt, count)
            offset = align(offset + count * _ITEM[fmt], ALIGN)
        self.pages_offset = align(offset, PAGE_SIZE)
        self.pages_bytes = pages * spec.page_bytes
        self.total = align(self.pages_offset + self.pages_bytes, PAGE_SIZE)


class Views:
    """Typed views of one mapping: ``words`` and one attribute per table. Python integers in and out, no copy."""

    words: memoryview[int]
    peer_pid: memoryview[int]
    peer_start: memoryview[int]
    peer_state: memoryview[int]
    peer_parts: memoryview[int]
    bucket: memoryview[int]
    chain: memoryview[int]
    free_slots: memoryview[int]
    entry_id: memoryview[int]
    tokens: memoryview[int]
    checksum: memoryview[int]
    state: memoryview[int]
    parts: memoryview[int]
    joined: memoryview[int]
    done: memoryview[int]
    batch: memoryview[int]
    generation: memoryview[int]
    writer: memoryview[int]
    first_page: memoryview[int]
    open_leases: memoryview[int]
    uses: memoryview[int]
    leased: memoryview[int]
    released: memoryview[int]
    cells: memoryview[int]
    page_next: memoryview[int]
    page_generation: memoryview[int]
    page_crc: memoryview[int]

    def __init__(self, mapping: mmap.mmap, layout: Layout) -> None:
        raw = memoryview(mapping)
        self.raw = raw
        self.words = raw[: N_WORDS * 8].cast("q")
        for name, (offset, fmt, count) in layout.tables.items():
            setattr(self, name, raw[offset : offset + count * _ITEM[fmt]].cast(fmt))  # type: ignore[call-overload]
        self.pages_raw = raw[layout.pages_offset : layout.pages_offset + layout.pages_bytes]

    def text(self, offset: int, length: int) -> str:
        """The UTF-8 text at ``offset``, up to its first NUL."""
        return bytes(self.raw[offset : offset + length]).split(b"\0")[0].decode("utf-8", "replace")

    def set_text(self, offset: int, room: int, text: str) -> None:
        """Writes ``text`` cut to ``room`` bytes, filled up with NULs."""
        data = text.encode("utf-8", "replace")[: room - 1]
        self.raw[offset : offset + room] = data + b"\0" * (room - len(data))
