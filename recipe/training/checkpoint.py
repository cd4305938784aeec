"""Checkpoints of the drafter: written under a temporary name, complete or not there, the same one on every rank.

checkpoints/step_00000400/
    optimizer_0000R-of-0000N.safetensors   each rank's masters and moments (`recipe/engine/optimizer_state.py`)
    weights.safetensors, config.json       what `export` reads
    state.json                             step, worlds, what a resume must match, size and sum of every file
checkpoints/latest    the name of the one to resume from; when that is damaged, the newest complete one is taken
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from recipe.data.schedule import Schedule
from recipe.drafter.config import DrafterConfig
from recipe.engine.optimizer_state import load_state, masters_unlike, save_state, unlike
from recipe.engine.worlds import gather_over_world, sum_over_world, world_place
from recipe.errors import ConfigError, RunError
from recipe.tell.disk import reason
from recipe.tell.run_dir import write_atomic, write_json
from recipe.training.integrity import FORMAT, STATE, damage, folder_name, seal, sum_of_file
from recipe.training.to_disk import sync_file

LATEST, WEIGHTS, CONFIG = "latest", "weights.safetensors", "config.json"


class SaveFailed(RunError):
    """A checkpoint could not be written, on some rank; all ranks raise it, and what had been begun is gone."""


class ResumeMismatch(RunError):
    """What was restored is not what was saved."""


def shard_name(rank: int, world: int) -> str:
    return f"optimizer_{rank + 1:05d}-of-{world:05d}.safetensors"


def steps_of(checkpoints: Path) -> list[int]:
    """Steps of the finished checkpoints, oldest first. Whether their files are whole, `damage` says."""
    found = (path for path in checkpoints.glob("step_[0-9]*") if (path / STATE).is_file())
    return sorted(int(path.name.removeprefix("step_")) for path in found if path.name[5:].isdecimal())


def choose(folder: Path, names: Collection[str] | None = None) -> tuple[int, list[str]]:
    """The step to go on from, and what was found damaged on the way: `latest`, else the newest whole one.

    ``names``: the files whose bytes are read (None: all, seconds for 20 GB). Raises ConfigError when there is none.
    """
    steps = steps_of(folder)
    try:
        named = (folder / LATEST).read_text().strip()
    except (OSError, UnicodeDecodeError):
        named = ""
    first = [step for step in steps if folder_name(step) == named]
    notes = [] if first or not steps else [f"{folder / LATEST} names no checkpoint ({named!r})"]
    for step in [*first, *(step for step in reversed(steps) if step not in first)]:
        problem = damage(folder / folder_name(step), names)
        if problem is None:
            return step, notes
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
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """``tick``: called whenever a piece of a file has reached the disk, for the watchdog."""
        self.folder, self.config, self.identity, self.schedule = folder, config, dict(identity), schedule
        self.keep, self.leader, self.device, self.tick = keep, leader, device, tick
        self._read_back = False  # whether a checkpoint of this launch has been read: until then older ones stay

    def save(self, engine: Any, step: int, trained: Mapping[str, Any] | None = None) -> Path:
        """Save after ``step`` optimizer steps. Until the rename nothing can be mistaken for a checkpoint.

        ``trained``: what those steps came to, for `saved_state`. Raises SaveFailed on every rank when one of them
        cannot write; older checkpoints stay. The first save of a launch is read back before any of them goes.
        """
        final, staging = self.folder / folder_name(step), self.folder / f".{folder_name(step)}.tmp"
        self._together(step, lambda: self._begin(staging), staging)
        facts: dict[str, Any] = {}
        sums: list[tuple[str, str]] = []
        self._together(step, lambda: facts.update(self._write(engine, staging, sums)), staging)
        of_all = dict(gather_over_world(sums))
        known = {"engine": facts, "trained": dict(trained or {})}
        self._together(step, lambda: self._publish(staging, final, step, known, of_all), staging)
        return final

    def restore(self, engine: Any, step: int) -> None:
        """Load the checkpoint of ``step``, which the leader chose for all ranks; other numbers of ranks are fine.

        Raises ResumeMismatch when the masters, or the weights that this
        rank now works with, are not the weights that lie in the checkpoint.
        """
        folder = self.folder / folder_name(step)
        state = saved_state(self.folder, step)
        files = [folder / name for name in sorted(state["files"]) if name.startswith("optimizer_")]
        shift = self.schedule.rate_step(step) - int(state["rate_step"])
        try:
            load_state(engine, files, state["engine"], shift)
            weights = load_file(folder / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise RunError(f"{folder} cannot be read: {error}") from error
        if other := unlike(engine, weights):
            raise ResumeMismatch(
                f"restored from {folder}, {other[0]} is not the weight that was saved there (and {len(other) - 1} more)"
            )

    def clean(self) -> None:
        """Remove what saves that were interrupted have left. The leader's, before the run goes on."""
        if self.leader:
            for staging in self.folder.glob(".step_*.tmp"):
                shutil.rmtree(staging, ignore_errors=True)

    def _begin(self, staging: Path) -> None:
        if self.leader:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()

    def _write(self, engine: Any, staging: Path, sums: list[tuple[str, str]]) -> dict[str, Any]:
        """This rank's files; ``sums`` gets name and sum of each."""
        rank, world = world_place()
        shard = staging / shard_name(rank, world)
        facts = save_state(engine, shard)
        sync_file(shard, self.tick)
        if self.leader:
            try:
                save_file(_weights(engine.module), staging / WEIGHTS)
            except SafetensorError as error:
                raise OSError(str(error)) from error
            sync_file(staging / WEIGHTS, self.tick)
            write_json(staging / CONFIG, self.config.to_dict())
        ours = [shard.name, WEIGHTS, CONFIG] if self.leader else [shard.name]
        sums += [(name, sum_of_file(staging / name)) for name in ours]
        return facts

    def _publish(self, staging: Path, final: Path, step: int, known: dict[str, Any], sums: Mapping[str, str]) -> None:
        if not self.leader:
            return
        state = {
            "format": FORMAT,
            "step": step,
            "worlds": [asdict(world) for world in self.schedule.worlds],
            "rate_step": self.schedule.rate_step(step),
            **known,
            "identity": self.identity,
            "files": {name: [(staging / name).stat().st_size, sums[name]] for name in sorted(sums)},
        }
        write_json(staging / STATE, seal(state))
        shutil.rmtree(final, ignore_errors=True)  # of an abandoned run: this step is being trained anew
        staging.rename(final)
        if not self._read_back and (problem := damage(final) or _other_masters(final, sums)):
            shutil.rmtree(final, ignore_errors=True)
            raise OSError(f"{problem}, as read back")
        self._read_back = True
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
        why = gather_over_world([("", reason(failed))] if failed is not None else [])[0][1]
        kept = ", ".join(map(str, steps_of(self.folder))) or "none"
        raise SaveFailed(f"the checkpoint of step {step} cannot be written: {why} (kept: step {kept})") from failed


