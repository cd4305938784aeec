"""The ways round what an older kernel or C library lacks; each is forced by asking for what does not exist."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from recipe.process import start_ticks
from recipe.ring import Ring, RingSpec, ring_path, segment, sync
from recipe.ring.monitor import Section

SPEC = RingSpec(2, 4, "float32", 4, 8, 8)


def place() -> Path:
    return ring_path(f"fallback-{os.getpid()}-{time.monotonic_ns()}", 1)


def test_names_keep_runs_and_nodes_apart_and_stay_in_their_folder() -> None:
    assert ring_path("a", 0) != ring_path("a", 1) and ring_path("a", 0) != ring_path("b", 0)
    assert ring_path("../x/y z", 3).parent == Path("/dev/shm")


def test_without_nameless_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # opening a folder for writing: "is a directory"
    path = place()
    ring = Ring.create(path, SPEC, "run")
    assert [file.name for file in path.parent.glob(f"{path.name}*")] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600
    Ring.attach(path, "run", timeout=0).close()
    ring.close()
    assert not path.exists()


def test_without_populate_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "_POPULATE_WRITE", 9999)
    ring = Ring.create(place(), SPEC, "run")
    ring.pages.fill_(3.0)
    told: list[tuple[int, int]] = []
    ring.populate(0, 1, lambda done, share: told.append((done, share)))
    assert told[-1][0] == told[-1][1] == ring.buffer[1]
    assert bool((ring.pages == 3.0).all()), "populating changed bytes"
    ring.close()


@pytest.mark.parametrize("clocklock", [True, False])
def test_two_threads_take_turns_at_the_lock(monkeypatch: pytest.MonkeyPatch, clocklock: bool) -> None:
    if not clocklock:
        monkeypatch.setattr(sync, "_clocklock", None)
    ring = Ring.create(place(), SPEC, "run", lock_timeout_s=30)
    order: list[str] = []

    def second() -> None:
        with Section(ring._monitor):
            order.append("second")

    with Section(ring._monitor):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.2)
        order.append("first")
    thread.join(20)
    assert order == ["first", "second"]
    ring.close()


def test_start_ticks_tells_the_dead_from_the_living() -> None:
    mine = start_ticks(os.getpid())
    assert mine is not None and sync.is_alive(os.getpid(), mine) and not sync.is_alive(os.getpid(), mine - 1)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(pid) is None, "a zombie counts as alive"
    os.waitpid(pid, 0)
    assert start_ticks(pid) is None
