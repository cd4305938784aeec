"""What a resumed run's loss may and may not be."""

from __future__ import annotations

import pytest

from recipe.training.checkpoint import ResumeMismatch
from recipe.training.losses import Losses

SETTING = {"objective": "dpace"}


def resumed(first: float, last: float, setting: object = SETTING) -> Losses:
    before = Losses(SETTING, {})
    for loss in (first, (first + last) / 2, last):
        before.add(loss * 7, 7)
    return Losses({"objective": "dpace"} if setting is SETTING else {"objective": setting}, before.to_json())


@pytest.mark.parametrize("loss", [0.9, 1.27, 1.5, 1.9])
def test_noise_passes(loss: float) -> None:
    losses = resumed(2.8, 1.27)
    losses.add(loss * 5, 5)
    losses.add(2.7 * 5, 5)  # what comes later is training's own affair
    assert losses.to_json() == {"first": pytest.approx(2.8), "last": pytest.approx(2.7), "setting": SETTING}


@pytest.mark.parametrize("loss", [2.06, 2.8, 9.0, float("nan"), float("inf")])
def test_what_undoes_half_of_the_learning_is_refused_by_name(loss: float) -> None:
    with pytest.raises(ResumeMismatch, match=r"after the resume and was 1\.2700 .*it began with 2\.8000"):
        resumed(2.8, 1.27).add(loss * 5, 5)


def test_nothing_is_said_where_nothing_can_be_told() -> None:
    resumed(2.8, 2.6).add(30.0, 10)  # hardly trained
    resumed(2.8, 1.27, "another").add(30.0, 10)  # another objective
    Losses(SETTING, {}).add(30.0, 10)  # a new run, or a checkpoint of an earlier version
    losses = resumed(2.8, 1.27)
    losses.add(0.0, 0.0)  # every step of the window was skipped: the next one is looked at
    with pytest.raises(ResumeMismatch):
        losses.add(28.0, 10)
