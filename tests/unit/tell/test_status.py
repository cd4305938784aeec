"""`status` against real processes: alive, stuck, stopped, killed, ended; and against files from other machines."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recipe.errors import ConfigError
from recipe.process import ProcessId
from recipe.tell import status_cli
from recipe.tell.run_dir import RunDir, write_json
from recipe.tell.status import Status, StatusWriter, duration, mark_dead, read_status

ROOT = Path(__file__).resolve().parents[3]
START = """
import sys, time, threading, os
from recipe.process import ProcessId
from recipe.tell.run_dir import RunDir
from recipe.tell.status import StatusWriter
run = RunDir.create(sys.argv[1], "r")
status = StatusWriter(run, 100, [ProcessId.own(2, "drafter")], stall_after_s=LIMIT, min_stall_s=LIMIT, heartbeat_s=0.2)
"""
# A generous limit where being slow on a busy machine must not look like a stall, a short one where it shall stall.
TRAIN = (
    START.replace("LIMIT", "60.0")
    + """
for step in range(10**6):
    status.training(step, 100, 1.5, 900.0, 60.0, 'drafter')
    time.sleep(0.02)
"""
)
VERB = """
import argparse, sys
from recipe.errors import ConfigError
from recipe.tell import status_cli
parser = argparse.ArgumentParser()
status_cli.add_arguments(parser)
try:
    sys.exit(status_cli.run(parser.parse_args()))
except ConfigError:
    sys.exit(2)
