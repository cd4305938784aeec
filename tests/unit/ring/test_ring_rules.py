"""Every rule of the ring, one at a time, in one process (two handles and threads where two parties are needed)."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recipe.errors import ConfigError, RunError
from recipe.ring import Ring, RingAborted, RingSpec, RingTimeout, monitor, ring_path
from recipe.ring import layout as L
from recipe.ring.monitor import Section

SPEC = RingSpec(streams=3, hidden=8, dtype="float32", page_tokens=4, n_pages=10, max_entries=6, reuse=2)


@pytest.fixture
def path() -> Iterator[Path]:
    place = ring_path(f"test-{os.getpid()}-{time.monotonic_ns()}", 0)
    yield place
    assert not place.exists(), "the ring left its name behind"


@pytest.fixture
def ring(path: Path) -> Iterator[Ring]:
    ring = Ring.create(path, SPEC, "run")
    yield ring
    ring.close()


@pytest.fixture
def only_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiters do not look round by themselves for half a minute: what wakes them in these tests is an event."""
    monkeypatch.setattr(monitor, "SLICE_S", 30.0)


def put(ring: Ring, batch: int, entries: list[tuple[int, int]]) -> None:
    """Reserves, fills token t of stream s of entry e with e·1000 + s·100 + t, and commits."""
    for write in ring.reserve(batch, [(entry, n, entry + 7) for entry, n in entries], timeout=20):
        for begin, end, view in ring.views(write):
            view.copy_(expected(ring.spec, write.entry_id, begin, end))
        ring.commit(write)


def expected(spec: RingSpec, entry: int, begin: int, end: int) -> torch.Tensor:
    stream = torch.arange(spec.streams).view(-1, 1, 1) * 100
    token = torch.arange(begin, end).view(1, -1, 1)
    return (entry * 1000 + stream + token).to(spec.torch_dtype).expand(-1, -1, spec.hidden)


def test_bytes_come_back_and_pages_are_freed_after_the_last_delivery(ring: Ring) -> None:
    put(ring, 0, [(5, 9), (6, 4)])
    assert ring.stats().free_pages == 10 - 3 - 1 and ring.stats().ready_tokens == 13
    first, second = ring.lease(5, 1, timeout=0), ring.lease(5, 0, timeout=0)
    assert first.pages == second.pages and first.n_tokens == 9 and first.checksum == 12
    for begin, end, view in ring.views(first):
        assert torch.equal(view, expected(SPEC, 5, begin, end))
    assert [(b, e) for b, e, _ in ring.views(first)] == [(0, 4), (4, 8), (8, 9)]
    assert ring.stats().entries == {"FREE": 4, "WRITING": 0, "READY": 1, "LEASED": 1}
    ring.release(first)
    assert ring.stats().free_pages == 6
    ring.release(second)
    assert ring.stats().free_pages == 9 and ring.stats().depth_tokens == 4 and ring.stats().delivered == 2
    ring.check_invariants()


def test_pages_are_a_view_of_the_mapping(ring: Ring, path: Path) -> None:
    other = Ring.attach(path, "run", timeout=1, spec=SPEC)
    assert ring.pages.shape == (10, 3, 4, 8) and ring.pages.dtype == torch.float32
    ring.pages[3, 2, 1] = 42.0
    assert other.pages[3, 2, 1].tolist() == [42.0] * 8
    address, size = ring.buffer
    assert address == ring.pages.data_ptr() and address % 4096 == 0 and size >= ring.pages.numel() * 4
    other.close()


def test_bfloat16_pages(path: Path) -> None:
    spec = RingSpec(2, 16, "bfloat16", 8, 4, 4)
    ring = Ring.create(path, spec, "run")
    assert ring.pages.dtype == torch.bfloat16 and spec.page_bytes == 2 * 16 * 8 * 2
    put(ring, 0, [(0, 20)])
    lease = ring.lease(0, timeout=0)
    got = torch.cat([view for _, _, view in ring.views(lease)], dim=1)
    assert torch.equal(got, expected(spec, 0, 0, 20))
    del got
    ring.release(lease)
    ring.close()


