"""Ends that are none, or are late: a launch that is stopped and continued, and a loss when all is done already."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from recipe.drafter.export_layout import load_export
from recipe.tell.run_dir import RunDir
from recipe.tell.status import read_status
from tests.integration.launches import ForkServer
from tests.integration.places import Place
from tests.tiny import make_config, make_rows, make_target


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, forks: ForkServer) -> Place:
    folder = tmp_path_factory.mktemp("ends")
    make_target(folder / "target")
    make_rows(folder / "rows")
    make_config(folder, dflash__ring__timeout_s=20, dflash__run__log_every=1)
    return Place(folder, forks)


def test_a_launch_that_is_stopped_and_continued_goes_on_and_is_still_watched(place: Place, forks: ForkServer) -> None:
    argv = ["train", str(place.folder / "config.json"), "--set", "dflash.run.name=paused"]
    launch = forks.launch(place.folder / "paused", [*argv, "--set", "dflash.run.epochs=60"])
    launch.wait_for("step=2/")
    everybody = launch.alive()
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3.0)
    said = launch.output.count("step=")
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
    launch.wait_for(f"step={said + 4}/", 30.0)
    os.kill(launch.pid("rank3"), signal.SIGKILL)
    assert launch.wait(20.0) not in (0, 2, None), launch.output[-3000:]
    assert "the run ends because of rank 3 (drafter 1, node 0)" in launch.output.splitlines()[-1]


def test_a_store_lost_at_the_very_end_does_not_hide_that_the_run_is_done(place: Place) -> None:
    order = {"rank": 3, "moment": "phase", "phase": "waiting for the others to end", "manner": "lost store"}
    launch = place.train("late", code=1, DEATH=order)
    status = read_status(RunDir.open(place.folder / "runs" / "late"))
    assert status.state == "DONE" and "ranks [0, 1]: the target's linear-attention" in str(status.kernels)
    assert "run in torch's functions (fla's kernels need a GPU)" in place.log("late")
    last = launch.output.splitlines()[-1]
    assert last.startswith("error: the run is done (10 steps, export in ") and "because of rank 3 (drafter 1" in last
    assert Path(place.summary("late")["export"]).is_dir()


def test_an_older_summary_says_nothing_of_a_later_step(place: Place) -> None:
    """Trained to step 6, then to 10, where the export fails: it is done again, and only then the run is over."""
    run = place.folder / "runs" / "stale"
    place.train("stale", "dflash.run.max_steps=6")
    place.resume("stale", code=1, DEATH={"rank": 2, "moment": "phase", "phase": "exporting", "manner": "exception"})
    assert (run / "checkpoints/step_00000010").is_dir() and not (run / "summary.json").exists()
    place.resume("stale")
    assert place.summary("stale")["steps"] == 10 and isinstance(place.summary("stale")["final_loss"], float)
    weights = run / "export/step_00000010/model.safetensors"
    for damage in (lambda: weights.write_bytes(weights.read_bytes()[:-9]), weights.unlink):
        assert "has done all of its 10 steps already" in place.resume("stale", code=2).output
        damage()
        place.resume("stale")
        load_export(weights.parent)
    summary = place.summary("stale")
    (run / "summary.json").write_text(json.dumps({**summary, "steps": 6}))  # as an older version left it
    place.resume("stale")
    assert place.summary("stale")["steps"] == 10
