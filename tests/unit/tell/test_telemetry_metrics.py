"""Metrics, the log line and the profile line."""

from __future__ import annotations

import io
import json
import math
import random
from pathlib import Path

import pytest

from recipe.tell.logline import TrainLog, format_line, rate
from recipe.tell.metrics import Metrics, read_metrics
from recipe.tell.profile import Profile, verdict
from recipe.tell.run_dir import RunDir

EXAMPLE = (
    "step=420/10000 loss=1.8342 tau_est=2.91 acc@1=0.712 lr=5.8e-04 gnorm=0.83 ms=412 wait_ms=9 "
    "tok/s=61.2k ring=12/90 mem=41.2GiB"
)
RECORD = {
    "step": 420, "steps": 10000, "loss": 1.83421, "tau_est": 2.9099, "acc@1": 0.71204, "acc@2": 0.5, "lr": 5.8e-4,
    "gnorm": 0.8312, "ms": 412.4, "wait_ms": 9.1, "tokens_per_s": 61234.0, "ring": [12, 90], "mem": int(41.2 * 2**30),
    "skipped": 0, "time": 1.0,
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "r")


def test_the_line_is_the_one_of_the_design() -> None:
    assert format_line(RECORD) == EXAMPLE
    assert format_line({**RECORD, "skipped": 2}) == EXAMPLE + " skipped=2"


@pytest.mark.parametrize(
    ("loss", "text"),
    [(None, "n/a"), (math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (0, "0.0000"), (1e5, "100000.0000")],
)
def test_a_line_shows_what_is_not_known_and_what_is_no_number(loss: float | None, text: str) -> None:
    line = format_line({"step": 7, "steps": 10**6, "loss": loss})
    known = {"step": "7/1000000", "loss": text}
    assert dict(part.split("=") for part in line.split()) == dict.fromkeys(
        ("tau_est", "acc@1", "lr", "gnorm", "ms", "wait_ms", "tok/s", "ring", "mem"), "n/a") | known  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (999.2, "999"), (1000, "1.0k"), (61234, "61.2k"), (999_960, "1.0M"), (2.5e6, "2.5M")]
)
def test_rate(value: float, text: str) -> None:
    assert rate(value) == text


