"""Which model a folder holds, told by its bytes and not by its path: a fine-tune has the names and sizes of its base.

Read are config.json, the headers of all safetensors files (names, shapes, dtypes, places) and some bytes of every
tensor: milliseconds for a small model, about a second for 50 GB. A training step moves every dense tensor nearly
everywhere, so another model is told apart; one in which nobody touched the sampled bytes is not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

SAMPLE = 1024  # bytes from the middle of a tensor
MOST = 4096  # tensors of a file that are looked into, evenly spaced: a mixture may have tens of thousands
HEADER_MOST = 100 << 20  # what safetensors itself allows


def fingerprint(folder: Path) -> str:
    """16 hexadecimal digits. Raises OSError; ValueError for a file that is no safetensors file."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        for piece in _pieces(path):
            digest.update(piece)
    return digest.hexdigest()[:16]


def _pieces(path: Path) -> Iterator[bytes]:
    """The header of a file, then SAMPLE bytes of each tensor that is looked into."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > HEADER_MOST:
            raise ValueError(f"{path} is no safetensors file")
        header = file.read(size)
        yield header
        spans = sorted(
            tuple(entry["data_offsets"]) for name, entry in json.loads(header).items() if name != "__metadata__"
        )
        for begin, end in spans[:: -(-len(spans) // MOST) or 1]:
            file.seek(8 + size + begin + max(0, (end - begin - SAMPLE) // 2))
            yield file.read(min(SAMPLE, end - begin))
