"""NaN and inf in a tap, a weight, a loss, a gradient: skipped by all ranks in that step, named, counted, and bounded.

Real launches over gloo, forked: see `fork_server.py`; `poison.py` plants the numbers.
"""

from __future__ import annotations

import re

import pytest
import torch

from recipe.telemetry.run_dir import RunDir
from recipe.telemetry.status import read_status
from tests.integration.launches import ForkServer
from tests.integration.places import Place
from tests.tiny import make_config, make_rows, make_target

PARAMETER = "layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, forks: ForkServer) -> Place:
    folder = tmp_path_factory.mktemp("numbers")
    make_target(folder / "target", kind="llama")
    make_rows(folder / "rows", count=64)
    make_config(folder, dflash__run__save_every=2, dflash__run__log_every=1, dflash__run__keep=8,
                dflash__layout__target_gpus=[0], dflash__layout__drafter_gpus=[1, 2], dflash__layout__target_tp=1,
                dflash__ring__reuse=1, dflash__run__max_skipped_steps=4, dflash__run__epochs=4)  # fmt: skip
    return Place(folder, forks)


def test_each_kind_is_skipped_in_its_step_named_and_counted(place: Place) -> None:
    """NaN in one ring page, an infinite loss, a NaN gradient, and an optimizer that does nothing in one step."""
    poison = [
        {"ranks": [0], "what": "tap", "entries": [5], "stream": 1, "value": "nan"},
        {"ranks": [2], "what": "loss", "steps": [7]},
        {"ranks": [1], "what": "gradient", "steps": [9], "name": PARAMETER},
        {"ranks": [1, 2], "what": "frozen", "steps": [11]},
    ]
    place.train("some", POISON=poison)
    text, seen = place.log("some"), {r["step"]: r for r in place.records("some")}
    tap = r"step (\d+): tap of layer 2 of entry 5 \(epoch 0, row 5, use 0\) is not finite on .*drafter"
    (bad,) = re.findall(tap, text)
    skipped = {int(bad): "nonfinite_taps", 7: "nonfinite_losses", 9: "nonfinite_gradients"}
    assert len(skipped) == 3
    assert {step for step, record in seen.items() if record["skipped"]} == skipped.keys()
    for step, kind in skipped.items():
        assert seen[step][kind] == 1 and seen[step]["loss"] is None
        assert re.search(rf"^step={step}/\d+ loss=n/a .*skipped=1 {kind}=1", text, re.M)
        assert sum(key.startswith("nonfinite") for key in seen[step]) == 1  # the cause, and none of its consequences
    assert re.search(r"step 7: loss \(inf\) of micro-batch \d with entry \d+ .* is not finite on .*drafter 1", text)
    assert re.search(rf"step 9: gradient of {re.escape(PARAMETER)} is not finite on .*drafter", text)
    assert {step for step, record in seen.items() if record.get("unmoved")} == {11} and seen[11]["unmoved"] == 2
    assert "weights did not change in 2 step(s) x rank(s) up to step 11" in text
    # DeepSpeed's warm-up gives the first two steps the rate 0: they change nothing, and that is no alarm.
    assert seen[1]["lr"] == seen[2]["lr"] == 0.0 < seen[6]["lr"]
    last = max(seen)
    assert all(torch.isfinite(value).all() for value in place.weights("some", last).values())
    assert place.summary("some")["counts"]["skipped"] == 3


def test_a_weight_that_is_nan_ends_the_run_and_keeps_the_checkpoint(place: Place) -> None:
    """On one rank only. The run has the state DIVERGED, and can go on from its last good checkpoint."""
    poison = [{"ranks": [2], "what": "weight", "steps": [6], "name": PARAMETER}]
    launch = place.train("weight", code=1, POISON=poison)
    assert re.search(rf"Diverged: step 6: weight {re.escape(PARAMETER)} is not finite on .*drafter 1", launch.output)
    run = RunDir.open(place.folder / "runs" / "weight")
    status = read_status(run)
    assert status.state == "DIVERGED" and status.step == 6 and PARAMETER in status.message
    assert (run.checkpoints / "latest").read_text() == "step_00000004\n"
    assert all(torch.isfinite(value).all() for value in place.weights("weight", 4).values())


@pytest.mark.slow
def test_more_than_a_bounded_number_stops_the_run(place: Place) -> None:
    """Every entry has an inf: nothing is ever applied, and the fifth skipped step is one too many."""
    poison = [{"ranks": [0], "what": "tap", "entries": None, "stream": 0, "value": "inf"}]
    place.train("all", code=1, POISON=poison)
    status = read_status(RunDir.open(place.folder / "runs" / "all"))
    assert status.state == "DIVERGED" and status.step == 5
    assert "5 of the last steps" in status.message and "tap of layer 1 of entry" in status.message
    assert [record["skipped"] for record in place.records("all")] == [1, 1, 1, 1]
