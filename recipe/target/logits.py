"""Who needs the target's last hidden state, and models whose logits are not simply the head times it."""

from __future__ import annotations

from typing import Any

from recipe.config.schema import DFlash
from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape

# Attributes of transformers' configs that change logits behind the head, with the value that means "not at all".
CHANGES: dict[str, Any] = {"logits_scaling": 1.0, "logit_scale": 1.0, "final_logit_softcapping": None}


SOFT_LABELS, EVALUATION = "dflash.objective.soft_labels", "dflash.evaluation.every"


def needs_logits(ours: DFlash) -> str | None:
    """The key of a config that asks for the last hidden state, and with it for all layers; None when none does."""
    return SOFT_LABELS if ours.objective.soft_labels else EVALUATION if ours.evaluation.every > 0 else None


def refuse_changed_logits(shape: TargetShape, asked_by: str = SOFT_LABELS) -> None:
    """ConfigError, under the name of the key that asks for logits, for a model that scales or caps them behind the
    head; for soft labels, and for decoding from hidden states."""
    for key, neutral in CHANGES.items():
        value = shape.text_config.get(key, neutral)
        if value not in (neutral, None):
            rule = f"{shape.model_type} changes its logits behind the head ({key} = {value}), which we do not compute"
            if asked_by == EVALUATION:
                raise ConfigError(EVALUATION, "above 0", rule, "set it to 0, and use `evaluate` on the exports")
            raise ConfigError(SOFT_LABELS, True, rule, "set it to false, and dflash.evaluation.every to 0")
