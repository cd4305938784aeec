"""All ranks take the same number of steps whatever the data, and what trains nothing is counted and said.

Real launches over gloo, forked: see `fork_server.py`. A rank that took one step more would hang in a collective.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from recipe.tell.run_dir import RunDir
from recipe.tell.status import read_status
from tests.integration.launches import ForkServer
from tests.integration.places import Place
from tests.tiny import MASK, make_config, make_target

LONGEST = 64
Row = tuple[int, list[int]]  # tokens, supervised positions


def write_rows(folder: Path, rows: list[Row]) -> None:
    """Rows of given lengths, supervised at given positions only."""
    import datasets

    draw = np.random.default_rng(0)
    features = datasets.Features(
        {
            "input_ids": datasets.Sequence(datasets.Value("int32")),
            "loss_mask": datasets.Sequence(datasets.Value("uint8")),
        }
    )
    columns = {
        "input_ids": [draw.integers(6, MASK, length).tolist() for length, _ in rows],
        "loss_mask": [[int(at in chosen) for at in range(length)] for length, chosen in rows],
    }
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(folder / "train"))
    (folder / "meta.json").write_text(json.dumps({"vocab_bound": MASK, "rows": len(rows)}))


def good(length: int) -> Row:
    return length, list(range(length // 2, length))


NASTY: list[Row] = [
    *[good(20 + i) for i in range(9)],
    (30, []),  # nothing supervised
    (30, []),
    (30, [17]),  # one token: no first draft to learn
    (30, [11, 13, 15, 17]),  # never two in a row
    (2, [0, 1]),  # shorter than a block of 8
    (3, [1, 2]),
    (1, [0]),
    good(LONGEST),  # alone as long as max_seq_len and the token budget
]
BARREN = 5  # of these: two empty masks, one token, none in a row, the row of one token


@pytest.fixture
def place(tmp_path: Path, forks: ForkServer) -> Place:
    make_target(tmp_path / "target", kind="llama")
    return Place(tmp_path, forks)


def configure(place: Place, rows: list[Row], **changes: object) -> None:
    write_rows(place.folder / "rows", rows)
    settings: dict[str, object] = {
        "gradient_accumulation_steps": 2, "dflash__layout__target_gpus": [0], "dflash__layout__target_tp": 1,
        "dflash__layout__drafter_gpus": [1, 2, 3], "dflash__run__log_every": 1, "dflash__run__epochs": 2,
        "dflash__ring__reuse": 1, "dflash__ring__min_ready": 1, "dflash__data__token_budget": LONGEST,
        "dflash__data__max_seq_len": LONGEST,
    }  # fmt: skip
    make_config(place.folder, **(settings | changes))


def check(place: Place, name: str, rows: int) -> str:
    """The run ended well and every row was trained on once in each of two epochs; returns its log."""
    assert read_status(RunDir.open(place.folder / "runs" / name)).state == "DONE"
    expected = Counter({f"{(epoch << 40) | row} 0": 1 for epoch in range(2) for row in range(rows)})
    assert place.trained(name) == expected
    return place.log(name)


def test_nasty_rows(place: Place) -> None:
    """Empty masks, one supervised token, rows shorter than a block, the longest possible row, an uneven tail."""
    configure(place, NASTY)
    place.train("nasty")
    log = check(place, "nasty", len(NASTY))
    assert "4 rows have fewer than two supervised tokens: they are read, and train nothing" in log
    assert f"{2 * BARREN} deliveries trained nothing: no two supervised tokens in a row" in log
    assert place.summary("nasty")["counts"]["barren"] == 2 * BARREN
    assert sum(record["barren"] for record in place.records("nasty")) == 2 * BARREN
    assert re.search(r"^step=\d+/\d+ .* barren=\d+", log, re.M)
    assert not sum(record["skipped"] for record in place.records("nasty"))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [[good(40)], [good(64), good(63)], [good(64)] * 7], ids=["one", "two", "seven"])
def test_fewer_rows_than_ranks(place: Place, rows: list[Row]) -> None:
    configure(place, rows)
    place.train("few")
    check(place, "few", len(rows))
    assert len(place.records("few")) == 2 * -(-len(rows) // 6)


@pytest.mark.slow
def test_a_step_without_any_supervision_is_counted(place: Place) -> None:
    """One micro-batch a step and rows that fill one: most steps have nothing to learn, and the run goes on."""
    configure(place, [good(LONGEST)] + [(LONGEST, [])] * 3, dflash__layout__drafter_gpus=[1],
              gradient_accumulation_steps=1)  # fmt: skip
    place.train("idle")
    log = check(place, "idle", 4)
    assert "6 steps had nothing supervised on any rank" in log
    assert sum(record.get("empty_steps", 0) for record in place.records("idle")) == 6
    assert all(record["loss"] is None for record in place.records("idle") if record.get("empty_steps"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["longer than the budget", "nothing supervised at all", "no row"])
def test_what_cannot_train_is_refused_in_one_message(place: Place, kind: str) -> None:
    rows = {"longer than the budget": [good(20), good(LONGEST + 1)], "nothing supervised at all": [(20, [])] * 4,
            "no row": []}[kind]  # fmt: skip
    configure(place, rows, **({"dflash__data__max_seq_len": 80} if "budget" in kind else {}))
    said = place.train("refused", code=2).output
    assert "Traceback" not in said and said.count("error:") == 1
    assert not (place.folder / "runs" / "refused").exists()


def test_rows_that_all_have_nothing_to_teach_are_refused_before_the_launch(tmp_path: Path, forks: ForkServer) -> None:
    make_target(tmp_path / "target", kind="llama")
    write_rows(tmp_path / "rows", [(30, [11, 13, 15, 17]), (30, [9]), (30, [])] * 6)
    make_config(tmp_path)
    launch = Place(tmp_path, forks).train("nothing", code=2)
    assert (
        "dflash.data.path" in launch.output
        and "none of the 18 rows has two supervised tokens in a row" in launch.output
    )
    assert "Traceback" not in launch.output and not (tmp_path / "runs").exists()
