"""``python -m recipe prepare``: conversations → rows (input_ids, loss_mask), with an account of every input row."""

from __future__ import annotations

import argparse
import fcntl
import glob
import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recipe.config.schema import Data
from recipe.data.tokenizer import load_tokenizer, template_hash, tokenizer_hash
from recipe.errors import ConfigError
from recipe.prepare import store
from recipe.prepare.chat_mask import ChatMask
from recipe.prepare.conversation import SCHEMAS
from recipe.prepare.formats import Position, Record, find_inputs, read_records
from recipe.prepare.progress import Progress
from recipe.prepare.report import Report
from recipe.prepare.show import show_rows
from recipe.prepare.split import heldout_mask, write_prompts
from recipe.prepare.work import Job, pick, run_chunks

DEFAULT_MAX_SEQ_LEN: int = Data.model_fields["max_seq_len"].default
# An interrupted job goes on from its last finished part: so many input rows, or so much time on a slow machine.
_PART_ROWS, _PART_S = 20_000, 30.0
_FORMAT = 5  # part of the cache key: raise it when the same input would give other rows


def prepare(
    inputs: Sequence[str | Path],
    tokenizer: str | Path,
    output: str | Path,
    *,
    max_seq_len: int = DEFAULT_MAX_SEQ_LEN,
    schema: str = "auto",
    holdout: float = 0,
    max_samples: int | None = None,
    weights: Sequence[float] | None = None,
    strict: bool = False,
    seed: int = 0,
    num_proc: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> Report:
    """Tokenise ``inputs`` (files, globs, folders) into the folder ``output``; returns the report that it holds.

    ``holdout``: rows (≥ 1) or share (< 1) kept from training. An unchanged repetition returns at once with
    ``report.up_to_date``. Raises ConfigError for the user's mistakes: no usable row, ``strict`` and a dropped row, …
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # we fork; each worker uses one core
    _check_settings(max_seq_len, schema, holdout, max_samples, weights, num_proc)
    output = Path(output)
    paths = find_inputs(inputs)
    if weights and len(weights) != len(paths):
        raise ConfigError("--weights", list(weights), f"there are {len(paths)} input files", "give one weight for each")
    loaded = load_tokenizer(tokenizer)
    settings = {
        "format": _FORMAT,
        "tokenizer_hash": tokenizer_hash(loaded),
        "template_hash": template_hash(loaded),
        "max_seq_len": max_seq_len,
        "schema": schema,
        "holdout": holdout,
        "max_samples": max_samples,
        "weights": weights,
        "seed": seed,
    }
    masker = ChatMask(loaded, str(tokenizer))
    settings["stop_ids"] = sorted(masker.stops)
    key = store.cache_key(paths, settings)
    store.settle(output)
    if store.cached(output, key) and not overwrite:
        report = Report.from_json(json.loads((output / "report.json").read_text(encoding="utf-8")))
        report.up_to_date = True
        _refuse_drops(report, strict)
        return report
    begun = time.monotonic()
    job = Job(schema, max_seq_len, bool(holdout))
    with _Workshop(output, key, fresh=overwrite) as shop:
        report = _tokenise(paths, masker, job, shop, settings, strict, num_proc or _cores(), quiet)
        _require_rows(report, paths)
        report.seconds = time.monotonic() - begun
        meta = {**settings, "made_by": store.MADE_BY, "key": key, "fingerprint": key[:32], "tokenizer": str(tokenizer)}
        _build(shop, report, meta, len(loaded), holdout, seed)
        store.publish(shop.built, output)
    return report


def _check_settings(
    max_seq_len: int,
    schema: str,
    holdout: float,
    max_samples: int | None,
    weights: Sequence[float] | None,
    num_proc: int | None,
) -> None:
    if max_seq_len < 2:
        raise ConfigError("--max-seq-len", max_seq_len, "must be ≥ 2", "give the longest row in tokens, such as 8192")
    if schema not in SCHEMAS:
        raise ConfigError("--format", schema, f"must be one of {', '.join(SCHEMAS)}", "leave it out for auto")
    if not math.isfinite(holdout) or holdout < 0 or (holdout >= 1 and holdout != int(holdout)):
        raise ConfigError("--holdout", holdout, "must be a share below 1 or a whole number of rows", "for example 0.02")
    for name, value in (("--max-samples", max_samples), ("--num-proc", num_proc)):
        if value is not None and value < 1:
            raise ConfigError(name, value, "must be ≥ 1", "leave it out for all")
    if weights and not (all(math.isfinite(w) and w >= 0 for w in weights) and max(weights) > 0):
        raise ConfigError("--weights", list(weights), "must be ≥ 0 and not all 0", "for example --weights 2 1")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Workshop:
    """The hidden folder beside the output where parts collect. It outlives a killed job, and its name holds the cache
    key, so the next job with the same input goes on from it."""

    def __init__(self, output: Path, key: str, fresh: bool) -> None:
        self.folder = output.parent / f".{output.name}.partial-{key[:16]}"
        self.built, self.fresh = self.folder / "built", fresh

    def __enter__(self) -> _Workshop:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "--output", str(self.folder.parent), f"cannot be written: {error}", "use another"
            ) from error
        self.lock = (self.folder / "lock").open("w")
        try:
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock: forked workers would keep it
        except OSError as error:
            where = str(self.folder)
            raise ConfigError("--output", where, "another prepare is making this now", "wait for it") from error
        shutil.rmtree(self.built, ignore_errors=True)
        if self.fresh:
            for path in self.folder.glob("part-*"):
                path.unlink()
        self.built.mkdir()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, ConfigError):  # else (killed, interrupted, crashed): kept, to go on from
            shutil.rmtree(self.folder, ignore_errors=True)
        self.lock.close()
        if kind is None:
            self._clear_abandoned()

    def _clear_abandoned(self) -> None:
        """What killed jobs with other inputs or options left for this output; nobody would go on from it."""
        for folder in self.folder.parent.glob(f"{glob.escape(self.folder.name.rpartition('-')[0])}-*"):
            try:
                with (folder / "lock").open("r+") as lock:
                    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            except OSError:  # another job's, or not there
                continue

    def parts(self) -> list[Path]:
        """Finished parts, in order; a part is finished when its report is there."""
        done: list[Path] = []
        for number in itertools.count():
            if not (self.folder / f"part-{number:05d}.json").is_file():
                return done
            done.append(self.folder / f"part-{number:05d}.stream")
        return done


def _tokenise(
    paths: list[Path],
    masker: ChatMask,
    job: Job,
    shop: _Workshop,
    settings: dict[str, Any],
    strict: bool,
    num_proc: int,
    quiet: bool,
) -> Report:
    """Run all records through the workers into numbered parts; returns the sum of the parts' reports."""
    total, position = Report(), Position()
    for done in shop.parts():
        total.merge(Report.from_json(json.loads(done.with_suffix(".json").read_text(encoding="utf-8"))))
    chosen = _chosen(paths, settings, position)
    records = itertools.islice(enumerate(chosen), total.rows_in, None)
    results = run_chunks(records, masker, job, num_proc)
    number = len(shop.parts())
    with Progress("prepare", quiet) as bar:
        while True:
            begun, part, path = time.monotonic(), Report(), shop.folder / f"part-{number:05d}.stream"
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, store.SCHEMA) as writer:
                for batch, report in results:
                    part.merge(report)
                    _refuse_drops(part, strict)
                    if len(batch):
                        writer.write_batch(batch)
                    both = (total.rows_in + part.rows_in, total.tokens + part.tokens)
                    bar.update(position.done / position.total, f"rows={both[0]} tokens={both[1]}", both[1])
                    if part.rows_in >= _PART_ROWS or time.monotonic() - begun > _PART_S:
                        break
            if not part.rows_in:
                total.sources = {str(path): total.sources.get(str(path), {"kept": 0, "dropped": 0}) for path in paths}
                return total
            _finish_part(path, part)
            total.merge(part)
            number += 1