def test_window_is_the_weighted_mean_over_all_its_micro_batches(run: RunDir) -> None:
    """Fault R47: two steps of four micro-batches; a mean of means or the last micro-batch would be far off."""
    draw = random.Random(3)
    metrics = Metrics(run, steps=100)
    losses: list[float] = []
    hits: list[int] = []
    for _step in range(2):
        for _micro in range(4):
            each = [draw.uniform(0, 9) for _ in range(draw.choice((1, 2, 500)))]
            right = [draw.random() < 0.3 for _ in each]
            losses += each
            hits += right
            sums = {"loss": sum(each), "acc@1": sum(right)}
            metrics.add(sums, {"loss": len(each), "acc@1": len(right)})
        metrics.step(0.5, 0.1, tokens=1000)
    record = metrics.flush(2, lr=1e-3, gnorm=0.5, ring=(3, 9), mem=2**30, epoch=0)
    assert record["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-12)
    assert record["acc@1"] == pytest.approx(sum(hits) / len(hits), rel=1e-12)
    assert (record["ms"], record["wait_ms"], record["tokens_per_s"]) == pytest.approx((500, 100, 2000))
    metrics.add({"loss": 4.0}, {"loss": 2.0})
    metrics.step(0.25, 0.0, tokens=10)
    second = metrics.flush(3)
    assert second["loss"] == 2.0 and "acc@1" not in second and second["ms"] == 250, "the window starts empty"
    stored = read_metrics(run.metrics_jsonl)
    assert [each["step"] for each in stored] == [2, 3]
    keys = "step loss tau_est acc@1 lr gnorm ms wait_ms tokens_per_s ring mem skipped epoch time"
    assert set(keys.split()) <= set(stored[0])


def test_nan_is_shown_and_stored_as_nan(run: RunDir) -> None:
    metrics = Metrics(run, steps=10)
    metrics.add({"loss": 5.0, "tau_est": 1.0}, {"loss": 2.0, "tau_est": 0.0})
    metrics.add({"loss": math.nan}, {"loss": 2.0})
    metrics.step(1, 0, 1, skipped=True)
    record = metrics.flush(1)
    assert math.isnan(record["loss"]) and record["tau_est"] == math.inf and record["skipped"] == 1
    assert "loss=nan tau_est=inf" in format_line(record) and format_line(record).endswith("skipped=1")
    assert math.isnan(read_metrics(run.metrics_jsonl)[0]["loss"])


def test_nothing_measured_is_not_zero_and_not_nan(run: RunDir) -> None:
    metrics = Metrics(run, steps=10)
    metrics.add({"loss": 0.0}, {"loss": 0.0})
    record = metrics.flush(1)
    assert record["loss"] is None and record["ms"] is None and "loss=n/a" in format_line(record)


def test_a_numerator_without_denominator_is_a_bug(run: RunDir) -> None:
    with pytest.raises(KeyError):
        Metrics(run, steps=1).add({"loss": 1.0}, {})


def test_resume_drops_what_will_be_written_again(run: RunDir) -> None:
    metrics = Metrics(run, steps=100)
    for step in (10, 20, 30):
        metrics.step(1, 0, 1, skipped=step != 10)
        metrics.flush(step)
    assert metrics.skipped_total == 2
    with open(run.metrics_jsonl, "a") as file:
        file.write('{"step": 40, "los')  # the process was killed here
    resumed = Metrics(run, steps=100, resume_step=20)
    assert resumed.skipped_total == 1
    resumed.flush(30)
    lines = run.metrics_jsonl.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [10, 20, 30]


def test_train_log_writes_file_and_stream_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    stream = io.StringIO()
    log = TrainLog(tmp_path / "train.log", stream)
    log.line(EXAMPLE)
    log.event("key is 0123456789abcdef")
    text = (tmp_path / "train.log").read_text()
    assert text == stream.getvalue() and text.startswith(EXAMPLE + "\n[") and "0123456789abcdef" not in text
    log.close()
    log.line("later")
    assert "later" in stream.getvalue()


def test_a_full_disk_does_not_stop_the_log() -> None:
    stream = io.StringIO()
    log = TrainLog("/dev/full", stream)
    log.line("one")
    log.line("two")
    assert stream.getvalue().count("warning") == 1 and "two" in stream.getvalue()


@pytest.mark.parametrize(
    ("produce", "consume", "side", "waits"),
    [(1, 37.8, "target", "drafter"), (30, 2, "drafter", "target"), (5, 4, "balanced", "neither"),
     (30, 31, "balanced", "neither")],
)  # fmt: skip
def test_verdict(produce: float, consume: float, side: str, waits: str) -> None:
    result = verdict(produce, consume, 60.0)
    assert (result.bottleneck, result.waiting_side) == (side, waits)
    assert result.line().startswith(f"profile bottleneck={side} ")


def test_the_advice_is_one_sentence_with_the_number() -> None:
    result = verdict(0.0, 37.8 * 3, 60.0, producers=5, consumers=3)
    expected = "drafters waited 63 % of the last 60 s for the target: raise ring.reuse or give the target more GPUs"
    assert result.advice == expected


def test_profile_cuts_windows_and_keeps_the_total() -> None:
    now = [100.0]
    profile = Profile(60, producers=2, consumers=1, clock=lambda: now[0])
    assert profile.update(50, 400) is None, "what was waited before training does not count"
    now[0] = 130.0
    assert profile.update(50, 410) is None
    now[0] = 160.0
    first = profile.update(50, 430)
    assert first is not None and first.drafter_wait_pct == 50 and first.bottleneck == "target"
    now[0] = 220.0
    second = profile.update(50 + 96, 430)
    assert second is not None and second.target_wait_pct == 80 and second.bottleneck == "drafter"
    total = profile.total()
    assert (total.window_s, total.target_wait_pct, total.drafter_wait_pct) == (120, 40, 25)
    silent = Profile(0, clock=lambda: now[0])
    assert silent.update(0, 0) is None
    now[0] += 1000
    assert silent.update(0, 500) is None and silent.total().bottleneck == "target"
