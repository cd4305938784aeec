"""Several nodes on one machine, without the price of imports: forks every node's DeepSpeed launcher, as a runner would.

`python -m tests.integration.nodes` imports everything once and reads one JSON object a line: ``{"folder": …, "port": …,
"argv": […], "hide": FOLDER or null}``. Per node it forks `deepspeed.launcher.launch` with the runner's arguments and
``argv`` for recipe/train.py; output and exit code go to FOLDER/nodeN/output and FOLDER/nodeN/rc. ``hide``: node 1 gets
an empty file system of its own there, as a node without the shared folder would see it (root only).
"""

from __future__ import annotations

import base64
import ctypes
import gc
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.fork_server import PRELOAD, ForkingPopen, as_after_exec, leave_with
from tests.integration.launches import ENVIRONMENT, REPOSITORY, members

NODES, LOCAL = 2, 2
_CLONE_NEWNS, _MS_REC_PRIVATE = 0x00020000, 0x4000 | 1 << 18


@dataclass
class NodeLaunch:
    """One launch over two "nodes"."""

    folder: Path
    pids: list[int]

    def output(self, node: int) -> str:
        return (self.folder / f"node{node}" / "output").read_text(errors="replace")

    def rank(self, node: int, local: int) -> int:
        return int((self.folder / f"node{node}" / f"rank{local}").read_text())

    def wait_for(self, pattern: str, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.output(0), re.M):
            assert time.monotonic() < deadline and not self.codes(), self.output(0)[-3000:] + self.output(1)[-3000:]
            time.sleep(0.02)

    def codes(self) -> list[int]:
        """Exit codes of the nodes that have ended."""
        files = [self.folder / f"node{node}" / "rc" for node in range(NODES)]
        return [int(file.read_text()) for file in files if file.exists() and file.read_text()]

    def alive(self) -> list[int]:
        return [pid for session in self.pids for pid in members(session)]

    def wait(self, timeout_s: float) -> list[int]:
        """Exit codes by node, once every process is gone; kills and fails when that takes longer."""
        deadline = time.monotonic() + timeout_s
        while self.alive() or len(self.codes()) < NODES:
            if time.monotonic() > deadline:
                left = self.alive()
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"still there after {timeout_s} s: {left}\n{self.output(0)}\n{self.output(1)}")
            time.sleep(0.05)
        return self.codes()


class Nodes:
    """Client of the process that forks nodes."""

    def __init__(self, log: Path, **environment: str) -> None:
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.nodes"], cwd=REPOSITORY,
                env={**os.environ, **ENVIRONMENT, **environment},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", log.read_text()

    def launch(self, folder: Path, *argv: str, hide: Path | None = None) -> NodeLaunch:
        for node in range(NODES):
            (folder / f"node{node}").mkdir(parents=True)
            (folder / f"node{node}" / "output").touch()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        request = {"folder": str(folder), "port": port, "argv": argv, "hide": str(hide) if hide else None}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return NodeLaunch(folder, json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def start_node(node: int, request: dict[str, Any]) -> int:
    """Fork what the runner starts on one node. Returns its pid, which is its session too."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if os.fork():  # stays above the launcher, as an ssh session does, and writes down how it ended
        _, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        (Path(request["folder"]) / f"node{node}" / "rc").write_text(str(code))
        os._exit(0)
    folder = Path(request["folder"]) / f"node{node}"
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd in (1, 2):
        os.dup2(output, fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if request["hide"] and node == 1:
        hide(request["hide"])
    as_after_exec({**os.environ, "FORK_SERVER_PIDS": str(folder)}, None, None)
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    world = base64.urlsafe_b64encode(json.dumps({f"node{n}": list(range(LOCAL)) for n in range(NODES)}).encode())
    sys.argv = [
        "launch", f"--world_info={world.decode()}", f"--node_rank={node}", "--master_addr=127.0.0.1",
        f"--master_port={request['port']}", str(REPOSITORY / "recipe" / "train.py"), *request["argv"],
    ]  # fmt: skip
    leave_with(importlib.import_module("deepspeed.launcher.launch").main)
    return 0


def hide(folder: str) -> None:
    """An empty file system in place of ``folder``, for this process and its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = [
        libc.unshare(_CLONE_NEWNS),
        libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None),
        libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=1m"),
    ]
    assert done == [0, 0, 0], os.strerror(ctypes.get_errno())


def serve() -> None:
    """Start what is asked for, until standard input is closed."""
    from recipe.target.cpu_kernels import use_torch_kernels_on_cpu

    use_torch_kernels_on_cpu()  # hides fla, before anything imports it
    for module in PRELOAD:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended nodes leave no zombies
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps([start_node(node, request) for node in range(NODES)]), file=answers, flush=True)


if __name__ == "__main__":
    serve()
