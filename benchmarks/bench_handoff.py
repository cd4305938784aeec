"""Stress of the hand-off from a GPU into the ring: every byte that a consumer reads is compared with what was captured.

    python benchmarks/bench_handoff.py [--device cuda] [--entries 4000] [--variant safe …] [--json FILE]

The product's `Handoff` and `Ring` run as in a target rank: taps are made on the compute stream behind a queue of matrix
products, submitted, dropped, and the blocks that the allocator gets back are overwritten with NaN at once, again and
again, at the same sizes. Consumers in processes of their own copy the pages back to the GPU and compare bit patterns.
Contents are a pure function of (entry, stream, token, feature), so a stale, early or torn read is always seen. The
``unsafe-…`` variants leave out one rule each and must fail, or the check proves nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipe.ring import Ring, RingSpec, ring_path
from recipe.target.handoff import IN_FLIGHT, Handoff, _Job

RUN = "handoff-stress"
PARTS = 2  # ranks of a tensor-parallel group: each copies its share of the streams
CONSUMERS = 2
WINDOW = 8  # consumers draw their entries in random order within this many
WAIT_S = 60.0


# -- what is sent: pure functions, known to both sides ---------------------------------------------------------------


def plan(seed: int, entries: int, most_tokens: int) -> list[list[tuple[int, int]]]:
    """Batches of (entry id, tokens): ragged sizes, one to eight to a batch."""
    draw, batches, entry = random.Random(seed), [], 0
    while entry < entries:
        count = min(draw.randint(1, 8), entries - entry)
        longest = draw.choice([17, 64, 65, 300, most_tokens])
        batches.append([(entry + i, draw.randint(1, longest)) for i in range(count)])
        entry += count
    return batches


def order(batches: list[list[tuple[int, int]]], consumer: int) -> Iterator[tuple[int, int]]:
    """What one consumer reads, and when: its share of the entries, shuffled within windows."""
    mine = [pair for batch in batches for pair in batch if pair[0] % CONSUMERS == consumer]
    draw = random.Random(consumer)
    for start in range(0, len(mine), WINDOW):
        window = mine[start : start + WINDOW]
        draw.shuffle(window)
        yield from window


def content(entries: torch.Tensor, stream: int, tokens: int, hidden: int) -> torch.Tensor:
    """int16 [n, tokens, hidden]: the bit patterns of an entry's tap; NaN and infinity are among them."""
    place = torch.arange(tokens * hidden, dtype=torch.int32, device=entries.device)
    seed = entries.to(torch.int32) * 747796405 + (stream + 1) * 277803737
    mixed = place * 1540483477 + seed[:, None]
    mixed ^= mixed >> 15
    mixed *= 668265263
    mixed ^= mixed >> 13
    return mixed.to(torch.int16).view(len(entries), tokens, hidden)


# -- the variants ----------------------------------------------------------------------------------------------------


class PackedElsewhere(Handoff):
    """Unsafe: packs on the copy stream without waiting for the compute stream's event."""

    def _copy(self, job: _Job) -> None:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            self._copy_pages(_Job([tap.clone() for tap in job.taps], job.writes, None))
            done = torch.cuda.Event()
            done.record()
        done.synchronize()


class DroppedEarly(Handoff):
    """Unsafe: lets go of the taps when the copies are queued, not when they are done."""

    def _copy(self, job: _Job) -> None:
        assert self._stream is not None and job.ready is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(job.ready)
            self._copy_pages(job)
            done = torch.cuda.Event()
            done.record()
        job.taps.clear()
        done.synchronize()


class CommittedEarly(Handoff):
    """Unsafe: publishes the entries when the copies are queued, not when they are done."""

    def _copy(self, job: _Job) -> None:
        assert self._stream is not None and job.ready is not None
        kept = self.__dict__.setdefault("kept", [])  # the taps live: this variant has one fault only
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(job.ready)
            self._copy_pages(job)
            done = torch.cuda.Event()
            done.record()
        kept.append((list(job.taps), done))
        while kept and kept[0][1].query():
            kept.pop(0)


VARIANTS: dict[str, type[Handoff]] = {
    "safe": Handoff,
    "unsafe-packed-on-second-stream": PackedElsewhere,
    "unsafe-taps-dropped-before-copied": DroppedEarly,
    "unsafe-published-before-copied": CommittedEarly,
}


# -- the two sides ---------------------------------------------------------------------------------------------------


