"""Ctrl-Z and `fg`, a debugger, a paused container, nohup: a run that stood still goes on and stays watched."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from recipe import process
from recipe.ring import Ring, RingSpec, monitor, ring_path
from recipe.watch import last_words, watchdog
from recipe.watch.node_watch import NodeWatch
from recipe.watch.role import Role
from recipe.watch.store import ControlStore
from recipe.watch.watchdog import Watchdog

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
LIVED = 7


def rank(life: Callable[[], None]) -> int:
    """A process that blocks signals as a rank does and lives so; its pid. It ends with LIVED when ``life`` returns."""
    pid = os.fork()
    if pid == 0:
        code = 9
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
            life()
            code = LIVED
        finally:
            os._exit(code)
    return pid


def code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def watched(seconds: float = 20.0, words: Path | None = None) -> None:
    if words is not None:
        os.environ[last_words.VARIABLE] = f"{os.getppid()}:{words}"
    NodeWatch(ALONE)
    time.sleep(seconds)


def stop_and_continue(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


def test_a_stop_is_no_signal_to_end_and_the_watch_outlives_it() -> None:
    pid = rank(watched)
    time.sleep(0.5)
    for _ in range(4):
        stop_and_continue(pid, 0.4)
        time.sleep(0.3)
    assert process.start_ticks(pid) is not None, "a stop has ended it"
    os.kill(pid, signal.SIGTERM)
    started = time.monotonic()
    assert code_of(pid) == 128 + signal.SIGTERM and time.monotonic() - started < 3.0


@pytest.mark.parametrize("ignored", [True, False])
def test_a_hang_up_ends_what_nohup_does_not_protect(ignored: bool) -> None:
    def life() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        watched(2.5)

    pid = rank(life)
    time.sleep(0.7)
    os.kill(pid, signal.SIGHUP)
    assert code_of(pid) == (LIVED if ignored else 128 + signal.SIGHUP)


def test_a_watch_that_fails_ends_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(watch: NodeWatch) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(NodeWatch, "_above", broken)
    pid = rank(lambda: watched(10.0, tmp_path / "words"))
    assert code_of(pid) == 1
    assert "the watch of its node failed: ZeroDivisionError: planted" in (tmp_path / "words").read_text()


def test_nobody_is_blamed_for_a_silence_in_which_the_listener_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's thread may be the first that runs again after a pause: the others' beats are old then."""
    monkeypatch.setattr(watchdog, "STARVED_S", 0.5)
    dog = Watchdog.__new__(Watchdog)
    dog.role, dog.silence_s, dog._flag = Role("target", 0, 2, 0, 1, 0, 0, 1, 1, 1), 1.0, None
    dog._store, dog._beats = ControlStore(dist.HashStore()), {}
    dog._watch = NodeWatch.__new__(NodeWatch)
    dog._watch.names = {0: "target", 1: "drafter"}
    dog._started = dog._judged_at = time.monotonic()
    for beat in (0, 1):
        dog._store.put(f"beat/{beat}", {"beat": 1})
    dog._judge_beats()
    time.sleep(1.3)  # stopped
    dog._judge_beats()
    assert dog._flag is None
    for _ in range(5):
        time.sleep(0.3)
        dog._store.put("beat/0", {"beat": time.monotonic()})
        dog._judge_beats()
    assert dog._flag is not None and dog._flag["rank"] == 1 and "no heartbeat" in dog._flag["cause"]


def test_the_launchers_other_children_are_no_ranks() -> None:
    """A helper process that the launcher started first; ranks that were exec'ed say who they are, in any order."""
    helper = subprocess.Popen(["sleep", "60"])
    ranks = [subprocess.Popen(["sleep", "60"], env={**os.environ, "LOCAL_RANK": str(local)}) for local in (2, 0, 1)]
    watch = NodeWatch.__new__(NodeWatch)
    watch.local_size, watch.rank, watch.local_rank, watch._forked = 3, 6, 0, False
    watch.siblings, watch._newest_at, watch._launcher = {}, time.monotonic(), os.getpid()
    pids = {one.pid for one in ranks} | {helper.pid}
    watch._seen = set()
    try:
        deadline = time.monotonic() + 5.0
        while not watch.siblings and time.monotonic() < deadline:
            assert watch._find_siblings(time.monotonic()) is None
            watch._seen = {child for child in watch._seen if child[1] in pids}  # pytest may have children of its own
            time.sleep(0.02)
        assert {one: pid for one, (pid, _) in watch.siblings.items()} == {
            6: ranks[1].pid, 7: ranks[2].pid, 8: ranks[0].pid,
        }  # fmt: skip
    finally:
        for one in (helper, *ranks):
            one.kill()
            one.wait()


def test_a_wait_for_the_ring_does_not_count_the_time_in_which_it_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "SLICE_S", 0.2)
    monkeypatch.setattr(monitor, "STARVED_S", 0.5)
    path = ring_path(f"test-stop-{os.getpid()}", 0)
    ring = Ring.create(path, RingSpec(1, 8, "float32", 4, 4, 4, 1), "run")

    def life() -> None:
        mine = Ring.attach(path, "run")
        mine.wait_ready(4, 2.0)

    try:
        pid = rank(life)
        time.sleep(0.6)
        stop_and_continue(pid, 2.5)
        time.sleep(0.3)
        for write in ring.reserve(0, [(1, 4, 7)], timeout=5):
            ring.commit(write)
        assert code_of(pid) == LIVED
    finally:
        ring.close()
