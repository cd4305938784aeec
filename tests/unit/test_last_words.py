"""The last line of a run that dies, and what /proc tells about the dead; with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from recipe.roles import last_words, process
from recipe.roles.node_watch import NodeWatch

REPORT = {"rank": 2, "role": "drafter 0, node 0", "cause": "it is gone", "code": 1}


def fork(code: int | signal.Signals) -> tuple[int, int]:
    """A child that waits for a line, then ends so; its pid and the pipe that holds it back."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)
        if isinstance(code, signal.Signals):
            os.kill(os.getpid(), code)
        os._exit(code)
    os.close(read)
    return pid, write


@pytest.mark.parametrize(
    ("code", "words"), [(signal.SIGKILL, "killed by SIGKILL"), (0, "exit code 0 before"), (7, "exit code 7 before")]
)
def test_how_a_child_ended_is_told_until_its_parent_has_asked(code: int, words: str) -> None:
    pid, pipe = fork(code)
    ticks = process.start_ticks(pid)
    assert ticks is not None and process.how_it_ended(pid, ticks) is None
    assert (ticks, pid) in process.children_of(os.getpid())
    os.close(pipe)
    while process.start_ticks(pid) is not None:
        time.sleep(0.01)
    assert words in (process.how_it_ended(pid, ticks) or "")
    assert process.how_it_ended(pid, ticks + 1) is None, "another process had that pid"
    os.waitpid(pid, 0)
    assert process.how_it_ended(pid, ticks) is None


def test_the_line_names_rank_role_cause_and_log(tmp_path: Path) -> None:
    line = last_words.line(REPORT, tmp_path)
    assert line == f"the run ends because of rank 2 (drafter 0, node 0): it is gone; log: {tmp_path / 'train.log'}"
    assert "no log" in last_words.line(REPORT, None)
    assert last_words.line({**REPORT, "code": 2, "cause": "x = 3: no"}, tmp_path) == "error: x = 3: no"


def test_one_rank_speaks_into_the_command_lines_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tmp_path / "talk" / "words"
    words.parent.mkdir()
    monkeypatch.setenv(last_words.VARIABLE, f"{os.getpid()}:{words}")
    last_words.say(REPORT, None)
    last_words.say({**REPORT, "rank": 3}, None)
    assert words.read_text().count("rank") == 1 and "rank 2" in words.read_text()
    assert capsys.readouterr().err == ""
    dead, pipe = fork(0)
    os.close(pipe)
    os.waitpid(dead, 0)
    monkeypatch.setenv(last_words.VARIABLE, f"{dead}:{words}")
    last_words.say(REPORT, None)  # the command line was killed: straight to the terminal, and its folder goes
    assert "rank 2" in capsys.readouterr().err and not words.parent.exists()


def test_an_innocent_ranks_traceback_goes_to_the_log_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = RuntimeError("gloo: Connection reset by peer")
    assert last_words.is_of_a_lost_peer(error) and not last_words.is_of_a_lost_peer(ValueError("a bug"))
    last_words.keep_traceback(error, "rank 1 (target)", tmp_path, guilty=False)
    assert capsys.readouterr().err == "" and "reset by peer" in (tmp_path / "train.log").read_text()
    last_words.keep_traceback(error, "rank 1 (target)", tmp_path, guilty=True)
    assert "reset by peer" in capsys.readouterr().err


def launcher(ranks: int, scene: int) -> list[str]:
    """A launcher with ``ranks`` children that each keep a NodeWatch; what each of them found."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.close(read)
        for rank in range(ranks):
            if os.fork() == 0:
                life_of(rank, ranks, scene, write)
        time.sleep(30)
        os._exit(0)
    os.close(write)
    try:
        with os.fdopen(read) as lines:
            return sorted(lines.readline() for _ in range(ranks - 1))
    finally:
        for _, pid in process.children_of(parent):  # one of them may be stopped
            os.kill(pid, signal.SIGKILL)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)


def life_of(rank: int, ranks: int, scene: int, pipe: int) -> None:
    """Rank 1 is killed or stopped; the others say whom their watch blames."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), scene)
        time.sleep(30)
        os._exit(0)
    watch = NodeWatch({"RANK": str(4 + rank), "LOCAL_RANK": str(rank), "LOCAL_SIZE": str(ranks)})
    watch.stopped_s = 1.0

    def end(report: dict[str, object]) -> None:
        os.write(pipe, f"{report['rank']} {report['role']} {report['cause']}\n".encode())
        time.sleep(30)  # a rank that left would be the others' news

    watch.take_over({5: "drafter 1"}, lambda now: None, lambda gap: None, end)
    time.sleep(30)
    os._exit(0)


@pytest.mark.parametrize(("scene", "words"), [(signal.SIGKILL, "killed by SIGKILL"), (signal.SIGSTOP, "stopped")])
def test_a_sibling_is_found_without_any_store(scene: signal.Signals, words: str) -> None:
    """By being the launcher's child, by the order of start; rank 5 is local rank 1 of the second node."""
    for line in launcher(3, scene):
        assert line.startswith("5 drafter 1 ") and words in line, line


@pytest.mark.parametrize(
    ("dead", "blamed"),
    [
        ((2,), 2),
        ((0, 2), 2),  # rank 1 lives: the launcher, which ends the lowest first, has not come to rank 2 yet
        ((0, 1), 0),
        ((1, 2), 2),
    ],
)
def test_of_several_dead_the_one_is_blamed_that_the_launcher_did_not_end(dead: tuple[int, ...], blamed: int) -> None:
    sleepers = {rank: subprocess.Popen(["sleep", "60"]) for rank in range(3)}
    watch = NodeWatch({"RANK": "3", "LOCAL_RANK": "3", "LOCAL_SIZE": "1"})
    watch.stop()
    try:
        for rank, sleeper in sleepers.items():
            ticks = process.start_ticks(sleeper.pid)
            assert ticks is not None
            watch.siblings[rank] = (sleeper.pid, ticks)
        assert watch.dead_sibling() is None
        for rank in dead:
            sleepers[rank].kill()
            sleepers[rank].wait()
        report = watch.dead_sibling()
        assert report is not None and report["rank"] == blamed
    finally:
        for sleeper in sleepers.values():
            sleeper.kill()
            sleeper.wait()
