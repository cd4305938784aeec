"""Where a run goes on: which checkpoint, whether it fits the config, and what another number of ranks changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recipe.check.feasibility import ring_size
from recipe.config import RunConfig
from recipe.data.rows import Rows
from recipe.data.schedule import Schedule, World, continued, world_of
from recipe.drafter.export_layout import load_export
from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape
from recipe.training.checkpoint import choose, mismatch, saved_state
from recipe.training.identity import identity


@dataclass(frozen=True)
class Resume:
    """The leader's decision for all ranks. ``worlds``: see `Schedule.of`; ``notes``: for the user."""

    step: int
    worlds: list[World]
    notes: list[str]

    def to_json(self) -> list[dict[str, int]]:
        """The worlds as plain data."""
        return [asdict(world) for world in self.worlds]


def worlds_from_json(value: Any) -> list[World]:
    """The inverse of `Resume.to_json`."""
    return [World(**{key: int(number) for key, number in fields.items()}) for fields in value]


def plan_resume(config: RunConfig, rows: Rows, nodes: int) -> Resume:
    """The step to go on from; reads only, so it may be called before the run's folder is touched.

    Raises ConfigError: no usable checkpoint, one of another drafter, target or data, or a run that is over.
    """
    run = config.dflash.run
    folder = Path(run.output_dir) / run.name / "checkpoints"
    step, damaged = choose(folder)
    notes = [f"{note}; resumed from step {step} instead" for note in damaged]
    state = saved_state(folder, step)
    for error in mismatch(state["identity"], identity(config, rows.fingerprint)):
        raise error
    saved = worlds_from_json(state["worlds"])
    worlds = continued(saved, world_of(config, nodes, step))
    schedule = Schedule.of(config, rows.lengths, nodes, worlds)
    if step > schedule.total_steps or (step == schedule.total_steps and _is_done(folder.parent, step)):
        rule = f"the run has done all of its {schedule.total_steps} steps already"
        raise ConfigError("--resume", run.name, rule, "raise run.max_steps, or start another run")
    if worlds[-1].since == step and len(worlds) > 1:
        notes += _describe(worlds[-2], worlds[-1])
        _check_ring(config, schedule, rows)
    return Resume(step, worlds, notes)


def _is_done(run: Path, step: int) -> bool:
    """Whether the summary of ``run`` is of ``step`` or a later one, and the export that it names is whole: an older one
    says nothing of this step. A run that is not done has its export written again."""
    try:
        summary = json.loads((run / "summary.json").read_text())
        named = Path(summary["export"])
        load_export(named if named.is_dir() else run / "export" / named.name)  # the run's folder may have been moved
        return bool(summary["steps"] >= step)
    except (OSError, ValueError, TypeError, KeyError, RecursionError, ConfigError):
        return False


def _describe(before: World, now: World) -> Sequence[str]:
    ranks, were = now.nodes * now.drafters, before.nodes * before.drafters
    notes = [
        f"resumed with {ranks} drafter rank(s) on {now.nodes} node(s) instead of {were} on {before.nodes}: masters and "
        "moments are divided anew, and what was not trained yet is trained once"
    ]
    batch, was = ranks * now.accumulation, were * before.accumulation
    if batch != was:
        note = f"an optimizer step now holds {batch} micro-batches instead of {was}"
        if was % ranks == 0:
            note += f" (gradient_accumulation_steps = {was // ranks} would keep {was})"
        notes.append(note)
    return notes


def _check_ring(config: RunConfig, schedule: Schedule, rows: Rows) -> None:
    """What is left of an epoch is planned anew, and the draw from it must fit into the ring as well."""
    target = config.dflash.target
    size = ring_size(config, TargetShape.resolve(target.path, target.revision), rows.lengths.tolist())
    peak = schedule.peak_pages(size.page_tokens)
    if peak > size.n_pages:
        rule = f"after the change of nodes the draw needs up to {peak} pages and the ring has {size.n_pages}"
        depth = -(-peak * config.dflash.ring.max_depth // size.n_pages)
        raise ConfigError("dflash.ring.max_depth", config.dflash.ring.max_depth, rule, f"raise it to {depth} or more")
