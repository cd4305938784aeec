"""Two threads in every rank that see a death or a hang anywhere in the run and then end this process at once.

Threads, because a Python signal handler does not run while the main thread sits in a collective; for the same reason
`recipe/train.py` blocks SIGTERM and SIGINT everywhere, and they are collected here. One thread looks at this node and
never blocks: the siblings' processes (exact, by pid and start time), the launcher above them, this rank's own progress.
The other talks to the control store: heartbeats, the abort flag, and on rank 0 everybody's heartbeats (a lost node).
Whoever sees something first raises the flag; every rank obeys it within a second. reference/deepspeed.md §2.
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
GRACE_S = 3.0  # between the end of this rank's work and SIGKILL for siblings that do not obey the flag
STOPPED_S = 10.0  # a sibling in state T (stopped) for this long is hung
SILENCE_S = 60.0  # a rank without a heartbeat, or a store without an answer, for this long is hung
SLOW_S = 1800.0  # the longest that a phase without steps may take
STEADY = ("producing", "training")
SIGNALS = (signal.SIGTERM, signal.SIGINT)

Report = dict[str, Any]


class Watchdog:
    """Heartbeat out, abort in. Start it before anything that can hang."""

    def __init__(self, role: Role, connect: Callable[[], ControlStore], hang_timeout_s: float) -> None:
        self.role, self.hang_timeout_s = role, hang_timeout_s
        self.silence_s = min(hang_timeout_s, SILENCE_S)
        self.run_dir: Path | None = None
        self.on_end: list[Callable[[Report], None]] = []
        self._store = connect()
        self._lock, self._ending, self._finished = threading.Lock(), threading.Lock(), threading.Event()
        self._phase: Report = {"phase": "starting", "done": 0, "total": 0, "step": 0}
        self._progress_at = self._answer_at = time.monotonic()
        self._flag: Report | None = None
        self._store_lost = False
        self._beats: dict[int, tuple[object, float]] = {}
        self._names: dict[int, str] = {}
        self._siblings: dict[int, tuple[int, int]] = {}
        self._stopped_since: dict[int, float] = {}
        self._launcher = os.getppid()
        self._runner = process.parent_of(self._launcher)
        self._store.put(f"name/{role.rank}", role.name)
        self._store.put(f"pid/{role.rank}", [os.getpid(), process.start_ticks(os.getpid())])
        self._threads = [
            threading.Thread(target=loop, name=f"watchdog-{name}", daemon=True)
            for name, loop in (("node", self._watch_node), ("store", self._talk_to_store))
        ]
        for thread in self._threads:
            thread.start()

    # -- what the main thread calls -----------------------------------------------------------------------------

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
        """End the whole run because of this rank, or because of the dead sibling that its error really tells of."""
        blamed = None
        if code == 1:
            time.sleep(2 * BEAT_S)  # a dead peer first shows as an error of a collective; look who is really gone
            blamed = self._dead_sibling()
        self._end(self._raise_flag(blamed or self._report(self.role.rank, cause, code)))

    def finish(self) -> None:
        """This rank has passed the end barrier and watches no more; nobody leaves before all have said so."""
        self._finished.set()
        for thread in self._threads:
            thread.join(timeout=5.0)

    # -- the thread that looks at this node ------------------------------------------------------------------------

    def _watch_node(self) -> None:
        looked = time.monotonic()
        while not self._finished.is_set():
            caught = signal.sigtimedwait(SIGNALS, BEAT_S)
            now = time.monotonic()
            if now - looked > 10 * BEAT_S:
                self._forgive(now - looked)  # this process itself was stopped (Ctrl-Z) or starved
            looked = now
            report = self._flag or self._look(now)
            if report is None and caught is not None:
                time.sleep(BEAT_S / 2)  # the kernel sends it when the launcher dies, a moment before that can be seen
                report = self._look(now) or self._explain_signal(signal.Signals(caught.si_signo))
            if report is not None and not self._finished.is_set():
                self._end(report if report is self._flag else self._raise_flag(report))

    def _forgive(self, gap: float) -> None:
        with self._lock:
            self._progress_at += gap
            self._answer_at += gap
        self._stopped_since.clear()

    def _look(self, now: float) -> Report | None:
        gone = self._dead_sibling() or self._stopped_sibling(now)
        if gone is not None:
            return gone
        if os.getppid() != self._launcher:
            return self._report(self.role.rank, "the deepspeed launcher above it died")
        if self._runner not in (None, 0, 1) and process.parent_of(self._launcher) != self._runner:
            return self._report(self.role.rank, "the deepspeed runner above its launcher died")
        with self._lock:
            stuck_s, silent_s, phase = now - self._progress_at, now - self._answer_at, self._phase["phase"]
        # Loading, compiling and saving cannot say how they move.
        if stuck_s > (self.hang_timeout_s if phase in STEADY else max(self.hang_timeout_s, SLOW_S)):
            return self._report(self.role.rank, f"no progress for {stuck_s:.0f} s in phase {phase!r}")
        if self._store_lost:
            return self._report(0, "the control store is lost: rank 0 or its node is gone")
        if silent_s > self.silence_s:
            return self._report(0, f"no answer from the control store for {silent_s:.0f} s: rank 0 hangs")
        return None

    def _dead_sibling(self) -> Report | None:
        for rank, (pid, ticks) in self._siblings.items():
            if process.start_ticks(pid) != ticks:
                return self._report(rank, "its process is gone (killed, or it left before the end)")
        return None

    def _stopped_sibling(self, now: float) -> Report | None:
        for rank, (pid, _) in self._siblings.items():
            if not process.is_stopped(pid):
                self._stopped_since.pop(rank, None)
            elif now - self._stopped_since.setdefault(rank, now) > min(STOPPED_S, self.hang_timeout_s):
                return self._report(rank, f"no progress for {STOPPED_S:.0f} s: its process is stopped (SIGSTOP)")
        return None

    def _explain_signal(self, signum: signal.Signals) -> Report:
        who = "interrupted (Ctrl-C)" if signum == signal.SIGINT else "it was told to end (SIGTERM)"
        return self._report(self.role.rank, who, 128 + int(signum))

    # -- the thread that talks to the store ------------------------------------------------------------------------

    def _talk_to_store(self) -> None:
        beats = 0
        while not self._finished.wait(BEAT_S):
            beats += 1
            try:
                self._exchange(beats)
            except (RuntimeError, OSError):
                self._store_lost = True
                return
            with self._lock:
                self._answer_at = time.monotonic()

    def _exchange(self, beats: int) -> None:
        with self._lock:
            beat = dict(self._phase, beat=beats)
        self._store.put(f"beat/{self.role.rank}", beat)
        flag = self._store.peek("abort")
        if isinstance(flag, dict):
            self._flag = flag
        if not self._siblings:
            self._siblings = self._find_siblings()
        if self.role.rank == 0:
            self._judge_beats()

    def _find_siblings(self) -> dict[int, tuple[int, int]]:
        """Pid and start time of the other ranks of this node; empty until all of them have said theirs."""
        local = self.role.world_size // self.role.nodes
        first = self.role.node * local
        found: dict[int, tuple[int, int]] = {}
        for rank in (rank for rank in range(first, first + local) if rank != self.role.rank):
            value = self._store.peek(f"pid/{rank}")
            if not isinstance(value, list):
                return {}
            found[rank] = (int(value[0]), int(value[1]))
            self._names[rank] = str(self._store.peek(f"name/{rank}") or f"rank {rank}")
        return found

    def _judge_beats(self) -> None:
        now = time.monotonic()
        for rank in range(self.role.world_size):
            beat = self._store.peek(f"beat/{rank}")
            counted, since = self._beats.get(rank, (None, now))
            if not isinstance(beat, dict):
                continue
            if beat["beat"] != counted:
                self._beats[rank] = (beat["beat"], now)
            elif now - since > self.silence_s and self._flag is None:
                self._names[rank] = str(self._store.peek(f"name/{rank}") or f"rank {rank}")
                cause = f"no heartbeat for {now - since:.0f} s (hung, or its node is lost)"
                self._flag = self._store.abort(self._report(rank, cause))

    # -- the end ------------------------------------------------------------------------------------------------------

    def _report(self, rank: int, cause: str, code: int = 1) -> Report:
        name = self.role.name if rank == self.role.rank else self._names.get(rank, f"rank {rank}")
        return {"rank": rank, "role": name, "cause": cause, "code": code}

    def _raise_flag(self, report: Report) -> Report:
        """Tell everybody; an earlier report stands. A store that does not answer cannot hold this rank up."""
        answer: list[Report] = []

        def tell() -> None:
            try:
                answer.append(self._store.abort(report))
            except (RuntimeError, OSError):
                return

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        teller.join(timeout=2.0)
        return answer[0] if answer else report

    def _end(self, report: Report) -> NoReturn:
        """Say why, leave the stacks behind, take stuck siblings along, and go."""
        if not self._ending.acquire(blocking=False):
            time.sleep(60)  # the other thread of this process is ending it already
        code = int(report.get("code", 1)) or 1
        try:
            for pid, ticks in self._siblings.values():
                if process.is_stopped(pid):
                    process.end(pid, ticks)  # a stopped process can obey nothing else
            if self._speaks(report, code):
                print(f"\nthe run ends because of {report['role']}: {report['cause']}", file=sys.stderr, flush=True)
            if self.run_dir is not None and str(report["cause"]).startswith("no "):
                self._dump_stacks(self.run_dir)
            for callback in self.on_end:
                callback(report)
            self._wait_for_siblings()
        finally:
            os._exit(code)

    def _speaks(self, report: Report, code: int) -> bool:
        """One line on the terminal of a node: of the rank to blame, or of the lowest that lives."""
        if report["rank"] == self.role.rank or code == 2:
            return report["rank"] == self.role.rank
        blamed_here = self._siblings.get(int(report["rank"]))
        if blamed_here is not None and process.start_ticks(blamed_here[0]) == blamed_here[1]:
            return False
        below = [sibling for rank, sibling in self._siblings.items() if rank < self.role.rank]
        return not any(process.start_ticks(pid) == ticks for pid, ticks in below)

    def _dump_stacks(self, run_dir: Path) -> None:
        """A hang is explained by where every rank stands; py-spy may be forbidden, this is not."""
        folder = run_dir / "stacks"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"rank_{self.role.rank}.txt", "w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)

    def _wait_for_siblings(self) -> None:
        """The lower rank leaves later (rank 0 serves the store), and ends those above it that do not obey."""
        above = [sibling for rank, sibling in self._siblings.items() if rank > self.role.rank]
        if self.role.rank == 0 and self.role.nodes > 1:
            time.sleep(3 * BEAT_S)  # the other nodes read the flag
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            if all(process.start_ticks(pid) != ticks for pid, ticks in above):
                return
            time.sleep(0.1)
        for pid, ticks in above:
            process.end(pid, ticks)
