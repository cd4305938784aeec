"""A folder with a tiny target, rows and config, in which runs are launched, interrupted, resumed and looked at."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from recipe.tell.metrics import read_metrics
from tests.integration.launches import ForkServer, Launch

LIMIT_S = 180.0


class Place:
    """``folder`` holds config.json (see `tests.tiny.make_config`); runs come to be below ``folder``/runs."""

    def __init__(self, folder: Path, server: ForkServer) -> None:
        self.folder, self.server, self.launches = folder, server, 0

    def train(
        self,
        name: str,
        *settings: str,
        flags: tuple[str, ...] = (),
        code: int | tuple[int, ...] = 0,
        **environment: Any,
    ) -> Launch:
        """One whole launch; ``settings`` are --set values, ``code`` the exit code (or codes) that is expected."""
        self.launches += 1
        sets = [word for value in (f"dflash.run.name={name}", *settings) for word in ("--set", value)]
        argv = ["train", str(self.folder / "config.json"), *sets, *flags]
        deliveries = self.folder / "deliveries" / f"{name}-{self.launches}"
        deliveries.mkdir(parents=True)
        environment["DELIVERIES"] = str(deliveries)
        launch = self.server.launch(self.folder / f"launch{self.launches}", argv, **environment)
        assert launch.wait(LIMIT_S) in (code if isinstance(code, tuple) else (code,)), launch.output[-4000:]
        return launch

    def resume(self, name: str, *settings: str, code: int = 0, **environment: Any) -> Launch:
        return self.train(name, *settings, flags=("--resume",), code=code, **environment)

    def copy(self, source: str, name: str, step: int) -> Path:
        """The run ``source`` as if it had to go on from ``step``."""
        run = self.folder / "runs" / name
        shutil.copytree(self.folder / "runs" / source, run)
        (run / "checkpoints" / "latest").write_text(f"step_{step:08d}\n")
        return run

    def weights(self, name: str, step: int) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "runs" / name / "checkpoints" / f"step_{step:08d}" / "weights.safetensors")

    def trained(self, name: str) -> Counter[str]:
        """``entry reuse`` of everything that the drafters of all launches of a run gave back to the ring."""
        files = (self.folder / "deliveries").glob(f"{name}-[0-9]*/rank*")
        return Counter(line for file in files for line in file.read_text().splitlines())

    def records(self, name: str) -> list[dict[str, Any]]:
        return read_metrics(self.folder / "runs" / name / "metrics.jsonl")

    def log(self, name: str) -> str:
        return (self.folder / "runs" / name / "train.log").read_text()

    def summary(self, name: str) -> dict[str, Any]:
        summary = json.loads((self.folder / "runs" / name / "summary.json").read_text())
        assert isinstance(summary, dict)
        return summary


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of any weight."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)
