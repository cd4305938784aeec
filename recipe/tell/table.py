"""The table at the end of a run: what was trained, how good it is, where it lies."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

_ROWS: tuple[tuple[str, str, str], ...] = (
    ("steps", "optimizer steps", "d"),
    ("final_loss", "final loss", ".4f"),
    ("tau", "tau (tokens per target forward, measured)", ".3f"),
    ("prompts", "held-out prompts decoded", "d"),
    ("identical", "output identical to plain greedy decoding", ""),
    ("target_forwards_per_token", "target forwards per token", ".3f"),
    ("accept_rate", "accept rate by position", ".2f"),
    ("bottleneck", "bottleneck", ""),
    ("warnings", "warning", ""),
)
_PATHS = ("checkpoint", "export", "metrics", "report")


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Label and text of every fact that ``summary`` holds (keys of summary.json); absent facts are left out."""
    rows = [(label, _text(summary[key], form)) for key, label, form in _ROWS if summary.get(key) is not None]
    return rows + [(key, str(summary[key])) for key in _PATHS if summary.get(key)]


def summary_table(summary: Mapping[str, Any], title: str = "Result", plain: bool = False) -> Table:
    """The rich table; ``plain`` has ASCII lines only. Long values fold instead of being cut."""
    table = Table(title=title, show_header=False, box=box.ASCII if plain else box.ROUNDED, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in summary_rows(summary):
        style = "bold green" if label.startswith("tau") else "bold red" if text == "no" else ""
        table.add_row(label, text, style=style)
    return table


def print_summary(summary: Mapping[str, Any], title: str = "Result", stream: TextIO | None = None) -> None:
    """Print the table; into a file or pipe without colours and wide enough that no path is folded."""
    stream = stream or sys.stdout
    terminal = stream.isatty()
    width = None if terminal else 12 + max((len(a) + len(b) for a, b in _widest(summary)), default=0)
    console = Console(file=stream, width=width, no_color=not terminal, highlight=False, markup=False)
    console.print(summary_table(summary, title, plain=not terminal))


def _widest(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = summary_rows(summary)
    return [(max((a for a, _ in rows), key=len, default=""), max((b for _, b in rows), key=len, default=""))]


def _text(value: Any, form: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return " ".join(_text(item, form) for item in value)
    return (
        format(value, form)
        if form and isinstance(value, (int, float)) and (form != "d" or isinstance(value, int))
        else str(value)
    )
