"""Writing what training can do without: trouble with the disk is said when it begins and when it is over, never raised.

Only checkpoints, the run's config.json and its export are more than that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from recipe.errors import ConfigError


def say(text: str) -> None:
    """On the terminal, which may be a file on the very disk that is full."""
    with suppress(OSError, ValueError):
        print(text, flush=True)


class DiskTrouble:
    """What cannot be written, by kind. ``tell``: where it is said, once per kind, and once more when it is over."""

    def __init__(self, tell: Callable[[str], None] = say) -> None:
        self._tell, self._missing = tell, dict[str, int]()

    @contextmanager
    def survived(self, what: str) -> Iterator[None]:
        """Around everything that writes (or reads back) ``what``, and around nothing else: it ends at an error."""
        try:
            yield
        except (OSError, SafetensorError, ConfigError) as error:
            self.failed(what, reason(error))
        else:
            self.worked(what)

    def failed(self, what: str, why: str) -> None:
        """As when it had been tried here."""
        if what not in self._missing:
            self._tell(f"warning: {what} cannot be written ({why}); the run goes on")
        self._missing[what] = self._missing.get(what, 0) + 1

    def worked(self, what: str) -> None:
        """As when it had been tried here."""
        if missing := self._missing.pop(what, 0):
            self._tell(f"{what} can be written again ({missing} time(s) it could not)")


def reason(error: BaseException) -> str:
    """``No space left on device``: the system's word if there is one, else the first line."""
    if isinstance(error, ConfigError):
        return error.rule
    text = str(error)
    return getattr(error, "strerror", None) or (text.splitlines()[0] if text else type(error).__name__)


class Lines:
    """Lines appended to a file, each flushed at once. The file is opened for each: a line that could not be written
    leaves nothing behind that a later one, or closing, would stumble over."""

    def __init__(self, path: str | os.PathLike[str], trouble: DiskTrouble | None = None) -> None:
        self._path, self._trouble = Path(path), trouble or DiskTrouble()
        self._cut = False
        self.write("")  # the file is there from now on

    def write(self, text: str) -> None:
        """``text`` holds whole lines."""
        with self._trouble.survived(self._path.name):
            before = self._cut
            self._cut = True
            with open(self._path, "a", encoding="utf-8") as file:
                file.write("\n" * before + text)  # what was cut off ends here
            self._cut = False
