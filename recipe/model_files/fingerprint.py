"""Which model a folder holds, told by its bytes and not by its path: a fine-tune has the names and sizes of its base.

Read are config.json, the headers of all safetensors files (names, shapes, dtypes, places) and some bytes of every
tensor: milliseconds for a small model, about a second for 50 GB. A training step moves every dense tensor nearly
everywhere, so another model is told apart; one in which nobody touched the sampled bytes is not.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

THREADS = 8
SAMPLE = 1024  # bytes from the middle of a tensor
MOST = 4096  # tensors of a file that are looked into, evenly spaced: a mixture may have tens of thousands
HEADER_MOST = 100 << 20  # what safetensors itself allows


def fingerprint(folder: Path) -> str:
    """16 hexadecimal digits. Raises OSError; ValueError for a file that is no safetensors file."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    paths = sorted(folder.glob("*.safetensors"))
    with ThreadPoolExecutor(THREADS) as pool:  # a network disk answers one small read in a millisecond, or eight
        for path, sampled in zip(paths, pool.map(_sampled, paths), strict=True):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode() + sampled)
    return digest.hexdigest()[:16]


def _sampled(path: Path) -> bytes:
    """Of the header of a file, then of SAMPLE bytes of each tensor that is looked into."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > HEADER_MOST:
            raise ValueError(f"{path} is no safetensors file")
        header = file.read(size)
        digest = hashlib.sha256(header)
        try:
            entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
            spans = sorted(tuple(entry["data_offsets"]) for entry in entries)
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is no safetensors file ({type(error).__name__})") from error
        for begin, end in spans[:: -(-len(spans) // MOST) or 1]:
            file.seek(8 + size + begin + max(0, (end - begin - SAMPLE) // 2))
            digest.update(file.read(min(SAMPLE, end - begin)))
    return digest.digest()
