"""A setting that the others leave without effect is refused, each by name; what ships has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.check import resolve
from recipe.config import RunConfig, load_config, load_config_text
from recipe.config.without_effect import TABLE, without_effect

OURS = "dflash.objective."
LINEAR = '{"type": "WarmupLR", "params": {"warmup_num_steps": 5}}'


def found(*overrides: str) -> list[str]:
    return [error.field for error in without_effect(load_config_text("{}", overrides))]


#: key -> settings that leave it without effect, a value of it, and the settings with which that value acts
CASES = {
    "dflash.objective.soft_weight": ([OURS + "soft_labels=false"], "0.5", []),
    "dflash.objective.temperature": ([OURS + "soft_labels=false"], "2.0", []),
    "dflash.objective.gamma": ([OURS + "loss=dpace"], "7.0", []),
    "dflash.objective.dpace_alpha": ([], "0.2", [OURS + "loss=dpace"]),
    "dflash.objective.noise.start": ([OURS + "noise.type=none"], "0.1", []),
    "dflash.objective.noise.end": ([OURS + "noise.type=none"], "0.1", []),
    "dflash.objective.noise.type": ([OURS + "noise.start=0", OURS + "noise.end=0"], "gaussian", []),
    "dflash.run.warmup_ratio": (["scheduler=" + LINEAR], "0.1", ['scheduler={"type": "WarmupLR"}']),
    "dflash.target.exact_sums": (["dflash.layout.target_tp=1"], "true", ["dflash.layout.target_tp=5"]),
    "dflash.target.revision": (["dflash.target.path=recipe/demo/assets"], "main", ["dflash.target.path=some/model"]),
    "dflash.drafter.sliding_window": (["dflash.drafter.num_layers=1"], "64", []),
}


def test_every_row_has_a_case() -> None:
    assert {row[0] for row in TABLE} == CASES.keys() | {"dflash.objective.soft_labels"}


@pytest.mark.parametrize("key", CASES)
def test_without_effect_and_with(key: str) -> None:
    without, value, acting = CASES[key]
    assert key in found(*without, f"{key}={value}")
    assert key not in found(*without)
    assert key not in found(*acting, f"{key}={value}")


def test_soft_labels_without_a_share() -> None:
    assert found(OURS + "soft_weight=0.0") == ["dflash.objective.soft_labels"]
    assert not found(OURS + "soft_weight=0.5") and not found(OURS + "soft_weight=1.0", OURS + "soft_labels=false")


def test_a_message_says_why_and_what_to_do() -> None:
    (error,) = without_effect(load_config_text("{}", [OURS + "loss=dpace", OURS + "gamma=7"]))
    assert "has no effect with loss = 'dpace'" in str(error) and "set loss to" in str(error)


@pytest.mark.parametrize("path", sorted(Path("ds_configs").glob("*.json")), ids=str)
def test_what_ships_is_free_of_them(path: Path) -> None:
    config = load_config(path)
    assert list(without_effect(config)) == []
    raw = json.loads(path.read_text())
    raw["dflash"]["target"] = {**raw["dflash"]["target"], "path": "recipe/demo/assets", "target_layer_ids": [1, 3]}
    resolved = resolve(RunConfig.model_validate(raw), gpus=0)  # a resolved file re-runs by itself
    assert list(without_effect(resolved)) == []
