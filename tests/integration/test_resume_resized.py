"""A run resumed on other ranks trains what the old ones had left, to the same weights; damage is never taken for good.

Real launches over gloo (4 levels of processes, forked instead of imported): see `fork_server.py`.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.launches import ForkServer, Launch, fork_server
from tests.tiny import make_config, make_rows, make_target

HALF, STEPS = 4, 10
ONE_DRAFTER = ("dflash.layout.drafter_gpus=[2]", "gradient_accumulation_steps=4")


class Place:
    """The tiny run and its server."""

    def __init__(self, folder: Path, server: ForkServer) -> None:
        self.folder, self.server, self.launches = folder, server, 0

    def train(self, name: str, *settings: str, flags: tuple[str, ...] = (), code: int = 0) -> Launch:
        """One whole launch; ``settings`` are --set values."""
        self.launches += 1
        sets = [word for value in (f"dflash.run.name={name}", *settings) for word in ("--set", value)]
        argv = ["train", str(self.folder / "config.json"), "--master-port", str(29650 + self.launches), *sets, *flags]
        deliveries = self.folder / "deliveries" / f"{name}-{self.launches}"
        deliveries.mkdir(parents=True)
        launch = self.server.launch(self.folder / f"launch{self.launches}", argv, DELIVERIES=str(deliveries))
        assert launch.wait(120.0) == code, launch.output[-4000:]
        return launch

    def resume(self, name: str, *settings: str, code: int = 0) -> Launch:
        return self.train(name, *settings, flags=("--resume",), code=code)

    def copy(self, source: str, name: str, step: int) -> Path:
        """The run ``source`` as if it had been interrupted after ``step``."""
        run = self.folder / "runs" / name
        shutil.copytree(self.folder / "runs" / source, run)
        (run / "checkpoints" / "latest").write_text(f"step_{step:08d}\n")
        return run

    def weights(self, name: str, step: int = STEPS) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "runs" / name / "checkpoints" / f"step_{step:08d}" / "weights.safetensors")

    def trained(self, name: str) -> Counter[str]:
        """``entry reuse`` of everything that the drafters of all launches of a run gave back to the ring."""
        files = (self.folder / "deliveries").glob(f"{name}-*/rank*")
        return Counter(line for file in files for line in file.read_text().splitlines())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("resume")
    make_target(folder / "target", kind="llama")
    make_rows(folder / "rows")
    make_config(
        folder, dflash__run__save_every=2, dflash__run__log_every=1, dflash__run__keep=8,
        dflash__layout={"target_gpus": [0, 1], "drafter_gpus": [2, 3], "target_tp": 2, "device": "cpu"},
    )  # fmt: skip
    with fork_server(folder / "server.log") as server:
        place = Place(folder, server)
        place.train("whole")
        yield place


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_two_ranks_become_one_and_nothing_changes(place: Place) -> None:
    """Twice the accumulation: the same global batches, so the same weights but for the order of additions."""
    place.copy("whole", "one", HALF)
    launch = place.resume("one", *ONE_DRAFTER)
    assert "resumed with 1 drafter rank(s) on 1 node(s) instead of 2 on 1" in launch.output
    moved = distance(place.weights("whole", HALF), place.weights("whole"))
    assert moved > 0.005 and distance(place.weights("one"), place.weights("whole")) < 1e-6
