"""The option list of every verb and the key list of the config are frozen in options.txt.

A new option or key is a decision: write it down with ``python tests/unit/test_options.py`` and commit the change.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipe.config.keys import known_keys
from recipe.run.cli import VERBS, build_parser

FROZEN = Path(__file__).with_name("options.txt")


def exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not there
        return False


def current() -> list[str]:
    """``VERB --option`` or ``VERB ARGUMENT`` for every verb, then ``config KEY``."""
    lines = []
    for name, verb in VERBS.items():
        if exists(verb.module):
            parser, _ = build_parser(name)
            for action in parser._actions:
                if action.dest != "help":
                    lines.append(f"{name} {' '.join(action.option_strings) or action.dest.upper()}")
    return lines + [f"config {key}" for key in known_keys()]


def frozen() -> list[str]:
    return FROZEN.read_text(encoding="utf-8").splitlines()


def test_no_option_or_key_comes_or_goes_unnoticed() -> None:
    now, then = set(current()), set(frozen())
    added, removed = sorted(now - then), sorted(then - now)
    assert not added and not removed, f"added: {added}; removed: {removed}. Meant? python tests/unit/test_options.py"


def test_every_option_has_a_help_text() -> None:
    silent = [
        f"{name} {action.dest}"
        for name, verb in VERBS.items()
        if exists(verb.module)
        for action in build_parser(name)[0]._actions
        if not action.help
    ]
    assert not silent


if __name__ == "__main__":
    FROZEN.write_text("\n".join(current()) + "\n", encoding="utf-8")
