"""The held-out split: a pure function of content and seed, so it does not change when rows are added elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa

from recipe.data.hashing import hash64, key_of
from recipe.errors import ConfigError

_STREAM = 11


def heldout_mask(table: pa.Table, holdout: float, seed: int) -> tuple[np.ndarray, str]:
    """(bool [sequences]: which go to the held-out side; why these are fewer rows than asked for, or ""). ``holdout``:
    rows if ≥ 1, else a share of them.

    Conversations that open with the same prompt stay together, and so do equal sequences; so no held-out row is seen in
    training. Groups are taken in the order of their hash; one that would overshoot is passed over.
    """
    row, group, content = (table.column(name).to_numpy() for name in ("row", "group", "content"))
    rows_of, first = np.unique(row, return_index=True)
    wanted = int(holdout) if holdout >= 1 else max(1, round(holdout * len(rows_of)))
    if wanted >= len(rows_of):
        raise ConfigError("--holdout", holdout, f"leaves nothing to train on: {len(rows_of)} rows", "hold out fewer")
    groups, sizes = np.unique(group[first], return_counts=True)
    order = np.argsort(hash64(key_of(seed, _STREAM), groups), kind="stable")
    chosen, left = [], wanted
    for g in order.tolist():
        if left == 0:
            break
        if sizes[g] <= left:
            chosen.append(groups[g])
            left -= int(sizes[g])
    held = np.isin(group, np.array(chosen, dtype=np.uint64))
    while True:  # equal sequences pull their whole conversation along (a pair and a chat may render alike)
        grown = np.isin(content, content[held])
        grown = held | np.isin(row, row[grown])
        if (grown == held).all():
            break
        held = grown
    if held.all():
        raise ConfigError("--holdout", holdout, "leaves nothing to train on: all rows are equal", "hold out nothing")
    short = wanted - len(np.unique(row[held]))
    return held, _why_short(wanted, sizes) if short > 0 else ""


def _why_short(wanted: int, sizes: np.ndarray) -> str:
    return (
        f"{wanted} were asked for: rows with the same text before their first answer stay together, and no more of"
        f" these {len(sizes)} groups fit (the largest has {sizes.max()} rows, the smallest {sizes.min()}); ask for"
        " another number, or evaluate on prompts from another file"
    )


def write_prompts(table: pa.Table, held: np.ndarray, path: Path) -> int:
    """heldout_prompts.jsonl: one line per held-out conversation, what comes before its last answer: as it was read, and
    as ``input_ids``, the very tokens that training rows have there. Returns the rows.
    """
    numbers = table.column("row").to_numpy()
    places = held.nonzero()[0]
    of_row: dict[int, list[int]] = {}
    for place in places.tolist():
        of_row.setdefault(int(numbers[place]), []).append(place)
    with path.open("w", encoding="utf-8") as out:
        for number in sorted(of_row):
            prompt = table.column("prompt")[of_row[number][0]].as_py()
            ids = max((_before_last_answer(table, place) for place in of_row[number]), key=len)
            if prompt and ids:
                out.write(json.dumps({**json.loads(prompt), "input_ids": ids}, ensure_ascii=False) + "\n")
    return len(of_row)


def _before_last_answer(table: pa.Table, place: int) -> list[int]:
    """Token ids of a sequence up to where its last supervised run begins."""
    mask = np.asarray(table.column("loss_mask")[place].as_py(), dtype=bool)
    begins = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
    ids: list[int] = table.column("input_ids")[place].as_py()[: int(begins[-1])]
    return ids
