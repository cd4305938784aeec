"""The line of log that people read, and the file it goes to."""

from __future__ import annotations

import io
import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO

from recipe.tell.disk import DiskTrouble, Lines
from recipe.tell.provenance import redact_text

GIB = 2**30
_SHOWN = {"step", "steps", "loss", "tau_est", "acc@1", "lr", "gnorm", "ms", "wait_ms", "tokens_per_s", "ring", "mem"}


def format_line(record: Mapping[str, Any], extra: tuple[str, ...] = ("skipped",)) -> str:
    """One record of `Metrics.flush` as the log line. Fields in ``extra`` appear only when they are not zero.

    A value that is missing or None (nothing was measured in the window) shows as ``n/a``; NaN shows as ``nan``.
    """
    ring = record.get("ring")
    parts = [
        f"step={record['step']}/{record['steps']}",
        "loss=" + _fixed(record.get("loss"), 4),
        "tau_est=" + _fixed(record.get("tau_est"), 2),
        "acc@1=" + _fixed(record.get("acc@1"), 3),
        "lr=" + _number(record.get("lr"), ".1e"),
        "gnorm=" + _fixed(record.get("gnorm"), 2),
        "ms=" + _fixed(record.get("ms"), 0),
        "wait_ms=" + _fixed(record.get("wait_ms"), 0),
        "tok/s=" + rate(record.get("tokens_per_s")),
        "ring=" + (f"{ring[0]}/{ring[1]}" if ring else "n/a"),
        "mem=" + (f"{record['mem'] / GIB:.1f}GiB" if record.get("mem") is not None else "n/a"),
    ]
    parts += [f"{key}={record[key]}" for key in extra if key not in _SHOWN and record.get(key)]
    return " ".join(parts)


def rate(value: float | None) -> str:
    """``61234`` → ``61.2k``; below 1000 without a fraction."""
    if value is None or not math.isfinite(value):
        return "n/a" if value is None else f"{value}"
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # 0.99995 of a unit already rounds up to it: 999,950 is 1.0M, not 1000.0k
        if value >= scale * (1 if scale == 1e3 else 0.99995):
            return f"{value / scale:.1f}{unit}"
    return f"{value:.0f}"


def _fixed(value: float | None, digits: int) -> str:
    return _number(value, f".{digits}f")


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


class TrainLog:
    """Prints lines and appends them to train.log, redacted and flushed one by one. Trouble with the disk is printed."""

    def __init__(self, path: str | os.PathLike[str], stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._lines: Lines | None = Lines(path, DiskTrouble(self._print))

    def line(self, text: str) -> None:
        """A line as it is (the step line)."""
        text = redact_text(text)
        self._print(text)
        if self._lines is not None:
            self._lines.write(text + "\n")

    def _print(self, text: str) -> None:
        with suppress(OSError):  # the terminal may be a file on the same full disk
            print(text, file=self._stream, flush=True)

    def note(self, text: str) -> None:
        """An event that goes to the file alone, because the terminal has it already."""
        stream, self._stream = self._stream, io.StringIO()
        self.event(text)
        self._stream = stream

    def event(self, text: str) -> None:
        """Anything else, with the time of day (UTC) in front."""
        self.line(f"[{time.strftime('%H:%M:%S', time.gmtime())}] {text}")

    def close(self) -> None:
        """Later lines are only printed."""
        self._lines = None
