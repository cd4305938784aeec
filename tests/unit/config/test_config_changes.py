"""A resume says every setting in which it trains otherwise than before, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.config import load_config_text
from recipe.config.changes import changes


@pytest.fixture
def before(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(load_config_text("{}").to_json())
    return path


def test_an_unchanged_run_has_nothing_to_say(before: Path) -> None:
    assert changes(before, load_config_text("{}")) == []


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optimizer.params.lr=0.1", "resumed with optimizer.params.lr = 0.1 instead of 0.0006"),
        ("dflash.objective.loss=dpace", 'resumed with dflash.objective.loss = "dpace" instead of "dflash"'),
        ("dflash.objective.noise.start=0.5", "resumed with dflash.objective.noise.start = 0.5 instead of 0.05"),
        ("dflash.target.dtype=float32", 'resumed with dflash.target.dtype = "float32" instead of "bfloat16"'),
        ("bf16.enabled=true", "resumed with bf16.enabled = true instead of false"),
        (
            "dflash.target.revision=abc",
            'resumed with dflash.target.revision = "abc" instead of null, which is the same model',
        ),
        (
            "dflash.drafter.init_from=x",
            'resumed with dflash.drafter.init_from = "x" instead of null, which changes '
            "nothing: the weights are the checkpoint's",
        ),
    ],
)
def test_a_setting_that_changes_the_training_is_said(before: Path, override: str, line: str) -> None:
    assert changes(before, load_config_text("{}", [override])) == [line]


@pytest.mark.parametrize("override", ["dflash.run.log_every=3", "dflash.telemetry.gpu=false", "dflash.run.keep=1"])
def test_what_only_changes_the_view_is_not_said(before: Path, override: str) -> None:
    assert changes(before, load_config_text("{}", [override])) == []


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00", "[" * 100_000])
def test_a_damaged_record_is_said(before: Path, text: str) -> None:
    before.write_text(text)
    (line,) = changes(before, load_config_text("{}"))
    assert "is not known" in line


def test_a_key_of_a_newer_version_is_no_change(before: Path) -> None:
    before.write_text('{"dflash": {}}')
    assert changes(before, load_config_text("{}")) == []
