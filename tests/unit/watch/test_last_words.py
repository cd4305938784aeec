"""The last line of a run that dies, and what /proc tells about the dead; with real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from recipe import process
from recipe.config.load import load_config_text
from recipe.run import train_cli
from recipe.tell.run_dir import RunDir
from recipe.tell.status import StatusWriter
from recipe.watch import last_words
from recipe.watch.farewell import Farewells
from recipe.watch.node_watch import NodeWatch

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
            if (scene or rank != 1) and os.fork() == 0:
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


def test_who_left_before_anybody_looked_is_missed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """With exit code 0, which the launcher takes for a good end: nobody is told, and no trace is left."""
    monkeypatch.setattr("recipe.watch.node_watch.ASSEMBLE_S", 1.0)
    lines = launcher(3, 0)
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(("5 drafter 1 only 2 of the 3", "-1  only 2 of the 3")), line


# -- who is to blame, in every order of events ------------------------------------------------------------------------


@dataclass
class Node:
    """Three siblings (ranks 0 to 2) of rank 3, whose watch is asked; each can say farewell and die."""

    watch: NodeWatch
    sleepers: dict[int, subprocess.Popen[bytes]]

    def die(self, rank: int, how: signal.Signals = signal.SIGKILL, asked: bool = False) -> None:
        """``asked``: the launcher has asked for the exit code, and nobody can say any more how it ended."""
        self.sleepers[rank].send_signal(how)
        while process.start_ticks(self.sleepers[rank].pid) is not None:
            time.sleep(0.01)
        if asked:
            self.sleepers[rank].wait()

    def say(self, rank: int, blamed: int, cause: str = "it is gone") -> None:
        Farewells(os.getpid(), rank).send({"rank": blamed, "role": "", "cause": cause, "code": 1}, [3])

    def blames(self) -> int | None:
        report = self.watch.departure()
        return None if report is None else int(report["rank"])


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(os, "getppid", os.getpid)  # this process is the launcher of its children
    watch = NodeWatch({"RANK": "3", "LOCAL_RANK": "3", "LOCAL_SIZE": "1"})
    watch.stop()
    sleepers = {rank: subprocess.Popen(["sleep", "60"]) for rank in range(3)}
    for rank, sleeper in sleepers.items():
        watch.siblings[rank] = (sleeper.pid, process.start_ticks(sleeper.pid) or -1)
    assert watch.departure() is None
    yield Node(watch, sleepers)
    watch._farewells.close()
    for sleeper in sleepers.values():
        sleeper.kill()
        sleeper.wait()


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_who_has_said_farewell_is_not_the_cause(node: Node, victim: int, asked: bool) -> None:
    """The others have left because of it before this rank looks: whatever their order and whoever is still there."""
    node.die(victim, asked=asked)
    others = [rank for rank in (2, 1, 0) if rank != victim]
    for other in others:
        node.say(other, blamed=victim)
        node.die(other, asked=asked)
    assert node.blames() == victim


def test_a_farewell_comes_before_the_death_is_seen(node: Node) -> None:
    """Rank 2 has seen that rank 0 died; this rank hears of it while all of them seem to live."""
    node.say(2, blamed=0)
    assert node.blames() == 0
    node.die(2)
    node.die(0)
    node.say(1, blamed=2)
    assert node.blames() == 0, "the first farewell decides"


def test_its_own_error_is_its_own_fault(node: Node) -> None:
    node.say(1, blamed=1, cause="ZeroDivisionError: planted")
    node.die(1, asked=True)
    node.die(0, signal.SIGTERM)  # by the launcher
    report = node.watch.departure()
    assert report is not None and report["rank"] == 1 and "planted" in report["cause"]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_who_was_ended_by_the_launcher_is_not_the_cause(node: Node, victim: int) -> None:
    """So early that nobody could say anything: SIGTERM comes from the launcher, because somebody had died."""
    for rank in range(3):
        node.die(rank, signal.SIGSEGV if rank == victim else signal.SIGTERM)
    assert node.blames() == victim


def test_who_was_seen_dead_first_stays_to_blame(node: Node) -> None:
    node.die(1, asked=True)
    assert node.blames() == 1
    node.die(2, asked=True)
    node.die(0, asked=True)
    assert node.blames() == 1


@pytest.mark.parametrize(("dead", "blamed"), [((2,), 2), ((0, 2), 2), ((0, 1), 0), ((1, 2), 2)])
def test_the_launcher_ends_the_lowest_first(node: Node, dead: tuple[int, ...], blamed: int) -> None:
    """Nothing is known but who is gone: a dead rank above a living one was not ended by the launcher."""
    for rank in dead:
        node.die(rank, asked=True)
    assert node.blames() == blamed


def test_only_this_users_processes_are_heard(node: Node) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to become somebody else")
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        node.say(2, blamed=1)
        os._exit(0)
    os.waitpid(pid, 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"not json", node.watch._farewells._group + "3")
    assert node.blames() is None
    node.say(2, blamed=1)
    assert node.blames() == 1


@pytest.mark.parametrize(
    ("signum", "words"),
    [
        (None, "the command line (pid {pid}): it is gone"),
        (signal.SIGTERM, "the command line (pid {pid}): it was told to end (SIGTERM), seen by rank 3"),
        (signal.SIGINT, "the command line (pid {pid}): interrupted (Ctrl-C, SIGINT), seen by rank 3"),
    ],
)
def test_what_happens_to_the_command_line_is_called_so(
    signum: signal.Signals | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, or told to end: the launcher below it is gone as well, which is the consequence."""
    caller = subprocess.Popen(["sleep", "60"])
    launcher = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(os, "getppid", lambda: launcher.pid)
    monkeypatch.setenv(last_words.VARIABLE, f"{caller.pid}:{tmp_path / 'words'}")
    watch = NodeWatch({"RANK": "3", "LOCAL_RANK": "3", "LOCAL_SIZE": "1"})
    watch.stop()
    try:
        assert watch._look(0.0) is None
        monkeypatch.setattr(os, "getppid", lambda: 1)
        if signum is None:
            caller.kill()
            caller.wait()
        else:
            last_words.note_signal(tmp_path / "words", signum)
        report = watch._look(0.0)
        assert report is not None
        assert last_words.line(report, None).startswith("the run ends because of " + words.format(pid=caller.pid))
    finally:
        watch._farewells.close()
        for one in (caller, launcher):
            one.kill()
            one.wait()


def test_an_earlier_launch_that_was_done_says_nothing_of_this_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher that is killed at once ends with 0, and status.json still says DONE."""
    run = RunDir.create(tmp_path, "r")
    StatusWriter(run).done()
    config = load_config_text("{}", [f"dflash.run.output_dir={tmp_path}", "dflash.run.name=r"])
    before = train_cli._last_launch(config)
    assert before is not None and train_cli._confirm_done(config, 0, None) == 0
    assert train_cli._confirm_done(config, 0, before) == 1
    assert "before the run had begun" in capsys.readouterr().err
    StatusWriter(run).done()
    assert train_cli._confirm_done(config, 0, before) == 0
