"""What must not end a run, or not take it along: a save slower than every time-out, a user's mistake in mid-training.

Real launches over gloo; see `fork_server.py`, and `death.py` for how a rank comes to be slow.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.launches import ForkServer
from tests.integration.places import Place
from tests.tiny import make_config, make_rows, make_target

DRAFTER = 1  # the leader: one target rank, two drafters


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, forks: ForkServer) -> Place:
    folder = tmp_path_factory.mktemp("late")
    make_target(folder / "target", kind="llama")
    make_rows(folder / "rows")
    make_config(folder, dflash__run__save_every=4, dflash__layout__target_gpus=[0],
                dflash__layout__drafter_gpus=[1, 2], dflash__layout__target_tp=1)  # fmt: skip
    return Place(folder, forks)


@pytest.mark.parametrize(
    ("rank", "seconds"),
    [(DRAFTER, 7), pytest.param(DRAFTER + 1, 70, marks=pytest.mark.slow)],  # 70: longer than 60 beyond the ring's 4
)
def test_a_save_may_take_longer_than_the_ring_waits(place: Place, rank: int, seconds: int) -> None:
    """The target has filled the ring and waits, the other drafter sits in a collective: nobody calls it a hang."""
    order = {"rank": rank, "moment": "save", "count": 1, "manner": "slow"}
    settings = ("dflash.ring.timeout_s=4", "dflash.ring.max_depth=4", "dflash.run.log_every=1")
    place.train(f"slow-{rank}", *settings, DEATH=order, SLOW_S=seconds)
    assert place.summary(f"slow-{rank}")["steps"] == 10 and place.summary(f"slow-{rank}")["seconds"] > seconds


def test_a_late_mistake_leaves_what_was_trained(place: Place) -> None:
    order = {"rank": DRAFTER, "moment": "step", "count": 3, "manner": "mistake"}
    launch = place.train("mistaken", "dflash.run.log_every=50", code=2, DEATH=order)
    assert "a mistake that the test planted" in launch.output and "Traceback" not in launch.output
    run = place.folder / "runs" / "mistaken"
    assert not list((run / "checkpoints").glob("step_*")) and (run / "metrics.jsonl").read_text() == ""
    assert "a mistake that the test planted" in place.log("mistaken")


def test_an_early_mistake_leaves_nothing(place: Place) -> None:
    order = {"rank": DRAFTER, "moment": "phase", "phase": "ready", "manner": "mistake"}
    place.train("early", code=2, DEATH=order)
    assert not (place.folder / "runs" / "early").exists()


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def test_a_check_that_fails_knows_nothing_of_an_older_run_and_leaves_nothing(place: Place) -> None:
    place.train("older")
    before = contents(place.folder / "runs")
    for manner, rank, code in (("SIGKILL", DRAFTER, (1, 247)), ("exception", 0, 1), ("mistake", DRAFTER, 2)):
        order = {"rank": rank, "moment": "phase", "phase": "ready", "manner": manner}
        launch = place.train("older", flags=("--check",), code=code, DEATH=order)
        said = launch.output.rpartition("\nerror: ")[2]
        assert said.startswith("the check failed: rank ") == (code != 2), launch.output
        assert "the run is done" not in launch.output and "log: " not in said
        folder = re.search(r"metrics are in (\S+)/metrics.jsonl", launch.output)
        assert folder is not None and "dflash-check-" in folder[1] and not Path(folder[1]).parents[1].exists()
        assert contents(place.folder / "runs") == before
