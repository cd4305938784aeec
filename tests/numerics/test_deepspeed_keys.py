"""Every DeepSpeed key that a run may set, on real ranks, against float64: at 1, 2 and 4 of them, each resuming another.

A key without a case here is not offered (tests/unit/config/test_config_refused.py); most cases are marked slow. One
chain of four short runs tries a key: two steps on one rank, saved; one on two, saved; one on four, saved; one on one.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe.config.keys import known_keys
from recipe.engine.optimizer_state import masters_unlike
from tests.numerics.zero_ranks import Optimizer, error, masters, mean_gradients, norm_of, reference, steps

CHAIN = ((1, 0, 2), (2, 2, 3), (4, 3, 4), (1, 4, 5))  # ranks, first step, last step
WARMUP, ALL = 3, 6


def warmed_up(step: int, kind: str) -> float | None:
    """Share of the rise that is done in ``step``, None after it. A schedule of DeepSpeed rests for one step."""
    at = step - 1
    if at >= WARMUP:
        return None
    return max(0.0, math.log(at + 1) / math.log(WARMUP) if kind == "log" else at / WARMUP) if at >= 0 else 0.0


def cosine(step: int, highest: float, kind: str, low: float, end: float) -> float:
    if step == 0:
        return 0.0
    risen = warmed_up(step, kind)
    if risen is not None:
        return highest * (low + risen * (1 - low))
    done = min(1.0, (step - WARMUP) / (ALL - WARMUP))
    return highest * (end + (1 - end) * (1 + math.cos(math.pi * done)) / 2)


def decay(step: int, highest: float, kind: str, low: float, falls: bool) -> float:
    risen = warmed_up(step, kind)
    if risen is not None:
        return low + risen * (highest - low)
    return low + (highest - low) * (ALL - (step - 1)) / (ALL - WARMUP) if falls else highest


def stable(step: int, highest: float, ratio: float, kind: str) -> float:
    """Ours: rise, stay, fall over the last ``ratio`` of all steps."""
    risen = warmed_up(step, "log")
    share = min(1.0, (ALL - (step - 1)) / (ratio * ALL))
    return highest * min(1.0 if risen is None else risen, share if kind == "linear" else 1.0 - math.sqrt(1.0 - share))


def schedule(kind: str, **params: Any) -> str:
    return "scheduler=" + json.dumps({"type": kind, "params": {"warmup_num_steps": WARMUP, **params}})


ZERO = {
    "zero_optimization.stage": 1,
    "zero_optimization.contiguous_gradients": False,
    "zero_optimization.reduce_scatter": False,
    "zero_optimization.reduce_bucket_size": 500,
    "zero_optimization.allgather_partitions": False,
    "zero_optimization.allgather_bucket_size": 100,
    "zero_optimization.overlap_comm": True,
    "steps_per_print": 1,
    "wall_clock_breakdown": True,
}
PARAMS: dict[str, dict[str, Any]] = {
    "gradient_clipping": {"clip": 0.0},
    "optimizer.params.weight_decay": {"weight_decay": 0.0},
    "optimizer.params.betas": {"betas": (0.8, 0.9)},
    "optimizer.params.eps": {"eps": 0.1},
    "optimizer.params.momentum": {"momentum": 0.8},
    "optimizer.params.muon_lr": {"muon_lr": 0.1},
    "optimizer.params.adam_lr": {"lr": 0.02},
}
SCHEDULES = {
    "WarmupCosineLR": (
        schedule("WarmupCosineLR", total_num_steps=ALL),
        lambda step, highest: cosine(step, highest, "log", 0.0, 0.0001),
    ),
    "WarmupCosineLR, every parameter": (
        schedule("WarmupCosineLR", total_num_steps=ALL, warmup_min_ratio=0.2, cos_min_ratio=0.3, warmup_type="linear"),
        lambda step, highest: cosine(step, highest, "linear", 0.2, 0.3),
    ),
    "WarmupLR": (
        schedule("WarmupLR", warmup_min_lr=0.001, warmup_type="linear"),
        lambda step, highest: decay(step, highest, "linear", 0.001, falls=False),
    ),
    "WarmupDecayLR": (
        schedule("WarmupDecayLR", total_num_steps=ALL, warmup_min_lr=0.001),
        lambda step, highest: decay(step, highest, "log", 0.001, falls=True),
    ),
    "WarmupStableDecayLR": (
        schedule("WarmupStableDecayLR", total_num_steps=ALL, decay_ratio=0.6),
        lambda step, highest: stable(step, highest, 0.6, "linear"),
    ),
    "WarmupStableDecayLR, 1-sqrt": (
        schedule("WarmupStableDecayLR", total_num_steps=ALL, decay_ratio=0.9, decay_type="1-sqrt"),
        lambda step, highest: stable(step, highest, 0.9, "1-sqrt"),
    ),
}
FIRST = "WarmupCosineLR, every parameter"
#: Keys of DeepSpeed that are no choice: one value, derived, or tried by every chain (accumulation is 8 / ranks).
FIXED = (
    "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "bf16.check_grad_overflow",
    "fp16.enabled", "data_types.grad_accum_dtype", "optimizer.type", "optimizer.params.lr",
    "optimizer.params.torch_adam",
)  # fmt: skip
ELSEWHERE = (
    "optimizer.params.ns_method", "bf16.enabled", "communication_data_type", "scheduler.type",
    *(f"scheduler.params.{key}" for key in (
        "total_num_steps", "warmup_num_steps", "warmup_min_ratio", "cos_min_ratio", "warmup_type", "warmup_min_lr",
        "warmup_max_lr", "decay_ratio", "decay_type",
    )),
)  # fmt: skip


def test_every_offered_key_is_tried() -> None:
    offered = {key for key in known_keys() if not key.startswith("dflash.")}
    assert offered == {*ZERO, *PARAMS, *FIXED, *ELSEWHERE}


def try_chain(folder: Path, optimizer: Optimizer, *settings: str, bf16: bool = False, exactness: float = 3e-6) -> None:
    dtype = torch.bfloat16 if bf16 else torch.float32
    load: list[Path] = []
    for number, (ranks, first, last) in enumerate(CHAIN):
        place = folder / str(number)
        place.mkdir(parents=True)
        weights, skipped, norm, rate = steps(
            ranks, first, last, load, place / "part", bf16=bf16, settings=(*optimizer.settings(), *settings)
        )
        wanted = reference(last, optimizer, dtype)
        where = f"{ranks} ranks, steps {first} to {last}"
        assert error(masters(place), wanted) < exactness, where
        assert error(weights, wanted) < (5e-3 if bf16 else exactness), where
        assert skipped == [False] * (last - first), where
        assert norm == pytest.approx(norm_of(mean_gradients(last - 1, dtype)), rel=10 * exactness), where
        assert rate == pytest.approx(optimizer.rate(last, optimizer.highest())), where
        load = sorted(place.glob("part_*"))
        assert not masters_unlike(load, torch.load(place / "weights.pt")), where
        assert len(load) == ranks


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AdamW", "Muon"])
@pytest.mark.parametrize("key", ZERO)
def test_ways_of_zero(tmp_path: Path, key: str, kind: str) -> None:
    if (key, kind) == ("zero_optimization.stage", "Muon"):
        pytest.skip("refused: tests/unit/check/test_config_checks.py")
    try_chain(tmp_path, Optimizer(kind), f"{key}={json.dumps(ZERO[key])}")


@pytest.mark.parametrize("kind", ["AdamW", "Muon"])
def test_all_ways_of_zero_together(tmp_path: Path, kind: str) -> None:
    ways = {key: value for key, value in ZERO.items() if (key, kind) != ("zero_optimization.stage", "Muon")}
    try_chain(tmp_path, Optimizer(kind), *(f"{key}={json.dumps(value)}" for key, value in ways.items()))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layout_that_is_not_its_own_map_is_noticed_when_it_is_saved_and_when_it_is_restored(
    tmp_path: Path, ranks: int
) -> None:
    """What made round_robin_gradients lose a run: masters under other parameters' names."""
    shuffled = {"round_robin_gradients": True}
    optimizer = Optimizer("AdamW")
    steps(ranks, 0, 2, save=tmp_path / "part", settings=tuple(optimizer.settings()), unoffered=shuffled)
    parts = sorted(tmp_path.glob("part_*"))
    assert masters_unlike(parts, torch.load(tmp_path / "weights.pt"))
    with pytest.raises(AssertionError, match="the master of"):
        steps(1, 2, 3, parts, settings=tuple(optimizer.settings()))


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "Muon"])
@pytest.mark.parametrize("key", ["nothing", *(pytest.param(key, marks=pytest.mark.slow) for key in PARAMS)])
def test_parameters_of_optimizers(tmp_path: Path, key: str, kind: str) -> None:
    if kind != "Muon" and key in ("optimizer.params.momentum", "optimizer.params.muon_lr"):
        pytest.skip("belongs to Muon")
    try_chain(tmp_path, replace(Optimizer(kind), **PARAMS.get(key, {})))


