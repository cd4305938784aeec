"""`evaluation.every`: real tau during training, from the target ranks, without a trace in what is trained."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipe.decode.evaluate import evaluate
from recipe.tell.metrics import read_metrics
from recipe.tell.run_dir import RunDir
from recipe.tell.status import read_status
from tests.integration.launches import ForkServer, Launch
from tests.tiny import make_config, make_rows, make_target

STEPS = 10
PROMPTS = 5


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("in_loop")
    make_target(folder / "target")
    make_rows(folder / "rows")
    rows = [{"messages": [{"role": "user", "content": f"w{20 + i} w{40 + i} w{9 + i}"}]} for i in range(PROMPTS)]
    (folder / "rows" / "heldout_prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_config(
        folder,
        dflash__run__max_steps=STEPS,
        dflash__run__save_every=4,
        dflash__run__log_every=1,
        dflash__evaluation={"every": 4, "max_new_tokens": 14},
    )
    return folder


def start(forks: ForkServer, place: Path, name: str, *more: str, **environment: Any) -> Launch:
    words = ["train", str(place / "config.json"), "--set", f"dflash.run.name={name}", *more]
    folder = place / "launches" / f"{name}-{len(list((place / 'launches').glob('*')))}"
    return forks.launch(folder, words, **environment)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step_{STEPS:08d}" / "weights.safetensors")


def evaluations(run: Path) -> dict[int, dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in sorted((run / "eval").glob("*.json"))]
    return {one["step"]: one for one in found}


@pytest.fixture(scope="module")
def evaluated(forks: ForkServer, place: Path) -> Path:
    launch = start(forks, place, "evaluated")
    assert launch.wait(150) == 0, launch.output[-3000:]
    return place / "runs" / "evaluated"


@pytest.fixture(scope="module")
def without(forks: ForkServer, place: Path) -> Path:
    launch = start(forks, place, "without", "--set", "dflash.evaluation.every=0")
    assert launch.wait(150) == 0, launch.output[-3000:]
    return place / "runs" / "without"


def test_results_are_written_logged_and_those_of_evaluate(evaluated: Path) -> None:
    found = evaluations(evaluated)
    assert sorted(found) == [4, 8, STEPS], "every fourth step and the last one"
    assert all(one["identical"] and one["prompts"] == PROMPTS and one["verify_forwards"] > 0 for one in found.values())
    assert all(one["state_replays"] > 0 for one in found.values()), "drafts were refused, so states were restored"
    log = (evaluated / "train.log").read_text()
    lines = re.findall(r"eval step=(\d+) tau=([\d.]+) identical=5/5 seconds=", log)
    assert [int(step) for step, _ in lines] == [4, 8, STEPS]
    records = {r["step"]: r for r in read_metrics(evaluated / "metrics.jsonl") if "eval_tau" in r}
    assert {step: r["eval_tau"] for step, r in records.items()} == {step: one["tau"] for step, one in found.items()}
    assert read_status(RunDir.open(evaluated)).state == "DONE"
    assert not list((evaluated / "eval").glob(".*")), "the drafters that were laid down are gone"
    again = evaluate(evaluated, num_prompts=PROMPTS, max_new_tokens=14)
    last = found[STEPS]
    assert (again.tau, again.accept_rate, again.tokens) == (last["tau"], last["accept_rate"], last["tokens"])


def test_what_is_trained_does_not_know_of_it(evaluated: Path, without: Path) -> None:
    ours, theirs = weights(evaluated), weights(without)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not evaluations(without)


@pytest.mark.slow
def test_a_killed_run_goes_on_evaluating_after_its_resume(forks: ForkServer, place: Path, without: Path) -> None:
    launch = start(forks, place, "killed")
    launch.wait_for("step=5/")
    pid = launch.pid("rank2")
    os.kill(pid, signal.SIGKILL)
    assert launch.wait(60) not in (0, None)
    run = place / "runs" / "killed"
    (run / "eval" / "step_00000004.json").unlink(missing_ok=True)  # as if death had come before the answer
    again = start(forks, place, "killed", "--resume")
    assert again.wait(150) == 0, again.output[-3000:]
    assert sorted(evaluations(run)) == [4, 8, STEPS]
    ours, theirs = weights(run), weights(without)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank0", "rank1"])
def test_a_death_during_an_evaluation_ends_the_run(forks: ForkServer, place: Path, victim: str) -> None:
    """Either rank of the replica, while its sibling waits for it in a broadcast or a sum."""
    more = ["--set", "dflash.evaluation.max_new_tokens=400", "--set", "dflash.evaluation.every=1"]
    launch = start(forks, place, f"dead-{victim}", *more)
    launch.wait_for("step=1/")
    folder = place / "runs" / f"dead-{victim}" / "eval"
    deadline = time.monotonic() + 30
    while not list(folder.glob(".drafter_*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(1.0)
    os.kill(launch.pid(victim), signal.SIGKILL)
    killed = time.monotonic()
    assert launch.wait(30) not in (0, None), launch.output[-3000:]
    assert time.monotonic() - killed < 12 and "target replica 0" in launch.output
    assert not list(folder.glob("*.json")), "it had ended already"


@pytest.mark.slow
def test_an_evaluation_longer_than_the_time_out_kills_nothing(forks: ForkServer, place: Path) -> None:
    """ring.timeout_s bounds a wait; the evaluation is cut into slices, and training goes on between them."""
    rows = [{"prompt": f"w{20 + i} w{40 + i} w{9 + i}"} for i in range(8)]
    (place / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ["--set", "dflash.ring.timeout_s=10", "--set", "dflash.evaluation.max_new_tokens=40"]
    more += ["--set", f"dflash.evaluation.prompts={place / 'many.jsonl'}"]
    more += ["--set", "dflash.objective.soft_labels=false"]  # a target that is loaded whole for it alone
    launch = start(forks, place, "long", *more)
    launch.wait_for("waiting for")
    run, seen = RunDir.open(place / "runs" / "long"), []
    while launch.code() is None and time.monotonic() - launch.started < 280:
        seen.append(read_status(run))
        time.sleep(0.3)
    assert launch.wait(10) == 0, launch.output[-3000:]
    assert "STALLED" not in [one.state for one in seen], seen
    found = evaluations(place / "runs" / "long")
    assert sorted(found) == [4, 8, STEPS] and all(one["identical"] for one in found.values())
    assert found[4]["seconds"] > 10, "too fast to show anything: raise max_new_tokens"


def test_logits_that_are_not_finite_end_the_run_as_diverged(forks: ForkServer, place: Path) -> None:
    """Every step is fine; the held-out prompts alone begin with a token that the rows do not hold and that is NaN."""
    target = make_target(place / "broken", kind="llama")
    weights = load_file(target / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][1] = float("nan")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    launch = start(forks, place, "nan", "--set", f"dflash.target.path={target}")
    assert launch.wait(150) == 1, launch.output[-3000:]
    why = "the evaluation of step 4: prompt 0, position 8: the target's logits are not finite"
    status = read_status(RunDir.open(place / "runs" / "nan"))
    assert status.state == "DIVERGED" and status.message.startswith(why)
    assert why in launch.output.splitlines()[-1]
    run = place / "runs" / "nan"
    assert not evaluations(run) and not (run / "summary.json").exists() and not list((run / "export").iterdir())
    records = read_metrics(run / "metrics.jsonl")
    assert records and all(record["skipped"] == 0 and record["loss"] > 0 for record in records)
    assert not any("eval_tau" in record for record in records)
