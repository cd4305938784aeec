"""What worker processes do: a chunk of records in, an Arrow batch and a report of every record out."""

from __future__ import annotations

import collections
import concurrent.futures
import hashlib
import itertools
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from recipe.prepare.chat_mask import ChatMask, Masked
from recipe.prepare.conversation import Chat, Pair, Sample, Text, Tokens, answers_in, normalise, parse
from recipe.prepare.formats import Record
from recipe.prepare.messages import is_trained, text_of
from recipe.prepare.report import Drop, Report
from recipe.prepare.store import SCHEMA

CHUNK = 128  # records that travel to a worker together


@dataclass(frozen=True)
class Job:
    """What every worker needs to know."""

    schema: str
    max_seq_len: int
    with_prompts: bool  # keep the messages of each row for heldout_prompts.jsonl


Chunk = list[tuple[int, Record]]  # (number of the row over all inputs, record)
Result = tuple[pa.RecordBatch, Report]


def work(chunk: Chunk, masker: ChatMask, job: Job) -> Result:
    """Mask all records of a chunk. One bad record is one line of the report; it never touches another record."""
    report = Report()
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for number, record in chunk:
        report.rows_in += 1
        row, unused = None, set[str]()
        try:
            row = parse(record.content)
            sample = normalise(row, job.schema, unused)
            masked = masker.mask(sample, job.max_seq_len)
        except Drop as drop:
            report.drop(record.source, record.number, drop, _excerpt(record.content), answers_in(row))
            continue
        except Exception as error:  # a fault of ours must cost one row, not the job; it is counted as ours
            ours = Drop("internal_error", f"{type(error).__name__}: {error}"[:200])
            report.drop(record.source, record.number, ours, _excerpt(record.content))
            continue
        report.keep(record.source)
        for turn in masked.turns:
            report.drop_turn(record.source, record.number, turn, _excerpt(record.content))
        for loss in sorted(masked.losses | {f"unused_key: {name[:60]}" for name in unused}):
            report.lose(record.source, record.number, loss, _excerpt(record.content))
        _count(masked, report)
        _append(columns, number, _name(row, record), sample, masked, job.with_prompts)
    arrays = [_column(columns[f.name], f.type) for f in SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA), report


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    flat = np.concatenate(values) if values else np.zeros(0)
    return pa.ListArray.from_arrays(offsets, pa.array(flat.astype(kind.value_type.to_pandas_dtype())))


def _name(row: Any, record: Record) -> str:
    own = row.get("id") if isinstance(row, dict) else None
    if isinstance(own, str | int) and not isinstance(own, bool):
        return str(own).encode("utf-8", "backslashreplace").decode()
    return f"{os.path.basename(record.source)}:{record.number}"


def _count(masked: Masked, report: Report) -> None:
    report.notes.update(masked.notes)
    for sequence in masked.sequences:
        report.sequences += 1
        report.tokens += len(sequence.input_ids)
        report.supervised_tokens += int(sequence.loss_mask.sum())


def _append(
    columns: dict[str, list[Any]], number: int, name: str, sample: Sample, masked: Masked, with_prompts: bool
) -> None:
    group, prompt = _hash(_opening(sample)), ""
    if with_prompts:
        prompt = _prompt_json(name, sample)
    for sequence in masked.sequences:
        ids, mask = sequence.input_ids, sequence.loss_mask.astype(np.uint8)
        content = _hash(ids.tobytes() + mask.tobytes())
        values = (ids, mask, len(ids), int(mask.sum()), name, number, group, content, prompt)
        for column, value in zip(SCHEMA.names, values, strict=True):
            columns[column].append(value)


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _opening(sample: Sample) -> bytes:
    """What decides on which side of the split a sample lies: all that comes before the first answer."""
    if isinstance(sample, Chat):
        first = next(i for i, m in enumerate(sample.messages) if m["role"] == "assistant")
        said = [[m["role"], text_of(m).strip()] for m in sample.messages[:first]]
        return json.dumps(said).encode()
    if isinstance(sample, Pair):
        return sample.prompt.encode()
    if isinstance(sample, Text):
        return sample.text.encode()
    first = sample.loss_mask.index(1) if 1 in sample.loss_mask else len(sample.loss_mask)
    return str(sample.input_ids[:first]).encode()