class Source:
    """Makes taps as a target does: on the current stream, late, into memory that was poisoned before."""

    def __init__(self, spec: RingSpec, device: torch.device, seed: int) -> None:
        self.spec, self.device, self.draw = spec, device, random.Random(seed)
        size = 4096 if device.type == "cuda" else 64
        self.burn = torch.randn(size, size, device=device, dtype=torch.bfloat16)

    def taps(self, batch: list[tuple[int, int]]) -> list[torch.Tensor]:
        spec, ids = self.spec, torch.tensor([entry for entry, _ in batch], device=self.device)
        shape = (len(batch), max(tokens for _, tokens in batch), spec.hidden)
        taps = [self.poisoned(shape) for _ in range(spec.streams)]
        for _ in range(self.draw.randint(0, 8)):
            self.burn @ self.burn  # the real taps come late: whoever does not wait reads the poison
        for stream, tap in enumerate(taps):
            tap.view(torch.int16).copy_(content(ids, stream, shape[1], spec.hidden))
        return taps

    def poisoned(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=self.spec.torch_dtype, device=self.device)

    def storm(self, batch: list[tuple[int, int]]) -> None:
        """Allocator pressure: blocks of the sizes just used, and of others, poisoned and given back."""
        longest = max(tokens for _, tokens in batch)
        shape = (len(batch), longest, self.spec.hidden)
        for _ in range(self.draw.randint(1, 3)):
            held = [self.poisoned(shape) for _ in range(self.spec.streams)]
            other = (1, self.draw.randint(1, 2 * longest), self.spec.hidden)
            held.append(self.poisoned(other))
            self.draw.shuffle(held)
            del held


def produce(ring: Ring, kind: type[Handoff], batches: list[list[tuple[int, int]]], device: torch.device) -> int:
    """The target's side. Returns the most bytes of device memory that the loop took, over what one batch takes."""
    errors: list[BaseException] = []
    source = Source(ring.spec, device, 1)
    handoffs = [kind(ring, device, range(part, ring.spec.streams, PARTS), errors.append) for part in range(PARTS)]
    for sequence, batch in enumerate(batches):
        entries = [(entry, tokens, 0) for entry, tokens in batch]
        writes = ring.reserve(sequence, entries, PARTS, WAIT_S)
        joined = [writes, *(ring.join(sequence, [e for e, _ in batch], WAIT_S) for _ in range(PARTS - 1))]
        taps = source.taps(batch)
        for handoff, own in zip(handoffs, joined, strict=True):
            handoff.submit(list(taps), list(enumerate(own)))
        del taps
        if errors:
            raise errors[0]
        source.storm(batch)
    for handoff in handoffs:
        handoff.close()
    if errors:
        raise errors[0]
    ring.finish(0)
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


@dataclass
class Found:
    """What a consumer saw. ``wrong``: entries with at least one wrong element; ``poison``: elements that were NaN's."""

    entries: int = 0
    elements: int = 0
    wrong: int = 0
    poison: int = 0
    first: str = ""

    def add(self, other: Found) -> None:
        self.entries, self.elements = self.entries + other.entries, self.elements + other.elements
        self.wrong, self.poison = self.wrong + other.wrong, self.poison + other.poison
        self.first = self.first or other.first


def consume(ring: Ring, batches: list[list[tuple[int, int]]], consumer: int, device: torch.device) -> Found:
    """The drafter's side: lease, copy back to the device on a stream of its own, release, compare."""
    found, spec = Found(), ring.spec
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    for entry, tokens in order(batches, consumer):
        lease = ring.lease(entry, timeout=WAIT_S)
        rows = torch.full((spec.streams, tokens, spec.hidden), float("nan"), dtype=spec.torch_dtype, device=device)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for begin, end, view in ring.views(lease):
                for index in range(spec.streams):
                    rows[index, begin:end].copy_(view[index], non_blocking=True)
        if stream is not None:
            stream.synchronize()
        ring.release(lease)
        compare(found, entry, rows.view(torch.int16))
    return found


def compare(found: Found, entry: int, rows: torch.Tensor) -> None:
    """rows: int16 [streams, tokens, hidden]."""
    ids = torch.tensor([entry], device=rows.device)
    wanted = torch.cat([content(ids, stream, *rows.shape[1:]) for stream in range(len(rows))])
    differs = rows != wanted
    found.entries, found.elements = found.entries + 1, found.elements + rows.numel()
    if differs.any():
        at = differs.nonzero()[0].tolist()
        found.wrong += 1
        found.poison += int((differs & (rows == 0x7FC0)).sum())
        found.first = (
            found.first or f"entry {entry}: {int(differs.sum())} wrong, first at (stream, token, feature) {at}"
        )


# -- putting them together -------------------------------------------------------------------------------------------


@dataclass
class Setting:
    """Sizes of one stress run; the same object on both sides."""

    entries: int
    most_tokens: int
    device: str
    spec: RingSpec
    seed: int = 7


