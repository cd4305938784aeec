"""The launcher's hostfile, read strictly: DeepSpeed takes a missing file for a local run, and ``slots=2abc`` for 2."""

from __future__ import annotations

import os
import re
from pathlib import Path

from recipe.errors import ConfigError

_LINE = re.compile(r"^(?P<host>\S+)\s+slots=(?P<slots>\d+)$")
EXAMPLE = "write NAME slots=N, for example: node1 slots=8"


def read_hostfile(path: str | Path) -> dict[str, int]:
    """Slots by host, in the file's order.

    Empty lines, ``#`` comments (also behind an entry) and CRLF line ends are fine. Raises ConfigError with the line
    number for a line that is no entry, for 0 slots, a host that occurs twice and a number of slots other than the first
    host's (the launcher rotates local ranks then); and for a file that is missing or names no host.
    """
    file = Path(os.path.expanduser(path))
    if not file.is_file():
        raise ConfigError(
            "--hostfile", str(path), "no such file", "give the path of a hostfile, or leave the option out"
        )
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--hostfile", str(path), f"cannot be read: {error}", "give a readable text file") from None
    slots: dict[str, int] = {}
    seen_at: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        entry = line.split("#", 1)[0].strip()
        if entry:
            host, count = _entry(f"{path} line {number}", entry)
            if host in slots:
                rule = f"the host is on line {seen_at[host]} already"
                raise ConfigError(f"{path} line {number}", entry, rule, "give each host one line")
            slots[host], seen_at[host] = count, number
            first = next(iter(slots))
            if count != slots[first]:
                rule = (
                    f"every host needs the same number of slots, and {first} (line {seen_at[first]}) has {slots[first]}"
                )
                raise ConfigError(
                    f"{path} line {number}", entry, rule, f"write slots={slots[first]}, or change the other"
                )
    if not slots:
        raise ConfigError("--hostfile", str(path), "names no host", EXAMPLE)
    return slots


def _entry(where: str, entry: str) -> tuple[str, int]:
    match = _LINE.match(entry)
    if match is None:
        raise ConfigError(where, entry, "is no entry of a hostfile", EXAMPLE)
    if int(match["slots"]) == 0:
        raise ConfigError(where, entry, "a host needs at least one slot", "remove the line, or give it slots")
    return match["host"], int(match["slots"])
