"""What a new shape costs attention: torch's choice of kernel (cuDNN on Hopper) against the choice without cuDNN.

    python benchmarks/bench_attention_plans.py [--json FILE]          under a minute on an H200

cuDNN builds an execution plan for every shape that a process has not seen. Each case is a stream of calls whose length
grows by one (decoding, masked) or changes at random (target batches of training, causal without a mask), timed call by
call with a synchronize: the first pass over the stream sees every shape for the first time, the second knows them all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

# name: (batch, query heads, key/value heads, head size, queries (None: as many as keys), key lengths)
CASES: dict[str, tuple[int, int, int, int, int | None, Sequence[int]]] = {
    "SmolLM2 decoding, batch 8, 16 tokens a block": (8, 9, 3, 64, 16, range(200, 260)),
    "SmolLM2 decoding, batch 96, plain": (96, 9, 3, 64, 1, range(200, 260)),
    "SmolLM2 training passes": (64, 9, 3, 64, None, [256 + 7 * (11 * i % 30) for i in range(30)]),
    "Qwen3.6-27B training passes": (6, 24, 4, 256, None, [2048 + 64 * (11 * i % 12) for i in range(12)]),
}


def stream(case: tuple[int, int, int, int, int | None, Sequence[int]], device: torch.device) -> list[float]:
    """Milliseconds of each call in bf16. Decoding has a boolean mask: causal, and some padding hidden on the right."""
    batch, heads, shared, size, queries, lengths = case
    times = []
    for length in lengths:
        rows = queries or length
        query = torch.randn(batch, heads, rows, size, dtype=torch.bfloat16, device=device)
        key, value = (
            torch.randn(batch, shared, length, size, dtype=torch.bfloat16, device=device).repeat_interleave(
                heads // shared, 1
            )
            for _ in range(2)
        )
        mask = None
        if queries is not None:
            mask = torch.ones(rows, length, dtype=torch.bool, device=device).tril(length - rows).repeat(batch, 1, 1, 1)
            mask[: batch // 2, ..., length - length // 8 :] = False
        torch.cuda.synchronize()
        began = time.perf_counter()
        scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, table = torch.device("cuda"), {}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}\n")
    print("| case | kernels | new shape, median ms (most) | known shape, median ms |\n|---|---|---|---|")
    for name, case in CASES.items():
        for kernels, allowed in (("without cuDNN", False), ("torch's choice", True)):
            torch.backends.cuda.enable_cudnn_sdp(allowed)
            stream((*case[:5], [max(case[5]) + 1]), device)  # the library is loaded
            new, known = stream(case, device), stream(case, device)
            table[f"{name}: {kernels}"] = {"new": new, "known": known}
            cells = [name, kernels, f"{statistics.median(new):.2f} ({max(new):.0f})", f"{statistics.median(known):.2f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
