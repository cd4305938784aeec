"""The launcher's hostfile, read strictly: DeepSpeed takes a missing file for a local run, and ``slots=2abc`` for 2."""

from __future__ import annotations

import os
import re
from pathlib import Path

from recipe.errors import ConfigError

_LINE = re.compile(r"^(?P<host>\S+)\s+slots=(?P<slots>[0-9]{1,4})$")
#: A host's name ends up on the command line of ssh: nothing that could be an option or a shell's word.
_HOST = re.compile(r"^(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?[A-Za-z0-9][A-Za-z0-9._:-]{0,252}$")
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
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # as the launcher does: no other letter ends a line
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--hostfile", str(path), f"cannot be read: {error}", "give a readable text file") from None
    slots: dict[str, int] = {}
    seen_at: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        entry = line.split("#", 1)[0].strip()
        if entry:
            host, count = _entry(f"{path} line {number}", entry)
            if (same := host.lower()) in seen_at:  # names of hosts know no case
                rule = f"the host is on line {seen_at[same]} already"
                raise ConfigError(f"{path} line {number}", entry, rule, "give each host one line")
            slots[host], seen_at[same] = count, number
            first = next(iter(slots))
            if count != slots[first]:
                other = f"{first} (line {seen_at[first.lower()]}) has {slots[first]}"
                rule = f"every host needs the same number of slots, and {other}"
                raise ConfigError(
                    f"{path} line {number}", entry, rule, f"write slots={slots[first]}, or change the other"
                )
    if not slots:
        raise ConfigError("--hostfile", str(path), "names no host", EXAMPLE)
    return slots


def _entry(where: str, entry: str) -> tuple[str, int]:
    match = _LINE.match(entry)
    if match is None:
        raise ConfigError(where, entry[:120], "is no entry of a hostfile", EXAMPLE)
    if _HOST.match(match["host"]) is None:
        rule = "is no name of a host: letters, digits, '.', '_', ':' and '-', beginning with a letter or digit"
        raise ConfigError(where, match["host"][:120], rule, EXAMPLE)
    if int(match["slots"]) == 0:
        raise ConfigError(where, entry, "a host needs at least one slot", "remove the line, or give it slots")
    return match["host"], int(match["slots"])
