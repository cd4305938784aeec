"""The ring between real processes: M producers × N consumers, and what happens when one of them dies or stops."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from recipe.errors import RunError
from recipe.ring import Ring, RingAborted, RingSpec, RingTimeout, monitor, ring_path
from recipe.ring.monitor import Section
from recipe.ring.sync import Event

DONE, ABORTED, FAILED = 0, 3, 9

SPEC = RingSpec(4, 8, "float32", 4, 150, 100, 3)


@dataclass(frozen=True)
class Job:
    """A run in small: ``replicas`` × ``tp`` producers of ragged entries, consumers that draw at random."""

    seed: int = 0
    batches: int = 40
    replicas: int = 2
    tp: int = 2
    consumers: int = 3
    reuse: int = 3
    window: int = 4  # batches of the reservoir
    spec: RingSpec = SPEC

    def entries(self, batch: int) -> list[tuple[int, int, int]]:
        rng = random.Random(self.seed * 1000 + batch)
        return [(batch * 100 + i, rng.randint(1, 17), rng.getrandbits(64)) for i in range(rng.randint(1, 5))]

    def deliveries(self) -> list[tuple[int, int, int, int]]:
        """(entry id, reuse index, tokens, checksum) in the order of a reservoir draw."""
        rng = random.Random(self.seed)
        keyed = []
        for batch in range(self.batches):
            for entry_id, n, checksum in self.entries(batch):
                keyed += [(batch + rng.uniform(0, self.window), (entry_id, r, n, checksum)) for r in range(self.reuse)]
        return [delivery for _, delivery in sorted(keyed)]

    def produce(self, ring: Ring, replica: int, rank: int) -> None:
        """Rank ``rank`` of a replica writes streams rank, rank + tp, … of each of its replica's entries."""
        for batch in range(replica, self.batches, self.replicas):
            entries = self.entries(batch)
            if rank == 0:
                writes = ring.reserve(batch, entries, parts=self.tp, timeout=30)
            else:
                writes = ring.join(batch, [entry[0] for entry in entries], timeout=30)
            for write in writes:
                for begin, end, view in ring.views(write):
                    view[rank :: self.tp] = content(write.entry_id, begin, end)[rank :: self.tp]
                ring.commit(write)
        if rank == 0:
            ring.finish(replica)

    def consume(self, ring: Ring, consumer: int, log: Path) -> None:
        with log.open("w") as file:
            for entry_id, reuse_index, n, checksum in self.deliveries()[consumer :: self.consumers]:
                lease = ring.lease(entry_id, reuse_index, timeout=30)
                got = torch.cat([view for _, _, view in ring.views(lease)], dim=1)
                good = torch.equal(got, content(entry_id, 0, n).expand(4, n, 8)) and lease.checksum == checksum
                ring.release(lease)
                print(json.dumps([entry_id, reuse_index, good]), file=file, flush=True)


def content(entry_id: int, begin: int, end: int) -> torch.Tensor:
    """[4, end - begin, 8] numbers that only this entry has at this place."""
    stream, token, feature = torch.arange(4).view(-1, 1, 1), torch.arange(begin, end).view(1, -1, 1), torch.arange(8)
    return ((entry_id * 32 + token) * 32 + stream * 8 + feature).float()


def fork(work: Callable[[], None]) -> int:
    """Runs ``work`` in a child; exit code DONE, ABORTED or FAILED."""
    pid = os.fork()
    if pid:
        return pid
    code = FAILED
    try:
        work()
        code = DONE
    except RingAborted:
        code = ABORTED
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


def peer(path: Path, work: Callable[[Ring], None]) -> int:
    """A child with a ring handle of its own."""

    def run() -> None:
        ring = Ring.attach(path, "run", timeout=30)
        try:
            work(ring)
        finally:
            ring.close()

    return fork(run)


