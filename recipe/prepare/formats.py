"""Reading records from files (JSONL, JSON, Parquet, Arrow, CSV, `datasets` folders, gzip, zstd) in bounded memory."""

from __future__ import annotations

import csv
import glob
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from recipe.errors import ConfigError
from recipe.prepare.compressed import PACKED, on_disk, unpacked
from recipe.prepare.report import Drop

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".csv", ".tsv")
#: Keys of a row; a .json file that holds one object with such a key is one row, with another key it wraps the rows.
ROW_KEYS = ("messages", "conversations", "prompt", "input_ids")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Record:
    """One input row: its file, its number there (1-based; the line for line formats) and its content: undecoded bytes
    of JSON, a Python object, or the reason why it could not be read."""

    source: str
    number: int
    content: Any


@dataclass
class Position:
    """How far reading has come, for the progress bar."""

    done: int = 0
    total: int = 1


def find_inputs(patterns: Sequence[str | Path]) -> list[Path]:
    """Files and `datasets` folders for paths and globs, each once, in the order given (globs sorted)."""
    found: list[Path] = []
    for pattern in map(str, patterns):
        if not pattern.strip() or "\0" in pattern:
            raise ConfigError("--input", pattern, "is no name of a file", "give files, folders or globs")
        here = (
            [Path(pattern)] if Path(pattern).exists() else [Path(p) for p in sorted(glob.glob(pattern, recursive=True))]
        )
        if not here:
            raise ConfigError("--input", pattern, "no file matches", "check the path; quote globs for the shell")
        for path in here:
            found += _inside(path) if path.is_dir() and not _is_dataset(path) else [path]
    found = list(dict.fromkeys(found))
    for path in found:
        if not path.is_file() and not path.is_dir():
            raise ConfigError("--input", str(path), "is neither a file nor a folder", "write the rows to a file first")
        if path.is_file() and _suffix(path) not in SUFFIXES:
            known = ", ".join(SUFFIXES)
            raise ConfigError("--input", str(path), "unknown file type", f"use one of {known}, also with .gz or .zst")
    return found


def _inside(folder: Path) -> list[Path]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and _suffix(p) in SUFFIXES)
    if not files:
        raise ConfigError("--input", str(folder), "this folder holds no data file", f"put {', '.join(SUFFIXES)} there")
    return files


