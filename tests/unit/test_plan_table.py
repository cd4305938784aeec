"""The verb ``plan`` on the reference config: no weights, no network."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from recipe.errors import ConfigError
from recipe.target.plan_table import add_arguments, run

CONFIG = str(Path(__file__).parents[2] / "ds_configs" / "qwen3.6_27b_5t3d.json")


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_json_has_every_degree(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments(CONFIG, "--json")) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [row["tp"] for row in plan["degrees"]] == list(range(1, 9))
    five = plan["degrees"][4]
    assert five["heads"] == [5, 5, 5, 5, 4] and len(five["rank_bytes"]) == 5
    assert 1 / 1.045 <= five["efficiency"] < 1
    assert five["all_reduce_bytes"] == round(128 * 5120 * 2 * 2 * 4 / 5)
    for split in plan["splits"]:
        assert split["replicas"] * split["tp"] + split["drafters"] == 8
    assert {"replicas": 1, "tp": 5, "drafters": 3}.items() <= next(s for s in plan["splits"] if s["tp"] == 5).items()
    rates = [split["tokens_per_s"] for split in plan["splits"]]
    assert rates == sorted(rates, reverse=True)


def test_table_and_memory_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments(CONFIG, "--tp", "5")) == 0
    out = capsys.readouterr().out
    assert "5x4,4 / 1,2x3,1; 10x3,9x2 / 4x3,3x2; 3520x2,3456x3" in out and "rank 4:" in out
    assert run(arguments(CONFIG, "--gpu-memory-gb", "8")) == 0
    assert "no split fits" in capsys.readouterr().out


def test_bad_numbers_are_refused() -> None:
    for words in (("--tp", "0"), ("--gpus", "0"), ("--tflops", "-1")):
        with pytest.raises(ConfigError):
            run(arguments(CONFIG, *words))
