"""One thread per rank that looks at this node from the rank's first moment: siblings, launcher, runner, signals.

It needs nothing but /proc and the launcher's environment, so it runs before torch is imported and before the control
store is reached: a rank that dies while the others still import or connect is noticed as well. The siblings are the
launcher's children; their environments say which is which. Once the rank has a `Watchdog`, that decides what
a finding means; until then the finding ends the process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from recipe import process
from recipe.watch import last_words
from recipe.watch.farewell import Farewells

LOOK_S = 0.2
STOPPED_S = 10.0  # a sibling in state T (stopped) for this long is hung
STARVED_S = 5.0  # a look that comes this late: this very process was stopped (Ctrl-Z) or starved
GRACE_S = 0.5  # before the store is reached: for the first rank, to say a mistake in the config before it is ended
ASSEMBLE_S = 8.0  # nobody new for so long: the launcher, which starts one after the other at once, has started all
TAKEN_APART_S = 0.5  # for the kernel to make a zombie of a process that is killed
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FROM_KERNEL = 0x80  # si_code of a terminal's Ctrl-C
GONE = "it is gone: killed, or told to end"
ENDED_BY_LAUNCHER = "SIGTERM"

Report = dict[str, Any]


class NodeWatch:
    """``siblings``: rank -> (pid, start ticks) of the other ranks of this node; empty until all have been seen.

    ``names``: rank -> name for messages, ``look``: the watchdog's own questions, ``end``: ends this process.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        env = os.environ if environment is None else environment
        self.rank, self.local_rank, self.local_size = (
            int(env.get(key, fallback)) for key, fallback in (("RANK", 0), ("LOCAL_RANK", 0), ("LOCAL_SIZE", 1))
        )
        self.siblings: dict[int, tuple[int, int]] = {}
        self.names: Mapping[int, str] = {}
        self.look: Callable[[float], Report | None] = lambda now: None
        self.forgive: Callable[[float], None] = lambda gap: None
        self.end: Callable[[Report], None] = self._end_early
        self.stopped_s = STOPPED_S
        self._early = True
        # What was ignored from the start stays so (nohup, a shell's `&`); the kernel would queue it all the same.
        self._signals = [one for one in SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]
        self._forked = "LOCAL_RANK" not in process.environment_of(os.getpid())
        self._newest_at = time.monotonic()
        self._stopped_since: dict[int, float] = {}
        self._departed: dict[int, str] = {}
        self._judging = threading.Lock()
        self._first_farewell: Report | None = None
        self._blamed: int | None = None
        self._seen: set[tuple[int, int]] = set()
        self._launcher = os.getppid()
        self._runner = process.parent_of(self._launcher)
        self._farewells = Farewells(self._launcher, self.rank)
        self._caller = last_words.command_line()
        self._caller_ticks = process.start_ticks(self._caller[0]) if self._caller else None
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-watch", daemon=True)
        self._thread.start()

    def take_over(
        self,
        names: Mapping[int, str],
        look: Callable[[float], Report | None],
        forgive: Callable[[float], None],
        end: Callable[[Report], None],
    ) -> None:
        """The rank has a watchdog now: ``look`` and ``end`` are its."""
        self.names, self.look, self.forgive, self.end = names, look, forgive, end
        self._early = False

    def stop(self) -> None:
        """Look no more; call it before leaving."""
        self._finished.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def report(self, rank: int, cause: str, code: int = 1) -> Report:
        """What everybody is told: the rank to blame, its role, the cause, the exit code of the whole run."""
        return {"rank": rank, "role": self.names.get(rank, ""), "cause": cause, "code": code}

    def departure(self) -> Report | None:
        """Why a rank of this node has left or leaves; None when none does.

        The dead are looked for first and what they have said after that: whoever left by itself has been heard then.
        The first farewell decides, because its rank looked at the dead when there were fewer of them.
        """
        with self._judging:
            gone = [rank for rank in self.siblings if self._is_gone(rank)]
            for rank, report in self._farewells.receive():
                if rank != self.rank and self._first_farewell is None:
                    self._first_farewell = report
            if self._first_farewell is not None:
                return self._first_farewell
            for rank in gone:
                self._departed.setdefault(rank, self._how(rank))
            if self._departed and self._blamed is None:
                self._blamed = self._blame(self._departed)  # and stays so: who dies later is a consequence
            if self._blamed is None:
                return None
            pid, how = self.siblings[self._blamed][0], self._departed[self._blamed]
            return self.report(self._blamed, f"its process (pid {pid}) is gone: {how}")

    def say_farewell(self, report: Report) -> None:
        """Call it before this rank leaves early, whatever the reason."""
        ranks = range(self.rank - self.local_rank, self.rank - self.local_rank + self.local_size)
        self._farewells.send(report, (rank for rank in ranks if rank != self.rank))

    def lives(self, rank: int) -> bool:
        """Whether ``rank`` is a sibling whose process runs and is not stopped."""
        return rank in self.siblings and not self._is_gone(rank) and not process.is_stopped(self.siblings[rank][0])

    def _is_gone(self, rank: int) -> bool:
        pid, ticks = self.siblings[rank]
        return process.start_ticks(pid) != ticks or process.is_leaving(pid)

    def _how(self, rank: int) -> str:
        """How a process ended, for as long as its parent has not asked; one that is being taken apart is waited for."""
        pid, ticks = self.siblings[rank]
        deadline = time.monotonic() + TAKEN_APART_S
        while (how := process.how_it_ended(pid, ticks)) is None and process.start_ticks(pid) == ticks:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return how or "killed, or it left before the end"

    def _blame(self, departed: Mapping[int, str]) -> int:
        """One of those who died and said nothing: nobody of them ended itself.

        When a rank has died, the launcher ends the others with SIGTERM, from the lowest up: a rank that something else
        ended comes first, then one above a living one.
        """
        ranks = sorted(rank for rank in departed if ENDED_BY_LAUNCHER not in departed[rank]) or sorted(departed)
        below = {rank for rank in (*self.siblings, self.rank) if rank < ranks[-1]}
        return ranks[0] if below <= set(departed) else ranks[-1]

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # a rank that nobody watches would hear neither signals nor the others' end
            if not self._finished.is_set():
                self.end(self.report(self.rank, f"the watch of its node failed: {type(error).__name__}: {error}"))

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._finished.is_set():
            # With a time-out Python's sigtimedwait invents a signal when the process is stopped and continued in it.
            caught = signal.sigtimedwait(self._signals, 0)
            now = time.monotonic()
            if now - looked > STARVED_S:
                self._stopped_since.clear()
                self._newest_at = now
                self.forgive(now - looked)
            looked = now
            found = self.look(now) or self._look(now)
            if found is None and caught is not None:
                time.sleep(LOOK_S)  # the kernel sends it when the launcher dies, a moment before that can be seen
                found = self.look(now) or self._look(now) or self._explain(caught)
            if found is not None and not self._finished.is_set():
                self.end(found)
            self._finished.wait(LOOK_S)

    def _look(self, now: float) -> Report | None:
        if not self.siblings:
            missing = self._find_siblings(now)
            if missing is not None:
                return missing
        return self.departure() or self._stopped_sibling(now) or self._above()

    def _above(self) -> Report | None:
        """The command line, the deepspeed runner or its launcher is gone. Whatever happens to the command line takes
        the others along, so it comes first."""
        if self._caller_ticks is not None and self._caller and process.start_ticks(self._caller[0]) is None:
            return self._outside(f"the command line (pid {self._caller[0]})", GONE)
        if os.getppid() != self._launcher:
            return self._told() or self._outside(f"the deepspeed launcher (pid {self._launcher})", GONE)
        if self._runner not in (None, 0, 1) and process.parent_of(self._launcher) != self._runner:
            return self._told() or self._outside(f"the deepspeed runner (pid {self._runner})", GONE)
        return None

    def _told(self) -> Report | None:
        """The command line got a signal and has handed it on."""
        if self._caller is None:
            return None
        pid, words = self._caller
        noted = last_words.noted_signal(words)
        return self._outside(f"the command line (pid {pid})", noted) if noted else None

    def _outside(self, who: str, cause: str, code: int = 1) -> Report:
        """No rank is to blame: this one has only seen it."""
        return {**self.report(self.rank, cause, code), "who": who}

    def _find_siblings(self, now: float) -> Report | None:
        """All children that the launcher has ever had, once they are as many as its environment says."""
        if self.local_size < 2:
            return None
        before = len(self._seen)
        self._seen.update(process.children_of(self._launcher))
        if len(self._seen) > before:
            self._newest_at = now
        found = self._by_local_rank()
        if len(found) == self.local_size:
            first = self.rank - self.local_rank
            self.siblings = {first + place: one for place, one in found.items() if one[0] != os.getpid()}
        elif now - self._newest_at > ASSEMBLE_S:
            return self._incomplete()
        return None

    def _by_local_rank(self) -> dict[int, tuple[int, int]]:
        """Local rank -> (pid, start ticks), as far as it can be said: the launcher may have other children.

        Who has gone cannot be asked for its environment any more, nor can who was forked without exec; these fill the
        places that are left, in the order of their start.
        """
        found, mute = {}, []
        for ticks, pid in sorted(self._seen):
            local = process.environment_of(pid).get("LOCAL_RANK", "")
            if local.isdecimal():
                found[int(local)] = (pid, ticks)
            elif self._forked or process.start_ticks(pid) != ticks:
                mute.append((pid, ticks))
        free = [place for place in range(self.local_size) if place not in found]
        if len(mute) == len(free):
            found |= dict(zip(free, mute, strict=True))
        return found

    def _incomplete(self) -> Report | None:
        """Somebody left before this rank could see it."""
        found = self._by_local_rank()
        if len(found) == self.local_size:
            return None
        absent = [place for place in range(self.local_size) if place not in found]
        came = min(len(self._seen), self.local_size - 1)
        cause = f"only {came} of the {self.local_size} processes of this node came: one left at the start"
        certain = len(absent) == self.local_size - came
        return self.report(self.rank - self.local_rank + absent[0] if certain else -1, cause)

    def _stopped_sibling(self, now: float) -> Report | None:
        for rank, (pid, _) in self.siblings.items():
            if not process.is_stopped(pid):
                self._stopped_since.pop(rank, None)
            elif now - self._stopped_since.setdefault(rank, now) > self.stopped_s:
                return self.report(rank, f"no progress for {self.stopped_s:.0f} s: pid {pid} is stopped (SIGSTOP)")
        return None

    def _explain(self, caught: signal.struct_siginfo) -> Report:
        """A signal, and nobody is gone: the launcher hands on what it was told, a terminal speaks to all of them."""
        if not self.siblings and self.local_size > 1:  # the launcher sends it too, when somebody has left
            incomplete = self._incomplete()
            if incomplete is not None:
                return incomplete
        signum = signal.Signals(caught.si_signo)
        heard, code = last_words.HEARD[signum], 128 + int(signum)
        told = self._told()
        if told is not None:
            return {**told, "code": code}
        if caught.si_code == FROM_KERNEL or signum == signal.SIGHUP:
            return self._outside("the terminal", heard, code)
        if caught.si_pid == self._launcher:
            return self._outside(f"the deepspeed launcher (pid {self._launcher})", "it was told to end", code)
        return self.report(self.rank, heard, code)

    def _end_early(self, report: Report) -> None:
        """Before there is a watchdog. The launcher ends one process after the other, so nobody may take long."""
        if report["code"] == 1:
            self._finished.wait(GRACE_S)
        if self._finished.is_set() or not self._early:
            return  # it has been said, or the watchdog has come, which looks again
        report = self.departure() or report
        self.say_farewell(report)
        if report["code"] == 2 or "exit code 2 " in report["cause"]:  # a mistake in the config, said already
            os._exit(2)
        lowest = not any(self.lives(rank) for rank in self.siblings if rank < self.rank)
        last_words.say(report, None, loud=report["rank"] == self.rank or lowest)
        for pid, ticks in self.siblings.values():
            if process.is_stopped(pid):
                process.end(pid, ticks)
        os._exit(int(report["code"]) or 1)