@pytest.mark.parametrize("kind", ["AdamW", "Muon"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != FIRST)) for n in SCHEDULES])
def test_schedules(tmp_path: Path, name: str, kind: str) -> None:
    setting, rate = SCHEDULES[name]
    try_chain(tmp_path, replace(Optimizer(kind), rate=rate), setting)


@pytest.mark.slow
def test_the_other_method_of_newton_schulz(tmp_path: Path) -> None:
    settings = json.loads(Optimizer().settings()[0].partition("=")[2])
    settings["params"]["ns_method"] = "standard"
    try_chain(tmp_path, Optimizer(), "optimizer=" + json.dumps(settings))


@pytest.mark.parametrize(
    ("communication", "kind", "exactness"),
    [
        pytest.param(None, "AdamW", 1e-2, marks=pytest.mark.slow),
        (None, "Muon", 1e-2),
        pytest.param("fp32", "AdamW", 3e-6, marks=pytest.mark.slow),
        ("fp32", "Muon", 1e-4),  # the sum is taken in fp32 and then rounded to bf16, once for each micro-batch
    ],
)
def test_half_precision(tmp_path: Path, communication: str | None, kind: str, exactness: float) -> None:
    """Masters and moments are fp32; gradients come in bf16, and are summed over ranks in what is asked for."""
    try_chain(tmp_path, Optimizer(kind), f"communication_data_type={json.dumps(communication)}", "bf16.enabled=true",
              bf16=True, exactness=exactness)  # fmt: skip