def _finish_part(path: Path, report: Report) -> None:
    passing = path.with_suffix(".tmp")
    store.write_json(passing, report.to_json())
    passing.rename(path.with_suffix(".json"))


def _chosen(paths: list[Path], settings: dict[str, Any], position: Position) -> Iterator[Record]:
    """All records, or the sample that --max-samples and --weights ask for (drawn over all sources before any work)."""
    if settings["max_samples"] is None and not settings["weights"]:
        yield from read_records(paths, position)
        return
    counts = [sum(1 for _ in read_records([path])) for path in paths]
    keep = pick(counts, settings["max_samples"], settings["weights"], settings["seed"])
    for path, wanted in zip(paths, keep, strict=True):
        yield from itertools.compress(read_records([path], position), wanted.tolist())


def _refuse_drops(report: Report, strict: bool) -> None:
    kinds = (
        (report.dropped, "row dropped"),
        (report.dropped_turns, "turn not supervised"),
        (report.losses, "not used"),
    )
    counts, what = next(((counts, what) for counts, what in kinds if counts), (None, ""))
    if not strict or not counts:
        return
    reason = next(iter(counts))
    example = report.examples[reason]
    raise ConfigError(
        "--strict",
        f"{example['file']}:{example['row']}",
        f"{what}: {reason} ({'; '.join(filter(None, (example['meaning'], example['detail'])))})",
        "mend the row, or leave out --strict",
    )


def _require_rows(report: Report, paths: list[Path]) -> None:
    if report.rows_out:
        return
    why = ", ".join(f"{reason} × {count}" for reason, count in report.dropped.most_common()) or "the input is empty"
    fix = "; ".join(
        f"{e['file']}:{e['row']} {reason} ({'; '.join(filter(None, (e['meaning'], e['detail'])))})"
        for reason, e in list(report.examples.items())[:3]
    )
    fix = f"mend the input; each reason's first row: {fix}" if fix else "give a file that holds conversations"
    name = str(paths[0]) if len(paths) == 1 else [str(p) for p in paths[:5]]
    raise ConfigError("--input", name, f"0 usable rows of {report.rows_in} ({why})", fix)


