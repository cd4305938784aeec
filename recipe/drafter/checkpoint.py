"""Checkpoints of the drafter: written under a temporary name, complete or not there, the same one on every rank.

checkpoints/step_00000400/   DeepSpeed's files (masters, optimizer, schedule), weights.safetensors and config.json
                             (what `export` reads), state.json (the one counter, and what a resume must match)
checkpoints/latest           the name of the newest complete one
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from recipe.drafter.config import DrafterConfig
from recipe.errors import ConfigError
from recipe.roles.engine import load_engine, save_engine
from recipe.roles.worlds import world_barrier
from recipe.telemetry.run_dir import write_atomic, write_json

LATEST = "latest"


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def steps_of(checkpoints: Path) -> list[int]:
    """Steps of the complete checkpoints, oldest first."""
    found = (path for path in checkpoints.glob("step_[0-9]*") if (path / "state.json").is_file())
    return sorted(int(path.name.removeprefix("step_")) for path in found)


class Checkpoints:
    """Saving and restoring in one run. Every rank of the drafter world calls every method together."""

    def __init__(
        self, folder: Path, config: DrafterConfig, identity: Mapping[str, Any], keep: int, leader: bool
    ) -> None:
        self.folder, self.config, self.identity = folder, config, dict(identity)
        self.keep, self.leader = keep, leader

    def save(self, engine: Any, step: int) -> Path:
        """Save after ``step`` optimizer steps. Until the rename nothing can be mistaken for a checkpoint."""
        final, staging = self.folder / folder_name(step), self.folder / f".{folder_name(step)}.tmp"
        if self.leader:
            shutil.rmtree(staging, ignore_errors=True)
            shutil.rmtree(final, ignore_errors=True)
        world_barrier()
        save_engine(engine, self.folder, staging.name, {"step": step})
        if self.leader:
            save_file(_weights(engine.module), staging / "weights.safetensors")
            write_json(staging / "config.json", self.config.to_dict())
            write_json(staging / "state.json", {"step": step, "identity": self.identity})
        world_barrier()
        if self.leader:
            staging.rename(final)
            write_atomic(self.folder / LATEST, final.name + "\n")
            for old in steps_of(self.folder)[: -self.keep]:
                shutil.rmtree(self.folder / folder_name(old))
        world_barrier()
        return final

    def restore(self, engine: Any, step: int) -> None:
        """Load the checkpoint of ``step``, which `find_resume` chose for all ranks."""
        load_engine(engine, self.folder, folder_name(step))


def find_resume(folder: Path, identity: Mapping[str, Any]) -> int:
    """The step to resume from. Raises ConfigError: no checkpoint, or one of another drafter, target or data."""
    steps = steps_of(folder)
    if not steps:
        raise ConfigError(
            "--resume", str(folder), "there is no complete checkpoint to resume", "start without --resume"
        )
    file = folder / folder_name(steps[-1]) / "state.json"
    try:
        state = json.loads(file.read_text())
        step, known = int(state["step"]), dict(state["identity"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        rule = f"{file} is damaged ({type(error).__name__})"
        fix = f"remove {file.parent} to resume from the checkpoint before it"
        raise ConfigError("--resume", str(folder), rule, fix) from error
    for key, value in identity.items():
        saved = known.get(key)
        if saved != value:
            raise ConfigError(
                key, value, f"the checkpoint to resume was made with {saved!r}", "use that value, or start a new run"
            )
    return step


def load_weights(run_dir: str | Path, step: int | None = None) -> tuple[DrafterConfig, dict[str, torch.Tensor], int]:
    """Configuration and weights of a checkpoint of a run (newest by default). Raises ConfigError."""
    folder = Path(run_dir) / "checkpoints"
    steps = steps_of(folder)
    if not steps or (step is not None and step not in steps):
        rule = f"the run has no checkpoint{'' if step is None else f' of step {step}'} (it has {steps or 'none'})"
        raise ConfigError("RUN" if step is None else "--step", str(run_dir) if step is None else step, rule,
                          "train it further, or choose one of those steps")  # fmt: skip
    step = steps[-1] if step is None else step
    path = folder / folder_name(step)
    config = DrafterConfig.from_dict(json.loads((path / "config.json").read_text()))
    return config, load_file(path / "weights.safetensors"), step


def _weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in module.state_dict().items()}
