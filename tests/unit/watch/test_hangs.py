"""What counts as a hang where nothing can be counted: a real rank with a real watchdog, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from recipe import process
from recipe.errors import RunError
from recipe.watch import last_words, network
from recipe.watch.node_watch import NodeWatch
from recipe.watch.role import Role
from recipe.watch.store import ControlStore
from recipe.watch.watchdog import Watchdog

HANG_S = 1.0
LONG_S = 4.0  # well beyond HANG_S, on a busy machine too


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def compute(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        sum(range(1000))


def write(seconds: float) -> None:
    """A slow disk: a little at a time, and no CPU to speak of."""
    deadline = time.monotonic() + seconds
    with open(os.devnull, "wb", buffering=0) as file:
        while time.monotonic() < deadline:
            file.write(bytes(4096))
            time.sleep(0.2)


def await_child(seconds: float) -> None:
    """A compiler in a process of its own, while this one waits for it."""
    pid = os.fork()
    if pid == 0:
        compute(seconds)
        os._exit(0)
    os.waitpid(pid, 0)


def life(phase: str, work: Callable[[float], None], words: Path) -> int:
    """The exit code of a rank that does ``work`` for LONG_S in ``phase``: 7 when the watchdog lets it."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
            os.environ[last_words.VARIABLE] = f"{os.getppid()}:{words}"
            store = dist.HashStore()
            role = Role("drafter", 0, 1, 0, 1, 0, 0, 1, 1, 1)
            # A fork has one thread, and it is the main one, whichever it was here.
            watch = NodeWatch({"RANK": "0", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"})
            watchdog = Watchdog(role, {0: "drafter 0"}, lambda: ControlStore(store), HANG_S, watch)
            watchdog.progress(phase)
            work(LONG_S)
            os._exit(7)
        os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("phase", ["saving", "building the drafter", "importing the model code"])
def test_a_phase_that_does_nothing_is_a_hang(phase: str, tmp_path: Path) -> None:
    started = time.monotonic()
    assert life(phase, sleep, tmp_path / "words") == 1
    assert time.monotonic() - started < LONG_S
    assert f"in phase {phase!r}" in (tmp_path / "words").read_text()


@pytest.mark.parametrize("work", [compute, write, await_child])
def test_a_phase_that_works_is_none(work: Callable[[float], None], tmp_path: Path) -> None:
    assert life("saving", work, tmp_path / "words") == 7


def test_a_steady_phase_must_count(tmp_path: Path) -> None:
    """An endless loop in a step uses a CPU as well."""
    assert life("training", compute, tmp_path / "words") == 1


def test_the_wait_for_rank_0_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # taken, and nobody listens
        port = nobody.getsockname()[1]
        monkeypatch.setattr(network, "SAY_S", 0.3)
        with pytest.raises(RunError, match=f"rank 0 at 127.0.0.1:{port} cannot be reached after 1 s"):
            network.await_listener("127.0.0.1", port, "rank 4 (drafter 0, node 1)", 1.0)
        said = capsys.readouterr().err.splitlines()
        assert 2 <= len(said) <= 3 and all("waits for rank 0" in line and "of at most 1 s" in line for line in said)
        threading.Timer(0.5, nobody.listen).start()
        network.await_listener("127.0.0.1", port, "rank 4", 10.0)


def test_who_is_taken_apart_by_the_kernel_is_no_longer_alive() -> None:
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
    assert not process.is_leaving(pid) and process.start_ticks(pid) is not None
    os.kill(pid, signal.SIGKILL)
    while process.start_ticks(pid) is not None:
        time.sleep(0.01)
    assert process.is_leaving(pid), "a zombie keeps the kernel's mark"
    os.waitpid(pid, 0)
    assert not process.is_leaving(pid)
