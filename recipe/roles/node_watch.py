"""One thread per rank that looks at this node from the rank's first moment: siblings, launcher, runner, signals.

It needs nothing but /proc and the launcher's environment, so it runs before torch is imported and before the control
store is reached: a rank that dies while the others still import or connect is noticed as well. The siblings are the
launcher's children; it starts them in the order of their local ranks. Once the rank has a `Watchdog`, that decides what
a finding means; until then the finding ends the process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from recipe.roles import last_words, process

LOOK_S = 0.2
STOPPED_S = 10.0  # a sibling in state T (stopped) for this long is hung
STARVED_S = 5.0  # a look that comes this late: this very process was stopped (Ctrl-Z) or starved
GRACE_S = 0.5  # before the store is reached: for the first rank, to say a mistake in the config before it is ended
ASSEMBLE_S = 60.0  # all siblings must have been seen alive at once by then
SIGNALS = (signal.SIGTERM, signal.SIGINT)

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
        self._started = time.monotonic()
        self._stopped_since: dict[int, float] = {}
        self._departed: dict[int, str] = {}
        self._seen: set[tuple[int, int]] = set()
        self._launcher = os.getppid()
        self._runner = process.parent_of(self._launcher)
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

    def dead_sibling(self) -> Report | None:
        """A rank of this node whose process is gone. Of several at once the one to blame: when a rank has died, the
        launcher ends the others from the lowest up, so a dead rank above a living one was not ended by it."""
        gone = sorted(rank for rank, (pid, ticks) in self.siblings.items() if process.start_ticks(pid) != ticks)
        if not gone:
            return None
        below = {rank for rank in (*self.siblings, self.rank) if rank < gone[-1]}
        rank = gone[0] if below <= set(gone) else gone[-1]
        pid, ticks = self.siblings[rank]
        how = self._departed.setdefault(rank, process.how_it_ended(pid, ticks) or "killed, or it left before the end")
        return self.report(rank, f"its process (pid {pid}) is gone: {how}")

    def lives(self, rank: int) -> bool:
        """Whether ``rank`` is a sibling whose process runs and is not stopped."""
        pid, ticks = self.siblings.get(rank, (0, -1))
        return process.start_ticks(pid) == ticks and not process.is_stopped(pid)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._finished.is_set():
            caught = signal.sigtimedwait(SIGNALS, LOOK_S)
            now = time.monotonic()
            if now - looked > STARVED_S:
                self._stopped_since.clear()
                self.forgive(now - looked)
            looked = now
            found = self.look(now) or self._look(now)
            if found is None and caught is not None:
                time.sleep(LOOK_S)  # the kernel sends it when the launcher dies, a moment before that can be seen
                found = self.look(now) or self._look(now) or self._explain(signal.Signals(caught.si_signo))
            if found is not None and not self._finished.is_set():
                self.end(found)

    def _look(self, now: float) -> Report | None:
        if not self.siblings:
            missing = self._find_siblings(now)
            if missing is not None:
                return missing
        gone = self.dead_sibling() or self._stopped_sibling(now)
        if gone is not None:
            return gone
        if os.getppid() != self._launcher:
            return self.report(self.rank, "the deepspeed launcher above it died")
        if self._runner not in (None, 0, 1) and process.parent_of(self._launcher) != self._runner:
            return self.report(self.rank, "the deepspeed runner above its launcher died")
        return None

    def _find_siblings(self, now: float) -> Report | None:
        """All children that the launcher has ever had, once they are as many as its environment says."""
        if self.local_size < 2:
            return None
        self._seen.update(process.children_of(self._launcher))
        if len(self._seen) > self.local_size:  # a helper process of the launcher's
            self._seen = {child for child in self._seen if "LOCAL_RANK" in process.environment_of(child[1])}
        if len(self._seen) == self.local_size:
            first = self.rank - self.local_rank
            self.siblings = {
                first + place: (pid, ticks)
                for place, (ticks, pid) in enumerate(sorted(self._seen))
                if pid != os.getpid()
            }
        elif now - self._started > ASSEMBLE_S:
            return self._incomplete()
        return None

    def _incomplete(self) -> Report | None:
        """Somebody left before this rank could see it."""
        if len(self._seen) >= self.local_size:
            return None
        there = {process.environment_of(pid).get("LOCAL_RANK") for _, pid in self._seen}
        absent = [place for place in range(self.local_size) if str(place) not in there]
        cause = f"only {len(self._seen)} of the {self.local_size} processes of this node came: one left at the start"
        certain = len(absent) == self.local_size - len(self._seen)
        return self.report(self.rank - self.local_rank + absent[0] if certain else -1, cause)

    def _stopped_sibling(self, now: float) -> Report | None:
        for rank, (pid, _) in self.siblings.items():
            if not process.is_stopped(pid):
                self._stopped_since.pop(rank, None)
            elif now - self._stopped_since.setdefault(rank, now) > self.stopped_s:
                return self.report(rank, f"no progress for {self.stopped_s:.0f} s: pid {pid} is stopped (SIGSTOP)")
        return None

    def _explain(self, signum: signal.Signals) -> Report:
        if not self.siblings and self.local_size > 1:  # the launcher sends it too, when somebody has left
            incomplete = self._incomplete()
            if incomplete is not None:
                return incomplete
        who = "interrupted (Ctrl-C)" if signum == signal.SIGINT else "it was told to end (SIGTERM)"
        return self.report(self.rank, who, 128 + int(signum))

    def _end_early(self, report: Report) -> None:
        """Before there is a watchdog. The launcher ends one process after the other, so nobody may take long."""
        if report["code"] == 1:
            self._finished.wait(GRACE_S)
        if self._finished.is_set() or not self._early:
            return  # it has been said, or the watchdog has come, which looks again
        if "exit code 2 " in report["cause"]:  # a mistake in the config, said already
            os._exit(2)
        if report["rank"] == self.rank or not any(self.lives(rank) for rank in self.siblings if rank < self.rank):
            last_words.say(report, None)
        for pid, ticks in self.siblings.values():
            if process.is_stopped(pid):
                process.end(pid, ticks)
        os._exit(int(report["code"]) or 1)
