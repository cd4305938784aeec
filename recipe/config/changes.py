"""What a resumed run changes: settings that a checkpoint allows to change are still never changed in silence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipe.config.deepspeed_keys import RunConfig

#: How often, how long and where to look: these change what is seen of a run, not what it learns. ``layout``: said by
#: the resume itself.
UNSAID = (
    "dflash.run.output_dir", "dflash.run.log_every", "dflash.run.save_every", "dflash.run.keep",
    "dflash.run.profile_interval", "dflash.telemetry", "dflash.evaluation", "dflash.layout", "dflash.ring.timeout_s",
    "dflash.ring.max_bytes", "steps_per_print", "wall_clock_breakdown", "gradient_accumulation_steps",
    "train_batch_size",
)  # fmt: skip
WITHOUT_EFFECT = {
    "dflash.drafter.init_from": ", which changes nothing: the weights are the checkpoint's",
    "dflash.target.path": ", where the same model lies",
    "dflash.target.revision": ", which is the same model",
}


def changes(before: Path, now: RunConfig) -> list[str]:
    """A line for each setting in which ``now`` trains otherwise than ``before``, the run's config.json (resolved).

    A file that is missing or damaged gives one line that says so.
    """
    try:
        then = json.loads(before.read_text(encoding="utf-8"))
        assert isinstance(then, dict)
    except (OSError, ValueError, RecursionError, AssertionError):
        return [f"{before} cannot be read, so what this resume changes is not known"]
    return [
        f"resumed with {path} = {json.dumps(new)} instead of {json.dumps(old)}{WITHOUT_EFFECT.get(path, '')}"
        for path, old, new in _differences(then, json.loads(now.to_json()), "")
        if not any(path == unsaid or path.startswith(f"{unsaid}.") for unsaid in UNSAID)
    ]


def _differences(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, old, new) of every value that differs. A key that ``old`` lacks is of a newer version."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in new:
            if key in old:
                yield from _differences(old[key], new[key], f"{path}.{key}" if path else key)
    elif old != new:
        yield path, old, new
