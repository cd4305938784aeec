"""What every rank knows once the run has been agreed on; the argument of both roles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from recipe.config import RunConfig
from recipe.data.rows import Rows
from recipe.data.schedule import Schedule
from recipe.model_files.shapes import TargetShape
from recipe.ring import Ring
from recipe.watch.role import Role
from recipe.watch.store import ControlStore
from recipe.watch.watchdog import Watchdog

START_UP_S = 1800.0  # the longest that any rank may be ahead of another while the run starts
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Scene:
    """What every rank knows once the run has been agreed on."""

    role: Role
    config: RunConfig
    shape: TargetShape
    device: torch.device
    rows: Rows
    schedule: Schedule
    ring: Ring
    watchdog: Watchdog
    store: ControlStore
    run_path: Path
    first_step: int
    resume: bool
    dry_run: bool
    notes: list[str]

    @property
    def taps(self) -> list[int]:
        return list(self.config.dflash.target.target_layer_ids or [])

    @property
    def soft_labels(self) -> bool:
        return self.config.dflash.objective.soft_labels

    @property
    def evaluates(self) -> bool:
        """Whether this rank decodes during training: those of the first target replica of node 0 do."""
        first = self.role.kind == "target" and self.role.node == 0 and self.role.replica == 0
        return first and self.evaluation_every > 0

    @property
    def evaluation_every(self) -> int:
        """Steps between evaluations, 0 for none."""
        return 0 if self.dry_run else self.config.dflash.evaluation.every

    @property
    def target_dtype(self) -> torch.dtype:
        """Of the target and of the taps in the ring."""
        return DTYPES[self.config.dflash.target.dtype]
