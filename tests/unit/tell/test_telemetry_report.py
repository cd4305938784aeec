"""The HTML report and the summary table."""

from __future__ import annotations

import argparse
import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from recipe.errors import ConfigError
from recipe.tell import report
from recipe.tell.curve import Series, curve_svg
from recipe.tell.metrics import Metrics
from recipe.tell.run_dir import RunDir, write_json
from recipe.tell.table import print_summary, summary_rows, summary_table

SUMMARY = {
    "steps": 300, "final_loss": 1.23456, "tau": 2.514, "identical": True, "prompts": 32, "bottleneck": "target",
    "target_forwards_per_token": 0.398, "accept_rate": [0.71, 0.5, 0.333], "export": "runs/demo/export/step_300",
    "checkpoint": "runs/demo/checkpoints/step_300", "metrics": "runs/demo/metrics.jsonl",
}  # fmt: skip


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    return parser.parse_args(words)


class Page(HTMLParser):
    """Collects what a browser would run or load, and checks that tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "circle", "polyline"):
            assert self.open.pop() == tag


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "r")


def fill(run: RunDir) -> None:
    metrics = Metrics(run, steps=100)
    for step in range(10, 101, 10):
        loss = math.nan if step == 50 else 100.0 / step
        metrics.add({"loss": loss, "tau_est": 2.0}, {"loss": 1.0, "tau_est": 1.0})
        metrics.step(0.4, 0.1, 100, skipped=step == 50)
        metrics.flush(step, lr=1e-3, gnorm=1.0, ring=(3, 9))
    write_json(
        run.config_json, {"dflash": {"run": {"name": "<script>alert(1)</script>"}, "x": {"hf_token": "hushhush"}}}
    )
    write_json(run.provenance_json, {"host": "h&m", "versions": {"torch": "2.13"}})
    write_json(run.summary_json, SUMMARY)
    write_json(run.eval / "step_100.json", {"tau": 2.514, "tau_ci": [2.4, 2.6], "domains": {"news": 2.2}})


def test_report_is_one_escaped_file_with_all_parts(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    fill(run)
    assert report.run(parse(str(run.path))) == 0
    assert capsys.readouterr().out == f"{run.report_html}\n"
    text = run.report_html.read_text()
    page = Page()
    page.feed(text)
    assert page.open == [] and page.loads == [] and "script" not in page.tags
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "") and "@import" not in text and "url(" not in text
    assert "&lt;script&gt;" in text and "h&amp;m" in text and "hushhush" not in text
    for part in ("Loss", "tau_est", "Learning rate", "tokens/s", "ms per step", "Ring", "Settings", "Origin", "Result"):
        assert part in text, part
    assert page.tags.count("svg") == 7
    assert "2.514" in text and "domains.news" in text and "tau_ci" in text and "1 skipped steps" in text
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(svg)


def test_report_of_a_bare_run_and_to_another_file(run: RunDir, tmp_path: Path) -> None:
    output = tmp_path / "other.html"
    assert report.run(parse(str(run.path), "--output", str(output))) == 0
    assert "No step has been logged yet" in output.read_text() and not run.report_html.exists()
    with pytest.raises(ConfigError) as caught:
        report.run(parse(str(run.path), "--output", str(tmp_path / "no" / "such" / "x.html")))
    assert caught.value.field == "--output"
    with pytest.raises(ConfigError):
        report.run(parse(str(tmp_path)))


def coordinates(svg: str) -> list[list[tuple[float, float]]]:
    lines = re.findall(r'polyline points="([^"]+)"', svg)
    return [[tuple(map(float, point.split(","))) for point in line.split()] for line in lines]  # type: ignore[misc]


def test_a_curve_is_drawn_where_its_numbers_say() -> None:
    (line,) = coordinates(curve_svg([Series("a", [(0, 1.0), (5, 3.0), (10, 2.0)])]))
    (x0, y0), (x1, y1), (x2, y2) = line
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 > y2 > y1  # y grows downwards
    assert y0 - y2 == pytest.approx(y2 - y1, abs=0.2)


def test_gaps_not_finite_values_and_spikes_stay_visible() -> None:
    svg = curve_svg([Series("a", [(0, 1.0), (1, 2.0), (2, None), (3, math.nan), (4, 1.0), (5, 2.0)])])
    assert len(coordinates(svg)) == 2 and svg.count("not finite at 3") == 1
    many = [(float(x), 1.0) for x in range(100_000)]
    many[77_777] = (77_777.0, 50.0)
    (line,) = coordinates(curve_svg([Series("a", many)]))
    assert len(line) <= 801 and min(y for _, y in line) < max(y for _, y in line) - 100
    flat = curve_svg([Series("a", [(3, 1.0)])])
    assert "circle" in flat and "nan" not in flat
    assert "nan" not in curve_svg([Series("a", [])])


def test_the_table_holds_every_fact() -> None:
    rows = dict(summary_rows(SUMMARY))
    assert rows["accept rate by position"] == "0.71 0.50 0.33"
    assert rows["output identical to plain greedy decoding"] == "yes"
    assert rows["tau (tokens per target forward, measured)"] == "2.514"
    assert len(rows) == len(SUMMARY) and summary_table(SUMMARY).row_count == len(SUMMARY)
    assert dict(summary_rows({"identical": False})) == {"output identical to plain greedy decoding": "no"}


def test_plain_text_when_it_is_not_a_terminal() -> None:
    stream = io.StringIO()
    long = "/" + "x" * 300
    print_summary({**SUMMARY, "export": long}, stream=stream)
    text = stream.getvalue()
    assert "\033" not in text and long in text and text.isascii() and "0.398" in text


def test_values_of_wrong_types_leave_gaps(run: RunDir) -> None:
    fill(run)
    whole = report.build(run)
    strange = (
        '{"step": "a", "loss": [1], "skipped": "z"}',
        '{"step": 7, "loss": {"x": 1}, "lr": "much", "skipped": []}',
        '{"step": 7, "loss": 1' + "0" * 400 + "}",
        '{"step": 1e400}',
        "[1]",
    )
    with run.metrics_jsonl.open("a") as file:
        file.write("".join(line + "\n" for line in strange))
    for status in ("[]", "{}", '{"state": 5, "step": "a", "steps": [], "processes": "x"}'):
        run.status_json.write_text(status)
        assert report.build(run).count("<polyline") == whole.count("<polyline") > 0
    assert summary_rows({"accept_rate": ["high", 0.5]})[0][1] == "high 0.50"
