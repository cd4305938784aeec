"""Several targets on a node: each row is produced by one of them only, and what is trained is what one target gives.

Real launches over gloo; see `fork_server.py`.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from recipe.check import resolve
from recipe.config import load_config
from recipe.data.rows import Rows
from recipe.data.schedule import Schedule, entry_id
from recipe.model_files.shapes import TargetShape
from recipe.target.producer import ProducerPlace
from tests.integration.launches import ForkServer
from tests.integration.places import Place
from tests.tiny import make_config, make_rows, make_target

ROWS, EPOCHS, REUSE = 48, 2, 2
LAYOUTS = {  # target ranks, degree; one drafter rank follows
    "one": (1, 1),
    "two replicas": (2, 1),
    "five replicas": (5, 1),
    "two replicas of two": (4, 2),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, forks: ForkServer) -> Place:
    folder = tmp_path_factory.mktemp("replicas")
    make_target(folder / "target", kind="llama")
    make_rows(folder / "rows", count=ROWS)
    make_config(folder, dflash__run__epochs=EPOCHS, dflash__ring__reuse=REUSE)
    return Place(folder, forks)


def train(place: Place, layout: str) -> str:
    """One launch of that layout, unless there was one; returns the run's name."""
    targets, tp = LAYOUTS[layout]
    name = layout.replace(" ", "-")
    if (place.folder / "runs" / name).exists():
        return name
    place.train(
        name,
        f"dflash.layout.target_gpus={list(range(targets))}",
        f"dflash.layout.drafter_gpus=[{targets}]",
        f"dflash.layout.target_tp={tp}",
    )
    return name


def last_weights(place: Place, name: str) -> dict[str, torch.Tensor]:
    checkpoints = (place.folder / "runs" / name / "checkpoints").glob("step_*")
    return place.weights(name, max(int(path.name.removeprefix("step_")) for path in checkpoints))


def everything() -> Counter[str]:
    """Each row of each epoch as often as it is reused."""
    names = itertools.product(range(EPOCHS), range(ROWS), range(REUSE))
    return Counter(f"{entry_id(epoch, row)} {reuse}" for epoch, row, reuse in names)


def test_two_replicas_train_every_row_exactly_as_often_as_asked(place: Place) -> None:
    assert place.trained(train(place, "two replicas")) == everything()


@pytest.mark.slow
def test_all_layouts_train_the_same_entries_to_the_same_weights(place: Place) -> None:
    runs = {layout: train(place, layout) for layout in LAYOUTS}
    wanted = last_weights(place, runs["one"])
    for layout, run in runs.items():
        tp = LAYOUTS[layout][1]
        assert place.trained(run) == everything(), layout
        for name, value in last_weights(place, run).items():
            if tp == 1:  # the same target, the same order, the same draws
                assert torch.equal(value, wanted[name]), (layout, name)
            else:  # its taps differ by the rounding of one sum
                assert torch.allclose(value, wanted[name], rtol=1e-3, atol=1e-4), (layout, name)


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_replicas_share_the_batches_out_without_overlap(place: Place, replicas: int) -> None:
    config = load_config(str(place.folder / "config.json"))
    shape = TargetShape.resolve(config.dflash.target.path)
    rows = Rows.open(config.dflash.data.path)
    schedule = Schedule.of(resolve(config, shape=shape), rows.lengths, 1)
    places = [ProducerPlace(0, replica, replicas, 0, 1) for replica in range(replicas)]
    shares = [list(filter(one.produces, schedule.production(0, 0))) for one in places]
    produced = [(batch.epoch, int(row)) for share in shares for batch in share for row in batch.rows]
    assert sorted(produced) == sorted(itertools.product(range(EPOCHS), range(ROWS)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1 and min(map(len, shares)) > 0