"""
STUCK = START.replace("LIMIT", "1.0") + "status.training(7, 100, 1.5); time.sleep(600)"


@contextlib.contextmanager
def child(code: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], RunDir]]:
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: (folder / "r" / "status.json").exists())
        yield process, RunDir.open(folder / "r")
    finally:
        process.kill()
        process.wait(10)


def wait_for(condition: Callable[[], Any], seconds: float = 40.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return result


def wait_state(run: RunDir, state: str) -> Status:
    return wait_for(lambda: (status := read_status(run)).state == state and status)  # type: ignore[no-any-return]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """The verb in a process of its own, as a user in another shell would call it."""
    return subprocess.run([sys.executable, "-c", VERB, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_a_training_run_then_stopped_then_woken_then_killed(tmp_path: Path) -> None:
    with child(TRAIN, tmp_path) as (process, run):
        status = wait_state(run, "TRAINING")
        assert status.steps == 100 and status.loss == 1.5 and status.waiting_side == "drafter"
        first = status.step or 0
        wait_for(lambda: (read_status(run).step or 0) > first + 20)
        done = command(str(run.path), "--json")
        values = json.loads(done.stdout)
        assert done.returncode == 0 and values["state"] == "TRAINING" and values["tokens_per_s"] == 900.0
        keys = "state step steps loss tokens_per_s eta_s waiting_side last_progress_s message gpus kernels"
        assert list(values) == keys.split()
        os.kill(process.pid, signal.SIGSTOP)
        status = wait_state(run, "STALLED")
        assert "rank 2 (drafter)" in status.message and "SIGSTOP" in status.message and status.exit_code == 3
        assert status.eta_s is None
        assert command(str(run.path)).returncode == 3
        os.kill(process.pid, signal.SIGCONT)
        wait_state(run, "TRAINING")
        os.kill(process.pid, signal.SIGKILL)
        status = wait_state(run, "DEAD")  # still a zombie here: it must not count as alive
        assert (
            "rank 2 (drafter)" in status.message and "gone" in status.message and str(run.train_log) in status.message
        )
        process.wait(10)
        done = command(str(run.path))
        assert done.returncode == 5 and done.stdout.startswith("DEAD")


def test_alive_without_progress_is_not_healthy(tmp_path: Path) -> None:
    with child(STUCK, tmp_path) as (process, run):
        status = wait_state(run, "STALLED")
        assert process.poll() is None and status.step == 7
        assert "no progress" in status.message

        def breathes_but_stands() -> bool:
            now = read_status(run)
            return 2 * (now.heartbeat_s or 0) < (now.last_progress_s or 0) - 1.0

        wait_for(breathes_but_stands)


def test_another_rank_that_is_gone_is_named(tmp_path: Path) -> None:
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    fields = ProcessId.own().to_dict()
    start = int(Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[19])
    rank = ProcessId.from_dict({**fields, "pid": victim.pid, "start": start, "rank": 1, "role": "target"})
    run = RunDir.create(tmp_path, "r")
    writer = StatusWriter(run, 100)
    writer.processes([ProcessId.own(2, "drafter"), rank])
    writer.training(1, 100, 2.0)
    wait_state(run, "TRAINING")
    victim.kill()
    victim.wait(10)
    assert "rank 1 (target)" in wait_state(run, "DEAD").message
    assert mark_dead(run, 1, "target", "killed by SIGKILL", launch=writer.launch)
    assert read_status(run).message == "rank 1 (target) died: killed by SIGKILL"
    writer.training(2, 100, 2.0)
    writer.close()
    writer.done()
    status = read_status(run)
    assert status.state == "DEAD" and "SIGKILL" in status.message, "the first end that was noted stays"


def test_a_reused_pid_is_not_the_old_process(tmp_path: Path) -> None:
    own = ProcessId.own()
    assert own.liveness() == "alive"
    assert ProcessId.from_dict({**own.to_dict(), "start": own.start - 1}).liveness() == "gone"
    assert ProcessId.from_dict({**own.to_dict(), "pid_namespace": "pid:[1]"}).liveness() == "unknown"
    assert ProcessId.from_dict({**own.to_dict(), "boot_id": "other"}).liveness() == "rebooted"
    assert ProcessId.from_dict({**own.to_dict(), "boot_id": "other", "host": "far"}).liveness() == "unknown"


def test_phases_of_a_start_and_ends(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "r")
    assert read_status(run).state == "STARTING", "made, nothing reported yet"
    writer = StatusWriter(run, heartbeat_s=0.1)
    writer.phase("loading", 34, 64, eta_s=12.0)
    status = wait_for(lambda: (s := read_status(run)).message == "loading 34/64" and s)
    assert (status.state, status.eta_s, status.exit_code) == ("STARTING", 12.0, 0)
    writer.filling(12, 30)
    status = wait_state(run, "FILLING")
    assert status.message == "filling 12/30"
    writer.training(1, 9, 2.0, eta_s=5.0)
    assert wait_state(run, "TRAINING").eta_s == 5.0
    writer.phase("evaluating", 3, 64)
    assert wait_for(lambda: (s := read_status(run)).message == "evaluating 3/64" and s).state == "TRAINING"
    writer.done("300 steps")
    status = read_status(run)
    assert (status.state, status.exit_code, status.message) == ("DONE", 0, "300 steps")
    assert not mark_dead(run, 0, "target", "late"), "a finished run cannot die"
    assert read_status(run).state == "DONE"


def test_a_phase_that_counts_says_how_long_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No estimate before it has counted on, a linear one afterwards, a fresh one for the next phase."""
    clock = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    writer = StatusWriter(RunDir.create(tmp_path, "r"), heartbeat_s=0.1)
    seen = []
    for label, done in (("loading", 4), ("loading", 4), ("loading", 14), ("loading", 34), ("loading", 3)):
        writer.phase(label, done, 64)
        seen.append(writer._fields["phase_eta_s"])
        clock[0] += 2.0
    writer.filling(12, 30)
    seen.append(writer._fields["phase_eta_s"])
    clock[0] += 3.0
    writer.filling(18, 30)
    seen.append(writer._fields["phase_eta_s"])
    assert seen == [None, None, pytest.approx(50 * 4 / 10), pytest.approx(30 * 6 / 30), None, None, pytest.approx(6.0)]
    writer.first_step(compiles=True)
    monkeypatch.undo()
    status = wait_for(lambda: (s := read_status(RunDir.open(tmp_path / "r"))).state == "TRAINING" and s)
    assert status.message == "first step, compiling" and status.eta_s is None
    writer.training(1, 9, 2.0, eta_s=5.0)
    writer.close()
    assert read_status(RunDir.open(tmp_path / "r")).message == "training"


def test_progress_is_what_moves_not_what_is_repeated(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "r")
    writer = StatusWriter(run, stall_after_s=1.5, heartbeat_s=0.05)

    def repeat() -> Status | None:
        writer.filling(3, 30)
        status = read_status(run)
        return status if status.state == "STALLED" else None

    assert "filling 3/30" in wait_for(repeat).message
    writer.filling(4, 30)
    wait_state(run, "FILLING")
    writer.close()


def test_slow_steps_are_expected_to_be_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create(tmp_path, "r")
    writer = StatusWriter(run, stall_after_s=600, min_stall_s=60)
    now = [1000.0]
    monkeypatch.setattr("recipe.tell.status_writer.time.monotonic", lambda: now[0])
    for step in range(1, 6):
        writer.training(step, 100, 1.0)
        now[0] += 20.0
    assert writer._expected_s() == pytest.approx(200.0)
    writer.phase("saving")
    now[0] += 500.0  # a save of 500 s is not a slow step
    writer.training(6, 100, 1.0)
    assert writer._expected_s() == pytest.approx(200.0)
    monkeypatch.undo()
    writer.done()


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
def test_a_jump_of_the_clock_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    run = RunDir.create(tmp_path, "r")
    writer = StatusWriter(run)
    writer.training(1, 10, 1.0)
    writer.close()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    status = read_status(run)
    assert status.state == "TRAINING" and (status.last_progress_s or 0) < 10


