"""A run resumed on other ranks trains what the old ones had left, to the same weights; damage is never taken for good.

Real launches over gloo (4 levels of processes, forked instead of imported): see `fork_server.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipe.check.derive import resolve
from recipe.config import load_config
from recipe.data.rows import Rows
from recipe.errors import ConfigError
from recipe.training.checkpoint import load_weights
from recipe.training.resume import plan_resume
from tests.integration.launches import ForkServer
from tests.integration.places import Place, distance
from tests.tiny import make_config, make_rows, make_target

HALF, STEPS, FOUR = 4, 10, "gradient_accumulation_steps=4"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, forks: ForkServer) -> Place:
    """Holds the run ``whole``: 2 drafters with accumulation 2, never disturbed."""
    folder = tmp_path_factory.mktemp("resume")
    make_target(folder / "target", kind="llama")
    make_rows(folder / "rows")
    make_config(folder, dflash__run__save_every=2, dflash__run__log_every=1, dflash__run__keep=8,
                dflash__layout__target_gpus=[0], dflash__layout__drafter_gpus=[1, 2],
                dflash__layout__target_tp=1)  # fmt: skip
    place = Place(folder, forks)
    place.train("whole")
    return place


def test_two_ranks_become_one_and_nothing_changes(place: Place) -> None:
    """Twice the accumulation: the same global batches, so the same weights but for the order of additions."""
    place.copy("whole", "one", HALF)
    elsewhere = Path(shutil.copytree(place.folder / "target", place.folder / "target-moved"))
    launch = place.resume(
        "one", f"dflash.target.path={elsewhere}", "dflash.layout.drafter_gpus=[1]", "gradient_accumulation_steps=4"
    )
    assert "resumed with 1 drafter rank(s) on 1 node(s) instead of 2 on 1" in launch.output
    assert f'dflash.target.path = "{elsewhere}" instead of' in launch.output and "the same model lies" in launch.output
    moved = distance(place.weights("whole", HALF), place.weights("whole", STEPS))
    assert moved > 0.005 and distance(place.weights("one", STEPS), place.weights("whole", STEPS)) < 1e-6
    rest, everything = place.trained("one"), place.trained("whole")
    assert set(everything.values()) == set(rest.values()) == {1}
    assert rest.keys() < everything.keys() and len(rest) > 0.5 * len(everything)
    losses = [{r["step"]: r["loss"] for r in place.records(name)} for name in ("whole", "one")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_muon_goes_on_where_it_was(place: Place) -> None:
    """On as many ranks to the same bits; on fewer to the same weights, as far as half precision can tell."""
    muon = 'optimizer={"type": "Muon", "params": {"muon_lr": 0.01, "adam_lr": 0.003}}'
    place.train("muon", muon)
    for name, settings in (("muon-two", ()), ("muon-one", ("dflash.layout.drafter_gpus=[1]", FOUR))):
        place.copy("muon", name, HALF)
        place.resume(name, muon, *settings)
    moved = distance(place.weights("muon", HALF), place.weights("muon", STEPS))
    assert distance(place.weights("muon-two", STEPS), place.weights("muon", STEPS)) == 0.0
    assert distance(place.weights("muon-one", STEPS), place.weights("muon", STEPS)) < 0.02 * moved
    norms = [record["gnorm"] for record in place.records("muon")]
    assert norms == pytest.approx([record["gnorm"] for record in place.records("whole")][:1] + norms[1:], rel=1e-4)


def test_a_damaged_checkpoint_is_passed_over_and_remains_of_saves_go(place: Place) -> None:
    """`latest` names step 8, whose file was cut off, and step 10 has a flipped bit: step 6 it is, to the same end."""
    run = place.copy("whole", "damaged", 8)
    shard = run / "checkpoints/step_00000008/optimizer_00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-7])
    other = run / "checkpoints/step_00000010/optimizer_00001-of-00002.safetensors"
    data = bytearray(other.read_bytes())
    data[len(data) // 2] ^= 1
    other.write_bytes(data)
    (run / "checkpoints/.step_00000099.tmp").mkdir()
    (run / "checkpoints/latest").unlink()  # as when the kill came just before it was written
    place.resume("damaged", "dflash.run.max_steps=6", code=2)  # nothing left to do: read before anything is touched
    (run / "checkpoints/latest").write_text("step_00000008\n")
    launch = place.resume("damaged")
    assert "optimizer_00002-of-00002.safetensors has" in launch.output
    assert "optimizer_00001-of-00002.safetensors has other bytes than were written" in launch.output
    assert "resumed from step 6 instead" in launch.output and "resumed at step 6" in launch.output
    assert distance(place.weights("damaged", STEPS), place.weights("whole", STEPS)) == 0.0
    assert not (run / "checkpoints/.step_00000099.tmp").exists()
    assert (run / "checkpoints/latest").read_text() == f"step_{STEPS:08d}\n"


def test_an_export_passes_over_damaged_weights_and_says_so(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    run = place.copy("whole", "flipped", STEPS)
    for name in ("step_00000010/weights", "step_00000008/optimizer_00001-of-00002"):
        path = run / "checkpoints" / f"{name}.safetensors"
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    _, weights, step = load_weights(run)
    assert step == 8 and distance(weights, place.weights("whole", 8)) == 0.0  # which needs no optimizer state
    said = capsys.readouterr().err
    assert "step_00000010/weights.safetensors has other bytes than were written; step 8 is taken instead" in said
    with pytest.raises(ConfigError, match="other bytes than were written"):
        load_weights(run, STEPS)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("dflash.drafter.block_size=4", "8"),
        ("dflash.drafter.mask_token_id=7", "198"),
        ("dflash.target.target_layer_ids=[0,2]", "[1, 2, 3, 4, 5]"),
        ("dflash.run.seed=43", "42"),
        ('optimizer={"type": "Muon"}', "AdamW"),
        ("dflash.ring.reuse=1", "2"),
        ("dflash.data.path=OTHER", "the rows"),
    ],
)
def test_another_drafter_or_data_is_refused_with_both_values(place: Place, setting: str, value: str) -> None:
    other = place.folder / "other-rows"
    if not other.exists():
        make_rows(other, seed=1)
    changes = [setting.replace("OTHER", str(other)), "dflash.run.name=whole"]
    config = resolve(load_config(str(place.folder / "config.json"), changes))
    with pytest.raises(ConfigError) as refused:
        plan_resume(config, Rows.open(config.dflash.data.path), 1)
    assert value in str(refused.value) and "was made with" in str(refused.value)


def test_the_target_is_known_by_its_weights_and_not_by_its_path(place: Place) -> None:
    moved = place.folder / "moved"
    shutil.copytree(place.folder / "target", moved)
    config = resolve(load_config(str(place.folder / "config.json"), ["dflash.run.name=whole"]))
    rows, there = Rows.open(config.dflash.data.path), f"dflash.target.path={moved}"
    elsewhere = resolve(load_config(str(place.folder / "config.json"), ["dflash.run.name=whole", there]))
    for one in (config, elsewhere):
        with pytest.raises(ConfigError, match="has done all of its"):  # whole: it fits, and is over
            plan_resume(one, rows, 1)
    weights = load_file(moved / "model.safetensors")
    save_file({name: value * 1.01 for name, value in weights.items()}, moved / "model.safetensors")
    with pytest.raises(ConfigError, match=r"weights in dflash.target.path.*\n?.*was made with"):
        plan_resume(elsewhere, rows, 1)


@pytest.mark.slow
def test_a_chain_of_worlds_trains_everything_once(place: Place) -> None:
    """2 drafters; then 3 under ZeRO 1 with other batches and two target replicas; then 1."""
    place.train("chain", "dflash.run.max_steps=3")
    three = ("dflash.layout.target_gpus=[0,1]", "dflash.layout.drafter_gpus=[2,3,4]", "gradient_accumulation_steps=1",
             "zero_optimization.stage=1")  # fmt: skip
    said = place.resume("chain", *three, "dflash.run.max_steps=7").output
    assert "an optimizer step now holds 3 micro-batches instead of 4" in said
    place.resume("chain", "dflash.layout.drafter_gpus=[1]", "gradient_accumulation_steps=2")
    trained = place.trained("chain")
    assert set(trained.values()) == {1} and trained.keys() == place.trained("whole").keys()
    states = sorted((place.folder / "runs/chain/checkpoints").glob("step_*/state.json"))
    last = json.loads(states[-1].read_text())
    assert [(w["since"], w["drafters"], w["accumulation"]) for w in last["worlds"]] == [(0, 2, 2), (3, 3, 1), (7, 1, 2)]
    assert all(torch.isfinite(value).all() for value in place.weights("chain", last["step"]).values())
