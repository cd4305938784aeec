"""Naming a process so that another one can tell, later, whether it still lives."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Liveness = Literal["alive", "stopped", "gone", "rebooted", "unknown"]


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
        stat = _stat(pid)
        return cls(pid, stat[1] if stat else 0, boot_id(), _namespace(), socket.gethostname(), rank, role)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ProcessId:
        """The inverse of `to_dict`. Raises KeyError or TypeError if something is missing."""
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def same_machine(self) -> bool:
        """Whether this reader shares kernel and pid numbers with the process."""
        return self.boot_id == boot_id() and self.pid_namespace == _namespace()

    def liveness(self) -> Liveness:
        """``unknown`` on another machine or in another container; ``rebooted`` when our host has restarted since."""
        if not self.same_machine():
            rebooted = self.host == socket.gethostname() and self.boot_id != boot_id()
            return "rebooted" if rebooted and self.host != "localhost" else "unknown"
        stat = _stat(self.pid)
        if stat is None or stat[1] != self.start or stat[0] in "ZX":
            return "gone"
        return "stopped" if stat[0] == "T" else "alive"

    def __str__(self) -> str:
        who = f"rank {self.rank} ({self.role}), " if self.rank is not None else ""
        return f"{who}pid {self.pid} on {self.host}"


def boot_id() -> str:
    """Identifies this boot of this kernel; empty where /proc does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time of a process, or None. The name in the second field may hold spaces and ')'."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])
