"""Several targets on a node: each row is produced by one of them only, and what is trained is what one target gives.

Real launches over gloo; see `fork_server.py`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipe.config import load_config, resolve
from recipe.data.rows import Rows
from recipe.data.schedule import Schedule, entry_id
from recipe.shapes import TargetShape
from recipe.target.producer import Producer, ProducerPlace
from tests.integration.launches import ForkServer, fork_server
from tests.tiny import make_config, make_rows, make_target

ROWS, EPOCHS, REUSE = 48, 2, 2
LAYOUTS = {  # target ranks, degree; one drafter rank follows
    "one": (1, 1),
    "two replicas": (2, 1),
    "five replicas": (5, 1),
    "two replicas of two": (4, 2),
}


class Place:
    def __init__(self, folder: Path, server: ForkServer) -> None:
        self.folder, self.server = folder, server

    def train(self, layout: str) -> None:
        targets, tp = LAYOUTS[layout]
        name = layout.replace(" ", "-")
        sets = {
            "dflash.run.name": name,
            "dflash.layout.target_gpus": list(range(targets)),
            "dflash.layout.drafter_gpus": [targets],
            "dflash.layout.target_tp": tp,
        }
        words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
        port = str(29720 + list(LAYOUTS).index(layout))
        (self.folder / "deliveries" / name).mkdir(parents=True)
        launch = self.server.launch(
            self.folder / f"launch-{name}",
            ["train", str(self.folder / "config.json"), "--master-port", port, *words],
            DELIVERIES=str(self.folder / "deliveries" / name),
        )
        assert launch.wait(180.0) == 0, launch.output[-4000:]

    def trained(self, layout: str) -> Counter[str]:
        """``entry reuse`` of everything that the drafter gave back to the ring."""
        files = (self.folder / "deliveries" / layout.replace(" ", "-")).glob("rank*")
        return Counter(line for file in files for line in file.read_text().splitlines())

    def weights(self, layout: str) -> dict[str, torch.Tensor]:
        (last,) = sorted((self.folder / "runs" / layout.replace(" ", "-") / "checkpoints").glob("step_*"))[-1:]
        return load_file(last / "weights.safetensors")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("replicas")
    make_target(folder / "target", kind="llama")
    make_rows(folder / "rows", count=ROWS)
    make_config(folder, dflash__run__epochs=EPOCHS, dflash__ring__reuse=REUSE)
    with fork_server(folder / "server.log") as server:
        yield Place(folder, server)


def everything() -> Counter[str]:
    """Each row of each epoch as often as it is reused."""
    names = itertools.product(range(EPOCHS), range(ROWS), range(REUSE))
    return Counter(f"{entry_id(epoch, row)} {reuse}" for epoch, row, reuse in names)


def test_two_replicas_train_every_row_exactly_as_often_as_asked(place: Place) -> None:
    place.train("two replicas")
    assert place.trained("two replicas") == everything()


@pytest.mark.slow
def test_all_layouts_train_the_same_entries_to_the_same_weights(place: Place) -> None:
    for layout in LAYOUTS:
        if layout != "two replicas":
            place.train(layout)
    expected, wanted = place.trained("one"), place.weights("one")
    assert expected == everything()
    for layout, (_, tp) in LAYOUTS.items():
        assert place.trained(layout) == expected, layout
        for name, value in place.weights(layout).items():
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
    shares = [_batches(schedule, replica, replicas) for replica in range(replicas)]
    produced = [(batch.epoch, int(row)) for share in shares for batch in share for row in batch.rows]
    assert sorted(produced) == sorted(itertools.product(range(EPOCHS), range(ROWS)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1 and min(map(len, shares)) > 0


def _batches(schedule: Schedule, replica: int, replicas: int) -> list[Any]:
    """What one replica's producer takes from the schedule."""
    producer = SimpleNamespace(schedule=schedule, place=ProducerPlace(0, replica, replicas, 0, 1))
    return list(Producer._own_batches(producer, 0))  # type: ignore[arg-type]
