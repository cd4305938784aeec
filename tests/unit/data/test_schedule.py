"""The schedule by brute force: whatever worlds a run passes through, each row is trained once an epoch and use."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from recipe.data.schedule import Schedule, World, continued

LENGTHS = np.random.default_rng(3).integers(2, 60, 83).astype(np.int32)
SETTINGS = {"seed": 5, "epochs": 3, "reuse": 2, "token_budget": 128, "max_batch_size": 4, "min_ready": 3}


def schedule(*worlds: World, lengths: np.ndarray = LENGTHS, max_steps: int | None = None, **changes: int) -> Schedule:
    return Schedule(lengths, worlds=worlds, max_steps=max_steps, **{**SETTINGS, **changes})


def trained(plan: Schedule, first: int, stop: int) -> Counter[tuple[int, int, int]]:
    """(epoch, row, reuse) of everything that all drafters of steps [first, stop) take."""
    seen: Counter[tuple[int, int, int]] = Counter()
    for step in range(first, stop):
        for node in range(plan.nodes):
            for drafter in range(plan.drafters):
                for index in range(plan.accumulation):
                    batch = plan.micro_batch(step, node, drafter, index)
                    seen.update((batch.epoch, int(r), int(u)) for r, u in zip(batch.rows, batch.reuses, strict=True))
    return seen


def produced(plan: Schedule, first: int) -> Counter[tuple[int, int]]:
    """(epoch, row) -> deliveries that all nodes publish for steps from ``first`` on."""
    seen: Counter[tuple[int, int]] = Counter()
    for node in range(plan.nodes):
        for expected, batch in enumerate(plan.production(first, node)):
            assert batch.sequence == expected
            assert len(batch.rows) * LENGTHS[batch.rows].max() <= 128
            for row, uses in zip(batch.rows, batch.uses, strict=True):
                seen[batch.epoch, int(row)] += int(uses)
    return seen


EVERYTHING = {(e, r, u): 1 for e in range(3) for r in range(len(LENGTHS)) for u in range(2)}


@pytest.mark.parametrize(
    "layouts",
    [
        [(1, 2, 2), (1, 1, 4)],  # the same micro-batches in a step
        [(1, 3, 2), (1, 2, 1), (1, 5, 3)],  # other ones
        [(2, 1, 2), (1, 2, 2)],  # another number of nodes: what is left of the epoch is planned anew
        [(1, 2, 1), (3, 2, 1), (2, 1, 1), (2, 3, 1), (1, 1, 1)],
    ],
)
@pytest.mark.parametrize("gap", [1, 4, 11, 25])
def test_each_delivery_is_trained_once_through_all_worlds(layouts: list[tuple[int, int, int]], gap: int) -> None:
    """Resumed after every ``gap`` steps, sometimes in one epoch, sometimes across two."""
    worlds, seen, step = [World(0, *layouts[0])], Counter(), 0
    for place, layout in enumerate(layouts):
        if place:
            worlds = continued(worlds, World(step, *layout))
        plan = schedule(*worlds)
        stop = min(step + gap, plan.total_steps) if place + 1 < len(layouts) else plan.total_steps
        seen += trained(plan, step, stop)
        rest = trained(plan, step, plan.total_steps)
        left: Counter[tuple[int, int]] = Counter()
        for (epoch, row, _), count in rest.items():
            left[epoch, row] += count
        assert produced(plan, step) == left  # targets publish just what drafters will lease
        step = stop
    assert seen == EVERYTHING


def test_a_step_of_as_many_micro_batches_stays_the_same_step() -> None:
    """2 drafters with accumulation 2 and 1 with 4: from the change on, each step holds the same entries."""
    whole = schedule(World(0, 1, 2, 2))
    resized = schedule(World(0, 1, 2, 2), World(7, 1, 1, 4))
    assert resized.total_steps == whole.total_steps == resized.rate_steps
    for step in range(7, whole.total_steps):
        assert trained(whole, step, step + 1) == trained(resized, step, step + 1)
        assert resized.rate_step(step) == step


def test_the_learning_rate_goes_on_from_the_same_share_of_the_data() -> None:
    whole = schedule(World(0, 1, 4, 1))
    half = whole.total_steps // 2
    fewer = schedule(World(0, 1, 4, 1), World(half, 1, 2, 1))
    assert fewer.total_steps == pytest.approx(half + 2 * (whole.total_steps - half), abs=6)
    assert fewer.rate_step(half) / fewer.rate_steps == pytest.approx(half / whole.total_steps, abs=0.05)
    assert fewer.rate_step(fewer.total_steps) == fewer.rate_steps
    capped = schedule(World(0, 1, 4, 1), World(5, 1, 2, 1), max_steps=10)
    assert (capped.rate_steps, capped.rate_step(5)) == (10, 5)


def test_worlds_of_an_abandoned_future_are_forgotten() -> None:
    first, second = World(0, 1, 2, 1), World(50, 1, 4, 1)
    assert continued([first, second], World(30, 1, 2, 1)) == [first]
    assert continued([first, second], World(50, 1, 4, 1)) == [first, World(50, 1, 4, 1)]
    assert continued([first, second], World(60, 2, 4, 1)) == [first, second, World(60, 2, 4, 1)]


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_fewer_rows_than_ranks_still_gives_equal_steps(rows: int) -> None:
    lengths = np.full(rows, 100, dtype=np.int32)  # one row fills a micro-batch
    plan = schedule(World(0, 1, 4, 2), lengths=lengths, min_ready=1, reuse=1)
    assert plan.total_steps == 3 * 1
    for step in range(plan.total_steps):
        assert sum(trained(plan, step, step + 1).values()) == rows
        sizes = [[len(plan.micro_batch(step, 0, d, i).rows) for i in range(2)] for d in range(4)]
        assert all(len(of_rank) == 2 for of_rank in sizes) and sum(map(sum, sizes)) == rows


def played_through(plan: Schedule, first: int, page_tokens: int) -> int:
    """The most pages of a ring that is played through: batches come when they are needed, entries go after their uses,
    as many micro-batches later as there are drafters."""
    peak = 0
    for node in range(plan.nodes):
        coming, pages, uses = plan.production(first, node), {}, {}
        used: list[list[tuple[int, int]]] = []
        for step in range(first, plan.total_steps):
            for drafter, index in itertools.product(range(plan.drafters), range(plan.accumulation)):
                batch = plan.micro_batch(step, node, drafter, index)
                entries = [(batch.epoch, int(row)) for row in batch.rows]
                while any(entry not in pages for entry in entries):
                    made = next(coming)
                    for row, count in zip(made.rows.tolist(), made.uses.tolist(), strict=True):
                        if count:
                            pages[made.epoch, row], uses[made.epoch, row] = -(-int(LENGTHS[row]) // page_tokens), count
                peak = max(peak, sum(pages[entry] for entry in pages if uses[entry]))
                used.append(entries)
                for entry in used.pop(0) if len(used) > plan.drafters else []:
                    uses[entry] -= 1
    return peak


def test_the_ring_needs_room_for_what_is_planned_anew() -> None:
    plan = schedule(World(0, 2, 1, 1), World(9, 1, 2, 1))
    needed = played_through(plan, 9, 16)
    assert needed <= plan.peak_pages(16) <= 1.5 * needed
    assert {stretch.part.rest_of is not None for stretch in plan.stretches} == {True, False}
