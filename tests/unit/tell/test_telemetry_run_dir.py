"""Run folders: made once, locked by a living process only, written to by whole files."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from recipe.errors import ConfigError
from recipe.tell.run_dir import RunDir, is_run, write_atomic, write_json

ROOT = Path(__file__).resolve().parents[3]
HOLDER = """
import sys, time
from recipe.tell.run_dir import RunDir
run = RunDir.create(sys.argv[1], "r")
(run.checkpoints / "latest").write_text("step_1")
print("ready", flush=True)
time.sleep(60)
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    """Another process that makes and keeps the run ``r``."""
    child = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


def test_create_makes_the_layout_and_refuses_a_second_one(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "runs", "a") as run:
        assert run.path == tmp_path / "runs" / "a"
        assert run.checkpoints.is_dir() and run.export.is_dir() and run.eval.is_dir()
        names = [run.config_json, run.provenance_json, run.train_log, run.metrics_jsonl, run.status_json]
        names += [run.report_html, run.summary_json]
        expected = "config.json provenance.json train.log metrics.jsonl status.json report.html summary.json"
        assert [path.name for path in names] == expected.split()
    with pytest.raises(ConfigError, match="exists already") as caught:
        RunDir.create(tmp_path / "runs", "a")
    assert caught.value.field == "dflash.run.name" and "--resume" in caught.value.fix
    assert sorted(os.listdir(tmp_path / "runs")) == ["a"], "no staging folder is left"


def test_an_empty_folder_is_taken_and_a_strange_one_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    RunDir.create(tmp_path, "empty").close()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1").write_text("precious")
    for fresh in (False, True):
        with pytest.raises(ConfigError, match="not a run"):
            RunDir.create(tmp_path, "thesis", fresh=fresh)
    assert (tmp_path / "thesis" / "chapter1").read_text() == "precious"


def test_resume_needs_a_run_and_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run to resume"):
        RunDir.create(tmp_path, "a", resume=True)
    first = RunDir.create(tmp_path, "a")
    run_id = first.run_id
    first.close()
    with pytest.raises(ConfigError, match="before its first checkpoint"):
        RunDir.create(tmp_path, "a", resume=True)
    (first.checkpoints / "latest").write_text("step_10")
    with RunDir.create(tmp_path, "a", resume=True) as again:  # also shows that the refusal gave its lock back
        assert again.run_id == run_id
        assert again.marker()["process"]["pid"] == os.getpid()


def test_fresh_keeps_one_older_run_and_nothing_else(tmp_path: Path) -> None:
    for text in ("one", "two", "three"):
        with RunDir.create(tmp_path, "demo", fresh=True) as run:
            run.train_log.write_text(text)
    assert sorted(os.listdir(tmp_path)) == ["demo", "demo.previous"]
    assert (tmp_path / "demo" / "train.log").read_text() == "three"
    assert (tmp_path / "demo.previous" / "train.log").read_text() == "two"


@pytest.mark.parametrize("worth", ["summary.json", "checkpoints/step_00000003"])
def test_fresh_never_drops_a_run_that_came_to_something(tmp_path: Path, worth: str) -> None:
    """A good run, a `--replace` that failed at once, and a second `--replace`."""
    with RunDir.create(tmp_path, "demo") as run:
        (run.path / worth).mkdir(parents=True)
    for _ in range(3):
        RunDir.create(tmp_path, "demo", fresh=True).close()
    kept = [path for path in tmp_path.glob("demo.*") if (path / worth).exists()]
    assert kept == [tmp_path / "demo.previous"] and len(list(tmp_path.iterdir())) >= 3


def test_fresh_spares_a_previous_folder_that_is_not_ours(tmp_path: Path) -> None:
    RunDir.create(tmp_path, "demo", fresh=True).close()
    (tmp_path / "demo.previous").mkdir()
    (tmp_path / "demo.previous" / "mine").write_text("precious")
    RunDir.create(tmp_path, "demo", fresh=True).close()
    assert (tmp_path / "demo.previous" / "mine").read_text() == "precious"
    assert sum(is_run(path) for path in tmp_path.iterdir()) == 2


def test_a_run_in_use_is_refused_until_its_process_is_killed(tmp_path: Path) -> None:
    child = hold(tmp_path)
    try:
        for options in ({"resume": True}, {"fresh": True}):
            with pytest.raises(ConfigError, match=f"another process is using this run: pid {child.pid} "):
                RunDir.create(tmp_path, "r", **options)
        os.kill(child.pid, signal.SIGKILL)
        child.wait(10)
        RunDir.create(tmp_path, "r", resume=True).close()
    finally:
        child.kill()
        child.wait(10)


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "a")
    (run.checkpoints / "latest").touch()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    try:
        time.sleep(0.2)
        run.close()
        RunDir.create(tmp_path, "a", resume=True).close()
        assert child.is_alive()
    finally:
        child.terminate()
        child.join(10)


def test_of_many_that_start_at_once_one_wins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(8), context.Queue()

    def start() -> None:
        barrier.wait()
        try:
            RunDir.create(tmp_path, "a")
            results.put("won")
            time.sleep(1.0)
        except ConfigError:
            results.put("refused")

    children = [context.Process(target=start) for _ in range(8)]
    for child in children:
        child.start()
    outcomes = sorted(results.get(timeout=20) for _ in children)
    for child in children:
        child.join(20)
    assert outcomes == ["refused"] * 7 + ["won"]
    assert os.listdir(tmp_path) == ["a"]


def test_open_names_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        RunDir.open(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="not a run folder"):
        RunDir.open(tmp_path)
    RunDir.create(tmp_path / "runs", "a").close()
    monkeypatch.chdir(tmp_path)
    assert RunDir.open("a").path == RunDir.open("runs/a").path == tmp_path / "runs" / "a"


def test_unwritable_output_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        RunDir.create(tmp_path / "file", "a")
    assert caught.value.field == "dflash.run.output_dir"
    with pytest.raises(ConfigError):
        RunDir.create("/proc", "a")


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path, stop, torn = tmp_path / "x.json", threading.Event(), []
    write_json(path, {"n": 0, "fill": "a" * 100_000})

    def read() -> None:
        while not stop.is_set():
            try:
                json.loads(path.read_text())
            except ValueError as error:
                torn.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(200):
        write_json(path, {"n": n, "fill": "ab"[n % 2] * 100_000}, durable=False)
    stop.set()
    reader.join()
    assert not torn and os.listdir(tmp_path) == ["x.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\ud800")
    path2 = tmp_path / "folder"
    path2.mkdir()
    with pytest.raises(OSError):
        write_atomic(path2, "new")
    assert path.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["folder", "x"]