def test_each_delivery_happens_once(ring: Ring) -> None:
    put(ring, 0, [(1, 4)])
    lease = ring.lease(1, 0, timeout=0)
    with pytest.raises(RunError, match="delivered before"):
        ring.lease(1, 0, timeout=0)
    ring.release(lease)
    with pytest.raises(RunError, match="delivered before"):
        ring.lease(1, 0, timeout=0)
    with pytest.raises(RunError, match="released before"):
        ring.release(lease)
    ring.release(ring.lease(1, 1, timeout=0))
    with pytest.raises(RunError, match="delivered before"):
        ring.lease(1, 1, timeout=0)
    with pytest.raises(RunError, match=r"in the ring already \(delivered\)"):
        ring.reserve(1, [(1, 4, 0)], timeout=0)
    with pytest.raises(RunError, match="delivers 2 times"):
        ring.lease(1, 2, timeout=0)
    assert ring.stats().delivered == 2 and ring.stats().aborted is None


def test_an_entry_with_fewer_deliveries_due_is_freed_after_them(ring: Ring) -> None:
    for write in ring.reserve(0, [(1, 4, 0), (2, 4, 0)], timeout=0, uses=[1, 2]):
        ring.commit(write)
    ring.release(ring.lease(1, 1, timeout=0))
    ring.release(ring.lease(2, 1, timeout=0))
    assert ring.stats().free_pages == 9 and ring.stats().ready_tokens == 4
    ring.check_invariants()
    for bad in ([0], [3], [1, 1]):
        with pytest.raises(RunError, match="uses"):
            ring.reserve(1, [(3, 4, 0)], timeout=0, uses=bad)


def test_batches_are_reserved_in_order_from_any_start(path: Path) -> None:
    ring = Ring.create(path, SPEC, "run", first_batch=17)
    with pytest.raises(RingTimeout, match="batch 18"):
        ring.reserve(18, [(1, 4, 0)], timeout=0.05)
    put(ring, 17, [(2, 4)])
    put(ring, 18, [(1, 4)])
    with pytest.raises(RunError, match="reserved before"):
        ring.reserve(17, [(3, 4, 0)], timeout=0)
    stats = ring.stats()
    assert stats.next_batch == 19 and stats.turn_wait_s >= 0.04 and stats.producer_wait_s == 0
    ring.close()


@pytest.mark.parametrize("entries", [[(1, 41)], [(i, 1) for i in range(7)], [(1, 20), (2, 21)]])
def test_a_batch_larger_than_the_ring_is_refused_at_once(ring: Ring, entries: list[tuple[int, int]]) -> None:
    begun = time.monotonic()
    with pytest.raises(RunError, match="the whole ring has 10 and 6"):
        ring.reserve(0, [(entry, n, 0) for entry, n in entries], timeout=30)
    assert time.monotonic() - begun < 15


@pytest.mark.parametrize("entry", [(-1, 4, 0), (1, 0, 0), (1, 4, 1 << 64)])
def test_bad_entries_are_refused(ring: Ring, entry: tuple[int, int, int]) -> None:
    with pytest.raises(RunError, match="bad entry"):
        ring.reserve(0, [entry], timeout=0)
    with pytest.raises(RunError, match="twice"):
        ring.reserve(0, [(1, 1, 0), (1, 1, 0)], timeout=0)


def test_a_batch_is_reserved_whole_or_not_at_all(ring: Ring) -> None:
    put(ring, 0, [(1, 28)])
    with pytest.raises(RingTimeout, match="4 pages and 2 slots for batch 1"):
        ring.reserve(1, [(2, 4, 0), (3, 12, 0)], timeout=0.05)
    assert ring.stats().free_pages == 3 and ring.stats().entries["WRITING"] == 0
    assert ring.stats().producer_wait_s >= 0.04


@pytest.mark.usefixtures("only_events")
def test_back_pressure_ends_when_pages_come_back(ring: Ring) -> None:
    put(ring, 0, [(1, 40)])
    done: list[float] = []
    thread = threading.Thread(target=lambda: (put(ring, 1, [(2, 4)]), done.append(time.monotonic())))
    thread.start()
    ring.release(ring.lease(1, 0, timeout=20))
    time.sleep(0.1)
    assert not done
    last = ring.lease(1, 1, timeout=20)
    freed = time.monotonic()
    ring.release(last)
    thread.join(20)
    assert done and done[0] > freed
    ring.check_invariants()


