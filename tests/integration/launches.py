"""Starting, aiming at and judging launches: with the fork server (seconds) or for real (imports and all)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "TORCH_CPP_LOG_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}  # fmt: skip


@dataclass
class Launch:
    """One `python -m recipe train …`: its processes, its output and how it ended."""

    session: int
    folder: Path
    started: float = field(default_factory=time.monotonic)
    process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> str:
        path = self.folder / "output"
        return path.read_text(errors="replace") if path.exists() else ""

    def pid(self, name: str, timeout_s: float = 60.0) -> int:
        """Pid of ``cli``, ``runner``, ``launcher`` or ``rankN``; waits until it is there."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self.process is not None:
                found = real_processes(self.session).get(name)
            else:
                path = self.folder / name
                found = int(path.read_text() or 0) if path.exists() else 0
            if found:
                return found
            assert time.monotonic() < deadline and self.code() is None, f"no {name}: {self.output[-3000:]}"
            time.sleep(0.02)

    def code(self) -> int | None:
        """Exit code of the command line, None while it runs."""
        if self.process is not None:
            return self.process.poll()
        path = self.folder / "output.rc"
        return int(path.read_text()) if path.exists() and path.read_text() else None

    def struck_at(self) -> float | None:
        """Wall-clock second at which the planted death came."""
        path = self.folder / "struck"
        return float(path.read_text()) if path.exists() and path.read_text() else None

    def wait_for(self, text: str, timeout_s: float = 180.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert time.monotonic() < deadline and self.code() is None, f"no {text!r}: {self.output[-3000:]}"
            time.sleep(0.02)

    def alive(self) -> list[int]:
        return members(self.session)

    def wait(self, timeout_s: float) -> int | None:
        """Exit code once every process of the launch is gone; None (and everything killed) when that takes longer."""
        deadline = time.monotonic() + timeout_s
        while self.alive() or self.code() is None:
            if time.monotonic() > deadline:
                self.clear()
                return None
            time.sleep(0.02)
        return self.code()

    def clear(self) -> None:
        """End what is left of this launch."""
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def members(session: int) -> list[int]:
    """Live processes of a session (zombies do not count)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(path.parent.name))
    return found


def real_processes(session: int) -> dict[str, int]:
    """Names of a real launch's processes by their command lines."""
    found = {}
    for pid in members(session):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        local = next((word.removeprefix("--local_rank=") for word in words if word.startswith("--local_rank=")), None)
        if local is not None and "deepspeed.launcher.launch" not in words:
            found[f"rank{local}"] = pid
        elif "deepspeed.launcher.launch" in words:
            found["launcher"] = pid
        elif any(word.endswith("/deepspeed") for word in words[:2]):
            found["runner"] = pid
        elif "recipe" in words:
            found["cli"] = pid
    return found


class ForkServer:
    """Client of `tests/integration/fork_server.py`."""

    def __init__(self, log: Path) -> None:
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.fork_server"],
                cwd=REPOSITORY, env={**os.environ, **ENVIRONMENT}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, text=True,
            )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", log.read_text()

    def launch(self, folder: Path, argv: list[str], **environment: Any) -> Launch:
        """Start one. ``environment`` values that are no strings become JSON."""
        folder.mkdir(parents=True)
        values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in environment.items()}
        request = {
            "argv": argv, "output": str(folder / "output"), "env": {"FORK_SERVER_PIDS": str(folder), **values},
        }  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Launch(int(self._process.stdout.readline()), folder)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


@contextlib.contextmanager
def fork_server(log: Path) -> Iterator[ForkServer]:
    server = ForkServer(log)
    try:
        yield server
    finally:
        server.close()


def real_launch(folder: Path, argv: list[str]) -> Launch:
    """The same command as a user would type it."""
    folder.mkdir(parents=True)
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "recipe", *argv], cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's `&` ignores it, for all below
        )  # fmt: skip
    return Launch(process.pid, folder, process=process)
