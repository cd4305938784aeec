"""The two kinds of failure: a user's mistake (one message, exit 2) and a fault of the run (keeps its traceback)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(Exception):
    """A user's mistake: says which field, what value it has, the rule it breaks and how to mend it.

    The command line prints ``str(error)`` and exits with 2, without a traceback.
    """

    def __init__(self, field: str, value: object, rule: str, fix: str) -> None:
        self.field, self.value, self.rule, self.fix = field, value, rule, fix
        super().__init__(f"{field} = {value!r}: {rule}\n  Fix: {fix}")


class RunError(Exception):
    """A fault while the run is under way (a dead peer, a time-out, corrupt data). Keeps its traceback."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint `` Did you mean 'x'?`` for a misspelt name, or an empty string when nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""
