"""Locks between processes that survive the death of any of them: a robust mutex and futex events in the mapping.

The mutex is pthread's (robust, process-shared, error-checking): when its holder dies, the next one gets it and is told.

The events are **not** pthread condition variables. In glibc before 2.41 a signaller waits until every waiter that was
woken has left (`g_refs`), so a waiter that is killed while it waits, the most likely place for a rank to be killed,
makes a later broadcast hang for ever with the mutex held (seen with glibc 2.36 at the second such kill). An event here
is a 32-bit counter: waiters remember its value under the mutex and futex-wait for a change, wakers count up under the
mutex and wake all. No state can be left behind.

All times are CLOCK_MONOTONIC, so a jump of the wall clock changes nothing. Every blocking call releases the GIL.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time
from collections.abc import Callable

from recipe.process import start_ticks

_libc = ctypes.CDLL(None, use_errno=True)  # releases the GIL: for calls that may block
_quick = ctypes.PyDLL(None)  # keeps it: for calls that never block
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "riscv64": 98, "s390x": 238}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE, _EVERYONE = 0, 1, 0x7FFFFFFF
_PROCESS_SHARED, _ROBUST, _ERRORCHECK = 1, 1, 2
MUTEX_BYTES = 64  # room for pthread_mutex_t (40 on x86-64, 48 on aarch64)
SLICE_S = 1.0  # no wait sleeps longer than this without looking round


class _Timespec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_int64), ("nsec", ctypes.c_int64))

    @classmethod
    def of(cls, seconds: float) -> _Timespec:
        whole = int(seconds)
        return cls(whole, int((seconds - whole) * 1e9))


_libc.syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_long,
]
_libc.syscall.restype = ctypes.c_long
for _name in ("pthread_mutex_trylock", "pthread_mutex_unlock", "pthread_mutex_consistent"):
    getattr(_quick, _name).argtypes = [ctypes.c_void_p]
_clocklock = getattr(_libc, "pthread_mutex_clocklock", None)  # glibc 2.30; without it the slow path naps
if _clocklock is not None:
    _clocklock.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]


class LockTimeout(Exception):
    """The mutex was not to be had in time: its holder lives but does not run (stopped, or a debugger)."""


class LockHeldByMe(Exception):
    """This very thread already holds the mutex (a signal handler that calls into the ring, for example)."""


class RobustMutex:
    """A pthread mutex at a fixed address of a shared mapping. ``address`` must stay mapped while this is in use."""

    def __init__(self, address: int) -> None:
        self._address = address

    def initialise(self) -> None:
        """Makes the mutex; once, by the creator, before anybody else can see the mapping."""
        attributes = ctypes.create_string_buffer(64)
        _check(_libc.pthread_mutexattr_init(attributes), "pthread_mutexattr_init")
        _check(_libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED), "setpshared")
        _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST), "setrobust")
        _check(_libc.pthread_mutexattr_settype(attributes, _ERRORCHECK), "settype")
        _check(_libc.pthread_mutex_init(ctypes.c_void_p(self._address), attributes), "pthread_mutex_init")
        _libc.pthread_mutexattr_destroy(attributes)

    def acquire(self, limit_s: float, tick: Callable[[], None] | None = None) -> bool:
        """Takes the mutex; True if its last holder died with it (it is made consistent: judge the data, then go on).

        ``tick`` runs about every second of waiting and may raise. Raises LockTimeout after ``limit_s``, LockHeldByMe.
        """
        code = _quick.pthread_mutex_trylock(self._address)
        if code == errno.EBUSY:
            code = self._acquire_slowly(limit_s, tick)
        if code == 0:
            return False
        if code == errno.EDEADLK:
            raise LockHeldByMe
        if code == errno.EOWNERDEAD:
            _check(_quick.pthread_mutex_consistent(self._address), "pthread_mutex_consistent")
            return True
        raise OSError(code, f"pthread_mutex_lock: {os.strerror(code)}")

    def _acquire_slowly(self, limit_s: float, tick: Callable[[], None] | None) -> int:
        deadline = time.monotonic() + limit_s
        while True:
            until = min(deadline, time.monotonic() + SLICE_S)
            code = self._lock_until(until)
            if code != errno.ETIMEDOUT:
                return code
            if tick is not None:
                tick()
            if time.monotonic() >= deadline:
                raise LockTimeout

    def _lock_until(self, until: float) -> int:
        if _clocklock is not None:
            return _clocklock(self._address, time.CLOCK_MONOTONIC, ctypes.byref(_Timespec.of(until)))
        while (code := _quick.pthread_mutex_trylock(self._address)) == errno.EBUSY:
            if time.monotonic() >= until:
                return errno.ETIMEDOUT
            time.sleep(0.0005)
        return code

    def release(self) -> None:
        """Gives the mutex back. Raises OSError when this thread does not hold it."""
        _check(_quick.pthread_mutex_unlock(self._address), "pthread_mutex_unlock")


class Event:
    """A counter in the mapping on which processes sleep. ``word`` is its view, ``address`` where that lies."""

    def __init__(self, word: memoryview[int], address: int) -> None:
        if _FUTEX_CALL is None:
            raise OSError(errno.ENOSYS, f"no futex call number known for {platform.machine()}")
        self._word, self._address = word, address

    def value(self) -> int:
        return self._word[0]

    def advance(self) -> None:
        """Counts up, with the mutex held; whoever read the old value will not fall asleep on it."""
        self._word[0] = (self._word[0] + 1) & 0xFFFFFFFF

    def wake(self) -> None:
        """Wakes all sleepers; best after the mutex is given back."""
        _libc.syscall(_FUTEX_CALL, self._address, _FUTEX_WAKE, _EVERYONE, None, None, 0)

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleeps while the counter is ``seen``, at most ``timeout_s``. May wake for no reason: look again."""
        span = _Timespec.of(max(timeout_s, 0.0))
        _libc.syscall(_FUTEX_CALL, self._address, _FUTEX_WAIT, seen, ctypes.byref(span), None, 0)


def is_alive(pid: int, start: int) -> bool:
    """Whether the process that had this pid and start time still runs (a pid alone may have been given away again)."""
    return start_ticks(pid) == start


def _check(code: int, call: str) -> None:
    if code != 0:
        raise OSError(code, f"{call}: {os.strerror(code)}")