def _prompt_json(name: str, sample: Sample) -> str:
    if isinstance(sample, Pair):
        return json.dumps({"id": name, "prompt": sample.prompt})
    if isinstance(sample, Tokens):
        return json.dumps({"id": name})
    if isinstance(sample, Text):
        return ""
    last = max(i for i, m in enumerate(sample.messages) if is_trained(m))
    before = [{k: v for k, v in m.items() if k != "train"} for m in sample.messages[:last]]
    said: dict[str, Any] = {"id": name, "messages": before}
    if sample.tools:
        said["tools"] = sample.tools
    return json.dumps(said)


def _excerpt(content: Any) -> str:
    text = content.decode("utf-8", "replace") if isinstance(content, bytes) else str(content)
    return text[:300].encode("utf-8", "backslashreplace").decode()


# ---- processes

_state: tuple[ChatMask, Job] | None = None


def _leave_with_parent(parent: int) -> None:
    """Workers of a killed job would wait for work for ever: they hold both ends of their own queue."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work_forked(chunk: Chunk) -> Result:
    assert _state is not None
    return work(chunk, *_state)


def run_chunks(records: Iterable[tuple[int, Record]], masker: ChatMask, job: Job, num_proc: int) -> Iterator[Result]:
    """Results in the order of the records. Workers start only when there is work for them; memory stays bounded."""
    chunks = _chunked(iter(records))
    head = list(itertools.islice(chunks, 2))
    if num_proc == 1 or len(head) < 2:
        for chunk in itertools.chain(head, chunks):
            yield work(chunk, masker, job)
        return
    yield from _run_pool(itertools.chain(head, chunks), masker, job, num_proc)


def _chunked(records: Iterator[tuple[int, Record]]) -> Iterator[Chunk]:
    while chunk := list(itertools.islice(records, CHUNK)):
        yield chunk


def _run_pool(chunks: Iterator[Chunk], masker: ChatMask, job: Job, num_proc: int) -> Iterator[Result]:
    global _state
    _state = (masker, job)  # inherited through fork: a tokenizer of 250 K entries is not sent to anybody
    flying: collections.deque[concurrent.futures.Future[Result]] = collections.deque()
    try:
        # An executor, not a Pool: a worker that dies (out of memory) is an error here; a Pool would wait for ever.
        fork = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(num_proc, fork, _leave_with_parent, (os.getpid(),)) as pool:
            for chunk in chunks:
                flying.append(pool.submit(_work_forked, chunk))
                if len(flying) >= 4 * num_proc:  # bounds memory: no more of the input is read until this is done
                    yield flying.popleft().result()
            while flying:
                yield flying.popleft().result()
    finally:
        for future in flying:
            future.cancel()
        _state = None


def pick(
    counts: Sequence[int], max_samples: int | None, weights: Sequence[float] | None, seed: int
) -> list[np.ndarray]:
    """Which records of each source are used, as bool arrays.

    With ``max_samples`` every source is sampled: a weighted draw without replacement (smallest −ln(u)/w). With weights
    alone the heaviest source is used whole and the others in proportion.
    """
    from recipe.data.hashing import hash64, key_of

    draws = []
    for source, count in enumerate(counts):
        hashed = hash64(key_of(seed, 21, source), np.arange(count, dtype=np.uint64)) >> np.uint64(11)
        uniform = (hashed.astype(np.float64) + 0.5) / float(1 << 53)
        weight = (weights[source] / max(weights)) if weights else 1.0
        draws.append(-np.log(uniform) / weight if weight > 0 else np.full(count, np.inf))
    if max_samples is None:
        keep = [np.exp(-d) if not weights else d for d in draws]
        if not weights:
            return [np.ones(len(d), dtype=bool) for d in keep]
        shares = [w / max(weights) for w in weights]
        return [np.exp(-d * s) < s if s > 0 else np.zeros(len(d), bool) for d, s in zip(draws, shares, strict=True)]
    flat = np.concatenate(draws)
    taken = np.zeros(len(flat), dtype=bool)
    taken[np.argsort(flat, kind="stable")[:max_samples]] = True
    taken &= np.isfinite(flat)
    return np.split(taken, np.cumsum(counts)[:-1])
