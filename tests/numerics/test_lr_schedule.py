"""Learning rates of the schedules, step by step, against closed forms. Through the engine: test_drafter_muon.py."""

from __future__ import annotations

import json
import math

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupCosineLR

from recipe.config import load_config_text
from recipe.engine.lr_schedule import WarmupStableDecayLR

RATES, TOTAL, WARMUP = (0.02, 6e-4), 50, 5


def rates(kind: type, **params: object) -> list[list[float]]:
    """What each group's optimizer step ``i`` uses once ``i`` steps were counted, for i = 0 … TOTAL."""
    overrides = [
        "scheduler=" + json.dumps({"type": kind.__name__, "params": params}),
        "optimizer=" + json.dumps({"type": "Muon", "params": {"muon_lr": RATES[0], "adam_lr": RATES[1]}}),
    ]
    section = load_config_text("{}", overrides).deepspeed_dict(TOTAL, WARMUP)["scheduler"]
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in RATES]
    optimizer = torch.optim.SGD(groups)
    schedule, found = kind(optimizer, **section["params"]), []
    for _ in range(TOTAL + 1):
        schedule.step()
        found.append([group["lr"] for group in optimizer.param_groups])
    return found


def rise(step: int, shape: str = "log") -> float:
    if step >= WARMUP:
        return 1.0
    return step / WARMUP if shape == "linear" else math.log(step + 1) / math.log(WARMUP)


@pytest.mark.parametrize("warmup", ["log", "linear"])
@pytest.mark.parametrize(
    ("shape", "fall"), [("linear", lambda done: 1 - done), ("1-sqrt", lambda done: 1 - math.sqrt(done))]
)
def test_rises_stays_and_falls_over_the_last_share(warmup: str, shape: str, fall: object) -> None:
    found = rates(WarmupStableDecayLR, decay_ratio=0.4, decay_type=shape, warmup_type=warmup)
    for step, both in enumerate(found):
        share = rise(step, warmup) if step <= 30 else fall((step - 30) / 20)  # type: ignore[operator]
        assert both == pytest.approx([rate * share for rate in RATES], abs=1e-12), step
    assert found[30] == pytest.approx(RATES) and found[TOTAL] == [0.0, 0.0]


def test_a_fall_over_all_steps_meets_the_rise_at_the_smaller_rate() -> None:
    found = rates(WarmupStableDecayLR, decay_ratio=1.0)
    for step, (rate, _) in enumerate(found):
        assert rate == pytest.approx(RATES[0] * min(rise(step), 1 - step / TOTAL), abs=1e-12)


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_a_cosine_ends_at_its_floor(floor: float) -> None:
    """``cos_min_ratio`` of DeepSpeed's own schedule."""
    found = rates(WarmupCosineLR, cos_min_ratio=floor)
    for step in range(WARMUP, TOTAL + 1):
        done = (step - WARMUP + 1) / (TOTAL - WARMUP)
        wanted = floor + (1 - floor) * (1 + math.cos(math.pi * min(done, 1.0))) / 2
        assert found[step] == pytest.approx([rate * wanted for rate in RATES], abs=2e-4 * RATES[0]), step