def elsewhere(run: RunDir, beat_age: float, still: float, **fields: Any) -> None:
    """status.json as a host far away, with another boot and its own monotonic clock, would have written it."""
    process = {**ProcessId.own().to_dict(), "host": "node7", "boot_id": "another", "pid_namespace": "pid:[1]"}
    now = time.time()
    content = {
        "launch": "x", "process": process, "processes": [process], "phase": "training", "step": 5, "steps": 10,
        "heartbeat": {"wall": now - beat_age, "monotonic": 5e6}, "expect_s": 100.0, "heartbeat_interval_s": 2.0,
        "progress": {"wall": now - 86400, "monotonic": 5e6 - still},
    }  # fmt: skip
    write_json(run.status_json, {**content, **fields})


def test_runs_on_other_hosts_are_judged_by_age(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "r")
    elsewhere(run, 2, 3)
    assert read_status(run).state == "TRAINING", "its wall clock jumped by a day between progress and heartbeat"
    elsewhere(run, -30, 3)
    assert read_status(run).state == "TRAINING", "its clock is ahead of ours"
    elsewhere(run, 2, 150)
    assert read_status(run).state == "STALLED"
    elsewhere(run, 90, 1)
    status = read_status(run)
    assert status.state == "DEAD" and "node7" in status.message and "cannot be looked at" in status.message
    elsewhere(run, 1e6, 1, phase="done", message="ok")
    assert read_status(run).state == "DONE"


def test_a_restarted_host(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "r")
    elsewhere(run, 300, 1, process={**ProcessId.own().to_dict(), "boot_id": "another"}, processes=[])
    status = read_status(run)
    assert status.state == "DEAD" and "restarted" in status.message


def test_diverged_by_word_and_by_number(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "r")
    writer = StatusWriter(run, 10)
    writer.training(3, 10, math.nan, 100.0)
    status = wait_state(run, "DIVERGED")
    assert "nan" in status.message and status.exit_code == 4
    assert json.loads(json.dumps(status.to_json(), allow_nan=False))["loss"] is None
    writer.diverged(4, "6 skipped steps in a row")
    writer.dead(0, "drafter", "exit after divergence")
    status = read_status(run)
    assert (status.state, status.message) == ("DIVERGED", "6 skipped steps in a row")


def test_a_new_launch_takes_over_and_the_old_one_is_silent(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "r")
    old = StatusWriter(run, heartbeat_s=0.05)
    old.dead(1, "target", "out of memory")
    older = StatusWriter(run, heartbeat_s=0.05)
    new = StatusWriter(run, 10, heartbeat_s=0.05)
    new.training(4, 10, 1.0)
    wait_state(run, "TRAINING")
    older.dead(1, "target", "late news")
    assert not mark_dead(run, 1, "target", "late watchdog", launch=older.launch)
    assert read_status(run).state == "TRAINING"
    new.done()


def test_a_resumed_run_does_not_show_its_old_end(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "r")
    (run.checkpoints / "latest").touch()
    StatusWriter(run).done()
    run.close()
    with RunDir.create(tmp_path, "r", resume=True) as again:
        assert read_status(again).state == "STARTING"


def test_a_disk_that_hangs_stops_neither_training_nor_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create(tmp_path, "r")
    writer = StatusWriter(run, heartbeat_s=0.02)
    stuck, release = threading.Event(), threading.Event()

    def hang(*_: object, **__: object) -> None:
        stuck.set()
        release.wait(30)

    monkeypatch.setattr("recipe.tell.status_writer.write_json", hang)
    monkeypatch.setattr("recipe.tell.status_writer._PATIENCE_S", 0.3)
    assert stuck.wait(10)
    started = time.monotonic()
    for step in range(1000):
        writer.training(step, 1000, 1.0)
    assert time.monotonic() - started < 5.0, "hung with the disk"
    writer.dead(0, "drafter", "disk")
    writer.close()
    assert time.monotonic() - started < 20.0
    release.set()


def test_no_status_or_a_damaged_one(tmp_path: Path) -> None:
    code = "import sys; from recipe.tell.run_dir import RunDir; RunDir.create(sys.argv[1], 'r')"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True)
    run = RunDir.open(tmp_path / "r")
    assert "before it reported" in read_status(run).message and read_status(run).state == "DEAD"
    for content in ("{", "[]", "{}", '{"process": 3}'):
        run.status_json.write_text(content)
        assert read_status(run).state == "DEAD" and "damaged" in read_status(run).message
    good = {"phase": "training", "process": ProcessId.own().to_dict()}
    good |= {name: {"wall": time.time(), "monotonic": time.monotonic()} for name in ("heartbeat", "progress")}
    for name, value in (("state", 5), ("state", ["DONE"]), ("phase", 5), ("phase", None), ("phase", "resting")):
        write_json(run.status_json, {**good, name: value})
        done = command(str(run.path))
        assert done.returncode == 5 and done.stderr == ""
        assert done.stdout.startswith("DEAD") and f"its '{name}' is not what it must be" in done.stdout
    write_json(run.status_json, good)
    assert read_status(run).state == "TRAINING"
    run.status_json.unlink()
    assert mark_dead(run, None, "runner", "the launcher ended with code 1")
    assert read_status(run).message == "runner: the launcher ended with code 1"


