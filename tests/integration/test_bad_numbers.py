"""NaN and inf in a tap, a weight, a loss, a gradient: skipped by all ranks in that step, named, counted, and bounded.

Real launches over gloo, forked: see `fork_server.py`; `poison.py` plants the numbers.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipe.tell.run_dir import RunDir
from recipe.tell.status import read_status
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
    place.train("some", "dflash.run.max_skipped_steps=50", POISON=poison)
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


EVERYWHERE = [{"ranks": [0], "what": "tap", "entries": None, "stream": 0, "value": "nan"}]
FROZEN = [{"ranks": [1, 2], "what": "frozen", "steps": [3, 4, 5]}]


@pytest.mark.parametrize(
    ("name", "poison", "why"),
    [
        ("short", EVERYWHERE, r"5 of the last 5 steps .* not finite .*; tap of layer 1 of entry \d+ "),
        ("unmoved", FROZEN, "of 5 steps 2 had the learning rate 0, 3 changed no weight"),
    ],
)
def test_a_short_run_that_trained_nothing_is_not_done(
    place: Place, name: str, poison: list[dict[str, Any]], why: str
) -> None:
    """Nor is it when it is resumed for its last step."""
    five = ("dflash.run.max_steps=5", "dflash.run.save_every=4", "dflash.run.max_skipped_steps=5")
    for launch in (place.train(name, *five, code=1, POISON=poison), place.resume(name, *five, code=1, POISON=poison)):
        run = RunDir.open(place.folder / "runs" / name)
        status = read_status(run)
        assert status.exit_code == 4 and status.state == "DIVERGED" and re.search(why, status.message)
        assert "Diverged: " in launch.output.splitlines()[-1] and "done:" not in launch.output
        assert not run.summary_json.exists() and not list(run.export.iterdir())
        assert [path.name for path in run.checkpoints.glob("step_*")] == ["step_00000004"]


def test_check_fails_on_a_tap_that_is_not_finite(place: Place) -> None:
    launch = place.train("checked", flags=("--check",), code=1, POISON=EVERYWHERE)
    assert "this config runs here" not in launch.output and not (place.folder / "runs" / "checked").exists()
    assert re.search(r"Diverged: .*step 1: tap of layer 1 of entry \d+", launch.output.splitlines()[-1])


def test_rates_of_zero_in_every_step_are_said_wherever_the_run_is_called_done(place: Place) -> None:
    place.train("rates", "dflash.run.max_steps=2")
    warning = "the learning rate was 0 in every step: nothing was trained"
    status = read_status(RunDir.open(place.folder / "runs" / "rates"))
    assert status.state == "DONE" and warning in status.message
    assert f"warning: {warning}" in place.log("rates") and place.summary("rates")["warnings"] == [warning]
    (place.folder / "runs" / "rates" / "summary.json").unlink()  # as if its end had failed
    place.resume("rates", "dflash.run.max_steps=2")
    assert place.summary("rates")["warnings"] == [warning]


def test_check_fails_on_an_embedding_row_that_no_step_may_come_to(place: Place) -> None:
    folder = make_target(place.folder / "broken", kind="llama")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][1, 7] = float("nan")  # a token that the rows do not hold
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    launch = place.train("row", f"dflash.target.path={folder}", flags=("--check",), code=2)
    assert (
        "dflash.target.path" in launch.output
        and "its embedding is not finite (NaN or inf) for token 1:" in launch.output
    )
    place.train("row", f"dflash.target.path={folder}", "dflash.run.max_steps=6")
    assert not sum(record["skipped"] for record in place.records("row"))