def load_weights(run_dir: str | Path, step: int | None = None) -> tuple[DrafterConfig, dict[str, torch.Tensor], int]:
    """Configuration and weights of a checkpoint of a run, by default of the newest whole one; says what is damaged.

    Raises ConfigError: there is none, or it is damaged.
    """
    folder = Path(run_dir) / "checkpoints"
    steps = steps_of(folder)
    if not steps or (step is not None and step not in steps):
        rule = f"the run has no checkpoint{'' if step is None else f' of step {step}'} (it has {steps or 'none'})"
        raise ConfigError("RUN" if step is None else "--step", str(run_dir) if step is None else step, rule,
                          "train it further, or choose one of those steps")  # fmt: skip
    if step is None:
        step, notes = choose(folder, (WEIGHTS, CONFIG))
        for note in notes:
            print(f"warning: {note}; step {step} is taken instead", file=sys.stderr, flush=True)
    path = folder / folder_name(step)
    problem = damage(path, (WEIGHTS, CONFIG))
    if problem is not None:
        raise ConfigError("--step", step, problem, f"choose another step (the run has {steps})")
    return stored_config(run_dir, step), load_file(path / WEIGHTS), step


def stored_config(run_dir: str | Path, step: int) -> DrafterConfig:
    """The drafter's, as a checkpoint holds it."""
    path = Path(run_dir) / "checkpoints" / folder_name(step) / CONFIG
    return DrafterConfig.from_dict(json.loads(path.read_text()))


def saved_state(folder: Path, step: int) -> dict[str, Any]:
    """state.json of a checkpoint that `choose` returned."""
    state = json.loads((folder / folder_name(step) / STATE).read_text())
    assert isinstance(state, dict)
    return state


def _other_masters(folder: Path, names: Collection[str]) -> str | None:
    """What in a checkpoint's optimizer files is not what its weights say, or None."""
    weights = load_file(folder / WEIGHTS)
    other = masters_unlike([folder / name for name in sorted(names) if name.startswith("optimizer_")], weights)
    return f"the master of {other[0]} is not its weight in {folder}" if other else None


def _weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in module.state_dict().items()}


def mismatch(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> Sequence[ConfigError]:
    """Every key in which a checkpoint belongs to another drafter, target or data, as an error naming both values."""
    # What is known by its bytes has a sum for a value, which nobody can set.
    fixes = {False: "use that value, or start a new run", True: "use what the run began with, or start a new run"}
    were = {"optimizer.type": "AdamW", **saved}  # not written before there was Muon
    return [
        ConfigError(
            key, value, f"the checkpoint to resume was made with {were.get(key)!r}", fixes[key.startswith("the ")]
        )
        for key, value in wanted.items()
        if were.get(key) != value
    ]
