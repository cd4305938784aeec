"""Random interleavings of all operations against a model of dictionaries: tables, counters, bytes at every step."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from recipe.errors import RunError
from recipe.ring import Lease, Ring, RingSpec, RingTimeout, Write, ring_path

PAGE = 4
_names = itertools.count()


@dataclass
class ModelEntry:
    tokens: int
    parts: int
    batch: int
    joined: int = 1
    done: int = 0
    pages: list[int] = field(default_factory=list)
    leased: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)

    @property
    def ready(self) -> bool:
        return self.done == self.parts


class RingMachine(RuleBasedStateMachine):
    """Every call is made with timeout 0, so it either happens now or raises what the model says it must raise."""

    @initialize(pages=st.integers(3, 12), entries=st.integers(1, 6), reuse=st.integers(1, 3), first=st.integers(0, 9))
    def start(self, pages: int, entries: int, reuse: int, first: int) -> None:
        spec = RingSpec(2, 3, "float32", PAGE, pages, entries, reuse)
        self.ring = Ring.create(ring_path(f"model-{os.getpid()}", next(_names)), spec, "model", first_batch=first)
        self.ring.unlink()
        self.spec, self.next_batch, self.next_id = spec, first, 0
        self.entries: dict[int, ModelEntry] = {}
        self.retired: list[int] = []
        self.writes: list[Write] = []
        self.leases: list[Lease] = []
        self.published = self.delivered = 0
        self.finished = False

    def free_pages(self) -> int:
        return self.spec.n_pages - sum(-(-e.tokens // PAGE) for e in self.entries.values())

    @rule(lengths=st.lists(st.integers(1, 14), min_size=0, max_size=4), parts=st.integers(1, 3), skip=st.integers(0, 4))
    def reserve(self, lengths: list[int], parts: int, skip: int) -> None:
        batch = self.next_batch + (skip == 4) - (skip == 3)
        ids = list(range(self.next_id, self.next_id + len(lengths)))
        wanted = [(i << 40 | i, n, i) for i, n in zip(ids, lengths, strict=True)]
        need = sum(-(-n // PAGE) for n in lengths)
        too_large = need > self.spec.n_pages or len(lengths) > self.spec.max_entries
        room = need <= self.free_pages() and len(lengths) <= self.spec.max_entries - len(self.entries)
        if too_large or skip == 3:
            with pytest.raises(RunError, match=r"whole ring|reserved before") as error:
                self.ring.reserve(batch, wanted, parts, timeout=0)
            assert not isinstance(error.value, RingTimeout)
        elif skip == 4 or not room:
            with pytest.raises(RingTimeout):
                self.ring.reserve(batch, wanted, parts, timeout=0)
        else:
            writes = self.ring.reserve(batch, wanted, parts, timeout=0)
            assert [(w.entry_id, w.n_tokens) for w in writes] == [entry[:2] for entry in wanted]
            for write in writes:
                self.entries[write.entry_id] = ModelEntry(write.n_tokens, parts, batch, pages=write.pages)
                for begin, _, view in self.ring.views(write):
                    view.fill_(write.generation * 100 + begin)
            self.writes += writes
            self.next_batch += 1
            self.next_id += len(lengths)

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        entry_id = data.draw(st.sampled_from(sorted(self.entries)))
        entry = self.entries[entry_id]
        if entry.joined < entry.parts:
            (write,) = self.ring.join(entry.batch, [entry_id], timeout=0)
            assert write.pages == entry.pages
            entry.joined += 1
            self.writes.append(write)
        else:
            with pytest.raises(RunError, match=r"parts already"):
                self.ring.join(entry.batch, [entry_id], timeout=0)

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        write = self.writes.pop(data.draw(st.integers(0, len(self.writes) - 1)))
        self.ring.commit(write)
        entry = self.entries[write.entry_id]
        entry.done += 1
        self.published += entry.ready
        with pytest.raises(RunError, match=r"committed before"):
            self.ring.commit(write)

    @rule(data=st.data(), reuse_index=st.integers(0, 2))
    def lease(self, data: st.DataObject, reuse_index: int) -> None:
        entry_id = data.draw(st.sampled_from([*sorted(self.entries), *self.retired[-2:], 1 << 50]))
        entry = self.entries.get(entry_id)
        if reuse_index >= self.spec.reuse or (entry and reuse_index in entry.leased):
            with pytest.raises(RunError, match=r"delivers|delivered before"):
                self.ring.lease(entry_id, reuse_index, timeout=0)
        elif entry is None or not entry.ready:
            with pytest.raises(RunError, match=r"waited|never come|delivered before"):
                self.ring.lease(entry_id, reuse_index, timeout=0)
        else:
            lease = self.ring.lease(entry_id, reuse_index, timeout=0)
            assert (lease.n_tokens, lease.pages, lease.checksum) == (entry.tokens, entry.pages, entry_id >> 40)
            entry.leased.add(reuse_index)
            self.leases.append(lease)
            self.delivered += 1

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        for begin, _, view in self.ring.views(lease):
            assert bool((view == lease.generation * 100 + begin).all()), "bytes of another entry"
        self.ring.release(lease)
        entry = self.entries[lease.entry_id]
        entry.released.add(lease.reuse_index)
        if len(entry.released) == self.spec.reuse:
            del self.entries[lease.entry_id]
            self.retired.append(lease.entry_id)

    @rule()
    def finish(self) -> None:
        self.ring.finish(0)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "ring"):
            return
        self.ring.check_invariants()
        stats, entries = self.ring.stats(), self.entries.values()
        held = {entry_id: sum(x.entry_id == entry_id for x in self.leases) for entry_id in self.entries}
        assert stats.entries == {
            "FREE": self.spec.max_entries - len(entries),
            "WRITING": sum(not e.ready for e in entries),
            "READY": sum(e.ready and not held[i] for i, e in self.entries.items()),
            "LEASED": sum(count > 0 for count in held.values()),
        }
        assert stats.free_pages == self.free_pages()
        assert stats.depth_tokens == sum(e.tokens for e in entries)
        assert stats.ready_tokens == sum(e.tokens for e in entries if e.ready and len(e.leased) < self.spec.reuse)
        counts = (stats.reserved, stats.published, stats.delivered, stats.retired, stats.next_batch)
        assert counts == (self.next_id, self.published, self.delivered, len(self.retired), self.next_batch)
        assert stats.aborted is None

    def teardown(self) -> None:
        if hasattr(self, "ring"):
            self.ring.close()


TestRingModel = RingMachine.TestCase
TestRingModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
