"""Settings that would change nothing together with the others: refused, because who writes one expects it to act.

Only what changes training is listed. Below a switch that is off, settings of what is shown or measured may stay
(`telemetry`, `evaluation`, DeepSpeed's monitors): they wait for the switch, and `evaluate` uses some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path

from recipe.config.deepspeed_keys import RunConfig
from recipe.errors import ConfigError

Condition = Callable[[RunConfig], object]


def _sets_no_warmup(config: RunConfig) -> bool:
    return config.scheduler is None or config.scheduler.params.warmup_num_steps != "auto"


#: (key, values that say nothing, when it has no effect, why, what to do)
TABLE: tuple[tuple[str, tuple[object, ...], Condition, str, str], ...] = (
    ("dflash.objective.soft_weight", (1.0,), lambda c: not c.dflash.objective.soft_labels,
     "without soft_labels", "remove it, or set soft_labels to true"),
    ("dflash.objective.temperature", (1.0,), lambda c: not c.dflash.objective.soft_labels,
     "without soft_labels", "remove it, or set soft_labels to true"),
    ("dflash.objective.soft_labels", (False,), lambda c: c.dflash.objective.soft_weight == 0.0,
     "with soft_weight = 0.0, the share of the soft labels", "set it to false, or raise soft_weight"),
    ("dflash.objective.gamma", (None,), lambda c: c.dflash.objective.loss == "dpace",
     "with loss = 'dpace', which weighs by confidence", 'remove it, or set loss to "dflash"'),
    ("dflash.objective.dpace_alpha", (0.5,), lambda c: c.dflash.objective.loss != "dpace",
     "with loss = 'dflash'", 'remove it, or set loss to "dpace"'),
    ("dflash.objective.noise.start", (0.05, 0.0), lambda c: c.dflash.objective.noise.type == "none",
     "with noise.type = 'none'", "remove it, or choose uniform or gaussian"),
    ("dflash.objective.noise.end", (0.01, 0.0), lambda c: c.dflash.objective.noise.type == "none",
     "with noise.type = 'none'", "remove it, or choose uniform or gaussian"),
    ("dflash.objective.noise.type", ("uniform", "none"),
     lambda c: c.dflash.objective.noise.start == c.dflash.objective.noise.end == 0.0,
     "with noise.start and noise.end of 0", "raise one of them, or remove it"),
    ("dflash.run.warmup_ratio", (0.04, 0.0), _sets_no_warmup,
     'without a scheduler whose warmup_num_steps is "auto"', "remove it, or let the scheduler follow it"),
    ("dflash.target.exact_sums", (False,), lambda c: c.dflash.layout.target_tp == 1,
     "with target_tp = 1: one rank makes every sum", "remove it"),
    ("dflash.target.revision", (None,), lambda c: Path(c.dflash.target.path, "config.json").is_file(),
     "with a folder as path: it names a version at the hub", "remove it"),
    ("dflash.drafter.sliding_window", (None,), lambda c: c.dflash.drafter.num_layers == 1,
     "with num_layers = 1: the last layer sees everything", "remove it, or use more layers"),
)  # fmt: skip


def without_effect(config: RunConfig) -> Iterator[ConfigError]:
    """A mistake for each setting of a resolved config that the others leave without effect."""
    for key, neutral, applies, why, fix in TABLE:
        if applies(config):
            value = attrgetter(key)(config)
            if value not in neutral:
                yield ConfigError(key, value, f"has no effect {why}", fix)
