"""``python -m recipe report RUN``: the whole run as one HTML file that needs nothing else."""

from __future__ import annotations

import argparse
import html
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipe.errors import ConfigError
from recipe.tell.curve import Series, curve_svg
from recipe.tell.gpu_roles import flat
from recipe.tell.metrics import count_of, read_metrics
from recipe.tell.provenance import redact
from recipe.tell.run_dir import RunDir, write_atomic
from recipe.tell.status import read_status
from recipe.tell.status_fields import gpu_rows
from recipe.tell.table import summary_rows

_CURVES = (
    ("Loss", ("loss",), ""),
    ("tau_est (teacher-forced)", ("tau_est",), "tokens"),
    ("tau (real decoding)", ("eval_tau",), "tokens"),
    ("Learning rate", ("lr",), ""),
    ("Gradient norm", ("gnorm",), ""),
    ("Throughput", ("tokens_per_s",), "tokens/s"),
    ("Step and wait", ("ms", "wait_ms"), "ms per step"),
    ("Ring, ready batches", ("ring",), "batches"),
)
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2rem}table{border-collapse:collapse}
td,th{padding:.2rem .8rem .2rem 0;text-align:left;vertical-align:top;border-bottom:1px solid #e4e4e4}
td{overflow-wrap:anywhere}
.curves{display:flex;flex-wrap:wrap;gap:1rem}figure{margin:0}figcaption{font-weight:600}
svg{background:#fafafa;border:1px solid #e4e4e4}.note{color:#666}code,pre{font-size:.9em}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb, on a parser of `recipe.run.cli`."""
    parser.description = "Write a run's curves, settings, origin and evaluation into one self-contained HTML file."
    parser.epilog = "example: python -m recipe report runs/demo   (writes runs/demo/report.html)"
    parser.add_argument("run", metavar="RUN", help="run folder, for example runs/demo (or just its name)")
    parser.add_argument("--output", metavar="FILE", help="where to write (default: RUN/report.html)")


def run(args: argparse.Namespace) -> int:
    """Write the report and print its path; returns 0. Raises ConfigError: no run, or the file cannot be written."""
    run_dir = RunDir.open(args.run)
    output = Path(os.path.expanduser(args.output)) if args.output else run_dir.report_html
    try:
        write_atomic(output, build(run_dir))
    except OSError as error:
        rule = f"cannot be written ({error.strerror})"
        raise ConfigError(
            "--output", str(output), rule, "give a file in a folder that exists and is writable"
        ) from error
    print(output)
    return 0


def build(run_dir: RunDir) -> str:
    """The page. Whatever is not there (yet) is left out; everything from files is escaped and redacted."""
    records = read_metrics(run_dir.metrics_jsonl)
    status = read_status(run_dir)
    summary = _read(run_dir.summary_json)
    sections = [
        f"<h1>{_text(run_dir.path.name)}</h1>",
        f"<p><b>{status.state}</b>: {_text(status.message)}</p>",
        f'<p class="note">Written {time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())} from {_text(run_dir.path)}</p>',
    ]
    if summary:
        sections += ["<h2>Result</h2>", _table(summary_rows(summary))]
    sections += [
        "<h2>Evaluation</h2>" + part if index == 0 else part for index, part in enumerate(_evaluations(run_dir))
    ]
    sections += ["<h2>Curves</h2>", _curves(records)]
    config, provenance = _read(run_dir.config_json), _read(run_dir.provenance_json)
    if config:
        sections += ["<h2>Settings</h2>", _table(_flatten(redact(config)))]
    if provenance:
        sections += ["<h2>Origin</h2>", _table(_flatten(redact(provenance)))]
    body = "\n".join(sections)
    title = _text(run_dir.path.name)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n'
    )


def _curves(records: Sequence[Mapping[str, Any]]) -> str:
    if not records:
        return '<p class="note">No step has been logged yet.</p>'
    figures = []
    for title, keys, unit in _CURVES:
        series = [Series(key, _points(records, key)) for key in keys]
        if any(value is not None for each in series for _, value in each.points):
            caption = _text(f"{title} ({unit})" if unit else title)
            figures.append(f"<figure><figcaption>{caption}</figcaption>{curve_svg(series)}</figure>")
    for title, name in (("GPU utilisation", "util_pct"), ("GPU memory", "mem_used")):
        figures += _gpu_figure(records, title, name)
    skipped = sum(count_of(record, "skipped") for record in records)
    windows = [record for record in records if not _is_evaluation(record)] or records
    note = f'<p class="note">{len(windows)} log windows, steps {windows[0]["step"]} to {windows[-1]["step"]}'
    return f'<div class="curves">{"".join(figures)}</div>{note}, {skipped} skipped steps.</p>'


def _gpu_figure(records: Sequence[Mapping[str, Any]], title: str, name: str) -> list[str]:
    """A line for each node and role; nothing for runs without GPU samples."""
    windows = [(float(record["step"]), flat(gpu_rows(record.get("gpu")))) for record in records]
    keys = sorted({key for _, values in windows for key in values if key.endswith(f"/{name}")})
    if not keys:
        return []
    scale, unit = (2**30, "GiB") if name == "mem_used" else (1, "%")
    lines = [
        Series(key.removesuffix(f"/{name}"), [(step, values[key] / scale) for step, values in windows if key in values])
        for key in keys
    ]
    return [f"<figure><figcaption>{_text(f'{title} ({unit})')}</figcaption>{curve_svg(lines)}</figure>"]


def _points(records: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float | None]]:
    """Evaluations have lines of their own, which are no gaps in the curves of training, nor the other way round."""
    wanted = [record for record in records if _is_evaluation(record) == key.startswith("eval_")]
    return sorted(((float(record["step"]), _number(record.get(key))) for record in wanted), key=lambda point: point[0])


def _is_evaluation(record: Mapping[str, Any]) -> bool:
    return "eval_prompts" in record


def _evaluations(run_dir: RunDir) -> list[str]:
    parts = []
    for path in sorted(run_dir.eval.glob("*.json")):
        values = _read(path)
        if values:
            rows = [(key, text) for key, text in _flatten(redact(values)) if len(text) < 2000]
            parts.append(f"<h3>{_text(path.stem)}</h3>{_table(rows)}")
    return parts


def _number(value: Any) -> float | None:
    """A plottable number; of the ring's pair the first; None leaves a gap, NaN is marked."""
    if isinstance(value, (list, tuple)):
        value = value[0] if value else None
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or (isinstance(value, int) and abs(value) > 2**63)
    ):
        return None
    return float(value)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        return [row for key, item in value.items() for row in _flatten(item, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(value, float) and math.isfinite(value):
        return [(prefix, f"{value:g}")]
    return [(prefix, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))]


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><th>{_text(a)}</th><td>{_text(b)}</td></tr>" for a, b in rows) + "</table>"


def _text(value: Any) -> str:
    return html.escape(str(value), quote=True)
