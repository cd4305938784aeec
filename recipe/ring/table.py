"""The bookkeeping of a ring: entries, pages and their states. Plain data structures over the mapping, no locking here.

Every method wants the mutex held. Cost per entry is constant: a chained hash finds an entry, pages and slots come from
free lists. A freed slot keeps its entry id until it is used again, so a second delivery soon after the first is named
as such; the slot that was freed first is used first.
"""

from __future__ import annotations

from array import array

from recipe.ring import layout as L
from recipe.ring.layout import FREE, LEASED, READY, WRITING

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads consecutive rows and epochs over the buckets


class Table:
    """Entry and page tables over `Views`. A *slot* is an entry's place in the tables."""

    def __init__(self, views: L.Views, spec: L.RingSpec, n_buckets: int) -> None:
        self.v, self.spec = views, spec
        self._shift = 64 - (n_buckets.bit_length() - 1)
        self._all_free = memoryview(bytes(2 * spec.reuse)).cast("h")

    def initialise(self, first_batch: int) -> None:
        """Empty tables; every page and slot free."""
        v, n, pages = self.v, self.spec.max_entries, self.spec.n_pages
        v.bucket[:] = memoryview(array("i", [-1]) * len(v.bucket))
        v.chain[:] = memoryview(array("i", [-1]) * n)
        v.entry_id[:] = v.first_page[:] = memoryview(array("q", [-1]) * n)
        v.free_slots[:] = memoryview(array("i", range(n)))
        v.page_next[:] = memoryview(array("i", [*range(1, pages), -1]))
        w = v.words
        w[L.W_NEXT_BATCH], w[L.W_FREE_PAGES], w[L.W_FREE_PAGE_HEAD] = first_batch, pages, 0
        w[L.W_FREE_SLOTS], w[L.W_SLOT_HEAD], w[L.W_STATE0 + FREE] = n, 0, n

    def _bucket(self, entry_id: int) -> int:
        return ((entry_id * _GOLDEN) & 0xFFFFFFFFFFFFFFFF) >> self._shift

    def find(self, entry_id: int) -> int:
        """Slot of an entry, or -1. A slot in state FREE means: was here, all deliveries done."""
        v = self.v
        slot = v.bucket[self._bucket(entry_id)]
        while slot >= 0 and v.entry_id[slot] != entry_id:
            slot = v.chain[slot]
        return slot

    def pages(self, slot: int) -> list[int]:
        """Page numbers of an entry in token order."""
        page, pages, following = self.v.first_page[slot], [], self.v.page_next
        while page >= 0:
            pages.append(page)
            page = following[page]
        return pages

    def take(self, entry_id: int, n_tokens: int, checksum: int, uses: int, parts: int, batch: int, writer: int) -> int:
        """FREE → WRITING: a slot and pages for a new entry. The caller made sure that both suffice."""
        v, w = self.v, self.v.words
        slot = v.free_slots[w[L.W_SLOT_HEAD]]
        w[L.W_SLOT_HEAD] = (w[L.W_SLOT_HEAD] + 1) % self.spec.max_entries
        w[L.W_FREE_SLOTS] -= 1
        if v.entry_id[slot] >= 0:
            self._unchain(slot)
        bucket = self._bucket(entry_id)
        v.chain[slot], v.bucket[bucket] = v.bucket[bucket], slot
        w[L.W_GENERATION] += 1
        generation = w[L.W_GENERATION]
        v.entry_id[slot], v.tokens[slot], v.checksum[slot], v.batch[slot] = entry_id, n_tokens, checksum, batch
        v.uses[slot] = uses
        v.parts[slot], v.joined[slot], v.done[slot], v.writer[slot] = parts, 1, 0, writer
        v.generation[slot], v.open_leases[slot], v.leased[slot], v.released[slot] = generation, 0, 0, 0
        reuse = self.spec.reuse
        v.cells[slot * reuse : (slot + 1) * reuse] = self._all_free
        self._take_pages(slot, generation)
        self._move(slot, WRITING)
        w[L.W_DEPTH_TOKENS] += n_tokens
        w[L.W_RESERVED] += 1
        return slot

    def _take_pages(self, slot: int, generation: int) -> None:
        v, w = self.v, self.v.words
        count = self.spec.pages_for(v.tokens[slot])
        page = v.first_page[slot] = w[L.W_FREE_PAGE_HEAD]
        for _ in range(count):
            v.page_generation[page] = generation
            last, page = page, v.page_next[page]
        v.page_next[last] = -1
        w[L.W_FREE_PAGE_HEAD] = page
        w[L.W_FREE_PAGES] -= count

    def publish(self, slot: int) -> None:
        """WRITING → READY."""
        w, tokens = self.v.words, self.v.tokens[slot]
        self._move(slot, READY)
        w[L.W_READY_TOKENS] += tokens
        w[L.W_PUBLISHED_TOKENS] += tokens
        w[L.W_PUBLISHED] += 1

    def lease(self, slot: int, reuse_index: int, peer: int) -> None:
        """READY or LEASED → LEASED, for one more reuse index."""
        v = self.v
        v.cells[slot * self.spec.reuse + reuse_index] = peer + 1
        v.open_leases[slot] += 1
        v.leased[slot] += 1
        if v.leased[slot] == v.uses[slot]:
            v.words[L.W_READY_TOKENS] -= v.tokens[slot]
        v.words[L.W_DELIVERED] += 1
        self._move(slot, LEASED)

    def release(self, slot: int, reuse_index: int) -> bool:
        """Ends one lease; True if it was the entry's last one, whose pages are then FREE."""
        v = self.v
        v.cells[slot * self.spec.reuse + reuse_index] = -1
        v.open_leases[slot] -= 1
        v.released[slot] += 1
        if v.released[slot] == v.uses[slot]:
            self._free(slot)
            return True
        if v.open_leases[slot] == 0:
            self._move(slot, READY)
        return False

    def _free(self, slot: int) -> None:
        v, w = self.v, self.v.words
        first = page = v.first_page[slot]
        count = 0
        while page >= 0:
            v.page_generation[page] = 0
            last, page, count = page, v.page_next[page], count + 1
        v.page_next[last] = w[L.W_FREE_PAGE_HEAD]
        w[L.W_FREE_PAGE_HEAD] = first
        w[L.W_FREE_PAGES] += count
        v.first_page[slot] = -1
        v.free_slots[(w[L.W_SLOT_HEAD] + w[L.W_FREE_SLOTS]) % self.spec.max_entries] = slot
        w[L.W_FREE_SLOTS] += 1
        w[L.W_DEPTH_TOKENS] -= v.tokens[slot]
        w[L.W_RETIRED] += 1
        self._move(slot, FREE)

    def _unchain(self, slot: int) -> None:
        v, bucket = self.v, self._bucket(self.v.entry_id[slot])
        at = v.bucket[bucket]
        if at == slot:
            v.bucket[bucket] = v.chain[slot]
            return
        while v.chain[at] != slot:
            at = v.chain[at]
        v.chain[at] = v.chain[slot]

    def _move(self, slot: int, state: int) -> None:
        v = self.v
        v.words[L.W_STATE0 + v.state[slot]] -= 1
        v.words[L.W_STATE0 + state] += 1
        v.state[slot] = state

    def held_by(self, peer: int) -> list[str]:
        """What a peer has in hand and must not leave with, in words (scans all slots)."""
        v, reuse, held = self.v, self.spec.reuse, []
        if v.peer_parts[peer]:
            held.append(f"has {v.peer_parts[peer]} parts to commit")
        for slot in range(self.spec.max_entries):
            if v.state[slot] == WRITING and v.writer[slot] == peer and v.peer_parts[peer]:
                held.append(f"writes entry {v.entry_id[slot]} ({v.done[slot]}/{v.parts[slot]} parts in)")
            elif v.state[slot] == LEASED:
                cells = v.cells[slot * reuse : (slot + 1) * reuse]
                held += [f"leases entry {v.entry_id[slot]} reuse {i}" for i, c in enumerate(cells) if c == peer + 1]
        return held

    def check(self) -> None:
        """Raises AssertionError unless all tables agree with each other (linear cost: tests and post-mortems)."""
        v, w, n = self.v, self.v.words, self.spec.max_entries
        owner = [-1] * self.spec.n_pages
        page, free = w[L.W_FREE_PAGE_HEAD], 0
        while page >= 0:
            assert owner[page] == -1 and v.page_generation[page] == 0, f"page {page} is twice in the free list"
            owner[page], free, page = n, free + 1, v.page_next[page]
        assert free == w[L.W_FREE_PAGES], f"{free} pages in the free list, {w[L.W_FREE_PAGES]} counted"
        states, ready, depth = [0] * 4, 0, 0
        for slot in range(n):
            state = v.state[slot]
            states[state] += 1
            if state == FREE:
                continue
            assert self.find(v.entry_id[slot]) == slot, f"entry {v.entry_id[slot]} is not found at its slot"
            pages = self.pages(slot)
            assert len(pages) == self.spec.pages_for(v.tokens[slot]), f"slot {slot}: wrong number of pages"
            for page in pages:
                assert owner[page] == -1, f"page {page} has two owners"
                assert v.page_generation[page] == v.generation[slot], f"page {page}: wrong generation"
                owner[page] = slot
            cells = v.cells[slot * self.spec.reuse : (slot + 1) * self.spec.reuse].tolist()
            assert sum(c > 0 for c in cells) == v.open_leases[slot] and cells.count(-1) == v.released[slot]
            assert (v.open_leases[slot] > 0) == (state == LEASED), f"slot {slot}: leases and state disagree"
            depth += v.tokens[slot]
            ready += v.tokens[slot] if state != WRITING and v.leased[slot] < v.uses[slot] else 0
        assert -1 not in owner, f"{owner.count(-1)} pages belong to nobody"
        assert states == [w[L.W_STATE0 + s] for s in range(4)], "counts by state are wrong"
        assert (ready, depth) == (w[L.W_READY_TOKENS], w[L.W_DEPTH_TOKENS]), "token counts are wrong"
        listed = {v.free_slots[(w[L.W_SLOT_HEAD] + i) % n] for i in range(w[L.W_FREE_SLOTS])}
        assert listed == {s for s in range(n) if v.state[s] == FREE}, "the list of free slots is wrong"
