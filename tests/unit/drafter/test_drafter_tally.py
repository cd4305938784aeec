"""What a run's steps came to: the bound on skipped ones, the verdict at the end, and what a resume keeps of both."""

from __future__ import annotations

import json
import math

import pytest

from recipe.training.tally import WINDOW, Outcome, Tally, outcome


def tally(steps: str, most: int = 5) -> Tally:
    """``steps``: s skipped, 0 rate of zero, e empty, u taken without moving anything, + taken."""
    kinds: dict[str, Outcome] = {"s": "skipped", "0": "rate_0", "e": "empty", "u": "taken", "+": "taken"}
    made = Tally(most)
    for letter in steps:
        made.add(kinds[letter], letter == "+")
    return made


def test_what_a_step_is() -> None:
    assert outcome(True, 1e-3, 5.0, math.nan) == "skipped" and outcome(True, 0.0, 0.0, math.nan) == "skipped"
    assert outcome(False, 0.0, 5.0, 1.0) == "rate_0"
    assert outcome(False, 1e-3, 0.0, 0.0) == "empty" and outcome(False, 1e-3, 5.0, 0.0) == "empty"
    assert outcome(False, 1e-3, 1e-9, 1e-9) == "taken"


def test_skips_are_bounded_in_a_row_and_scattered() -> None:
    count = Tally(2)
    for step in range(3 * WINDOW):
        count.add("skipped" if step % (WINDOW // 2) == 0 else "taken", True)
        assert not count.too_many_skipped()  # two in any hundred
    assert count.add("skipped", False) == 2 and not count.too_many_skipped()
    assert count.add("skipped", False) == 3 and count.too_many_skipped()
    none_allowed = Tally(0)
    none_allowed.add("skipped", False)
    assert none_allowed.too_many_skipped()


@pytest.mark.parametrize(
    ("steps", "most", "fault"),
    [
        ("sssss", 5, "5 of the last 5 steps had numbers that are not finite"),
        ("ssssssss", 1000, "nothing was trained: of 8 steps 8 were skipped"),
        ("+++++++++s", 5, "1 of the last 10"),
        ("+" * 19 + "s", 5, None),  # one in twenty is five in a hundred
        ("+" * 18 + "s", 5, "1 of the last 19"),
        ("s" * 5 + "+" * 95, 5, None),
        ("+", 0, None),
        ("00sss", 1000, "nothing was trained: of 5 steps 3 were skipped for numbers that are not finite, 2 had the"),
        ("eeee", 5, "nothing was trained: of 4 steps 4 had nothing supervised, or no gradient, on any rank"),
        ("00ee", 5, "2 had the learning rate 0, 2 had nothing supervised"),
        ("00uuu", 5, "2 had the learning rate 0, 3 changed no weight"),
        ("00uu+", 5, None),
        ("00", 5, None),
        ("", 5, None),
    ],
)
def test_the_verdict_at_the_end(steps: str, most: int, fault: str | None) -> None:
    made = tally(steps, most)
    found = made.fault(made.moved)
    assert found is None if fault is None else found is not None and fault in found


def test_rates_of_zero_are_warned_of() -> None:
    assert tally("00").warning(0.0) == "the learning rate was 0 in every step: nothing was trained"
    assert tally("00+").warning(1.0) is None and tally("").warning(0.0) is None


def resumed(steps: str, then: str, most: int = 5) -> Tally:
    """Interrupted after ``steps`` on two ranks that moved alike, and gone on by one of two."""
    before, after = tally(steps), Tally(most)
    after.restore(json.loads(json.dumps(before.to_json(2 * before.moved))), len(steps), first=True)
    for letter in then:
        part = tally(letter)
        after.add(next(kind for kind in part.counts if part.counts[kind]), letter == "+")  # type: ignore[arg-type]
    return after


def test_a_resumed_run_is_judged_like_one_that_was_not_interrupted() -> None:
    made = resumed("sss", "ss")
    assert made.fault(made.moved) == tally("sssss").fault(0.0)
    made = resumed("+" * 98 + "s", "s")
    assert made.moved == 196 and made.fault(196.0) is None and "since the resume" in str(made.warning(196.0))
    made = resumed("++", "s+")
    assert "1 of the last 4" in str(made.fault(made.moved))
    other = Tally(5)
    other.restore(tally("++").to_json(4.0), 2, first=False)
    assert other.moved == 0 and other.counts == {"skipped": 0, "rate_0": 0, "empty": 0, "taken": 2}


def test_a_resume_at_the_last_step_trains_nothing_and_says_so() -> None:
    made = resumed("00+++", "")
    assert made.fault(made.moved) is None and "no step was left to train" in str(made.warning(made.moved))
    assert "nothing was trained" in str(resumed("00uu", "").fault(0.0))
    old = Tally(5)
    old.restore(None, 400, first=True)  # a checkpoint from before there were tallies
    assert old.fault(old.moved) is None and "no step was left" in str(old.warning(old.moved))
