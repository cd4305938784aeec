"""Checkpoints of the drafter: written under a temporary name, complete or not there, the same one on every rank.

checkpoints/step_00000400/
    optimizer_0000R-of-0000N.safetensors   each rank's masters and moments (`recipe/roles/optimizer_state.py`)
    weights.safetensors, config.json       what `export` reads
    state.json                             step, worlds, what a resume must match, and the size of every file
checkpoints/latest    the name of the one to resume from; when that is damaged, the newest complete one is taken
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from recipe.data.schedule import Schedule
from recipe.drafter.config import DrafterConfig
from recipe.errors import ConfigError, RunError
from recipe.roles.engine import load_engine, save_engine
from recipe.roles.worlds import sum_over_world, world_barrier, world_place
from recipe.telemetry.run_dir import write_atomic, write_json

LATEST, STATE, WEIGHTS, CONFIG = "latest", "state.json", "weights.safetensors", "config.json"
FORMAT = 2


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def shard_name(rank: int, world: int) -> str:
    return f"optimizer_{rank + 1:05d}-of-{world:05d}.safetensors"


def steps_of(checkpoints: Path) -> list[int]:
    """Steps of the finished checkpoints, oldest first. Whether their files are whole, `damage` says."""
    found = (path for path in checkpoints.glob("step_[0-9]*") if (path / STATE).is_file())
    return sorted(int(path.name.removeprefix("step_")) for path in found if path.name[5:].isdecimal())


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files (a missing one, another size, no state), or None. Reads no tensor."""
    try:
        state = json.loads((folder / STATE).read_text())
        known, step = dict(state["files"]), int(state["step"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"{folder / STATE} is damaged or of another version ({type(error).__name__})"
    if folder.name != folder_name(step):
        return f"{folder} holds step {step}"
    for name, size in known.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} of {size} bytes"
    return None


def choose(folder: Path) -> tuple[int, list[str]]:
    """The step to go on from, and what was found damaged on the way: `latest`, else the newest complete one.

    Raises ConfigError when there is none.
    """
    steps = steps_of(folder)
    try:
        named = (folder / LATEST).read_text().strip()
    except (OSError, UnicodeDecodeError):
        named = ""
    first = [step for step in steps if folder_name(step) == named]
    notes = [] if first or not steps else [f"{folder / LATEST} names no checkpoint ({named!r})"]
    for step in [*first, *(step for step in reversed(steps) if step not in first)]:
        problem = damage(folder / folder_name(step))
        if problem is None:
            return step, [f"{note}; resumed from step {step} instead" for note in notes]
        notes.append(problem)
    rule = "; ".join(notes) if steps else "there is no complete checkpoint to resume"
    raise ConfigError("--resume", str(folder), rule, "start without --resume")


class Checkpoints:
    """Saving and restoring in one run. Every rank of the drafter world calls every method together."""

    def __init__(
        self,
        folder: Path,
        config: DrafterConfig,
        identity: Mapping[str, Any],
        schedule: Schedule,
        keep: int,
        leader: bool,
        device: torch.device,
    ) -> None:
        self.folder, self.config, self.identity, self.schedule = folder, config, dict(identity), schedule
        self.keep, self.leader, self.device = keep, leader, device

    def save(self, engine: Any, step: int) -> Path:
        """Save after ``step`` optimizer steps. Until the rename nothing can be mistaken for a checkpoint.

        Raises RunError on the rank that could not write, after what was begun has been removed; older ones stay.
        """
        final, staging = self.folder / folder_name(step), self.folder / f".{folder_name(step)}.tmp"
        self._together(step, lambda: self._begin(staging), staging)
        facts: dict[str, Any] = {}
        self._together(step, lambda: facts.update(self._write(engine, staging)), staging)
        self._together(step, lambda: self._publish(staging, final, step, facts), staging)
        return final

    def restore(self, engine: Any, step: int) -> None:
        """Load the checkpoint of ``step``, which the leader chose for all ranks; other numbers of ranks are fine."""
        folder = self.folder / folder_name(step)
        state = json.loads((folder / STATE).read_text())
        files = sorted(folder.glob("optimizer_*.safetensors"))
        shift = self.schedule.rate_step(step) - int(state["rate_step"])
        try:
            load_engine(engine, files, state["engine"], shift)
        except (OSError, SafetensorError) as error:
            raise RunError(f"{folder} cannot be read: {error}") from error

    def clean(self) -> None:
        """Remove what saves that were interrupted have left. The leader's, before the run goes on."""
        if self.leader:
            for staging in self.folder.glob(".step_*.tmp"):
                shutil.rmtree(staging, ignore_errors=True)

    def _begin(self, staging: Path) -> None:
        if self.leader:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()

    def _write(self, engine: Any, staging: Path) -> dict[str, Any]:
        rank, world = world_place()
        shard = staging / shard_name(rank, world)
        facts = save_engine(engine, shard)
        _sync(shard)
        if self.leader:
            try:
                save_file(_weights(engine.module), staging / WEIGHTS)
            except SafetensorError as error:
                raise OSError(str(error)) from error
            _sync(staging / WEIGHTS)
            write_json(staging / CONFIG, self.config.to_dict())
        return facts

    def _publish(self, staging: Path, final: Path, step: int, facts: dict[str, Any]) -> None:
        if not self.leader:
            return
        state = {
            "format": FORMAT,
            "step": step,
            "worlds": [asdict(world) for world in self.schedule.worlds],
            "rate_step": self.schedule.rate_step(step),
            "engine": facts,
            "identity": self.identity,
            "files": {path.name: path.stat().st_size for path in sorted(staging.iterdir())},
        }
        write_json(staging / STATE, state)
        shutil.rmtree(final, ignore_errors=True)  # of an abandoned run: this step is being trained anew
        staging.rename(final)
        write_atomic(self.folder / LATEST, final.name + "\n")
        steps = steps_of(self.folder)
        # Later steps than this one are left over from before a resume from an earlier checkpoint.
        current = [known for known in steps if known <= step]
        for old in [*current[: -self.keep], *(known for known in steps if known > step)]:
            shutil.rmtree(self.folder / folder_name(old), ignore_errors=True)

    def _together(self, step: int, work: Callable[[], None], staging: Path) -> None:
        """Do ``work`` on every rank; when it fails on one of them, leave nothing half-made and say so once."""
        failed: OSError | None = None
        try:
            work()
        except OSError as error:
            failed = error
        if sum_over_world([float(failed is not None)], self.device)[0] == 0:
            return
        if self.leader:
            shutil.rmtree(staging, ignore_errors=True)
        world_barrier()
        if failed is not None:
            kept = ", ".join(map(str, steps_of(self.folder))) or "none"
            raise RunError(
                f"the checkpoint of step {step} cannot be written: {failed.strerror or failed} (kept: step {kept})"
            ) from failed
        world_barrier()  # the rank that failed says so and ends the run; this one waits for that


def load_weights(run_dir: str | Path, step: int | None = None) -> tuple[DrafterConfig, dict[str, torch.Tensor], int]:
    """Configuration and weights of a checkpoint of a run, by default of the one that a resume takes.

    Raises ConfigError: there is none, or it is damaged.
    """
    folder = Path(run_dir) / "checkpoints"
    steps = steps_of(folder)
    if not steps or (step is not None and step not in steps):
        rule = f"the run has no checkpoint{'' if step is None else f' of step {step}'} (it has {steps or 'none'})"
        raise ConfigError("RUN" if step is None else "--step", str(run_dir) if step is None else step, rule,
                          "train it further, or choose one of those steps")  # fmt: skip
    step = choose(folder)[0] if step is None else step
    path = folder / folder_name(step)
    problem = damage(path)
    if problem is not None:
        raise ConfigError("--step", step, problem, f"choose another step (the run has {steps})")
    config = DrafterConfig.from_dict(json.loads((path / CONFIG).read_text()))
    return config, load_file(path / WEIGHTS), step


def saved_state(folder: Path, step: int) -> dict[str, Any]:
    """state.json of a checkpoint that `choose` returned."""
    state = json.loads((folder / folder_name(step) / STATE).read_text())
    assert isinstance(state, dict)
    return state


def _weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in module.state_dict().items()}


def _sync(path: Path) -> None:
    """On the disk before the rename: a power cut must not leave a complete name with empty files."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def mismatch(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> Sequence[ConfigError]:
    """Every key in which a checkpoint belongs to another drafter, target or data, as an error naming both values."""
    fix = "use that value, or start a new run"
    return [
        ConfigError(key, value, f"the checkpoint to resume was made with {saved.get(key)!r}", fix)
        for key, value in wanted.items()
        if saved.get(key) != value
    ]
