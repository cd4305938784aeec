"""Anchors and noise: the rule, the spread, and randomness that depends on the entry alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recipe.config.schema import Noise
from recipe.drafter.anchors import EntryKey, candidates, plan_anchors, shares
from recipe.drafter.batch import assemble, blank
from recipe.drafter.noise import add_noise, noise_scale
from recipe.drafter.variant import DFLASH


def test_anchor_and_its_successor_are_supervised() -> None:
    assert candidates(np.array([1, 1, 0, 1, 1, 1, 0, 1])).tolist() == [0, 3, 4]
    assert candidates(np.array([0, 1])).tolist() == candidates(np.array([1])).tolist() == []


def test_shares_fill_like_water() -> None:
    assert shares([100, 100, 100], 30) == [10, 10, 10]
    assert shares([2, 100, 100], 32) == [2, 15, 15]
    assert shares([2, 5, 100], 1000) == [2, 5, 100]
    assert shares([50, 60, 70], 2) == [0, 1, 1]
    assert shares([], 5) == [] and shares([0, 0], 5) == [0, 0]
    rng = np.random.default_rng(0)
    for _ in range(200):
        have, total = rng.integers(0, 40, rng.integers(1, 9)).tolist(), int(rng.integers(0, 120))
        given = shares(have, total)
        assert sum(given) == min(total, sum(have)) and all(g <= h for g, h in zip(given, have, strict=True))
        short = [g for g, h in zip(given, have, strict=True) if g < h]
        assert not short or max(given) - min(short) <= 1, (have, total, given)


def masks(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.random(n) < 0.8 for n in lengths]


def test_anchors_depend_on_the_entry_not_on_its_neighbours() -> None:
    keys = [EntryKey(1, 7), EntryKey(1, 8), EntryKey(1, 9)]
    together = plan_anchors(masks(60, 50, 40), keys, 30, seed=3)
    assert [len(a) for a in together] == [10, 10, 10]
    assert all((np.diff(a) > 0).all() for a in together)
    for mask, found in zip(masks(60, 50, 40), together, strict=True):
        assert (mask[found] & mask[found + 1]).all()
    reordered = plan_anchors(masks(60, 50, 40)[::-1], keys[::-1], 30, seed=3)
    alone = plan_anchors(masks(60)[:1], keys[:1], 10, seed=3)
    assert np.array_equal(together[0], reordered[2]) and np.array_equal(together[0], alone[0])
    more = plan_anchors(masks(60)[:1], keys[:1], 20, seed=3)
    assert set(together[0]) < set(more[0])


@pytest.mark.parametrize(
    "other", [(EntryKey(2, 7), 3), (EntryKey(1, 8), 3), (EntryKey(1, 7, 1), 3), (EntryKey(1, 7), 4)]
)
def test_seed_epoch_row_and_reuse_give_fresh_anchors(other: tuple[EntryKey, int]) -> None:
    first = plan_anchors(masks(400), [EntryKey(1, 7)], 20, seed=3)[0]
    assert not np.array_equal(first, plan_anchors(masks(400), [other[0]], 20, seed=other[1])[0])


def test_a_packed_row_bounds_blocks_by_the_document() -> None:
    """Slots past the end of a document carry no weight, though the packed row goes on."""
    anchors = plan_anchors([np.ones(6, bool), np.ones(9, bool)], [EntryKey(0, 0), EntryKey(0, 1)], 50, seed=0)
    batch = assemble(np.arange(15), np.ones(15, bool), [6, 9], anchors, [torch.zeros(15, 4)], None, 20)
    assert batch.host.keep.sum() == 5 + 8 and len(batch.anchors) == 20
    targets = DFLASH.targets(batch.host, 4)
    for anchor, stop, keep, row, weight in zip(
        batch.host.anchors, batch.host.stops, batch.host.keep, targets.label_rows, targets.supervised, strict=True
    ):
        assert weight.tolist() == [bool(keep) and o > 0 and anchor + o < stop for o in range(4)]
        assert all(row[o] == anchor + o for o in range(4) if weight[o])
    assert batch.position_ids.tolist() == [*range(6), *range(9)]
    assert not blank(5, 8, last_hidden=True, dtype=torch.float32, device=torch.device("cpu")).host.keep.any()


@pytest.mark.parametrize("kind", ["uniform", "gaussian"])
def test_noise_is_seeded_per_entry_and_annealed(kind: str) -> None:
    noise = Noise(type=kind, start=0.5, end=0.1)
    assert noise_scale(noise, 0.0) == 0.5 and noise_scale(noise, 1.0) == pytest.approx(0.1)
    assert noise_scale(noise, 0.25) == pytest.approx(0.4) and noise_scale(noise, 7.0) == pytest.approx(0.1)
    keys, spans = [EntryKey(0, 1), EntryKey(0, 2)], [(0, 300), (300, 1000)]
    taps = [torch.zeros(1000, 8) for _ in range(3)]
    add_noise(taps, spans, keys, noise, 0.25, seed=9)
    spread = torch.cat(taps).std().item()
    assert spread == pytest.approx(0.4 if kind == "gaussian" else 0.4 / 3**0.5, rel=0.03)
    assert kind == "gaussian" or torch.cat(taps).abs().max() <= 0.4
    alone = [torch.zeros(700, 8) for _ in range(3)]
    add_noise(alone, [(0, 700)], keys[1:], noise, 0.25, seed=9)
    assert all(torch.equal(a, t[300:]) for a, t in zip(alone, taps, strict=True))
    assert not torch.equal(taps[0][:300], taps[1][:300])
    again = [torch.zeros(700, 8) for _ in range(3)]
    add_noise(again, [(0, 700)], [EntryKey(0, 2, 1)], noise, 0.25, seed=9)
    assert not torch.equal(again[0], alone[0])


def test_no_noise_leaves_the_taps_alone() -> None:
    taps = [torch.ones(4, 2)]
    add_noise(taps, [(0, 4)], [EntryKey(0, 0)], Noise(type="none"), 0.0, seed=0)
    assert torch.equal(taps[0], torch.ones(4, 2))