def test_parts_of_a_tensor_parallel_group(ring: Ring) -> None:
    first = ring.reserve(0, [(1, 9, 0), (2, 3, 0)], parts=3, timeout=0)
    second, third = ring.join(0, [2, 1], timeout=0), ring.join(0, [1, 2], timeout=0)
    assert first[0].pages == second[1].pages == third[0].pages
    with pytest.raises(RunError, match="all its 3 parts"):
        ring.join(0, [1], timeout=0)
    for writes in (first, second):
        for write in writes:
            ring.commit(write)
    with pytest.raises(RunError, match="committed before"):
        ring.commit(first[0])
    with pytest.raises(RingTimeout, match=r"writes entry 1 \(2/3 parts in\)"):
        ring.lease(1, 0, timeout=0.02)
    ring.commit(third[0])
    assert ring.lease(1, 0, timeout=0).n_tokens == 9
    with pytest.raises(RunError, match="is not of batch 0"):
        ring.join(0, [9], timeout=0)
    with pytest.raises(RingTimeout, match="batch 1 to be reserved"):
        ring.join(1, [9], timeout=0.02)


@pytest.mark.usefixtures("only_events")
def test_waiting_for_what_never_comes_is_an_error_once_all_have_finished(path: Path) -> None:
    ring = Ring.create(path, SPEC, "run", producers=2)
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            ring.lease(9, 0, timeout=30)
        except RunError as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    ring.finish(0)
    ring.finish(0)
    time.sleep(0.05)
    assert thread.is_alive()
    ring.finish(1)
    thread.join(20)
    assert "never come" in str(failures[0])
    with pytest.raises(RunError, match="producer 2 does not exist"):
        ring.finish(2)
    ring.close()


def test_the_start_gate(ring: Ring) -> None:
    with pytest.raises(RingTimeout, match="8 tokens to be ready"):
        ring.wait_ready(8, timeout=0.02)
    put(ring, 0, [(1, 4)])
    put(ring, 1, [(2, 4)])
    assert ring.wait_ready(8, timeout=0) == "ready"
    for reuse_index in range(2):
        ring.release(ring.lease(1, reuse_index, timeout=0))
    assert ring.wait_ready(8, timeout=0) == "ready", "a drafter that comes late must not wait again"
    with pytest.raises(RingTimeout):
        ring.wait_ready(9, timeout=0.02)
    ring.finish(0)
    assert ring.wait_ready(9, timeout=0) == "finished"


@pytest.mark.usefixtures("only_events")
def test_the_start_gate_opens_when_the_ring_can_get_no_fuller(ring: Ring) -> None:
    put(ring, 0, [(1, 30)])  # 8 of 10 pages
    blocked = threading.Thread(target=put, args=(ring, 1, [(2, 12)]))
    reasons: list[str] = []
    gate = threading.Thread(target=lambda: reasons.append(ring.wait_ready(40, timeout=60)))
    gate.start()
    with pytest.raises(RingTimeout):
        ring.reserve(1, [(2, 12, 0)], timeout=0.05)
    gate.join(20)
    assert reasons == ["full"]
    blocked.start()
    for reuse_index in range(2):
        ring.release(ring.lease(1, reuse_index, timeout=1))
    blocked.join(20)
    assert ring.lease(2, 0, timeout=0).n_tokens == 12


def test_drained(ring: Ring) -> None:
    put(ring, 0, [(1, 4)])
    ring.finish(0)
    with pytest.raises(RingTimeout, match="last deliveries"):
        ring.wait_drained(timeout=0.02)
    for reuse_index in range(2):
        ring.release(ring.lease(1, reuse_index, timeout=0))
    ring.wait_drained(timeout=0)