def consumer_process(pipe: Any, consumer: int) -> None:
    """Serves one run after another, so that CUDA starts once. Entry point of a spawned process."""
    try:
        while (task := pipe.recv()) is not None:
            setting, path = task
            device = torch.device(setting.device)
            ring = Ring.attach(path, RUN, WAIT_S)
            if device.type == "cuda":
                torch.cuda.set_device(device)
                ring.cuda_register()
            pipe.send("ready")
            batches = plan(setting.seed, setting.entries, setting.most_tokens)
            pipe.send(asdict(consume(ring, batches, consumer, device)))
            ring.close()
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise


class Consumers:
    """Processes, or threads of this one (for tools that watch a single process)."""

    def __init__(self, threads: bool) -> None:
        self.pipes, self.workers = [], []
        context = get_context("spawn")
        for consumer in range(CONSUMERS):
            ours, theirs = context.Pipe()
            make: Callable[..., Any] = threading.Thread if threads else context.Process
            worker = make(target=consumer_process, args=(theirs, consumer), daemon=True)
            worker.start()
            self.pipes.append(ours)
            self.workers.append(worker)

    def everybody(self) -> list[Any]:
        answers = [pipe.recv() for pipe in self.pipes]
        for answer in answers:
            if isinstance(answer, str) and answer != "ready":
                raise RuntimeError(f"a consumer failed: {answer}")
        return answers

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for worker in self.workers:
            worker.join(30)


def stress(variant: str, setting: Setting, consumers: Consumers) -> dict[str, Any]:
    """One variant over all entries; what was found, how fast, and the peak of device memory in batches."""
    device, spec = torch.device(setting.device), setting.spec
    path = ring_path(f"{RUN}-{variant}-{os.getpid()}", 0)
    ring = Ring.create(path, spec, RUN)
    ring.populate()
    if device.type == "cuda":
        ring.cuda_register()
        torch.cuda.reset_peak_memory_stats(device)
    for pipe in consumers.pipes:
        pipe.send((setting, path))
    consumers.everybody()
    ring.unlink()
    batches = plan(setting.seed, setting.entries, setting.most_tokens)
    begun = time.perf_counter()
    peak = produce(ring, VARIANTS[variant], batches, device)
    found = Found()
    for answer in consumers.everybody():
        found.add(Found(**answer))
    seconds = time.perf_counter() - begun
    free = ring.stats().free_pages
    ring.close()
    token_bytes = spec.row_bytes * spec.streams
    largest = max(len(batch) * max(tokens for _, tokens in batch) for batch in batches) * token_bytes
    return {
        "variant": variant,
        "batches": len(batches),
        **asdict(found),
        "gb": found.elements * spec.torch_dtype.itemsize / 1e9,
        "seconds": seconds,
        "peak_batches": peak / largest,
        "pages_back": free == spec.n_pages,
    }


def default_setting(device: str, entries: int, small: bool = False) -> Setting:
    """Real widths on a GPU; a shape of the same raggedness for a CPU or a slow tool."""
    device = "cuda:0" if device == "cuda" else device
    if device != "cpu" and not small:
        return Setting(entries, 1024, device, RingSpec(6, 5120, "bfloat16", 64, 640, 640))
    return Setting(entries, 256, device, RingSpec(3, 64, "bfloat16", 16, 512, 512))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--entries", type=int, default=4000)
    parser.add_argument("--unsafe-entries", type=int, default=400)
    parser.add_argument("--variant", action="append", choices=list(VARIANTS))
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--threads", action="store_true", help="consumers in this process, for compute-sanitizer")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    variants = args.variant or (list(VARIANTS) if args.device == "cuda" else ["safe"])
    consumers, results = Consumers(args.threads), []
    for variant in variants:
        count = args.entries if variant == "safe" else args.unsafe_entries
        results.append(stress(variant, default_setting(args.device, count, args.small), consumers))
        r = results[-1]
        print(
            f"{variant}: {r['entries']} entries in {r['batches']} batches, {r['gb']:.1f} GB in {r['seconds']:.1f} s, "
            f"wrong entries {r['wrong']} ({r['poison']} poisoned elements), peak {r['peak_batches']:.2f} batches "
            f"(cap {IN_FLIGHT} in flight), pages back {r['pages_back']} {r['first']}",
            flush=True,
        )
    consumers.close()
    if args.json:
        name = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
        args.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "results": results}, indent=1))
    # Wrong only if a consumer is faster than the copy, which an H200 never showed: reported, not asked for.
    judged = [r for r in results if r["variant"] != "unsafe-published-before-copied"]
    bad = [r["variant"] for r in judged if (r["wrong"] > 0) != r["variant"].startswith("unsafe")]
    sys.exit(f"unexpected: {bad}" if bad else 0)


if __name__ == "__main__":
    main()
