"""The two files for the 27B node: one holds the published recipe exactly, the other is the best that was measured."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipe.config import RunConfig, load_config
from recipe.run.train_cli import add_arguments, run

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED, BEST = (f"ds_configs/qwen3.6_27b_5t3d{suffix}.json" for suffix in ("", "_best"))
RECIPE = {
    "optimizer.type": "AdamW", "optimizer.params.lr": 6e-4, "optimizer.params.weight_decay": 0.01,
    "scheduler.type": "WarmupCosineLR", "dflash.run.warmup_ratio": 0.04, "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0, "zero_optimization.stage": 2, "bf16.enabled": True,
    "dflash.run.epochs": 6, "dflash.run.profile_interval": 60,
    "dflash.data.token_budget": 49152, "dflash.data.max_seq_len": 8192, "dflash.data.max_batch_size": 64,
    "dflash.layout.target_gpus": [0, 1, 2, 3, 4], "dflash.layout.drafter_gpus": [5, 6, 7],
    "dflash.layout.target_tp": 5, "dflash.target.path": "Qwen/Qwen3.6-27B",
    "dflash.ring.min_ready": 30, "dflash.ring.max_depth": 90, "dflash.ring.reuse": 1,
    "dflash.drafter.num_layers": 5, "dflash.drafter.block_size": 32, "dflash.drafter.max_anchors": 1024,
    "dflash.drafter.mask_token_id": 248070,
    "dflash.objective.loss": "dflash", "dflash.objective.soft_labels": True, "dflash.objective.soft_weight": 1.0,
    "dflash.objective.gamma": 10.0, "dflash.objective.acceptance_weight": 0.0,
    "dflash.objective.noise.type": "uniform", "dflash.objective.noise.start": 0.05,
    "dflash.objective.noise.end": 0.01,
}  # fmt: skip
#: DeepSpeed's own defaults, which differ from the recipe's, the mask id of that tokenizer, and gamma, which null gives.
NOT_BY_DEFAULT = {
    "scheduler.type", "gradient_accumulation_steps", "bf16.enabled", "dflash.drafter.mask_token_id",
    "dflash.objective.gamma",
}  # fmt: skip


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, node


def values(config: RunConfig) -> dict[str, Any]:
    return dict(leaves(json.loads(config.to_json())))


def test_the_reference_file_is_the_published_recipe() -> None:
    found = values(load_config(PUBLISHED))
    assert {key: found[key] for key in RECIPE} == RECIPE


def test_the_schema_follows_it() -> None:
    found, wanted = values(RunConfig()), {key: RECIPE[key] for key in RECIPE.keys() - NOT_BY_DEFAULT}
    assert {key: found[key] for key in wanted} == wanted


def test_every_key_in_which_the_best_differs_is_explained() -> None:
    published, best = (dict(leaves(json.loads((ROOT / path).read_text()))) for path in (PUBLISHED, BEST))
    changed = {key for key in published.keys() | best.keys() if published.get(key) != best.get(key)}
    changed.remove("dflash.run.name")
    text = (ROOT / "docs" / "quality.md").read_text()
    assert [key for key in changed if f"| `{key.removeprefix('dflash.')}` |" not in text] == []
    assert "dflash.objective.loss" in changed, "the two files are different recipes"


@pytest.mark.parametrize("path", [PUBLISHED, BEST])
def test_both_pass_the_check_anywhere(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args([path, "--check", "--no-model"])) == 0
    assert "objective" in capsys.readouterr().out
