"""Numbers that are not finite: the factor that stops a step, the names of what is wrong, and the bound."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from recipe.drafter.anchors import EntryKey
from recipe.training.health import MOST_LINES, Health, as_pairs, causes, counts


@dataclass
class Where:
    keys: list[EntryKey] = field(default_factory=lambda: [EntryKey(0, 4), EntryKey(1, 9, 1)])
    spans: tuple[tuple[int, int], ...] = ((0, 3), (3, 5))


def health(module: nn.Module | None = None, gradients: list[str] | None = None) -> Health:
    return Health(module or nn.Linear(2, 2), ["tap of layer 1", "tap of layer 6"], lambda: gradients or [])


def test_a_good_micro_batch_is_left_as_it_is() -> None:
    watch = health()
    factor = watch.factor(Where(), torch.randn(2, 5) * 1e6, torch.tensor(3.0, requires_grad=True))
    assert factor.item() == 1.0 and not factor.requires_grad
    assert watch.factor(Where([], ()), None, torch.tensor(0.0)).item() == 1.0
    assert watch.diagnose() == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_tap_is_named_by_layer_entry_and_use(value: float) -> None:
    sums, watch = torch.zeros(2, 5), health()
    sums[1, 4] = value
    assert torch.isnan(watch.factor(Where(), sums, torch.tensor(1.0)))
    (found,) = watch.diagnose()
    entry = (1 << 40) | 9
    assert (found.kind, found.text) == ("taps", f"tap of layer 6 of entry {entry} (epoch 1, row 9, use 1)")
    assert watch.diagnose() == []  # told once


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_bad_loss_is_named_by_micro_batch_and_entries(value: str) -> None:
    watch = health()
    watch.factor(Where(), torch.zeros(2, 5), torch.tensor(1.0))
    assert torch.isnan(watch.factor(Where(), torch.zeros(2, 5), torch.tensor(float(value))))
    (found,) = watch.diagnose()
    assert found.kind == "losses" and found.text.startswith(f"loss ({value}) of micro-batch 1 with entry 4 ")


def test_weights_and_gradients_are_named_by_parameter() -> None:
    module = nn.Linear(2, 2)
    assert health(module).weights_are_finite()
    with torch.no_grad():
        module.bias[1] = float("nan")
    watch = health(module, ["weight"])
    assert not watch.weights_are_finite()
    assert [(f.kind, f.text) for f in watch.diagnose()] == [
        ("weights", "weight bias"), ("gradients", "gradient of weight"),
    ]  # fmt: skip


def test_consequences_are_not_told_as_causes() -> None:
    found = as_pairs("rank 1", health(gradients=["a", "b"]).diagnose())
    assert causes(found) == found and counts(found) == {"nonfinite_gradients": 2}
    assert causes([*found, ("losses", "x")]) == [("losses", "x")]
    assert causes([*found, ("losses", "x"), ("weights", "y"), ("taps", "z")]) == [("taps", "z"), ("weights", "y")]
    assert causes([]) == []


def test_a_flood_is_cut_short() -> None:
    found = health(gradients=[f"p{i}" for i in range(50)]).diagnose()
    assert len(found) == MOST_LINES + 1 and f"{50 - MOST_LINES} more" in found[-1].text
