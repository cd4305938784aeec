"""One thread in every rank that sees a death or a hang anywhere in the run and then ends this process at once.

A thread, because a Python signal handler does not run while the main thread sits in a collective; for the same reason
SIGTERM and SIGINT are blocked everywhere and collected here. Watched are: the siblings' processes on this node (exact,
by pid and start time), the launcher above them, and on rank 0 the heartbeats of all ranks (a lost node, a stopped
process). Whoever sees something first raises the abort flag in the control store; every watchdog obeys it within a
second. reference/deepspeed.md §2.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from recipe.roles import process
from recipe.roles.role import Role
from recipe.roles.store import ControlStore

BEAT_S = 0.5
GRACE_S = 3.0  # between the abort flag and SIGKILL for siblings that do not obey (stopped, stuck in the kernel)
HEARTBEAT_S = 60.0  # a rank without a heartbeat for this long is hung, whatever its own watchdog says
SIGNALS = (signal.SIGTERM, signal.SIGINT)

Report = dict[str, Any]


def block_signals() -> None:
    """Keep SIGTERM and SIGINT for the watchdog. Call it first in the process, before any library starts a thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


class Watchdog:
    """Heartbeat out, abort in. Start it before anything that can hang."""

    def __init__(self, role: Role, connect: Callable[[], ControlStore], hang_timeout_s: float) -> None:
        self.role = role
        self.hang_timeout_s = hang_timeout_s
        self.run_dir: Path | None = None
        self.on_end: list[Callable[[Report], None]] = []
        self._store = connect()
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        self._phase: Report = {"phase": "starting", "done": 0, "total": 0, "step": 0}
        self._progress_at = time.monotonic()
        self._finished = threading.Event()
        self._seen: dict[int, tuple[object, float]] = {}
        self._launcher = os.getppid()
        self._runner = process.parent_of(self._launcher)
        self._siblings: dict[int, tuple[int, int]] | None = None
        self._store.put(f"name/{role.rank}", role.name)
        self._store.put(f"pid/{role.rank}", [os.getpid(), process.start_ticks(os.getpid())])
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def progress(self, phase: str, done: int = 0, total: int = 0, step: int = 0) -> None:
        """Say that something moved; shown by `status`, and the proof of life that a hang is judged by."""
        with self._lock:
            self._phase = {"phase": phase, "done": done, "total": total, "step": step}
            self._progress_at = time.monotonic()

    def tick(self) -> None:
        """Progress within the current phase (for long phases that cannot count)."""
        with self._lock:
            self._progress_at = time.monotonic()

    def phases(self) -> dict[int, Report]:
        """The last published phase of every rank that has one: phase, done, total, step."""
        beats = {rank: self._store.peek(f"beat/{rank}") for rank in range(self.role.world_size)}
        return {rank: beat for rank, beat in beats.items() if isinstance(beat, dict)}

    def abort(self, cause: str, code: int = 1) -> NoReturn:
        """End the whole run because of this rank; does not return."""
        report: Report = {"rank": self.role.rank, "role": self.role.name, "cause": cause, "code": code}
        try:
            report = self._store.abort(report)
        except (RuntimeError, OSError):
            report["cause"] = f"{cause} (and the control store is gone)"
        self._end(report)

    def finish(self) -> None:
        """This rank has passed the end barrier: nobody's exit is a death any more."""
        self._finished.set()
        self._thread.join(timeout=5.0)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        beats = 0
        while not self._finished.is_set():
            caught = signal.sigtimedwait(SIGNALS, BEAT_S)
            beats += 1
            try:
                report = self._look(beats)
                if report is None and caught is not None:
                    report = self._explain_signal(signal.Signals(caught.si_signo))
            except (RuntimeError, OSError):
                report = {"rank": 0, "role": "rank 0", "cause": "the control store is lost: rank 0 is gone", "code": 1}
            if report is not None and not self._finished.is_set():
                self._end(report)

    def _look(self, beats: int) -> Report | None:
        with self._lock:
            beat = dict(self._phase, beat=beats)
            stuck_s = time.monotonic() - self._progress_at
        self._store.put(f"beat/{self.role.rank}", beat)
        flag = self._store.peek("abort")
        if isinstance(flag, dict):
            return flag
        if self._store.peek("ended") is not None:
            return None  # all ranks have passed the end barrier: exits are no deaths
        if os.getppid() != self._launcher:
            return self._flag(self.role.rank, "the deepspeed launcher above it died")
        if self._runner not in (None, 0, 1) and process.parent_of(self._launcher) != self._runner:
            return self._flag(self.role.rank, "the deepspeed runner above its launcher died")
        if stuck_s > self.hang_timeout_s:
            return self._flag(self.role.rank, f"no progress for {stuck_s:.0f} s in phase {beat['phase']!r}")
        return self._look_at_siblings() or (self._look_at_beats() if self.role.rank == 0 else None)

    def _look_at_siblings(self) -> Report | None:
        for rank, (pid, ticks) in self._find_siblings().items():
            if process.start_ticks(pid) != ticks:
                time.sleep(0.1)  # what it had to say it said to the store before it went: look once more
                flag = self._store.peek("abort")
                if isinstance(flag, dict) or self._store.peek("ended") is not None:
                    return flag if isinstance(flag, dict) else None
                return self._flag(rank, "its process is gone (killed, or it left before the end)")
        return None

    def _find_siblings(self) -> dict[int, tuple[int, int]]:
        """Pid and start time of the other ranks of this node, once all of them have said them."""
        if self._siblings is None:
            local = self.role.world_size // self.role.nodes
            first = self.role.node * local
            ranks = [rank for rank in range(first, first + local) if rank != self.role.rank]
            found: dict[int, tuple[int, int]] = {}
            for rank in ranks:
                value = self._store.peek(f"pid/{rank}")
                if not isinstance(value, list):
                    return found
                found[rank] = (int(value[0]), int(value[1]))
            self._siblings = found
        return self._siblings

    def _look_at_beats(self) -> Report | None:
        now = time.monotonic()
        for rank in range(self.role.world_size):
            beat = self._store.peek(f"beat/{rank}")
            counted, since = self._seen.get(rank, (None, now))
            if not isinstance(beat, dict):
                continue
            if beat["beat"] != counted:
                self._seen[rank] = (beat["beat"], now)
            elif now - since > min(self.hang_timeout_s, HEARTBEAT_S):
                return self._flag(rank, f"no heartbeat for {now - since:.0f} s (stopped, or its node is lost)")
        return None

    def _explain_signal(self, signum: signal.Signals) -> Report:
        who = "interrupted (Ctrl-C)" if signum == signal.SIGINT else "it was told to end (SIGTERM)"
        return self._store.abort(
            {"rank": self.role.rank, "role": self.role.name, "cause": who, "code": 128 + int(signum)}
        )

    def _flag(self, rank: int, cause: str) -> Report:
        name = self._store.peek(f"name/{rank}") or f"rank {rank}"
        return self._store.abort({"rank": rank, "role": name, "cause": cause, "code": 1})

    def _end(self, report: Report) -> NoReturn:
        """Say why, leave the stacks behind, take stuck siblings along, and go. Never returns."""
        if not self._ending.acquire(blocking=False):
            time.sleep(60)  # the other thread of this process is ending it already
        code = int(report.get("code", 1)) or 1
        try:
            print(f"\n[{self.role.name}] the run ends because of {report['role']}: {report['cause']}", file=sys.stderr)
            sys.stderr.flush()
            if self.run_dir is not None and str(report["cause"]).startswith("no "):
                self._dump_stacks(self.run_dir)
            for callback in self.on_end:
                callback(report)
            self._end_stuck_siblings()
        finally:
            os._exit(code)

    def _dump_stacks(self, run_dir: Path) -> None:
        """A hang is explained by where every rank stands; py-spy may be forbidden, this is not."""
        folder = run_dir / "stacks"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"rank_{self.role.rank}.txt", "w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)

    def _end_stuck_siblings(self) -> None:
        """Wait until the siblings are gone, so that the one that knows the cause leaves last; end who does not obey."""
        siblings = self._siblings or {}
        deadline = time.monotonic() + GRACE_S + 0.2 * (self.role.rank % 8)
        while time.monotonic() < deadline:
            # A sibling that waits like this one would make both wait: the higher rank leaves first.
            lower = [s for rank, s in siblings.items() if rank > self.role.rank]
            if all(process.start_ticks(pid) != ticks for pid, ticks in lower):
                return
            time.sleep(0.1)
        for rank, (pid, ticks) in siblings.items():
            if rank > self.role.rank or self._is_stopped(pid):
                process.end(pid, ticks)

    @staticmethod
    def _is_stopped(pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        except OSError:
            return False