def wait_for(pids: list[int], limit_s: float) -> dict[int, int]:
    """Exit codes of all children (-signal for a killed one); kills what is left after the limit and fails."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + limit_s
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes and (done := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(done[1])
        if time.monotonic() > deadline:
            left = [pid for pid in pids if pid not in codes]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            pytest.fail(f"{len(left)} of {len(pids)} processes hung for {limit_s} s")
        time.sleep(0.002)
    return codes


@contextlib.contextmanager
def new_ring(spec: RingSpec = Job.spec, **options: object) -> Iterator[Ring]:
    path = ring_path(f"test-{os.getpid()}-{time.monotonic_ns()}", 0)
    ring = Ring.create(path, spec, "run", **options)  # type: ignore[arg-type]
    try:
        yield ring
    finally:
        ring.close()
        assert not path.exists()


def start(job: Job, ring: Ring, folder: Path) -> list[int]:
    pids = []
    for replica in range(job.replicas):
        for rank in range(job.tp):
            pids.append(peer(ring.path, lambda r, p=replica, k=rank: job.produce(r, p, k)))  # type: ignore[misc]
    for consumer in range(job.consumers):
        log = folder / f"consumer{consumer}.log"
        pids.append(peer(ring.path, lambda r, c=consumer, f=log: job.consume(r, c, f)))  # type: ignore[misc]
    return pids


def delivered(folder: Path) -> list[tuple[int, int]]:
    """All deliveries that consumers wrote down; asserts that the bytes of each were right."""
    found = []
    for log in folder.glob("consumer*.log"):
        for line in log.read_text().splitlines():
            entry_id, reuse_index, good = json.loads(line)
            assert good, f"entry {entry_id} had wrong bytes"
            found.append((entry_id, reuse_index))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_every_entry_is_delivered_exactly_reuse_times(seed: int, tmp_path: Path) -> None:
    job = Job(seed=seed, replicas=(1, 2, 3)[seed], tp=(1, 2, 2)[seed], consumers=(2, 3, 2)[seed])
    with new_ring(producers=job.replicas, verify=seed == 2) as ring:
        pids = start(job, ring, tmp_path)
        ring.wait_drained(timeout=40)
        assert set(wait_for(pids, 20).values()) == {DONE}
        assert sorted(delivered(tmp_path)) == sorted(d[:2] for d in job.deliveries())
        stats = ring.stats()
        assert stats.free_pages == job.spec.n_pages and stats.depth_tokens == stats.ready_tokens == 0
        assert stats.delivered == job.reuse * stats.retired == len(job.deliveries())
        ring.check_invariants()


def kill_one_at_random(seed: int, folder: Path) -> str:
    """One run in which one process is killed at a random moment; "done" or "aborted". Fails on a hang or a repeat."""
    rng, job = random.Random(seed), Job(seed=seed, batches=60)
    with new_ring(producers=job.replicas) as ring:
        pids = start(job, ring, folder)
        while ring.stats().peers < 1 + len(pids):  # whoever dies before he attaches is the watchdog's, not the ring's
            time.sleep(0.001)
        moment = rng.randint(0, len(job.deliveries()))
        while ring.stats().delivered < moment:
            time.sleep(0.001)
        victim = rng.choice(pids)
        os.kill(victim, signal.SIGKILL)
        codes = wait_for(pids, 40)
        assert codes.pop(victim) in (-signal.SIGKILL, DONE)
        found = delivered(folder)
        assert len(set(found)) == len(found), "something was delivered twice"
        complete = sorted(found) == sorted(d[:2] for d in job.deliveries())
        assert set(codes.values()) <= {DONE, ABORTED}, codes
        if ABORTED not in codes.values():
            # Nobody had to wait for the dead one any more: then at most the end of its own log may be missing.
            assert complete or victim in pids[-job.consumers :]
        return "aborted" if ABORTED in codes.values() else "done"


def test_a_few_random_kills(tmp_path: Path) -> None:
    outcomes = []
    for seed in range(6):
        folder = tmp_path / str(seed)
        folder.mkdir()
        outcomes.append(kill_one_at_random(seed, folder))
    assert "aborted" in outcomes


@pytest.mark.slow
def test_many_random_kills(tmp_path: Path) -> None:
    outcomes = []
    for seed in range(100, 220):
        folder = tmp_path / str(seed)
        folder.mkdir()
        outcomes.append(kill_one_at_random(seed, folder))
    print({outcome: outcomes.count(outcome) for outcome in set(outcomes)})


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_producer_killed_in_the_middle_of_an_update_aborts_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "SLICE_S", 60.0)  # so that only the abort can wake the waiter

    def half_an_update(ring: Ring) -> None:
        with Section(ring._monitor) as section:
            section.begin("reserve")
            ring._table.take(1, 9, 0, 1, 1, 0, ring._monitor.peer)
            die()

    with new_ring() as ring:
        waiter = peer(ring.path, lambda r: r.lease(1, 0, timeout=30) and None)
        time.sleep(0.2)
        victim = peer(ring.path, half_an_update)
        assert wait_for([victim], 30)[victim] == -signal.SIGKILL
        with pytest.raises(RingAborted, match=f"pid {victim} died in the middle of 'reserve'"):
            ring.finish(0)
        assert wait_for([waiter], 20)[waiter] == ABORTED


def test_the_lock_of_a_holder_killed_between_updates_is_recovered() -> None:
    def hold(ring: Ring) -> None:
        with Section(ring._monitor):
            die()

    with new_ring() as ring:
        for batch in range(3):
            victim = peer(ring.path, hold)
            wait_for([victim], 30)
            for write in ring.reserve(batch, [(batch, 9, 0)], timeout=5):
                ring.commit(write)
            for reuse_index in range(3):
                ring.release(ring.lease(batch, reuse_index, timeout=5))
        ring.check_invariants()
        begun = time.monotonic()
        with pytest.raises(RingAborted, match=r"pid \d+ died without closing the ring"):
            ring.lease(99, 0, timeout=30)
        assert time.monotonic() - begun < 12


def test_a_consumer_killed_with_a_lease_aborts_the_ring_and_is_named() -> None:
    def lease_and_die(ring: Ring) -> None:
        ring.lease(7, 1, timeout=30)
        die()

    with new_ring() as ring:
        ring.commit(ring.reserve(0, [(7, 9, 0)], timeout=0)[0])
        victim = peer(ring.path, lease_and_die)
        wait_for([victim], 30)
        begun = time.monotonic()
        with pytest.raises(RingAborted, match=f"pid {victim} died .* it leases entry 7 reuse 1"):
            ring.lease(8, 0, timeout=30)
        assert time.monotonic() - begun < 12


def test_a_joined_rank_killed_before_its_commit_aborts_the_ring() -> None:
    def join_and_die(ring: Ring) -> None:
        ring.join(0, [7], timeout=30)
        die()

    with new_ring() as ring:
        ring.commit(ring.reserve(0, [(7, 9, 0)], parts=2, timeout=0)[0])
        victim = peer(ring.path, join_and_die)
        wait_for([victim], 30)
        with pytest.raises(RingAborted, match=f"pid {victim} died .* has 1 parts to commit"):
            ring.lease(7, 0, timeout=30)


def test_bytes_that_another_process_changes_are_never_trained_on() -> None:
    """A torn or stray write into a published page: the CRC of the commit no longer fits, everybody stops."""
    with new_ring(verify=True) as ring:
        ring.commit(ring.reserve(0, [(7, 9, 0), (8, 9, 0)], timeout=0)[1])

        def scribble(other: Ring) -> None:
            page = other.lease(8, 0, timeout=5).pages[1]
            other.pages[page, 3, 2, 5] += 1.0
            other.close()  # with the lease in hand: that alone ends the ring

        def scribble_and_release(other: Ring) -> None:
            lease = other.lease(8, 0, timeout=5)
            other.release(lease)
            other.pages[lease.pages[1], 3, 2, 5] += 1.0

        waiter = peer(ring.path, lambda r: r.lease(7, 0, timeout=30) and None)
        culprit = peer(ring.path, scribble_and_release)
        assert wait_for([culprit], 30)[culprit] == DONE
        with pytest.raises(RunError, match=r"page \d+ \(page 1 of entry 8\) changed"):
            ring.lease(8, 1, timeout=5)
        assert wait_for([waiter], 20)[waiter] == ABORTED
    with new_ring() as ring:
        ring.commit(ring.reserve(0, [(8, 9, 0)], timeout=0)[0])
        culprit = peer(ring.path, scribble)
        wait_for([culprit], 30)
        with pytest.raises(RingAborted, match="closed the ring although it leases entry 8"):
            ring.lease(8, 1, timeout=5)


def test_waiters_that_are_killed_do_not_hang_those_who_wake() -> None:
    """The case in which glibc's condition variables hang: waiters die while they wait, then others are woken."""
    with new_ring() as ring:
        event: Event = ring._monitor.events[0]
        for _ in range(8):
            victims = [fork(lambda: event.wait(event.value(), 60)) for _ in range(3)]
            time.sleep(0.03)
            os.kill(victims[0], signal.SIGKILL)
            begun = time.monotonic()
            while len(victims) > 0 and time.monotonic() - begun < 30:
                with Section(ring._monitor) as section:
                    section.notify(0)
                victims = [pid for pid in victims if not os.waitpid(pid, os.WNOHANG)[0]]
                time.sleep(0.005)
            assert not victims


