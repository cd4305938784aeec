"""Whether the files of a checkpoint hold what was written: sizes, and a CRC-32 of every byte.

Disks, network file systems and copies flip bits; such a checkpoint would load, and train on, without a word. A CRC-32
misses one random damage in 4·10⁹ and costs a save or a resume about 0.3 s a GB and thread. It is no protection
against somebody who changes files on purpose.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

STATE = "state.json"
FORMAT = 3
PIECE = 8 << 20
THREADS = 4
OWN_SUM = "crc32 of this file without this line"


def sum_of_file(path: Path) -> str:
    """CRC-32 of a file, 8 hexadecimal digits. Raises OSError."""
    found = 0
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            found = zlib.crc32(piece, found)
    return f"{found:08x}"


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
    read = [name for name in files if names is None or name in names]
    with ThreadPoolExecutor(THREADS) as pool:
        found = dict(zip(read, pool.map(_sum_or_none, (folder / name for name in read)), strict=True))
    bad = next((name for name in read if found[name] != files[name][1]), None)
    return None if bad is None else f"{folder / bad} has other bytes than were written"


def folder_name(step: int) -> str:
    """Of the checkpoint after ``step`` optimizer steps."""
    return f"step_{step:08d}"


def _sum_or_none(path: Path) -> str | None:
    try:
        return sum_of_file(path)
    except OSError:  # a bad sector
        return None


def _sum_of_state(state: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(state, sort_keys=True).encode()):08x}"
