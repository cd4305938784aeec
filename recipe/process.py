"""Facts about processes from /proc: is this the same live process, who is its parent. Zombies count as dead.

`ProcessId` names one so that another can tell later whether it still lives.
"""

from __future__ import annotations

import _posixsubprocess
import contextlib
import ctypes
import functools
import hashlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Liveness = Literal["alive", "stopped", "gone", "rebooted", "unknown"]

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
#: PF_EXITING, PF_POSTCOREDUMP, PF_DUMPCORE, PF_SIGNALED of the kernel's include/linux/sched.h
LEAVING_FLAGS = 0x4 | 0x8 | 0x200 | 0x400


def _stat(pid: int, thread: int | None = None) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the state letter on (field 3 of proc(5) is the first here)."""
    try:
        with open(f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def start_ticks(pid: int) -> int | None:
    """Start time of ``pid`` in clock ticks since boot, or None when it is gone or a zombie.

    `kill(pid, 0)` is true for zombies and for a recycled pid; the start time tells them apart.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] in (b"Z", b"X") else int(fields[19])


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped (SIGSTOP, a debugger)."""
    fields = _stat(pid)
    return fields is not None and fields[0] in (b"T", b"t")


def is_leaving(pid: int) -> bool:
    """Whether the kernel takes the process apart (killed, crashed, exiting) while it is not a zombie yet.

    Its connections are closed some time before that: a second and more with tens of GB of memory or with a GPU.
    """
    fields = _stat(pid)
    return fields is not None and bool(int(fields[6]) & LEAVING_FLAGS)


def work_of_thread(thread: int) -> tuple[int, int]:
    """What a thread of this process has done so far: (clock ticks on a CPU, its children's included; bytes read and
    written). Neither grows while it sleeps, waits for a lock or for a disk that does not answer."""
    folder = Path(f"/proc/self/task/{thread}")
    fields = _stat(os.getpid(), thread)
    ticks = sum(map(int, fields[11:15])) if fields else 0  # utime, stime, and those of children that have ended
    with contextlib.suppress(OSError):  # a kernel without CONFIG_PROC_CHILDREN
        for child in (folder / "children").read_text().split():
            ticks += sum(map(int, (_stat(int(child)) or [])[11:15]))
    count = 0
    with contextlib.suppress(OSError):
        lines = (folder / "io").read_text().splitlines()
        count = sum(int(line.split()[1]) for line in lines if line.startswith(("rchar:", "wchar:")))
    return ticks, count


def boot_id() -> str:
    """Identifies this boot of this kernel; empty where /proc does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Identifies the pid namespace (the container); empty where /proc does not say."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def parent_of(pid: int) -> int | None:
    """Parent pid, or None when the process is gone."""
    fields = _stat(pid)
    return None if fields is None else int(fields[1])


def how_it_ended(pid: int, ticks: int) -> str | None:
    """How a process ended, while its parent has not asked yet (it is a zombie); None when nobody can say any more."""
    fields = _stat(pid)
    if fields is None or fields[0] != b"Z" or int(fields[19]) != ticks or len(fields) < 50:
        return None
    status = int(fields[49])  # 0 also when the kernel does not show it to us, so only a signal or a code is certain
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return f"killed by {name}" + (" (by somebody, or by the kernel for want of memory)" if number == 9 else "")
    return f"it left with exit code {os.waitstatus_to_exitcode(status)} before the end"


def children_of(parent: int) -> list[tuple[int, int]]:
    """(start ticks, pid) of the children of ``parent``, zombies too: sorted, they are in the order of their start."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        fields = _stat(pid)
        if fields is not None and int(fields[1]) == parent:
            found.append((int(fields[19]), pid))
    return found


def environment_of(pid: int) -> dict[str, str]:
    """The environment with which a process was started; empty when it may not be read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent (the launcher) dies, however it dies; the watchdog then says so."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def free_children(signals: tuple[signal.Signals, ...]) -> None:
    """From now on children do not inherit that this process blocks ``signals``: forked ones, and those that Python
    starts (subprocess, multiprocessing, posix_spawn; so git, compilers and W&B's service). C code that forks by itself
    is not reached.

    A started child has the mask of the thread that starts it, which is open for that moment. While a signal waits to be
    collected it stays shut: this process ends in any case, and must be able to say why.
    """

    def opened(start: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(start)
        def with_open_mask(*args: Any, **kwargs: Any) -> Any:
            if signal.sigpending() & set(signals):
                return start(*args, **kwargs)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
            try:
                return start(*args, **kwargs)
            finally:
                signal.pthread_sigmask(signal.SIG_BLOCK, signals)

        return with_open_mask

    os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, signals))
    subprocess._fork_exec = _posixsubprocess.fork_exec = opened(_posixsubprocess.fork_exec)  # type: ignore[attr-defined]
    os.posix_spawn, os.posix_spawnp = opened(os.posix_spawn), opened(os.posix_spawnp)


def secret_of(pid: int) -> bytes:
    """What only this user (and root) can know of a live process: where the kernel has put its stack and libraries
    (/proc/PID/auxv), as 32 bytes. The same for all who ask; empty where it may not be read."""
    try:
        return hashlib.sha256(Path(f"/proc/{pid}/auxv").read_bytes()).digest()
    except OSError:
        return b""


def adopt_orphans() -> None:
    """From now on descendants whose parents die become children of this process, which can wait for them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def wait_for_children(but: set[int], limit_s: float) -> bool:
    """Wait until this process has no child left ``but`` those; False when it still has after ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    while left := {pid for _, pid in children_of(os.getpid())} - but:
        if time.monotonic() > deadline:
            return False
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)
    return True


def end(pid: int, ticks: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Send ``signum`` to the process that had this pid and start time; nothing when it is gone."""
    if start_ticks(pid) == ticks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


@dataclass(frozen=True)
class ProcessId:
    """A pid is reused, so it counts only together with its start time (clock ticks), boot and pid namespace."""

    pid: int
    start: int
    boot_id: str
    pid_namespace: str
    host: str
    rank: int | None = None
    role: str | None = None

    @classmethod
    def own(cls, rank: int | None = None, role: str | None = None) -> ProcessId:
        """The calling process. ``rank`` and ``role`` let the status name it when it dies."""
        pid = os.getpid()
        return cls(pid, start_ticks(pid) or 0, boot_id(), pid_namespace(), socket.gethostname(), rank, role)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ProcessId:
        """The inverse of `to_dict`. Raises KeyError or TypeError if something is missing."""
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def same_machine(self) -> bool:
        """Whether this reader shares kernel and pid numbers with the process."""
        return self.boot_id == boot_id() and self.pid_namespace == pid_namespace()

    def liveness(self) -> Liveness:
        """``unknown`` on another machine or in another container; ``rebooted`` when our host has restarted since."""
        if not self.same_machine():
            rebooted = self.host == socket.gethostname() and self.boot_id != boot_id()
            return "rebooted" if rebooted and self.host != "localhost" else "unknown"
        if start_ticks(self.pid) != self.start:
            return "gone"
        return "stopped" if is_stopped(self.pid) else "alive"

    def __str__(self) -> str:
        who = f"rank {self.rank} ({self.role}), " if self.rank is not None else ""
        return f"{who}pid {self.pid} on {self.host}"
