"""Prepared rows on disk, memory-mapped: token ids and loss masks by row number."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recipe.errors import ConfigError


@dataclass(frozen=True)
class Occurrences:
    """Of one token id: in ``rows`` of the ``read`` rows, ``tokens`` times; ``supervised``: where it is learnt."""

    read: int
    rows: int
    tokens: int
    supervised_rows: int
    supervised_tokens: int


class Rows:
    """One split of a folder made by `prepare`.

    ``lengths`` and ``supervised`` are int32 [n]: tokens and supervised tokens of each row. ``rows[i]`` reads one row
    from the memory map. ``fingerprint`` names the content: equal fingerprints mean equal rows in equal order.
    """

    def __init__(self, table: pa.Table, meta: dict[str, Any], folder: Path, split: str) -> None:
        self.folder, self.split, self.meta = folder, split, meta
        self._ids = _Lists(table.column("input_ids"))
        self._mask = _Lists(table.column("loss_mask"))
        if not np.array_equal(self._ids.lengths(), self._mask.lengths()):
            raise ValueError("a row's input_ids and loss_mask have different lengths")
        self.lengths = _counts(table, "length", self._ids.lengths)
        self.supervised = _counts(table, "supervised", self._mask.sums)
        self.fingerprint = str(meta.get("fingerprint") or self._digest()) + ":" + split

    @classmethod
    def open(cls, path: str | Path, split: str = "train") -> Rows:
        """Open ``path``/``split``. Raises ConfigError when the folder is missing, damaged or has no row."""
        folder = Path(path)
        fix = "make it with `python -m recipe prepare --input FILES --tokenizer TARGET --output " + str(path) + "`"
        if not (folder / "meta.json").is_file():
            raise ConfigError("dflash.data.path", str(path), "is not a folder made by `prepare`", fix)
        if not (folder / split).is_dir():
            raise ConfigError("dflash.data.path", str(path), f"has no split {split!r}", fix)
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            if not isinstance(meta, dict):
                raise ValueError(f"meta.json holds {type(meta).__name__}, not an object")
            table = _table(folder / split)
            _check_columns(table)
            rows = cls(table, meta, folder, split)
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            raise ConfigError("dflash.data.path", str(path), f"{split} is damaged: {error}", fix) from error
        if len(rows) == 0:
            raise ConfigError("dflash.data.path", str(path), f"{split} has no row", fix)
        return rows

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids int64 [T], loss_mask bool [T]) of one row; fresh arrays that the caller may change."""
        return self._ids[index].astype(np.int64), self._mask[index].astype(bool)

    def check_tokenizer(self, path: str | Path) -> None:
        """Refuse rows that were made with another tokenizer or chat template than the one in ``path``."""
        from recipe.data.tokenizer import load_tokenizer, template_hash, tokenizer_hash

        tokenizer = load_tokenizer(path, field="dflash.target.path")
        found = {"tokenizer_hash": tokenizer_hash(tokenizer), "template_hash": template_hash(tokenizer)}
        for name, value in found.items():
            made = self.meta.get(name)
            if made and made != value:
                raise ConfigError(
                    "dflash.data.path",
                    str(self.folder),
                    f"was prepared with another {name.split('_')[0]} ({made[:12]}, made from "
                    f"{self.meta.get('tokenizer')}) than the target's ({value[:12]}, {path})",
                    f"prepare the data again with --tokenizer {path}",
                )

    def vocab_bound(self) -> int:
        """One more than the largest token id of the folder; read from all rows where meta.json does not tell."""
        told = self.meta.get("vocab_bound")
        if type(told) is int:
            return told
        return 1 + max(int(values.max()) for values in self._ids.values if len(values))

    def occurrences(self, token: int, most: int = 20_000) -> Occurrences:
        """Where ``token`` stands in the rows, or in ``most`` of them, drawn at random: a fraction of a second."""
        places = range(len(self))
        if len(self) > most:  # every n-th could fall in step with how the data was mixed
            places = np.random.default_rng(0).choice(len(self), most, replace=False).tolist()
        hits = [(index, hit) for index in places if (hit := self._ids[index] == token).any()]
        supervised = [int((self._mask[index].astype(bool) & hit).sum()) for index, hit in hits]
        return Occurrences(
            len(places), len(hits), sum(int(hit.sum()) for _, hit in hits), sum(map(bool, supervised)), sum(supervised)
        )

    def _digest(self) -> str:
        """A name for folders whose meta.json has none: of the shapes and of a sample of the content."""
        digest = hashlib.sha256(self.lengths.tobytes() + self.supervised.tobytes())
        for index in range(0, len(self), max(1, len(self) // 64)):
            digest.update(self._ids[index].tobytes())
        return digest.hexdigest()[:32]


class _Lists:
    """Row access to a chunked list column without copying it."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self.chunks = [chunk for chunk in column.chunks if len(chunk)]
        self.first = np.cumsum([0, *(len(chunk) for chunk in self.chunks)])
        self.offsets = [chunk.offsets.to_numpy(zero_copy_only=False) for chunk in self.chunks]
        self.values = [_flat(chunk.values) for chunk in self.chunks]

    def __len__(self) -> int:
        return int(self.first[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        chunk = int(np.searchsorted(self.first, index, side="right")) - 1
        offsets, at = self.offsets[chunk], int(index - self.first[chunk])
        return self.values[chunk][offsets[at] : offsets[at + 1]]

    def lengths(self) -> np.ndarray:
        return np.concatenate([np.diff(offsets) for offsets in self.offsets] or [np.zeros(0)]).astype(np.int32)

    def sums(self) -> np.ndarray:
        sums = []
        for offsets, values in zip(self.offsets, self.values, strict=True):
            running = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
            sums.append(running[offsets[1:]] - running[offsets[:-1]])
        return np.concatenate(sums or [np.zeros(0)]).astype(np.int32)


def _check_columns(table: pa.Table) -> None:
    for name in ("input_ids", "loss_mask"):
        kind = table.column(name).type  # KeyError without such a column
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            raise ValueError(f"column {name!r} holds {kind}, not lists of integers")
        if not (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)):
            raise ValueError(f"column {name!r} holds {kind}, not lists of integers")
        if table.column(name).null_count:
            raise ValueError(f"column {name!r} has empty cells")


def _flat(values: pa.Array) -> np.ndarray:
    if pa.types.is_boolean(values.type):
        values = pc.cast(values, pa.uint8())  # Arrow packs booleans into bits
    return values.to_numpy(zero_copy_only=False)


def _counts(table: pa.Table, name: str, otherwise: Any) -> np.ndarray:
    if name in table.column_names:
        return table.column(name).to_numpy().astype(np.int32)
    return otherwise()


def _table(folder: Path) -> pa.Table:
    """The Arrow table of a `datasets` folder, memory-mapped, in row order."""
    import datasets

    try:
        dataset = datasets.load_from_disk(str(folder), keep_in_memory=False)
    except Exception as error:  # datasets raises a zoo of types for damaged folders
        raise OSError(str(error)) from error
    if not isinstance(dataset, datasets.Dataset):
        raise ValueError("is a DatasetDict, not one split")
    if dataset._indices is not None:
        dataset = dataset.flatten_indices()
    return dataset.data.table
