"""A progress bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any


class Progress:
    """``with Progress("prepare") as bar: bar.update(share, "rows=12", count)``; shows ``count`` per second."""

    def __init__(self, name: str, quiet: bool = False, every_s: float = 5.0) -> None:
        self.name, self.quiet, self.every_s = name, quiet, every_s
        self.begun = self.said = time.monotonic()
        self._bar: Any = None
        self._from: float | None = None

    def __enter__(self) -> Progress:
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
            self._bar = Bar(
                *columns, TimeRemainingColumn(), TextColumn("{task.fields[facts]}"), console=Console(stderr=True)
            )
            self._task = self._bar.add_task(self.name, total=1.0, facts="")
            self._bar.start()
        return self

    def update(self, share: float, facts: str, count: float = 0.0) -> None:
        """``share``: 0 to 1 of the whole work."""
        self._from = count if self._from is None else self._from
        now = time.monotonic()
        rate = (count - self._from) / (now - self.begun) if now > self.begun else 0.0
        if self._bar is not None:
            self._bar.update(self._task, completed=min(share, 1.0), facts=f"{facts} {rate / 1000:.1f}k/s")
        elif not self.quiet and now - self.said >= self.every_s:
            self.said = now
            left = (now - self.begun) * (1 - share) / share if share > 0 else 0.0
            print(
                f"{self.name}: {100 * share:.0f} % {facts} {rate / 1000:.1f}k/s eta={left:.0f}s",
                file=sys.stderr,
                flush=True,
            )

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
