"""The ring on this machine's CPU: entries per second, time from publish to lease, and copy rate of two processes.

    python benchmarks/bench_ring.py [--hidden 5120] [--streams 6] [--entries 2000] [--json FILE]

One producer process copies taps from private memory into pages, one consumer copies them out; the same bytes are then
copied by plain `Tensor.copy_` between two private buffers, which is the ceiling. The hand-off alone (no bytes) follows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipe.ring import Ring, RingSpec, ring_path


def in_child(work: Callable[[], None]) -> int:
    """Forks; the child exits with 0 when ``work`` returns."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return pid


def transfer(spec: RingSpec, entries: int, tokens: int, copy: bool) -> dict[str, float]:
    """Entries of ``tokens`` tokens from one process to another, eight to a batch; rates over the whole run."""
    path = ring_path(f"bench-{os.getpid()}", int(copy))
    ring = Ring.create(path, spec, "bench")
    ring.populate()

    def produce() -> None:
        handle = Ring.attach(path, "bench")
        source = torch.randn(spec.streams, tokens, spec.hidden).to(spec.torch_dtype)
        for batch in range(entries // 8):
            for write in handle.reserve(batch, [(batch * 8 + i, tokens, 0) for i in range(8)], timeout=60):
                if copy:
                    for begin, end, view in handle.views(write):
                        view.copy_(source[:, begin:end])
                handle.commit(write)
        handle.finish(0)
        handle.close()

    begun = time.perf_counter()
    pid = in_child(produce)
    sink = torch.empty(spec.streams, tokens, spec.hidden, dtype=spec.torch_dtype)
    for entry_id in range(entries // 8 * 8):
        lease = ring.lease(entry_id, timeout=60)
        if copy:
            for begin, end, view in ring.views(lease):
                sink[:, begin:end].copy_(view)
        ring.release(lease)
    seconds = time.perf_counter() - begun
    stats = ring.stats()
    ring.close()
    if os.waitpid(pid, 0)[1]:
        raise SystemExit("the producer failed")
    return {
        "entries_per_s": entries / seconds,
        "gb_per_s": entries * sink.nbytes / seconds / 1e9 if copy else 0.0,
        "producer_wait_s": stats.producer_wait_s,
        "consumer_wait_s": stats.consumer_wait_s,
    }


def plain_copy(spec: RingSpec, tokens: int) -> float:
    """GB/s of Tensor.copy_ from one private buffer to another, of the size of an entry."""
    source = torch.randn(spec.streams, tokens, spec.hidden).to(spec.torch_dtype)
    target = torch.empty_like(source)
    target.copy_(source)
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < 1:
        target.copy_(source)
        count += 1
    return count * source.nbytes / (time.perf_counter() - begun) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--streams", type=int, default=6, help="taps + last hidden state")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of an entry")
    parser.add_argument("--page-tokens", type=int, default=32)
    parser.add_argument("--entries", type=int, default=400)
    parser.add_argument("--json", type=Path, default=None, help="also write the numbers here")
    given = parser.parse_args()
    torch.set_num_threads(1)
    pages = 16 * -(-given.tokens // given.page_tokens)
    spec = RingSpec(given.streams, given.hidden, "bfloat16", given.page_tokens, pages, pages)
    small = RingSpec(1, 8, "bfloat16", given.page_tokens, 4000, 4000)
    numbers = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "load": os.getloadavg()[0],
        "page_bytes": spec.page_bytes,
        "plain_copy_gb_per_s": plain_copy(spec, given.tokens),
        "through_the_ring": transfer(spec, given.entries, given.tokens, copy=True),
        "hand_off_only": transfer(small, 20000, given.page_tokens, copy=False),
    }
    print(json.dumps(numbers, indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps(numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()
