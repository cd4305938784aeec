"""Muon under ZeRO-2, on real ranks over gloo, against a float64 reference; saved and resumed on other numbers of ranks.

What it guards: DeepSpeed cuts matrices across ranks, so momentum and orthogonalisation must see whole ones; its
momentum is not laid out as the weights are; and left alone it clips the update, leaves the norms' gradients unclipped,
and adds up in bf16. With which keys: test_deepspeed_keys.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from recipe.engine.optimizer_state import Shards
from tests.numerics.zero_ranks import (
    CLIP,
    NORMS,
    SHAPES,
    STEPS,
    Optimizer,
    error,
    mean_gradients,
    norm_of,
    reference,
    steps,
)  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_weights_are_the_references(world: int) -> None:
    weights, skipped, norm, rate = steps(world)
    assert not any(skipped) and rate == pytest.approx(Optimizer().muon_lr)
    assert error(weights, reference(STEPS)) < 2e-6
    assert norm == pytest.approx(norm_of(mean_gradients(STEPS - 1)), rel=1e-5) and norm > CLIP


@pytest.mark.parametrize(("before", "after"), [(2, 2), (1, 4), (4, 2)])
def test_a_resumed_run_goes_on_as_if_nothing_had_been(tmp_path: Path, before: int, after: int) -> None:
    """Saved after two steps and read by as many ranks: bit for bit. By others: but for the order of sums."""
    whole = steps(after)[0]
    steps(before, 0, 2, save=tmp_path / "part")
    parts = sorted(tmp_path.glob("part_*"))
    assert len(parts) == before
    resumed = steps(after, 2, STEPS, load=parts)[0]
    if before == after:
        assert all(torch.equal(a, b) for a, b in zip(resumed, whole, strict=True))
    assert error(resumed, reference(STEPS)) < 2e-6


def test_a_schedule_of_ours_is_resumed_in_its_place_and_follows_a_new_total(tmp_path: Path) -> None:
    def schedule(total: int) -> tuple[str]:
        params = {"total_num_steps": total, "warmup_num_steps": 1, "decay_ratio": 0.5}
        return ("scheduler=" + json.dumps({"type": "WarmupStableDecayLR", "params": params}),)

    whole, _, _, rate = steps(2, settings=schedule(STEPS))
    assert rate == pytest.approx(Optimizer().muon_lr * 0.5)  # of the step that comes next, one before the last
    steps(2, 0, 2, save=tmp_path / "part", settings=schedule(STEPS))
    parts = sorted(tmp_path.glob("part_*"))
    resumed, _, _, again = steps(2, 2, STEPS, load=parts, settings=schedule(STEPS))
    assert again == rate and all(torch.equal(a, b) for a, b in zip(resumed, whole, strict=True))
    assert steps(2, 2, STEPS, load=parts, settings=schedule(2 * STEPS))[3] == pytest.approx(Optimizer().muon_lr)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_step_with_a_bad_gradient_changes_nothing(tmp_path: Path, bad: float) -> None:
    """One on one rank, in a matrix that two ranks share: all skip, and the momentum never sees it. 1e30 squared is
    infinite: a norm that cannot be told is not clipped to nothing."""
    steps(2, 0, 1, save=tmp_path / "part")
    parts = sorted(tmp_path.glob("part_*"))
    clean, skipped = steps(2, 2, 4, load=parts)[:2]
    assert skipped == [False, False]
    poisoned, skipped, _, _ = steps(2, 1, 4, load=parts, poison=1, bad=bad)
    assert skipped == [True, False, False]
    assert math.isnan(steps(2, 1, 2, load=parts, poison=1, bad=bad)[2])
    assert all(torch.equal(a, b) for a, b in zip(poisoned, clean, strict=True))


def test_half_precision_is_near() -> None:
    """As it runs: five steps of Newton-Schulz in half precision."""
    assert error(steps(1, exact=False)[0], reference(STEPS)) < 2e-3


@pytest.mark.parametrize(("world", "exactness"), [(1, 1e-6), (2, 1e-2)])
def test_bf16_gradients_are_added_up_in_fp32(tmp_path: Path, world: int, exactness: float) -> None:
    """Micro-batches of bf16 gradients: their sum and the momentum lose nothing to eight bits, but in the reduction."""
    _, _, norm, _ = steps(world, 1, 2, save=tmp_path / "part", bf16=True)
    mean = mean_gradients(1, torch.bfloat16)
    assert norm == pytest.approx(norm_of(mean), rel=10 * exactness)
    parts = Shards(sorted(tmp_path.glob("part_*")))
    factor = min(1.0, CLIP / norm_of(mean))
    for name, wanted in zip([*SHAPES, *NORMS], mean, strict=True):  # left alone DeepSpeed drops the gradient of `norm`
        kind, share = ("momentum_buffer", 0.05 * factor) if name in SHAPES else ("exp_avg", 0.1 * factor)
        moment = parts.read(kind, name.replace(".", "_"), 0, wanted.numel())
        assert moment.dtype == torch.float32
        assert error([moment], [share * wanted.flatten()]) < exactness