def test_a_stopped_holder_is_named_and_the_ring_can_still_be_aborted() -> None:
    def stop(ring: Ring) -> None:
        with Section(ring._monitor):
            os.kill(os.getpid(), signal.SIGSTOP)

    with new_ring(lock_timeout_s=1.5) as ring:
        waiter = peer(ring.path, lambda r: r.lease(1, 0, timeout=30) and None)
        time.sleep(0.2)
        stopped = peer(ring.path, stop)
        os.waitpid(stopped, os.WUNTRACED)
        with pytest.raises(RingTimeout, match=f"pid {stopped} has held the ring's lock for 1.5 s"):
            ring.finish(0)
        begun = time.monotonic()
        ring.abort("the watchdog says so")
        assert time.monotonic() - begun < 8
        assert wait_for([waiter], 20)[waiter] == ABORTED
        os.kill(stopped, signal.SIGCONT)
        wait_for([stopped], 30)
        assert ring.stats().aborted == "the watchdog says so"


def test_a_forked_child_may_use_its_parents_handle() -> None:
    with new_ring() as ring:

        def child() -> None:
            ring.commit(ring.reserve(0, [(1, 9, 0)], timeout=5)[0])
            ring.close()

        pid = fork(child)
        assert ring.lease(1, 0, timeout=5).n_tokens == 9
        assert wait_for([pid], 30)[pid] == DONE
        assert ring.path.exists(), "a child took the name away"
        assert ring.stats().aborted is None


