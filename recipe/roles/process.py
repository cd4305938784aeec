"""Facts about processes from /proc: is this the same live process, who is its parent. Zombies count as dead."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def start_ticks(pid: int) -> int | None:
    """Start time of ``pid`` in clock ticks since boot, or None when it is gone or a zombie.

    `kill(pid, 0)` is true for zombies and for a recycled pid; the start time tells them apart.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped (SIGSTOP, a debugger)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def parent_of(pid: int) -> int | None:
    """Parent pid, or None when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return None


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent (the launcher) dies, however it dies; the watchdog then says so."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def end(pid: int, ticks: int) -> None:
    """SIGKILL the process that had this pid and start time; nothing when it is gone."""
    if start_ticks(pid) == ticks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
