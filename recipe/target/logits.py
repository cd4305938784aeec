"""Models whose logits are not simply the head times the last hidden state: soft labels would be wrong for them."""

from __future__ import annotations

from typing import Any

from recipe.errors import ConfigError
from recipe.shapes import TargetShape

# Attributes of transformers' configs that change logits behind the head, with the value that means "not at all".
CHANGES: dict[str, Any] = {"logits_scaling": 1.0, "logit_scale": 1.0, "final_logit_softcapping": None}


def refuse_changed_logits(shape: TargetShape) -> None:
    """ConfigError for a model that scales or caps its logits; for soft labels, and for decoding from hidden states."""
    from transformers import AutoConfig

    settings = {key: value for key, value in shape.text_config.items() if key != "model_type"}
    config = AutoConfig.for_model(shape.text_config["model_type"], **settings)  # with the defaults of this type
    for key, neutral in CHANGES.items():
        value = getattr(config, key, neutral)
        if value not in (neutral, None):
            rule = f"{shape.model_type} changes its logits behind the head ({key} = {value}), which we do not compute"
            fix = "set it to false, and dflash.evaluation.every to 0"
            raise ConfigError("dflash.objective.soft_labels", True, rule, fix)