def test_waiting_costs_no_processor_time() -> None:
    with new_ring() as ring:
        begun = time.process_time()
        with pytest.raises(RingTimeout):
            ring.lease(1, 0, timeout=2.5)
        assert time.process_time() - begun < 0.05


def pump(ring: Ring, entries: int) -> float:
    """Entries through the ring in batches of ten; CPU seconds per entry."""
    begun, batch = time.process_time(), ring.stats().next_batch
    for _ in range(entries // 10):
        writes = ring.reserve(batch, [(batch * 10 + i, 1 + (batch * 7 + i * 13) % 15, i) for i in range(10)], timeout=5)
        for write in writes:
            ring.commit(write)
        for write in reversed(writes):
            ring.release(ring.lease(write.entry_id, 0, timeout=5))
        batch += 1
    return (time.process_time() - begun) / entries


def no_growth(entries: int) -> None:
    with new_ring(RingSpec(1, 4, "float32", 4, 2000, 2000)) as ring:
        pump(ring, 10_000)  # every slot and page has been used once
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        costs = [pump(ring, entries // 10) for _ in range(10)]
        print(f"{1e6 * min(costs):.1f} µs of CPU per entry")
        assert min(costs[5:]) < 1.5 * min(costs[:5]), costs
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 2048  # KiB
        ring.check_invariants()


def test_a_hundred_thousand_entries_without_growth() -> None:
    no_growth(100_000)


@pytest.mark.slow
def test_a_million_entries_without_growth() -> None:
    no_growth(1_000_000)
