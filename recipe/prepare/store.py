"""Putting a prepared folder in its place: built under another name, renamed when whole, never over strangers' files."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from recipe.errors import ConfigError

MADE_BY = "recipe.prepare"
SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("length", pa.int32()),
        ("supervised", pa.int32()),
        ("id", pa.string()),
        ("row", pa.int64()),  # number of the input row; turns of one conversation share it
        ("group", pa.uint64()),  # hash of the opening prompt: one group never spans the split
        ("content", pa.uint64()),  # hash of ids and mask
        ("prompt", pa.string()),  # JSON for heldout_prompts.jsonl; empty without --holdout
    ]
)
KEPT_COLUMNS = ["input_ids", "loss_mask", "length", "supervised", "id"]
_OURS = {"train", "heldout", "heldout_prompts.jsonl", "meta.json", "report.json"}


def cached(output: Path, key: str) -> bool:
    """Whether ``output`` holds exactly what ``key`` asks for. Raises ConfigError when it holds others' files."""
    if not output.exists():
        return False
    if not output.is_dir():
        raise ConfigError("--output", str(output), "is a file", "give a folder")
    names = {entry.name for entry in output.iterdir()}
    if not names:
        return False
    meta = _read_json(output / "meta.json")
    strangers = sorted(names - _OURS)
    if meta.get("made_by") != MADE_BY or strangers:
        what = f"holds {strangers[0]!r}, which `prepare` did not make" if strangers else "was not made by `prepare`"
        raise ConfigError("--output", str(output), what, "give a new folder; nothing in this one was touched")
    return meta.get("key") == key and (output / "report.json").is_file() and (output / "train").is_dir()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def cache_key(inputs: Sequence[Path], settings: dict[str, Any]) -> str:
    """Names everything that decides the output: settings (tokenizer and template hashes among them) and the bytes of
    every input file. Modification times are not trusted."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for path in inputs:
        for file in [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file()):
            digest.update(str(file).encode("utf-8", "surrogateescape") + b"\0")
            try:
                with file.open("rb") as stream:
                    digest.update(_digest(stream))
            except OSError as error:
                raise ConfigError(
                    "--input", str(file), f"cannot be read: {error}", "check the file's rights"
                ) from error
    return digest.hexdigest()


def _digest(stream: Any) -> bytes:
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.digest()


def open_parts(paths: Iterable[Path]) -> pa.Table:
    """One table over stream files, memory-mapped."""
    tables = [pa.ipc.open_stream(pa.memory_map(str(path))).read_all() for path in paths]
    return pa.concat_tables([SCHEMA.empty_table(), *tables])


def write_split(table: pa.Table, folder: Path, keep: Any | None = None) -> None:
    """Save (the rows ``keep``, bool [n], of) a table as a `datasets` folder, batch by batch."""
    import datasets

    passing = folder.with_suffix(".stream")
    schema = pa.schema([SCHEMA.field(name) for name in KEPT_COLUMNS])
    at = 0
    with pa.OSFile(str(passing), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for batch in table.select(KEPT_COLUMNS).to_batches(1000):
            kept = batch if keep is None else batch.filter(pa.array(keep[at : at + len(batch)]))
            at += len(batch)
            if len(kept):
                writer.write_batch(kept)
    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        datasets.Dataset.from_file(str(passing)).save_to_disk(str(folder))
    finally:
        if not bars:
            datasets.enable_progress_bars()
    passing.unlink()


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=True, default=str) + "\n", encoding="utf-8")


def publish(built: Path, output: Path) -> None:
    """Put ``built`` in the place of ``output``; the name never holds a mixture of old and new."""
    if not output.exists():
        os.replace(built, output)
        return
    old = output.with_name(f".{output.name}.old-{os.getpid()}")
    os.replace(output, old)
    os.replace(built, output)
    shutil.rmtree(old)


def settle(output: Path) -> None:
    """Mend what a job left that was killed within `publish`: the old folder gets its name back, or goes."""
    for old in output.parent.glob(f".{glob.escape(output.name)}.old-*"):
        if Path("/proc", old.name.rpartition("-")[2]).exists():
            continue  # its job is at work
        if output.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(old, output)