def _is_dataset(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _suffix(path: Path) -> str:
    return (path.with_suffix("") if path.suffix in PACKED else path).suffix.lower()


def size_of(paths: Sequence[Path]) -> int:
    """Bytes on disk of all inputs."""
    files = [f for p in paths for f in ([p] if p.is_file() else p.rglob("*")) if f.is_file()]
    return sum(f.stat().st_size for f in files)


def read_records(paths: Sequence[Path], position: Position | None = None) -> Iterator[Record]:
    """All records of all inputs in order. A file that breaks in the middle ends with one `damaged_file` record."""
    position = position or Position()
    position.total = max(1, size_of(paths))
    before = 0
    for path in paths:
        number = 0
        try:
            for number, content in _read(path, position, before):
                yield Record(str(path), number, content)
        except (OSError, EOFError, ValueError, csv.Error) as error:  # pyarrow's errors are ValueErrors or OSErrors
            yield Record(str(path), number + 1, Drop("damaged_file", str(error)[:200]))
        before += size_of([path])
        position.done = before


def _read(path: Path, position: Position, before: int) -> Iterator[tuple[int, Any]]:
    if path.is_dir():
        yield from _read_dataset(path)
        return
    suffix = _suffix(path)
    with path.open("rb") as raw:
        stream = unpacked(raw, path.suffix)
        if suffix in (".parquet", ".arrow"):
            rows = _read_columns(stream, suffix, path.suffix in PACKED)
        elif suffix in (".csv", ".tsv"):
            rows = _read_csv(stream, "," if suffix == ".csv" else "\t")
        else:
            rows = _read_json(stream) if suffix == ".json" else _read_lines(stream)
        for item in rows:
            position.done = before + raw.tell()
            yield item


def _read_lines(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines of JSON, undecoded: parsing is the workers' job. Blank lines are no rows."""
    for number, line in enumerate(stream, 1):
        if number == 1:
            line = line.removeprefix(_BOM)
        if line.strip():
            yield number, line


def _read_json(stream: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """A .json file: an array of rows, one object (perhaps with the rows under one key), or really JSON lines."""
    buffered = stream if hasattr(stream, "peek") else io.BufferedReader(stream)  # type: ignore[type-var]
    start = buffered.peek(64).removeprefix(_BOM).lstrip()  # type: ignore[attr-defined]
    if start[:1] == b"[" and b"\n" not in start.rstrip(b"\n") and start.rstrip() == b"[]":
        return
    if start[:1] == b"[":
        yield from _read_array(buffered)
        return
    begin, rows = b"", list[bytes]()
    while len(rows) < 2 and (line := buffered.readline()):
        begin += line
        rows += [line] if line.strip() else []
    if len(rows) == 2 and any(_is_json(line) for line in rows):  # a broken line does not hide that these are lines
        yield from _read_lines(_Chained(begin, buffered))  # type: ignore[arg-type]
        return
    content = begin + buffered.read()
    try:
        whole = json.loads(content.removeprefix(_BOM))
    except ValueError:
        if not any(_is_json(line) for line in content.splitlines()):
            raise
        yield from _read_lines(io.BytesIO(content))
        return
    yield from _rows_of(whole)


def _is_json(line: bytes) -> bool:
    """Whether a line alone is an object, as those of JSON lines are."""
    try:
        return isinstance(json.loads(line.removeprefix(_BOM)), dict)
    except ValueError:
        return False


class _Chained:
    """Lines that were read already, then the rest of its stream."""

    def __init__(self, first: bytes, rest: IO[bytes]) -> None:
        self.first, self.rest = first, rest

    def __iter__(self) -> Iterator[bytes]:
        yield from self.first.splitlines(keepends=True)
        yield from self.rest


def _rows_of(whole: Any) -> Iterator[tuple[int, Any]]:
    """An object that holds the rows under one key, or is the one row."""
    lists = [v for v in whole.values() if isinstance(v, list)] if isinstance(whole, dict) else []
    wrapped = len(lists) == 1 and len(whole) == 1 and next(iter(whole)) not in ROW_KEYS
    rows = lists[0] if wrapped else [whole]
    yield from enumerate(rows, 1)


def _read_array(stream: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """The elements of one JSON array, decoded one by one from a moving window of the file."""
    text = io.TextIOWrapper(stream, encoding="utf-8-sig")
    decoder = json.JSONDecoder()
    window, number, at = text.read(1 << 20).lstrip()[1:], 0, 0
    while True:
        at = _skip(window, at)
        try:
            if window[at : at + 1] == "]":
                return
            value, end = decoder.raw_decode(window, at)
            if end == len(window):
                raise ValueError("a number may go on in the next block")
        except ValueError:
            more = text.read(max(1 << 20, len(window)))
            if not more:
                raise
            window, at = window[at:] + more, 0
            continue
        number, at = number + 1, end
        yield number, value


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at


def _read_csv(stream: IO[bytes], delimiter: str) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    lines = csv.DictReader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), delimiter=delimiter)
    for number, row in enumerate(lines, 1):
        yield number, {k: _cell(v) for k, v in row.items() if k is not None and v not in (None, "")}


def _cell(value: Any) -> Any:
    """A cell that holds a JSON list or object (messages, tools, input_ids) is decoded, any other stays text."""
    if isinstance(value, str) and value[:1] in "[{":
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _read_columns(stream: IO[bytes], suffix: str, packed: bool) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if packed:
        stream = on_disk(stream)  # these formats are read from their end
    if suffix == ".parquet":
        batches = _row_groups(pq.ParquetFile(stream, pre_buffer=False, buffer_size=1 << 20))
    else:
        start = stream.read(6)
        stream.seek(0)
        if start == b"ARROW1":
            file = pa.ipc.open_file(stream)
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
        else:
            batches = iter(pa.ipc.open_stream(stream))
    number = 0
    for batch in batches:
        for at in range(0, len(batch), 256):
            for row in batch.slice(at, 256).to_pylist():
                number += 1
                yield number, _without_nulls(row)


def _row_groups(file: Any) -> Iterator[Any]:
    """Batches of one row group after the other: asked for all at once, they would be buffered together."""
    for group in range(file.num_row_groups):
        yield from file.iter_batches(256, row_groups=[group])


def _without_nulls(value: Any) -> Any:
    """A column format gives every object the keys of all rows, null where a row had none; alone, it had none."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(v) for v in value]
    return value


def _read_dataset(folder: Path) -> Iterator[tuple[int, Any]]:
    import datasets

    loaded = datasets.load_from_disk(str(folder), keep_in_memory=False)
    splits = [loaded[name] for name in sorted(loaded)] if isinstance(loaded, datasets.DatasetDict) else [loaded]
    number = 0
    for split in splits:
        for row in split.with_format(None):
            number += 1
            yield number, _without_nulls(row)
