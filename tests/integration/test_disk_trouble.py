"""A disk without room or inodes, really: training goes on without what it can do without, and saves when it can again.

The run's folder lies on a small tmpfs of its own, which a rank fills between two steps (`death.py`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from recipe.tell.run_dir import RunDir
from recipe.tell.status import read_status
from tests.integration.launches import ForkServer, Launch
from tests.integration.places import Place, distance
from tests.tiny import make_config, make_rows, make_target

LEADER, STEPS = 1, 60
FULL = ("full disk", "no inodes")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, forks: ForkServer) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("disk")
    (folder / "runs").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m,nr_inodes=600", "none", str(folder / "runs")]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("needs root: a full disk is made on a small file system of its own")
    try:
        make_target(folder / "target", kind="llama")
        make_rows(folder / "rows")
        rows = [{"messages": [{"role": "user", "content": f"w{20 + i} w{40 + i}"}]} for i in range(2)]
        (folder / "rows" / "heldout_prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        make_config(folder, dflash__run__max_steps=STEPS, dflash__run__epochs=20, dflash__run__save_every=4,
                    dflash__run__log_every=1, dflash__run__keep=1, dflash__layout__target_gpus=[0],
                    dflash__layout__drafter_gpus=[1, 2], dflash__layout__target_tp=1,
                    dflash__evaluation={"every": 2, "max_new_tokens": 6})  # fmt: skip
        place = Place(folder, forks)
        place.train("whole")
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(folder / "runs")], check=False)


def filled(place: Place, forks: ForkServer, name: str, manner: str) -> Launch:
    """A launch whose leader leaves nothing of the disk in its fifth step."""
    order = {"rank": LEADER, "moment": "step", "count": 5, "manner": manner}
    words = ["train", str(place.folder / "config.json"), "--set", f"dflash.run.name={name}"]
    return forks.launch(place.folder / name, words, DEATH=order, FILL=str(place.folder / "runs"))


def make_room(place: Place) -> None:
    ballast = place.folder / "runs" / "ballast"
    shutil.rmtree(ballast) if ballast.is_dir() else ballast.unlink()


@pytest.mark.parametrize("manner", FULL)
def test_what_is_no_checkpoint_ends_nothing_and_a_save_is_tried_again(
    place: Place, forks: ForkServer, manner: str
) -> None:
    launch = filled(place, forks, f"room {manner}".replace(" ", "-"), manner)
    launch.wait_for("the checkpoint of step 8 cannot be written: ")
    launch.wait_for("is not evaluated")
    time.sleep(0.5)
    make_room(place)
    assert launch.wait(120) == 0, launch.output[-4000:]
    name = launch.folder.name
    assert distance(place.weights(name, STEPS), place.weights("whole", STEPS)) == 0.0
    assert "(kept: step 4); training goes on, and step 12 is to be saved" in launch.output
    assert launch.output.count("warning: drafters to evaluate (eval/) cannot be written") == 1
    assert launch.output.count("drafters to evaluate (eval/) can be written again") == 1
    assert (place.folder / "runs" / name / "eval" / f"step_{STEPS:08d}.json").exists()
    assert read_status(RunDir.open(place.folder / "runs" / name)).state == "DONE"
    assert "Traceback" not in launch.output
    shutil.rmtree(place.folder / "runs" / name)


@pytest.mark.parametrize("manner", FULL)
def test_a_last_save_that_fails_ends_the_run_by_name_and_leaves_the_good_one(
    place: Place, forks: ForkServer, manner: str
) -> None:
    launch = filled(place, forks, f"never {manner}".replace(" ", "-"), manner)
    assert launch.wait(120) not in (0, 2, None), launch.output[-4000:]
    name = launch.folder.name
    last = launch.output.splitlines()[-1]
    assert f"SaveFailed: the checkpoint of step {STEPS} cannot be written: " in last and "(kept: step 4)" in last, last
    assert f"step={STEPS}/{STEPS}" in launch.output
    make_room(place)
    place.resume(name)
    assert distance(place.weights(name, STEPS), place.weights("whole", STEPS)) == 0.0
    shutil.rmtree(place.folder / "runs" / name)