@pytest.mark.usefixtures("only_events")
def test_abort_wakes_every_kind_of_waiter_at_once(path: Path) -> None:
    ring = Ring.create(path, SPEC, "run")
    ring.reserve(0, [(1, 40, 0)], parts=2, timeout=0)
    waits = [
        lambda: ring.reserve(1, [(2, 4, 0)]),
        lambda: ring.reserve(2, [(3, 4, 0)]),
        lambda: ring.join(1, [2]),
        lambda: ring.lease(1),
        lambda: ring.lease(2),
        lambda: ring.wait_ready(4),
        lambda: ring.wait_drained(),
    ]
    caught: list[RingAborted] = []

    def run(wait) -> None:  # type: ignore[no-untyped-def]
        with pytest.raises(RingAborted) as error:
            wait()
        caught.append(error.value)

    threads = [threading.Thread(target=run, args=(wait,)) for wait in waits]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    ring.abort("rank 3 burnt down")
    ring.abort("a later reason")
    for thread in threads:
        thread.join(20)
    assert len(caught) == len(waits) and {error.reason for error in caught} == {"rank 3 burnt down"}
    assert ring.stats().aborted == "rank 3 burnt down"
    with pytest.raises(RingAborted):
        ring.finish(0)
    ring.close()


def test_on_wait_is_called_every_second_and_may_end_the_wait(path: Path) -> None:
    calls: list[tuple[str, float]] = []

    def on_wait(what: str, waited_s: float) -> None:
        calls.append((what, waited_s))
        if len(calls) == 2:
            raise KeyError("watchdog")

    ring = Ring.create(path, SPEC, "run", on_wait=on_wait)
    with pytest.raises(KeyError, match="watchdog"):
        ring.lease(3, timeout=30)
    assert calls[0][0] == "entry 3 (reuse index 0)" and 1.0 <= calls[0][1] < 10 and 2.0 <= calls[1][1] < 20
    assert ring.stats().consumer_wait_s > 0.9
    ring.close()


def test_changed_bytes_are_detected(path: Path) -> None:
    ring = Ring.create(path, SPEC, "run", verify=True)
    put(ring, 0, [(1, 9), (2, 3)])
    assert ring.lease(1, 0, timeout=0).n_tokens == 9
    ring.pages[ring.lease(2, 0, timeout=0).pages[0], 0, 3] = 5.0  # beyond the last valid token: nobody reads that
    ring.lease(2, 1, timeout=0)
    page = ring._table.pages(ring._table.find(1))[2]
    ring.pages[page, 2, 0, 7] += 1
    with pytest.raises(RunError, match=rf"page {page} \(page 2 of entry 1\) changed"):
        ring.lease(1, 1, timeout=0)
    assert "changed" in (ring.stats().aborted or "")
    ring.close()


def test_an_entry_overwritten_under_a_lease_is_detected(path: Path) -> None:
    ring = Ring.create(path, SPEC, "run")
    put(ring, 0, [(1, 9)])
    lease = ring.lease(1, 0, timeout=0)
    ring._table.v.page_generation[lease.pages[1]] += 1
    with pytest.raises(RunError, match="overwritten under a lease"):
        ring.release(lease)
    with pytest.raises(RingAborted, match="overwritten"):
        ring.lease(1, 1, timeout=0)
    ring.close()


def test_an_update_that_fails_half_way_aborts(path: Path) -> None:
    ring = Ring.create(path, SPEC, "run")
    with pytest.raises(KeyboardInterrupt), Section(ring._monitor) as section:
        section.begin("reserve")
        raise KeyboardInterrupt
    with pytest.raises(RingAborted, match="interrupted in the middle of 'reserve'"):
        ring.finish(0)
    ring.close()


def test_an_error_before_the_first_write_leaves_the_ring_usable(ring: Ring) -> None:
    with pytest.raises(KeyboardInterrupt), Section(ring._monitor):
        raise KeyboardInterrupt
    put(ring, 0, [(1, 4)])


def test_calls_from_inside_a_call(ring: Ring) -> None:
    with Section(ring._monitor), pytest.raises(RunError, match="from inside"):
        ring.finish(0)
    with Section(ring._monitor):
        ring.abort("from a signal handler")
    with pytest.raises(RingAborted, match="signal handler"):
        ring.finish(0)


