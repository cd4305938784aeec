"""tau, acceptance by position, intervals and mismatches, on results written out by hand."""

from __future__ import annotations

import pytest

from recipe.decode.metrics import accept_rate, first_difference, target_forwards_per_token, tau, tau_interval
from recipe.decode.speculative import Block, DecodeResult, commit


def result(*blocks: tuple[int, int, int]) -> DecodeResult:
    made = [Block(*block) for block in blocks]
    return DecodeResult([0] * (1 + sum(block.committed for block in made)), made, 0, 1.0)


def test_tau_counts_the_bonus_and_not_the_prefill() -> None:
    assert tau([result((3, 3, 4), (3, 0, 1)), result((3, 1, 2))]) == pytest.approx(7 / 3)
    assert tau([result((3, 0, 1))] * 5) == 1.0, "a useless drafter"
    assert tau([result((3, 3, 4))] * 5) == 4.0, "a perfect drafter of block size 4"
    assert tau([result()]) is None
    assert target_forwards_per_token([result((3, 3, 4), (3, 0, 1)), result((3, 1, 2))]) == pytest.approx(5 / 9)
    assert target_forwards_per_token([result()]) == 1.0


def test_accept_rate_leaves_out_blocks_that_ended_before() -> None:
    results = [result((3, 3, 4), (3, 1, 2), (3, 0, 1), (1, 1, 1))]
    assert accept_rate(results, 4) == pytest.approx([3 / 4, 1 / 3, 1 / 3])
    assert accept_rate([result((1, 1, 1))], 4) == [1.0, None, None]


def test_interval_covers_tau_and_shrinks() -> None:
    few, many = [result((3, k % 4, k % 4 + 1)) for k in range(8)], [result((3, k % 4, k % 4 + 1)) for k in range(800)]
    (low, high), (low2, high2) = tau_interval(few) or (0, 0), tau_interval(many) or (0, 0)
    assert 1.0 <= low < 2.5 < high <= 4.0 and low < low2 < 2.5 < high2 < high
    # 800 draws of a uniform 1..4: the standard error is sqrt(1.25 / 800) = 0.0395
    assert high2 - low2 == pytest.approx(2 * 1.96 * 0.0395, rel=0.1)
    assert tau_interval(few) == tau_interval(few) and tau_interval(few[:1]) is None


@pytest.mark.parametrize(
    ("one", "other", "position"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None), ([4, 2], [5, 2], 0)],
)
def test_first_difference(one: list[int], other: list[int], position: int | None) -> None:
    assert first_difference(one, other) == position


@pytest.mark.parametrize(
    ("drafts", "choices", "room", "stop", "block", "new"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 9, (), (3, 3, 4), [1, 2, 3, 4]),
        ([1, 2, 3], [1, 9, 3, 4], 9, (), (3, 1, 2), [1, 9]),
        ([1, 2, 3], [1, 2, 3, 4], 3, (), (3, 3, 3), [1, 2, 3]),
        ([1, 2, 3], [1, 2, 3, 4], 9, (2,), (2, 2, 2), [1, 2]),  # the end token was drafted: the third never counted
        ([1, 2, 3], [1, 9, 3, 4], 9, (9,), (3, 1, 2), [1, 9]),  # the end token is the bonus: the second was refused
        ([1, 2, 3], [7, 2, 3, 4], 9, (2,), (3, 0, 1), [7]),  # an end token behind a refusal ends nothing
        ([1, 2, 3], [1, 2, 3, 4], 9, (4,), (3, 3, 4), [1, 2, 3, 4]),
    ],
)
def test_commit(drafts: list, choices: list, room: int, stop: tuple, block: tuple, new: list) -> None:
    assert commit(drafts, choices, room, stop) == (Block(*block), new)
