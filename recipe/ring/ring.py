"""The shared-memory ring between the target ranks (producers) and the drafter ranks (consumers) of one node.

An entry is one sequence: a list of fixed pages ``[streams, page_tokens, hidden]``. It goes FREE → WRITING (`reserve`)
→ READY (the last part's `commit`) ⇄ LEASED (`lease`, `release`) → FREE after its last delivery. Bytes are copied by the
callers straight into and out of `pages`, outside the lock. See monitor.py for what happens when a process dies.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

from recipe.errors import RunError
from recipe.ring import layout as L
from recipe.ring.handle import RingHandle
from recipe.ring.layout import FREE, WRITING
from recipe.ring.monitor import Section
from recipe.ring.tickets import Lease, Write


class Ring(RingHandle):
    """What producers and consumers do, on top of `RingHandle`. Thread-safe; a forked child may go on using it."""

    # producers

    def reserve(
        self,
        batch_seq: int,
        entries: Sequence[tuple[int, int, int]],
        parts: int = 1,
        timeout: float | None = None,
        uses: Sequence[int] | None = None,
    ) -> list[Write]:
        """Room for a whole batch of ``(entry_id, n_tokens, checksum)``; blocks until it is its turn and there is room.

        Batches are served in the order of ``batch_seq`` over all replicas, whole or not at all. ``parts``: commits that
        make an entry READY; the caller has one, each `join` brings another. ``checksum``: any 64-bit word, handed to
        the consumer. ``uses``: deliveries that are due for each entry (default: ``reuse``; a resumed or cut run needs
        fewer). Raises RunError at once for a batch that can never fit or an entry that was there already.
        """
        monitor, table, spec, words = self._monitor, self._table, self.spec, self._monitor.words
        need = self._pages_needed(batch_seq, entries, parts)
        due = [spec.reuse] * len(entries) if uses is None else list(uses)
        if len(due) != len(entries) or not all(1 <= count <= spec.reuse for count in due):
            raise RunError(f"batch {batch_seq}: uses {due} for {len(entries)} entries; each must be in 1..{spec.reuse}")
        peer = monitor.peer

        def attempt(section: Section) -> list[Write] | None:
            if words[L.W_NEXT_BATCH] != batch_seq:
                if words[L.W_NEXT_BATCH] > batch_seq:
                    raise RunError(f"batch {batch_seq} was reserved before: batch {words[L.W_NEXT_BATCH]} is next")
                section.account = L.W_TURN_WAIT_NS
                return None
            for entry_id, _, _ in entries:
                if (slot := table.find(entry_id)) >= 0:
                    state = "delivered" if table.v.state[slot] == FREE else L.STATES[table.v.state[slot]]
                    raise RunError(f"entry {entry_id} of batch {batch_seq} is in the ring already ({state})")
            if words[L.W_FREE_PAGES] < need or words[L.W_FREE_SLOTS] < len(entries):
                if not words[L.W_BLOCKED]:
                    words[L.W_BLOCKED] = 1
                    section.notify(L.E_READY)
                section.account = L.W_SPACE_WAIT_NS
                return None
            section.begin("reserve")
            slots = [table.take(*entry, use, parts, batch_seq, peer) for entry, use in zip(entries, due, strict=True)]
            words[L.W_BLOCKED], words[L.W_NEXT_BATCH] = 0, batch_seq + 1
            table.v.peer_parts[peer] += len(slots)
            section.notify(L.E_SPACE)
            if parts > 1:
                section.notify(L.E_RESERVED)
            return [self._write(slot) for slot in slots]

        def what() -> str:
            return f"{need} pages and {len(entries)} slots for batch {batch_seq} (of {spec.n_pages} pages)"

        return monitor.wait(L.E_SPACE, attempt, what, timeout)

    def join(self, batch_seq: int, entry_ids: Sequence[int], timeout: float | None = None) -> list[Write]:
        """The same entries for another tensor-parallel rank: waits until ``batch_seq`` is reserved.

        Raises RunError if an entry is not of that batch, or has all its parts already.
        """
        table, words, peer = self._table, self._monitor.words, self._monitor.peer

        def attempt(section: Section) -> list[Write] | None:
            if words[L.W_NEXT_BATCH] <= batch_seq:
                return None
            slots = [table.find(entry_id) for entry_id in entry_ids]
            for entry_id, slot in zip(entry_ids, slots, strict=True):
                if slot < 0 or table.v.batch[slot] != batch_seq:
                    raise RunError(f"entry {entry_id} is not of batch {batch_seq}")
                if table.v.state[slot] != WRITING or table.v.joined[slot] >= table.v.parts[slot]:
                    raise RunError(f"entry {entry_id} has all its {table.v.parts[slot]} parts already")
            section.begin("join")
            for slot in slots:
                table.v.joined[slot] += 1
            table.v.peer_parts[peer] += len(slots)
            return [self._write(slot) for slot in slots]

        return self._monitor.wait(L.E_RESERVED, attempt, lambda: f"batch {batch_seq} to be reserved", timeout)

    def commit(self, write: Write) -> None:
        """This part of the entry is in the pages. The last part makes it READY. Raises RunError if done before."""
        table, v, peer = self._table, self._table.v, self._monitor.peer
        if not write.open:
            raise RunError(f"entry {write.entry_id} was committed before by this rank")
        with Section(self._monitor) as section:
            if v.generation[write.slot] != write.generation or v.state[write.slot] != WRITING:
                raise RunError(f"entry {write.entry_id} is no longer being written")
            section.begin("commit")
            write.open = False
            v.peer_parts[peer] -= 1
            v.done[write.slot] += 1
            last = v.done[write.slot] == v.parts[write.slot]
            if last and not self.verify:
                table.publish(write.slot)
                section.notify(L.E_READY)
        if last and self.verify:  # nobody else writes now, so the sums can be taken outside the lock
            for page, crc in zip(write.pages, self._crcs(write), strict=True):
                v.page_crc[page] = crc
            with Section(self._monitor) as section:
                section.begin("commit")
                table.publish(write.slot)
                section.notify(L.E_READY)

    def finish(self, producer: int) -> None:
        """Producer number ``producer`` has committed its last entry. Once all have, nobody waits for more."""
        words = self._monitor.words
        if not 0 <= producer < words[L.W_PRODUCERS]:
            raise RunError(f"producer {producer} does not exist: the ring has {words[L.W_PRODUCERS]}")
        with Section(self._monitor) as section:
            section.begin("finish")
            words[L.W_FINISHED] |= 1 << producer
            section.notify(L.E_READY)
            section.notify(L.E_SPACE)

    # consumers

    def lease(self, entry_id: int, reuse_index: int = 0, timeout: float | None = None) -> Lease:
        """Waits until an entry is READY and takes delivery ``reuse_index`` of it (0 … reuse - 1), each exactly once.

        Raises RunError if that delivery was taken, if no producer is left that could bring the entry, or (with
        ``verify``) if its bytes are not those that were published; RingTimeout, RingAborted.
        """
        monitor, table, v = self._monitor, self._table, self._table.v
        if not 0 <= reuse_index < self.spec.reuse:
            raise RunError(f"reuse index {reuse_index} of entry {entry_id}: the ring delivers {self.spec.reuse} times")
        peer = monitor.peer

        def attempt(section: Section) -> Lease | None:
            slot = table.find(entry_id)
            if slot < 0 and self._all_finished:
                raise RunError(f"entry {entry_id} will never come: all producers have finished")
            section.account = L.W_CONSUMER_WAIT_NS
            if slot < 0 or v.state[slot] == WRITING:
                return None
            if v.state[slot] == FREE or v.cells[slot * self.spec.reuse + reuse_index] != 0:
                raise RunError(f"entry {entry_id}, reuse index {reuse_index}, was delivered before")
            section.begin("lease")
            table.lease(slot, reuse_index, peer)
            return Lease(
                entry_id, reuse_index, v.tokens[slot], table.pages(slot), v.checksum[slot], v.generation[slot], slot
            )

        def what() -> str:
            slot = table.find(entry_id)
            parts = f", {v.done[slot]} of its {v.parts[slot]} parts are in" if slot >= 0 else ""
            return f"entry {entry_id} (reuse index {reuse_index}{parts})"

        lease = monitor.wait(L.E_READY, attempt, what, timeout)
        if self.verify:
            for place, (page, crc) in enumerate(zip(lease.pages, self._crcs(lease), strict=True)):
                if v.page_crc[page] != crc:
                    self._corrupt(f"page {page} (page {place} of entry {entry_id}) changed after it was published")
        return lease

    def release(self, lease: Lease) -> None:
        """Ends a lease; after the entry's last delivery its pages are FREE. Raises RunError if done before.

        If the entry or a page of it was given away meanwhile, what was read cannot be trusted: aborts, raises RunError.
        """
        table, v, peer, reason = self._table, self._table.v, self._monitor.peer, ""
        if not lease.open:
            raise RunError(f"entry {lease.entry_id}, reuse index {lease.reuse_index}, was released before")
        with Section(self._monitor) as section:
            owners = {v.generation[lease.slot], *(v.page_generation[page] for page in lease.pages)}
            if owners != {lease.generation}:
                reason = f"entry {lease.entry_id} was overwritten under a lease (generations {sorted(owners)})"
            elif v.cells[lease.slot * self.spec.reuse + lease.reuse_index] != peer + 1:
                reason = f"pid {os.getpid()} releases entry {lease.entry_id}, which another process leased"
            else:
                section.begin("release")
                lease.open = False
                if table.release(lease.slot, lease.reuse_index):
                    section.notify(L.E_SPACE)
        if reason:
            self._corrupt(reason)

    def wait_ready(self, tokens: int, timeout: float | None = None) -> str:
        """The start gate: waits until ``tokens`` tokens have been published since the start. Says why it opened.

        "ready"; "finished": all producers are done; "full": the producers wait for room, so no more can come.
        """
        words = self._monitor.words
        _ = self._monitor.peer

        def attempt(_: Section) -> str | None:
            if words[L.W_PUBLISHED_TOKENS] >= tokens:
                return "ready"
            if self._all_finished:
                return "finished"
            return "full" if words[L.W_BLOCKED] and not words[L.W_STATE0 + WRITING] else None

        def what() -> str:
            return f"{tokens} tokens to be ready ({words[L.W_PUBLISHED_TOKENS]} are)"

        return self._monitor.wait(L.E_READY, attempt, what, timeout)

    def wait_drained(self, timeout: float | None = None) -> None:
        """Waits until all producers have finished and every entry has been delivered and released."""
        words = self._monitor.words
        _ = self._monitor.peer

        def attempt(_: Section) -> bool | None:
            return True if self._all_finished and words[L.W_FREE_PAGES] == self.spec.n_pages else None

        self._monitor.wait(L.E_SPACE, attempt, lambda: "the last deliveries", timeout)

    def _write(self, slot: int) -> Write:
        v = self._table.v
        return Write(v.entry_id[slot], v.tokens[slot], self._table.pages(slot), v.batch[slot], v.generation[slot], slot)

    def _pages_needed(self, batch_seq: int, entries: Sequence[tuple[int, int, int]], parts: int) -> int:
        spec, need = self.spec, 0
        for entry_id, n_tokens, checksum in entries:
            if entry_id < 0 or n_tokens < 1 or not 0 <= checksum < 1 << 64:
                raise RunError(f"batch {batch_seq}: bad entry (id {entry_id}, {n_tokens} tokens, checksum {checksum})")
            need += spec.pages_for(n_tokens)
        if len({entry[0] for entry in entries}) != len(entries):
            raise RunError(f"batch {batch_seq} holds an entry twice")
        if not 1 <= parts <= L.MAX_PARTS:
            raise RunError(f"batch {batch_seq}: parts = {parts} is not in 1..{L.MAX_PARTS}")
        if need > spec.n_pages or len(entries) > spec.max_entries:
            raise RunError(
                f"batch {batch_seq} needs {need} pages and {len(entries)} slots; "
                f"the whole ring has {spec.n_pages} and {spec.max_entries}"
            )
        return need

    def _crcs(self, ticket: Write | Lease) -> list[int]:
        """CRC-32 of the valid tokens of each page."""
        spec, raw, left, sums = self.spec, self._table.v.pages_raw, ticket.n_tokens, []
        for page in ticket.pages:
            crc, span = 0, min(left, spec.page_tokens) * spec.row_bytes
            for stream in range(spec.streams):
                at = page * spec.page_bytes + stream * spec.page_tokens * spec.row_bytes
                crc = zlib.crc32(raw[at : at + span], crc)
            sums.append(crc)
            left -= spec.page_tokens
        return sums

    def _corrupt(self, reason: str) -> None:
        self.abort(reason)
        raise RunError(reason)