def test_closing_with_something_in_hand_aborts(path: Path) -> None:
    ring = Ring.create(path, SPEC, "run")
    other = Ring.attach(path, "run", timeout=1)
    put(ring, 0, [(1, 4)])
    other._monitor._pid = -1  # as if it were another process: it registers as a peer of its own
    other.lease(1, 0, timeout=0)
    other.close()
    with pytest.raises(RingAborted, match="closed the ring although it leases entry 1 reuse 0"):
        ring.lease(1, 1, timeout=0)
    ring.close()
    ring.close()
    with pytest.raises(RunError, match="closed"):
        ring.lease(1)
    with pytest.raises(RunError, match="closed"):
        ring.commit(None)  # type: ignore[arg-type]


def test_nothing_is_left_after_close(path: Path) -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("dflash-")
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdigit()
                 if os.path.islink(f"/proc/self/fd/{fd}")]  # fmt: skip
        return maps, len(links)

    before = held()
    for _ in range(5):
        ring = Ring.create(path, SPEC, "run")
        other = Ring.attach(path, "run", timeout=1)
        ring.populate(0, 2)
        put(ring, 0, [(1, 4)])
        assert float(other.pages.sum()) != 0
        other.close()
        ring.close()
    assert held() == before
    kept = Ring.create(path, SPEC, "run")
    tensor = kept.pages
    kept.close()
    tensor[0] = 1.0  # a tensor that outlives the ring keeps its memory: no crash
    del tensor, kept, ring, other
    assert held() == before


def test_the_file(path: Path) -> None:
    ring = Ring.create(path, SPEC, "run")
    status = path.stat()
    assert status.st_mode & 0o777 == 0o600 and status.st_size == SPEC.bytes and status.st_blocks * 512 >= SPEC.bytes
    with pytest.raises(RunError, match="is of run 'run', not of 'else'"):
        Ring.attach(path, "else", timeout=0)
    with pytest.raises(RunError, match="expects"):
        Ring.attach(path, "run", 0, spec=RingSpec(3, 8, "bfloat16", 4, 10, 6, 2))
    with pytest.raises(ConfigError, match=f"run that is alive .pid {os.getpid()}"):
        Ring.create(path, SPEC, "run")
    ring._mapped.views.words[L.W_VERSION] = 99
    with pytest.raises(RunError, match="version 99"):
        Ring.attach(path, "run", timeout=0)
    ring._mapped.views.words[L.W_VERSION] = L.VERSION
    ring.unlink()
    assert not path.exists()
    successor = Ring.create(path, SPEC, "next")
    ring.unlink()
    ring.close()
    assert path.exists(), "another run's file was removed"
    successor.close()
    with pytest.raises(RunError, match="did not appear"):
        Ring.attach(path, "run", timeout=0.02)


def test_a_dead_runs_file_is_replaced(path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        Ring.create(path, SPEC, "dead")
        os._exit(0)
    os.waitpid(pid, 0)
    assert path.exists()
    with pytest.raises(RunError, match="dead process"):
        Ring.attach(path, "dead", timeout=0)
    ring = Ring.create(path, SPEC, "run")
    Ring.attach(path, "run", timeout=0).close()
    ring.close()


@pytest.mark.parametrize("damage", ["garbage", "empty", "mode", "symlink", "user"])
def test_a_file_that_is_not_ours_is_refused(path: Path, damage: str, tmp_path: Path) -> None:
    if damage == "user" and os.geteuid() != 0:
        pytest.skip("only root can make another user's file")
    if damage == "symlink":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.write_bytes(b"" if damage == "empty" else b"x" * 5000)
        path.chmod(0o644 if damage == "mode" else 0o600)
        if damage == "user":
            os.chown(path, 12345, 12345)
    try:
        with pytest.raises(ConfigError, match="ring path"):
            Ring.create(path, SPEC, "run")
        assert os.path.lexists(path), "a foreign file was removed"
    finally:
        path.unlink()


def test_populate_reports_its_share(ring: Ring) -> None:
    told: list[tuple[int, int]] = []
    for part in range(3):
        ring.populate(part, 3, lambda done, share: told.append((done, share)))
    assert all(done == share for done, share in told)
    assert sum(share for _, share in told) == ring.buffer[1]


@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"n_pages": 0}, {"reuse": 0}, {"hidden": -1}])
def test_a_bad_spec_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        RingSpec(**{**SPEC.__dict__, **change})  # type: ignore[arg-type]
