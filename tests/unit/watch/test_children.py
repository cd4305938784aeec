"""Children of a rank, which blocks SIGTERM, SIGINT and SIGHUP, hear them; the rank itself goes on blocking them."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import multiprocessing, os, signal, subprocess, sys, time
from recipe.process import free_children
BLOCKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

def masked(pid="self"):
    lines = open(f"/proc/{pid}/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("SigBlk")).split()[1], 16)

def report(pipe):
    pipe.send(masked())

def in_python(method):
    context = multiprocessing.get_context(method)
    ear, mouth = context.Pipe()
    child = context.Process(target=report, args=(mouth,))
    child.start()
    found = ear.recv()
    child.join()
    return found

def started(**how):
    text = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, **how).stdout
    return int(next(line for line in text.splitlines() if line.startswith("SigBlk")).split()[1], 16)

def spawned():
    pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ)
    found = masked(pid)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    return found

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    own = masked()
    assert own and started() == own, "nothing is tested: children are free anyhow"
    free_children(BLOCKED)
"""
CASES = {
    "subprocess": "started()",
    "subprocess in a folder, with open files": "started(close_fds=False, cwd='/')",
    "subprocess with a function": "started(preexec_fn=lambda: None)",
    "fork": "in_python('fork')",
    "spawn": "in_python('spawn')",
    "forkserver": "in_python('forkserver')",
    "posix_spawn": "spawned()",
}


def run(tmp_path, code: str) -> subprocess.CompletedProcess[str]:  # type: ignore[no-untyped-def]
    script = tmp_path / "rank.py"
    script.write_text(BEGIN + "".join(f"    {line}\n" for line in code.splitlines()))
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("case", CASES)
def test_a_child_is_free_and_the_rank_is_not(tmp_path, case: str) -> None:  # type: ignore[no-untyped-def]
    done = run(tmp_path, f"found = {CASES[case]}\nassert found == 0, hex(found)\nassert masked() == own")
    assert done.returncode == 0, done.stderr


def test_a_signal_that_waits_is_not_lost_to_a_child_that_starts(tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = "os.kill(os.getpid(), signal.SIGTERM)\nsubprocess.run(['true'])\n"
    code += "assert signal.sigtimedwait(BLOCKED, 0).si_signo == signal.SIGTERM\nprint('collected')"
    done = run(tmp_path, code)
    assert done.returncode == 0 and done.stdout == "collected\n", done.stderr
