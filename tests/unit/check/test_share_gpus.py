"""`layout.share_gpus`: which ranks may sit on one GPU."""

from __future__ import annotations

import pytest

from recipe.check.feasibility import _check_shared
from recipe.config.schema import Layout
from recipe.errors import ConfigError


def layout(targets: list[int], drafters: list[int], tp: int) -> Layout:
    return Layout(target_gpus=targets, drafter_gpus=drafters, target_tp=tp, share_gpus=True)


@pytest.mark.parametrize(
    ("targets", "drafters", "tp", "gpus"),
    [([0], [1], 1, 1), ([0, 1], [2, 3], 2, 2), ([0, 1], [2], 1, 2), ([0], [1, 2, 3], 1, 3)],
)
def test_a_target_and_a_drafter_may_share(targets: list[int], drafters: list[int], tp: int, gpus: int) -> None:
    _check_shared(layout(targets, drafters, tp), gpus)


@pytest.mark.parametrize(
    ("targets", "drafters", "tp", "gpus", "said"),
    [
        ([0, 1], [2], 2, 1, r"ranks \[0, 1\] work together"),
        ([0], [1, 2], 1, 1, r"ranks \[1, 2\] work together"),
        ([1], [0], 1, 1, "takes GPU 1 for rank 1"),
        ([0, 1], [2], 1, 1, "takes GPU 1 for rank 1"),
    ],
)
def test_ranks_of_one_world_may_not(targets: list[int], drafters: list[int], tp: int, gpus: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _check_shared(layout(targets, drafters, tp), gpus)
