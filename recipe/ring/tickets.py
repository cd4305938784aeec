"""What the ring hands out: a page list to write, a page list to read, its statistics, and its two ways to fail."""

from __future__ import annotations

from dataclasses import dataclass, field

from recipe.errors import RunError


class RingTimeout(RunError):
    """A wait took longer than its limit; the text says what is missing and which process holds what."""


class Misfit(RunError):
    """Tensors that are not what a ring's pages hold: copied all the same they would be repeated, cut or rounded."""


class RingAborted(RunError):
    """The ring was aborted, by a peer or because a peer died; ``reason`` says why. Nothing in it can be trusted now."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the ring was aborted: {reason}")


@dataclass
class Write:
    """One entry to fill: token t of stream s belongs into ``ring.pages[pages[t // P], s, t % P]``, P = page_tokens."""

    entry_id: int
    n_tokens: int
    pages: list[int]
    batch_seq: int
    generation: int
    slot: int = field(repr=False)
    open: bool = field(default=True, repr=False)


@dataclass
class Lease:
    """One delivery of one entry; the layout of ``pages`` is that of `Write`. Read only, until it is released."""

    entry_id: int
    reuse_index: int
    n_tokens: int
    pages: list[int]
    checksum: int
    generation: int
    slot: int = field(repr=False)
    open: bool = field(default=True, repr=False)


@dataclass(frozen=True)
class RingStats:
    """A snapshot. Tokens are real tokens, padding of last pages is not counted.

    ``ready_tokens``: published with a delivery still to come. ``depth_tokens``: reserved and not yet freed.
    ``reserved``, ``published``, ``retired``: entries since the start; ``delivered``: leases since the start.
    ``entries``: entry slots by state, FREE included. ``peers``: processes attached now, this one included.
    ``producer_wait_s``: waits for pages or slots (the drafters are slow); ``turn_wait_s``: waits for another replica's
    batch; ``consumer_wait_s``: waits for entries (the target is slow). Each is summed over all processes and grows
    while they wait.
    """

    free_pages: int
    n_pages: int
    ready_tokens: int
    depth_tokens: int
    reserved: int
    published: int
    delivered: int
    retired: int
    next_batch: int
    entries: dict[str, int]
    peers: int
    producers: int
    producers_finished: int
    producer_wait_s: float
    turn_wait_s: float
    consumer_wait_s: float
    aborted: str | None