JUNK = (None, True, "x", "", [], {}, [1], {"a": 1}, -1, 1e308, math.nan, math.inf, 10**400, "\x1b[31m")


def damaged(whole: dict[str, Any]) -> Iterator[str]:
    """status.json with each of its values, at any depth, replaced by each piece of junk."""
    for path in [(key,) for key in whole] + [
        (key, inner) for key in ("process", "heartbeat", "progress") for inner in whole[key]
    ]:
        for junk in JUNK:
            fields = json.loads(json.dumps(whole))
            section = fields
            for key in path[:-1]:
                section = section[key]
            section[path[-1]] = junk
            yield json.dumps(fields)
    yield from ("", "nul", "[" * 100_000, json.dumps(whole)[:80])


def test_nothing_in_the_files_is_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong types, absurd numbers, truncation: a state, a line and an exit code; and strict JSON."""
    run = RunDir.create(tmp_path, "r")
    writer = StatusWriter(run, 100, [ProcessId.own(2, "drafter")])
    writer.training(3, 100, 1.5, 900.0, 60.0, "drafter")
    writer.close()
    words = {"run": str(run.path), "watch": False, "interval": 2.0}
    for text in damaged(json.loads(run.status_json.read_text())):
        run.status_json.write_text(text)
        for as_json in (False, True):
            code = status_cli.run(argparse.Namespace(**words, json=as_json))
            out = capsys.readouterr().out
            assert code in (0, 3, 4, 5) and out.strip() and "\x1b" not in out
            if as_json:
                json.loads(out, parse_constant=pytest.fail)
    run.status_json.unlink()
    for text in ("", "null", "[]", '"run_id"', "[" * 100_000):
        (run.path / ".run.json").write_text(text)
        with pytest.raises(ConfigError, match="not a run folder"):
            status_cli.run(argparse.Namespace(**words, json=False))


def test_secrets_stay_out_of_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "f00dfeedf00dfeed")
    run = RunDir.create(tmp_path, "r")
    StatusWriter(run).dead(0, "target", "401 for f00dfeedf00dfeed")
    assert "f00dfeed" not in run.status_json.read_text()


def test_an_unwritable_status_never_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.create(tmp_path, "r")
    run.status_json.mkdir()
    writer = StatusWriter(run, heartbeat_s=0.05)
    writer.training(1, 10, 1.0)
    time.sleep(0.2)
    writer.done()
    assert capsys.readouterr().out.count("status.json cannot be written") == 1


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    status_cli.add_arguments(parser)
    return parser.parse_args(words)


def test_watch_ends_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with child(TRAIN, tmp_path) as (process, run):
        wait_state(run, "TRAINING")
        watcher = subprocess.Popen(
            [sys.executable, "-c", VERB, str(run.path), "--watch", "--json", "--interval", "0.1"],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert watcher.stdout is not None
        states = [json.loads(watcher.stdout.readline())["state"]]
        process.kill()
        process.wait(10)
        states += [json.loads(line)["state"] for line in watcher.stdout]
        assert watcher.wait(20) == 5 and states[0] == "TRAINING" and states[-1] == "DEAD"


def test_screen_and_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.create(tmp_path, "r")
    writer = StatusWriter(run, 200)
    writer.training(50, 200, 1.25, 61234.0, 3700.0, "drafter")
    writer.close()
    assert status_cli.run(arguments(str(run.path))) == 0
    text = capsys.readouterr().out
    for part in (
        "TRAINING",
        "50/200 (25.0 %)",
        "1.2500",
        "61.2k tokens/s",
        "about 1 h 1 min",
        "target is the bottleneck",
    ):
        assert part in text, part
    assert len(text.splitlines()) < 24
    with pytest.raises(ConfigError):
        status_cli.run(arguments(str(tmp_path / "nothing")))
    with pytest.raises(ConfigError) as caught:
        status_cli.run(arguments(str(run.path), "--watch", "--interval", "0"))
    assert caught.value.field == "--interval"
    assert command(str(tmp_path)).returncode == 2


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (75, "1 min 15 s"), (3700, "1 h 1 min"), (2e5, "2 d 7 h")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
