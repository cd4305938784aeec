"""Who asks for the target's last hidden state is named, and paid for in the plan: soft labels or evaluation."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from recipe.config import load_config
from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape
from recipe.target.logits import needs_logits, refuse_changed_logits
from recipe.target.plan_table import add_arguments, build_plan

CONFIG = Path(__file__).parents[3] / "ds_configs" / "qwen3.6_27b_5t3d.json"


def rank_bytes(folder: Path, **changes: object) -> list[int]:
    """Of the reference target at degree 5, with sections of the config changed."""
    text = json.loads(CONFIG.read_text())
    text["dflash"]["objective"]["soft_labels"] = changes.get("soft_labels", False)
    text["dflash"].setdefault("evaluation", {})["every"] = changes.get("every", 0)
    file = folder / "c.json"
    file.write_text(json.dumps(text))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    plan = build_plan(parser.parse_args([str(file), "--tp", "5"]))
    return plan["degrees"][0]["rank_bytes"]


def test_the_plan_counts_all_layers_and_the_head_of_a_target_that_evaluates(tmp_path: Path) -> None:
    cut, whole = rank_bytes(tmp_path), rank_bytes(tmp_path, soft_labels=True)
    evaluating = rank_bytes(tmp_path, every=10)
    shape = TargetShape.resolve("Qwen/Qwen3.6-27B")
    assert not shape.tie_word_embeddings and all(a < b for a, b in zip(cut, whole, strict=True))
    assert evaluating == [whole[0] + 2 * shape.vocab_size * shape.hidden_size, *whole[1:]]


def test_the_key_that_asks_is_named() -> None:
    asked = {("false", 0): None, ("false", 5): "dflash.evaluation.every", ("true", 5): "dflash.objective.soft_labels"}
    for (soft, every), name in asked.items():
        overrides = (f"dflash.objective.soft_labels={soft}", f"dflash.evaluation.every={every}")
        assert needs_logits(load_config(str(CONFIG), overrides).dflash) == name
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
                "num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8, "max_position_embeddings": 64,
                "rms_norm_eps": 1e-6}  # fmt: skip
    capped = TargetShape.from_config({"model_type": "gemma2", **settings})
    with pytest.raises(ConfigError, match=r"(?s)dflash\.evaluation\.every.*set it to 0") as caught:
        refuse_changed_logits(capped, "dflash.evaluation.every")
    assert "soft_labels" not in str(caught.value)