def _build(shop: _Workshop, report: Report, meta: dict[str, Any], vocabulary: int, holdout: float, seed: int) -> None:
    """Write splits, meta.json and report.json into ``shop.built``."""
    table = store.open_parts(shop.parts())
    content = table.column("content").to_numpy()
    report.duplicates = int(len(content) - len(np.unique(content)))
    lengths, supervised = table.column("length").to_numpy(), table.column("supervised").to_numpy()
    held = np.zeros(len(table), dtype=bool)
    if holdout:
        held, report.heldout_short = heldout_mask(table, holdout, seed)
    store.write_split(table, shop.built / "train", ~held if holdout else None)
    if held.any():
        store.write_split(table, shop.built / "heldout", held)
        report.heldout_rows = write_prompts(table, held, shop.built / "heldout_prompts.jsonl")
        report.heldout_sequences = int(held.sum())
    meta |= {
        "rows": int((~held).sum()),
        "tokens": int(lengths[~held].sum()),
        "supervised_tokens": int(supervised[~held].sum()),
        "heldout_rows": int(held.sum()),
        "longest": int(lengths.max()),
        "vocab_size": vocabulary,
        "vocab_bound": 1 + max(int(chunk.flatten().to_numpy().max()) for chunk in _chunks(table)),
        "length_quantiles": {str(q): int(np.quantile(lengths, q)) for q in (0.1, 0.5, 0.9, 0.99)},
    }
    store.write_json(shop.built / "meta.json", meta)
    store.write_json(shop.built / "report.json", report.to_json())


def _chunks(table: pa.Table) -> Iterator[Any]:
    return (chunk for chunk in table.column("input_ids").chunks if len(chunk))


# ---- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m recipe prepare``."""
    kinds = "JSONL, JSON, Parquet, Arrow, CSV (also .gz, .zst), datasets folders, globs"
    parser.add_argument("--input", nargs="+", metavar="FILE", help=kinds)
    parser.add_argument("--tokenizer", metavar="PATH", help="the target's folder, or a hub id in the local cache")
    parser.add_argument("--output", metavar="DIR", required=True, help="folder to make; data.path of the run")
    parser.add_argument("--max-seq-len", type=int, default=DEFAULT_MAX_SEQ_LEN, help="tokens of a row (%(default)s)")
    parser.add_argument("--format", default="auto", metavar="|".join(SCHEMAS), help="what the rows hold (%(default)s)")
    parser.add_argument("--holdout", type=float, default=0, metavar="N|SHARE", help="rows kept from training")
    parser.add_argument("--max-samples", type=int, metavar="N", help="use this many rows, drawn from all inputs")
    parser.add_argument("--weights", type=float, nargs="+", metavar="W", help="one mixing weight for each input file")
    parser.add_argument("--strict", action="store_true", help="whatever of a row cannot be used is an error")
    parser.add_argument("--seed", type=int, default=0, help="of the sample and of the split (%(default)s)")
    parser.add_argument("--num-proc", type=int, metavar="N", help="worker processes (all cores)")
    parser.add_argument("--overwrite", action="store_true", help="make the rows again even if nothing changed")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N rows, supervised tokens coloured")


def run(args: argparse.Namespace) -> int:
    """Exit code 0; ConfigError (2) for a user's mistake. With --show and no --input only looks at DIR."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.show < 0:
        raise ConfigError("--show", args.show, "must be ≥ 0", "give the number of rows to print, for example 5")
    if not args.output.strip() or "\0" in args.output:
        raise ConfigError("--output", args.output, "is no name of a folder", "give the folder to make")
    if not args.input:
        if not args.show:
            raise ConfigError("--input", None, "is missing", "name the files with conversations, or use --show N")
        show_rows(args.output, args.tokenizer, args.show)
        return 0
    if not args.tokenizer:
        raise ConfigError("--tokenizer", None, "is missing", "give the target's folder")
    report = prepare(
        args.input,
        args.tokenizer,
        args.output,
        max_seq_len=args.max_seq_len,
        schema=args.format,
        holdout=args.holdout,
        max_samples=args.max_samples,
        weights=args.weights,
        strict=args.strict,
        seed=args.seed,
        num_proc=args.num_proc,
        overwrite=args.overwrite,
    )
    print(report.text())
    speed = (
        f" ({report.tokens / report.seconds / 1000:.0f}k tokens/s)" if report.seconds and not report.up_to_date else ""
    )
    print(f"{args.output} is up to date" if report.up_to_date else f"wrote {args.output}{speed}")
    if args.show:
        show_rows(args.output, args.tokenizer, args.show)
    return 0
