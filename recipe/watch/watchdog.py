"""What a rank tells the others and obeys: heartbeats and progress out, the abort flag in, and the end of the process.

Threads, because a Python signal handler does not run while the main thread sits in a collective; for the same reason
`recipe/train.py` blocks SIGTERM and SIGINT everywhere, and `NodeWatch` collects them. That thread looks at this node
and never blocks; it asks `Watchdog._look` too. The thread here talks to the control store: heartbeats, the abort flag,
and on rank 0 everybody's heartbeats (a lost node). Whoever sees something first raises the flag; every rank obeys it
within a second. What the launcher itself does: docs/deepspeed.md.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from recipe import process
from recipe.watch import last_words
from recipe.watch.node_watch import STARVED_S, NodeWatch, Report
from recipe.watch.role import Role
from recipe.watch.store import ControlStore

BEAT_S = 0.5
GRACE_S = 3.0  # between the end of this rank's work and SIGKILL for siblings that do not obey the flag
WOKEN_S = 2.0  # for a stopped process, woken once more, to write down where it stood
BLAME_S = 4.0  # an error that tells of a lost peer waits so long to learn who that is
SILENCE_S = 60.0  # a rank without a heartbeat, or a store without an answer, for this long is hung
JOIN_S = 600.0  # every rank has sent its first heartbeat by then
SLOW_S = 1800.0  # the longest that a phase may work that cannot say how it moves
STEADY = ("producing", "training", "evaluating", "loading the target", "touching the ring's memory")
WAITING = ("torch/distributed/", "deepspeed/comm/", "recipe/ring/", "concurrent/futures/", "recipe/watch/store")
RESERVE_BYTES = 64 << 20  # address space, not memory: given back at the end, which needs threads and buffers itself


class Watchdog:
    """Heartbeat out, abort in. Start it before anything that can hang.

    Args:
        names: rank -> role of every rank of the run, for messages.
        connect: makes this watchdog's own connection to the control store.
        hang_timeout_s: a steady phase without progress for this long is a hang.
        watch: what looks at this node; it asks this watchdog from now on.
    """

    def __init__(
        self,
        role: Role,
        names: Mapping[int, str],
        connect: Callable[[], ControlStore],
        hang_timeout_s: float,
        watch: NodeWatch,
    ) -> None:
        self.role, self.hang_timeout_s, self._watch = role, hang_timeout_s, watch
        self.silence_s = min(hang_timeout_s, SILENCE_S)
        self.run_dir: Path | None = None
        self.on_end: list[Callable[[Report], None]] = []
        self._store = connect()
        self._lock, self._ending, self._finished = threading.Lock(), threading.Lock(), threading.Event()
        self._phase: Report = {"phase": "starting", "done": 0, "total": 0, "step": 0}
        self._progress_at = self._answer_at = self._started = self._judged_at = time.monotonic()
        self._flag: Report | None = None
        self._store_lost = False
        self._main = threading.main_thread().ident
        self._work, self._worked_at = (0, 0), self._started
        self._beats: dict[int, tuple[object, float]] = {}
        self._stuck: dict[int, Report] = {}
        self._reserve: bytearray | None = bytearray(RESERVE_BYTES)
        self._to_tell: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=loop, name=f"watchdog-{name}", daemon=True)
            for name, loop in (("store", self._talk_to_store), ("teller", self._tell))
        ]
        for thread in self._threads:
            thread.start()
        watch.stopped_s = min(watch.stopped_s, hang_timeout_s)
        watch.take_over(names, self._look, self._forgive, self._end_by_watch)

    # -- what the main thread calls -----------------------------------------------------------------------------

    def progress(self, phase: str, done: int = 0, total: int = 0, step: int = 0, note: str = "") -> None:
        """Say that something moved; shown by `status`, and the proof of life that a hang is judged by.

        ``note`` stands behind the counts on the screen while the run starts.
        """
        with self._lock:
            self._phase = {"phase": phase, "done": done, "total": total, "step": step, "note": note}
            self._progress_at = time.monotonic()

    def tick(self) -> None:
        """Progress within the current phase (for long phases that cannot count)."""
        with self._lock:
            self._progress_at = time.monotonic()

    def phases(self) -> dict[int, Report]:
        """The last published phase of every rank that has one: phase, done, total, step. Empty when the store is gone:
        the watchdog's own threads say so."""
        try:
            beats = {rank: self._store.peek(f"beat/{rank}") for rank in range(self.role.world_size)}
        except (RuntimeError, OSError):
            return {}
        return {rank: beat for rank, beat in beats.items() if isinstance(beat, dict)}

    def abort(self, cause: str, code: int = 1, error: BaseException | None = None) -> NoReturn:
        """End the whole run because of this rank, or because of the rank that its error really tells of.

        ``error``: its traceback is shown when this rank is to blame, and only kept in the log when another one is.
        """
        self._reserve = None
        blamed = None
        if code == 1:
            patience = BLAME_S if error is not None and last_words.is_of_a_lost_peer(error) else 2 * BEAT_S
            blamed = self._who_is_gone(patience)
        own = self._watch.report(self.role.rank, cause, code)
        report = self._raise_flag(blamed or own)
        if error is not None and code == 1:
            with contextlib.suppress(Exception):  # a stopped process that was woken is to blame, but its error is not
                last_words.keep_traceback(error, self.role.name, self.run_dir, guilty=report == own)
        self._end(report)

    def is_ending(self) -> bool:
        """Whether a thread of this process is ending it: whatever is made from now on, nobody will clear away."""
        return self._ending.locked()

    def finish(self) -> None:
        """This rank has passed the end barrier and watches no more; nobody leaves before all have said so."""
        self._finished.set()
        self._watch.stop()
        self._threads[0].join(timeout=5.0)

    def sibling_left(self) -> bool:
        """After `finish`: whether a rank of this node is gone already. The others are told before this one goes too:
        some of them may still watch, and would take it for the first."""
        report = self._watch.departure()
        if report is not None:
            self._watch.say_farewell(report)
        return report is not None

    def is_alone(self) -> bool:
        """Whether no other rank of this node lives."""
        return not any(self._watch.lives(rank) for rank in self._watch.siblings)

    # -- what the node's watch asks ----------------------------------------------------------------------------------

    def _look(self, now: float) -> Report | None:
        if self._flag is not None:
            return self._flag
        with self._lock:
            stuck_s, silent_s, phase = now - self._progress_at, now - self._answer_at, self._phase["phase"]
        gone = self._watch.departure()
        if gone is not None:
            return gone
        if self._hangs(now, stuck_s, phase):
            return self._blame_for_a_hang(stuck_s, phase)
        if self._store_lost and (self.role.rank == 0 or self._watch.lives(0)):
            return self._watch.report(self.role.rank, "it lost its connection to the control store, which lives")
        if self._store_lost:
            return self._watch.report(0, "the control store is lost: this rank, which serves it, or its node is gone")
        if silent_s > self.silence_s:
            return self._watch.report(0, f"no answer from the control store for {silent_s:.0f} s: rank 0 hangs")
        return None

    def _hangs(self, now: float, stuck_s: float, phase: str) -> bool:
        """Whether this rank hangs. Compiling, importing and saving cannot say how they move, but whoever does that
        uses a CPU, reads or writes: that counts as progress, up to SLOW_S. Nor does one hang that waits for another
        rank: that one is judged by itself, and the wait has its own time-out."""
        if phase in STEADY:
            return stuck_s > self.hang_timeout_s
        work = process.work_of_thread(os.getpid())  # the main thread has the number of the process
        if work != self._work or self._waits():
            self._work, self._worked_at = work, now
        idle_s = min(stuck_s, now - self._worked_at)
        return idle_s > self.hang_timeout_s or stuck_s > max(self.hang_timeout_s, SLOW_S)

    def _blame_for_a_hang(self, stuck_s: float, phase: str) -> Report:
        """Those who wait in a collective for the one that hangs make no progress either: blame the one that does not
        wait, and of several the one that stands still longest."""
        own = {"still": stuck_s, "waits": self._waits(), "phase": phase}
        known = {**self._stuck, self.role.rank: own}
        rank = min(known, key=lambda each: (bool(known[each]["waits"]), -float(known[each]["still"])))
        found = known[rank]
        return self._watch.report(rank, f"no progress for {found['still']:.0f} s in phase {found['phase']!r}")

    def _waits(self) -> bool:
        """Whether the main thread sits in something that waits for another rank."""
        frame = sys._current_frames().get(self._main or 0)
        while frame is not None:
            if any(part in frame.f_code.co_filename for part in WAITING):
                return True
            frame = frame.f_back
        return False

    def _forgive(self, gap: float) -> None:
        with self._lock:
            self._progress_at += gap
            self._answer_at += gap

    def _who_is_gone(self, patience_s: float) -> Report | None:
        """A dead peer first shows as an error of a collective or of the store; look who is really gone."""
        deadline = time.monotonic() + patience_s
        while True:
            found = self._flag or self._watch.departure()
            if found is not None or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    # -- the threads that talk to the store -----------------------------------------------------------------------

    def _talk_to_store(self) -> None:
        beats = 0
        while not self._finished.wait(BEAT_S):
            beats += 1
            try:
                self._exchange(beats)
            except (RuntimeError, OSError):
                time.sleep(BEAT_S)  # if rank 0 died, its siblings see exactly that
                self._store_lost = True
                return
            except Exception as error:  # a rank that nobody hears of must not go on
                cause = f"its watchdog failed: {type(error).__name__}: {error}"
                self._end_by_watch(self._watch.report(self.role.rank, cause))
            with self._lock:
                self._answer_at = time.monotonic()

    def _exchange(self, beats: int) -> None:
        with self._lock:
            still_s, phase = time.monotonic() - self._progress_at, self._phase
            beat = dict(phase, beat=beats, still=round(still_s, 2))
        beat["waits"] = still_s > 2.0 and self._waits()
        self._store.put(f"beat/{self.role.rank}", beat)
        flag = self._store.peek("abort")
        if isinstance(flag, dict):
            self._flag = flag
        if still_s > self.hang_timeout_s / 2:
            others = self.phases()
            self._stuck = {rank: other for rank, other in others.items() if float(other["still"]) > still_s / 2}
        if self.role.rank == 0:
            self._judge_beats()

    def _judge_beats(self) -> None:
        now = time.monotonic()
        gap, self._judged_at = now - self._judged_at, now
        if gap > STARVED_S:  # this process was stopped, and so may all have been: they are heard again first
            self._started += gap
            self._beats = {rank: (count, since + gap) for rank, (count, since) in self._beats.items()}
        for rank in range(self.role.world_size):
            beat = self._store.peek(f"beat/{rank}")
            counted, since = self._beats.get(rank, (None, self._started))
            count = beat["beat"] if isinstance(beat, dict) else None
            if count != counted:
                self._beats[rank] = (count, now)
            elif now - since > (JOIN_S if count is None else self.silence_s) and self._flag is None:
                cause = f"no heartbeat for {now - since:.0f} s (hung, or its node is lost)"
                self._flag = self._store.abort(self._watch.report(rank, cause))

    def _tell(self) -> None:
        """Waits for the one report that this rank may raise. A thread from the start: at the end none may be had."""
        report = self._to_tell.get()
        try:
            self._told.put(self._store.abort(report))
        except (RuntimeError, OSError):
            self._told.put(report)

    def _raise_flag(self, report: Report) -> Report:
        """Tell everybody; an earlier report stands. A store that does not answer cannot hold this rank up."""
        if report is self._flag:
            return report
        self._to_tell.put(report)
        try:
            return self._told.get(timeout=2.0)
        except queue.Empty:
            return self._flag or report

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end_by_watch(self, report: Report) -> None:
        if not self._finished.is_set():
            self._reserve = None
            self._end(self._raise_flag(report))

    def _end(self, report: Report) -> NoReturn:
        """Say why, leave the stacks behind, take stuck siblings along, and go."""
        if not self._ending.acquire(blocking=False):
            time.sleep(60)  # another thread of this process is ending it already
        code = int(report.get("code", 1)) or 1
        try:
            self._watch.say_farewell(report)  # before anybody can see this rank go
            stopped = self._wake_stopped()
            if code != 2 or report["rank"] == self.role.rank:
                last_words.say(report, self.run_dir, loud=self._speaks(report))
            report = {**report, "line": last_words.line(report, self.run_dir)}
            if report.get("who"):  # for the files: no rank died
                report |= {"rank": None, "role": report["who"], "cause": last_words.cause(report)}
            if self.run_dir is not None and str(report["cause"]).startswith("no "):
                self._dump_stacks(self.run_dir)
            for callback in self.on_end:
                with contextlib.suppress(Exception):  # a full disk, no memory: the end goes on
                    callback(report)
            self._wait_for(stopped, WOKEN_S)
            self._wait_for_siblings()
        finally:
            os._exit(code)

    def _speaks(self, report: Report) -> bool:
        """One line on the terminal of a node: of the rank to blame, or of the lowest that lives."""
        rank = int(report["rank"])
        if rank == self.role.rank:
            return True
        if self._watch.lives(rank):
            return False
        return not any(self._watch.lives(other) for other in self._watch.siblings if other < self.role.rank)

    def _dump_stacks(self, run_dir: Path) -> None:
        """A hang is explained by where every rank stands; py-spy may be forbidden, this is not."""
        with contextlib.suppress(OSError):
            folder = run_dir / "stacks"
            folder.mkdir(exist_ok=True)  # a run folder that is gone is not made anew
            with open(folder / f"rank_{self.role.rank}.txt", "w", encoding="utf-8") as file:
                file.write(f"{self.role.name}, phase {self._phase['phase']!r}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)

    def _wake_stopped(self) -> list[tuple[int, int]]:
        """A stopped process can obey nothing: wake it, so that it sees the flag and writes down where it stood."""
        stopped = [one for one in self._watch.siblings.values() if process.is_stopped(one[0])]
        for pid, ticks in stopped:
            process.end(pid, ticks, signal.SIGCONT)
        return stopped

    def _wait_for_siblings(self) -> None:
        """The lower rank leaves later (rank 0 serves the store), and ends those above it that do not obey."""
        if self.role.rank == 0 and self.role.nodes > 1:
            time.sleep(3 * BEAT_S)  # the other nodes read the flag
        self._wait_for([one for rank, one in self._watch.siblings.items() if rank > self.role.rank], GRACE_S)

    def _wait_for(self, processes: list[tuple[int, int]], seconds: float) -> None:
        """Until they are gone; after ``seconds`` they are killed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(process.start_ticks(pid) == ticks for pid, ticks in processes):
            time.sleep(0.1)
        for pid, ticks in processes:
            process.end(pid, ticks)
