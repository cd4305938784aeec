"""Mutual exclusion, waiting and death: every access to a ring's tables goes through a `Section` of its `Monitor`.

The rule for a holder that dies: an update marks the header (W_DIRTY) before its first write and clears the mark after
its last. If the mutex comes back from a dead holder unmarked, the tables are whole and work goes on. If it is marked,
or an exception leaves an update half done, the ring is aborted with the reason: never silent corruption.

The rule for a peer that dies without `close`: the first waiter that notices (waiters look every second) aborts the ring
and names the peer and what it held. A run does not go on without one of its ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from recipe.errors import RunError
from recipe.process import start_ticks
from recipe.ring import layout as L
from recipe.ring.segment import Segment
from recipe.ring.sync import SLICE_S, Event, LockHeldByMe, LockTimeout, RobustMutex, is_alive
from recipe.ring.table import Table
from recipe.ring.tickets import RingAborted, RingTimeout

Result = TypeVar("Result")
OnWait = Callable[[str, float], None]
STARVED_S = 4.0  # a look that comes this much later than SLICE_S: this process did not run meanwhile
UPDATES = ("register", "reserve", "join", "commit", "finish", "lease", "release", "close")


class Section:
    """Holds the mutex for a ``with`` block. ``begin`` before the first write; ``notify`` wakes waiters on the way out.

    ``account``: header word to which the wait that follows is charged.
    """

    __slots__ = ("_monitor", "_wakes", "account")

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._wakes: list[Event] = []
        self.account = -1

    def __enter__(self) -> Section:
        self._monitor.acquire()
        return self

    def begin(self, update: str) -> None:
        """From here until the end of the block the tables may disagree."""
        self._monitor.words[L.W_DIRTY] = 1 + UPDATES.index(update)

    def notify(self, event: int) -> None:
        self._wakes.append(self._monitor.events[event])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        words = self._monitor.words
        if kind is not None and words[L.W_DIRTY]:
            what = UPDATES[words[L.W_DIRTY] - 1]
            self._monitor.set_abort(
                f"pid {os.getpid()} was interrupted in the middle of {what!r}: {kind.__name__} {error}"
            )
            self._wakes = list(self._monitor.events)
        for event in self._wakes:
            event.advance()
        words[L.W_DIRTY] = 0
        self._monitor.mutex.release()
        for event in self._wakes:
            event.wake()


class Monitor:
    """The lock, the events and the peers of one attached ring."""

    def __init__(self, segment: Segment, table: Table, on_wait: OnWait | None, lock_timeout_s: float) -> None:
        self.segment, self.table = segment, table  # the segment keeps the addresses below mapped
        self.views, self.words = segment.views, segment.views.words
        self._on_wait, self._lock_timeout_s = on_wait, lock_timeout_s
        self.mutex = RobustMutex(segment.address + L.OFFSET_MUTEX)
        self.events = []
        for index in range(L.N_EVENTS):
            at = L.OFFSET_EVENTS + index * L.ALIGN
            self.events.append(Event(self.views.raw[at : at + 4].cast("I"), segment.address + at))
        self._pid, self._peer = 0, -1

    @property
    def peer(self) -> int:
        """This process's slot in the peer table; a forked child gets its own with its first call."""
        if os.getpid() != self._pid:
            self._register()
        return self._peer

    def acquire(self) -> None:
        """Takes the mutex. Raises RingAborted, or RingTimeout when the holder lives but does not run."""
        try:
            holder_died = self.mutex.acquire(self._lock_timeout_s, self._tick_in_lock)
        except LockTimeout:
            holder = self.words[L.W_HOLDER]
            raise RingTimeout(
                f"pid {holder} has held the ring's lock for {self._lock_timeout_s:g} s without dying: is it stopped?"
            ) from None
        except LockHeldByMe:
            raise RunError("the ring was called from inside one of its own calls (a signal handler?)") from None
        if holder_died and self.words[L.W_DIRTY]:
            what = UPDATES[self.words[L.W_DIRTY] - 1]
            self.set_abort(f"pid {self.words[L.W_HOLDER]} died in the middle of {what!r}")
            self.words[L.W_DIRTY] = 0
            self._shout()
        if self.words[L.W_ABORTED]:
            self.mutex.release()
            raise RingAborted(self.reason() or "")
        self.words[L.W_HOLDER] = os.getpid()

    def wait(
        self, event: int, attempt: Callable[[Section], Result | None], what: Callable[[], str], timeout: float | None
    ) -> Result:
        """Calls ``attempt`` with the mutex held, now and after each ``event``, until it returns something.

        ``what()`` describes what is missing. Raises RingTimeout after ``timeout`` seconds (None: never), RingAborted.
        Time in which this very process was stopped (Ctrl-Z) does not count: the others were too, or will be missed.
        """
        start = looked = waiting_since = time.monotonic()
        account, stopped = -1, 0.0
        while True:
            with Section(self) as section:
                now = time.monotonic()
                if account >= 0:
                    self.words[account] += int((now - waiting_since) * 1e9)
                late = now - waiting_since - SLICE_S
                stopped += late if late > STARVED_S else 0.0
                result = attempt(section)
                if result is not None:
                    return result
                account, waiting_since = section.account, now
                seen = self.events[event].value()
            left = SLICE_S if timeout is None else start + stopped + timeout - now
            if left <= 0:
                raise RingTimeout(f"waited {now - start:.1f} s for {what()}; {self.describe()}")
            if now - looked >= SLICE_S:
                looked = now
                self.look_round(what, now - start)
            self.events[event].wait(seen, min(SLICE_S, left))

    def look_round(self, what: Callable[[], str], waited_s: float) -> None:
        """The once-a-second duties of a waiter: are all peers alive, and the caller's own callback."""
        v = self.views
        for slot in range(L.MAX_PEERS):
            if v.peer_state[slot] != L.P_ATTACHED or v.peer_pid[slot] == self._pid:
                continue
            pid, start = v.peer_pid[slot], v.peer_start[slot]
            if is_alive(pid, start):
                continue
            with Section(self):
                if (v.peer_state[slot], v.peer_pid[slot], v.peer_start[slot]) == (L.P_ATTACHED, pid, start):
                    held = self.table.held_by(slot)
                    rest = f" and {len(held) - 4} more" if len(held) > 4 else ""
                    doing = f"; it {', '.join(held[:4])}{rest}" if held else ""
                    self.set_abort(f"pid {pid} died without closing the ring{doing}")
                    self._shout()
        if self._on_wait is not None:
            self._on_wait(what(), waited_s)

    def abort(self, reason: str) -> None:
        """Aborts the ring, even when the mutex is stuck, and from inside a signal handler. The first reason stays."""
        locked = True
        try:
            self.mutex.acquire(SLICE_S)
        except (LockTimeout, LockHeldByMe):
            locked = False
        self.set_abort(reason)
        self._shout()
        if locked:
            self.mutex.release()

    def set_abort(self, reason: str) -> None:
        """Marks the ring as aborted; the flag is written last."""
        if not self.words[L.W_ABORTED]:
            self.views.set_text(L.OFFSET_REASON, L.REASON_BYTES, reason)
            self.words[L.W_ABORTED] = 1

    def reason(self) -> str | None:
        """Why the ring was aborted, or None."""
        return self.views.text(L.OFFSET_REASON, L.REASON_BYTES) if self.words[L.W_ABORTED] else None

    def describe(self) -> str:
        """Who holds what, for the message of a time-out."""
        w, v, lines = self.words, self.views, []
        for slot in range(L.MAX_PEERS):
            if v.peer_state[slot] == L.P_ATTACHED and (held := self.table.held_by(slot)):
                lines.append(f"pid {v.peer_pid[slot]} {', '.join(held[:3])}{' …' if len(held) > 3 else ''}")
        states = ", ".join(f"{w[L.W_STATE0 + s]} {name}" for s, name in enumerate(L.STATES) if s)
        who = "; ".join(lines) or "nobody holds an entry"
        return (
            f"next batch {w[L.W_NEXT_BATCH]}, {w[L.W_FREE_PAGES]} of {self.table.spec.n_pages} pages free, "
            f"entries: {states}; {who}"
        )

    def leave(self) -> None:
        """Takes this process off the peer table. Leaving with an open write or lease aborts the ring."""
        if os.getpid() != self._pid or self.words[L.W_ABORTED]:
            return
        with Section(self) as section:
            if held := self.table.held_by(self._peer):
                self.set_abort(f"pid {self._pid} closed the ring although it {', '.join(held[:4])}")
                self._shout()
            section.begin("close")
            self.views.peer_state[self._peer] = L.P_FREE

    def _register(self) -> None:
        v, pid = self.views, os.getpid()
        with Section(self) as section:
            free = next((slot for slot in range(L.MAX_PEERS) if v.peer_state[slot] == L.P_FREE), None)
            if free is None:
                raise RunError(f"the ring already has {L.MAX_PEERS} processes")
            section.begin("register")
            v.peer_pid[free], v.peer_start[free] = pid, start_ticks(pid) or 0
            v.peer_parts[free], v.peer_state[free] = 0, L.P_ATTACHED
            self._pid, self._peer = pid, free

    def _tick_in_lock(self) -> None:
        if self.words[L.W_ABORTED]:
            raise RingAborted(self.reason() or "")
        if self._on_wait is not None:
            self._on_wait("the ring's lock", SLICE_S)

    def _shout(self) -> None:
        for event in self.events:
            event.advance()
            event.wake()
