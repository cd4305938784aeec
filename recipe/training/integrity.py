"""Whether the files of a checkpoint hold what was written: sizes, and CRC-32 sums over every byte.

Disks, network file systems and copies flip bits; such a checkpoint would load, and train on, without a word. A file is
summed in pieces by several threads, 2.4 GB/s each where memory keeps up; a CRC-32 misses one random damage in 4·10⁹. It
is no protection against somebody who changes files on purpose.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

STATE = "state.json"
FORMAT = 4
PIECE = 64 << 20  # bytes that one thread sums
READ = 1 << 20  # bytes that it holds in memory
THREADS = 8
OWN_SUM = "crc32 of this file without this line"


def sum_of_file(path: Path) -> str:
    """CRC-32 of the CRC-32s of a file's pieces, 8 hexadecimal digits. Raises OSError."""
    with open(path, "rb") as file, ThreadPoolExecutor(THREADS) as pool:
        fd = file.fileno()
        sums = pool.map(lambda start: _sum_of_piece(fd, start), range(0, os.fstat(fd).st_size, PIECE))
        return f"{zlib.crc32(b''.join(one.to_bytes(4, 'little') for one in sums)):08x}"


def _sum_of_piece(fd: int, start: int) -> int:
    found, place, end = 0, start, start + PIECE
    buffer = memoryview(bytearray(READ))
    while place < end and (got := os.preadv(fd, [buffer[: end - place]], place)):
        found, place = zlib.crc32(buffer[:got], found), place + got
    return found


def seal(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` with the sum of itself; what state.json holds."""
    return {**state, OWN_SUM: _sum_of_state(state)}


def damage(folder: Path, names: Collection[str] | None = None) -> str | None:
    """What is wrong with a checkpoint, or None: another format, a missing file, another size, other bytes.

    ``names``: the files whose bytes are read; None: all. The sizes of all are compared.
    """
    try:
        state = json.loads((folder / STATE).read_text())
        if state["format"] != FORMAT:
            return f"{folder / STATE} has format {state['format']!r}, and this program reads {FORMAT}"
        if state.pop(OWN_SUM, None) != _sum_of_state(state):
            return f"{folder / STATE} has other bytes than were written"
        files, step = dict(state["files"]), int(state["step"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"{folder / STATE} is damaged or of another version ({type(error).__name__})"
    if folder.name != folder_name(step):
        return f"{folder} holds step {step}"
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} of {size} bytes"
    for name, (_, known) in files.items():
        if (names is None or name in names) and _sum_or_none(folder / name) != known:
            return f"{folder / name} has other bytes than were written"
    return None


def folder_name(step: int) -> str:
    """Of the checkpoint after ``step`` optimizer steps."""
    return f"step_{step:08d}"


def _sum_or_none(path: Path) -> str | None:
    try:
        return sum_of_file(path)
    except OSError:  # a bad sector
        return None


def _sum_of_state(state: Mapping[str, Any]) -> str:
    """Of what a reader gets: JSON makes text of keys that are numbers, which sort otherwise."""
    read = json.loads(json.dumps(state))
    return f"{zlib.crc32(json.dumps(read, sort_keys=True).encode()):08x}"
