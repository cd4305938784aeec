"""`--set optimizer.type=…` (and scheduler.type) on a file that is written for another type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.config import ConfigErrors, load_config, load_config_text
from recipe.config.deepspeed_keys import Muon

CONFIGS = Path(__file__).resolve().parents[3] / "ds_configs"
MUON = {"type": "Muon", "params": {"muon_lr": 0.014, "adam_lr": 6e-4, "momentum": 0.9, "weight_decay": 0.02}}
ADAM = {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.02}}


def load(optimizer: dict[str, object], *overrides: str) -> tuple[object, list[str]]:
    said: list[str] = []
    return load_config_text(json.dumps({"optimizer": optimizer}), overrides, say=said.append).optimizer, said


def test_from_muon_to_adamw() -> None:
    optimizer, said = load(MUON, "optimizer.type=AdamW")
    assert optimizer.model_dump() == {
        "type": "AdamW",
        "params": {"lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.02, "torch_adam": True},
    }
    assert len(said) == 1 and "optimizer.type = AdamW" in said[0] and "muon_lr, adam_lr, momentum" in said[0]


def test_from_adamw_to_muon_and_what_is_given_beside_it_counts() -> None:
    optimizer, said = load(ADAM, "optimizer.params.muon_lr=0.03", "optimizer.type=Muon")
    assert isinstance(optimizer, Muon)
    params = optimizer.params
    assert (params.muon_lr, params.adam_lr, params.weight_decay) == (0.03, 6e-4, 0.02)
    assert len(said) == 1 and "the file's lr left out" in said[0]


def test_the_same_type_leaves_out_nothing() -> None:
    optimizer, said = load(MUON, "optimizer.type=Muon")
    assert optimizer.params.momentum == 0.9 and not said


def test_a_parameter_of_the_other_type_in_set_is_still_a_mistake() -> None:
    with pytest.raises(ConfigErrors, match=r"belongs to another optimizer\.type"):
        load(MUON, "optimizer.type=AdamW", "optimizer.params.muon_lr=0.1")


def test_a_mistake_in_the_file_is_still_one() -> None:
    with pytest.raises(ConfigErrors, match=r"optimizer\.params\.muon_lr"):
        load({"type": "AdamW", "params": {"muon_lr": 0.1}})
    with pytest.raises(ConfigErrors, match="must be one of AdamW, Adam, Muon"):
        load(MUON, "optimizer.type=Moun")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.name)
@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
@pytest.mark.parametrize("scheduler", ["WarmupCosineLR", "WarmupLR", "WarmupDecayLR", "WarmupStableDecayLR"])
def test_every_shipped_file_takes_every_type(path: Path, optimizer: str, scheduler: str) -> None:
    config = load_config(path, (f"optimizer.type={optimizer}", f"scheduler.type={scheduler}"))
    assert (config.optimizer.type, config.scheduler and config.scheduler.type) == (optimizer, scheduler)
