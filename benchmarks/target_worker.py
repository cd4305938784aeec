"""One rank of the target benchmark (`bench_target.py` starts it): the product's load and capture, timed, compared."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_target import parse_batch
from target_truth import float32_taps, relative_error, run_alone, transformers_taps

from recipe.model_files.shapes import TargetShape, default_target_layer_ids
from recipe.target.capture import TapCapture
from recipe.target.cpu_kernels import use_torch_kernels_on_cpu
from recipe.target.loader import load_target
from recipe.target.plan_cost import layer_matrices, mixers_and_mixtures
from recipe.target.shard_plan import ShardPlan


class Rank:
    """What a rank of the benchmark knows; results go to ``out/rank<r>.json`` after each part, so none is lost."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.results = args, dict[str, Any]()
        self.shape = TargetShape.resolve(str(args.folder))
        self.device = torch.device("cuda", args.rank % args.gpus) if args.gpus else torch.device("cpu")
        self.dtype = torch.bfloat16 if args.gpus else torch.float32
        layers = self.shape.num_layers
        self.taps = default_target_layer_ids(layers) if layers >= 8 else tuple(range(layers))
        if args.gpus:
            torch.cuda.set_device(self.device)
        backend = "nccl" if args.gpus >= args.world else "gloo"
        store = dist.FileStore(str(args.out / "store"), args.world)
        dist.init_process_group(backend, store=store, rank=args.rank, world_size=args.world)
        self.group = dist.group.WORLD if args.world > 1 else None
        self.record("backend", backend)

    def record(self, key: str, value: Any) -> None:
        self.results[key] = value
        (self.args.out / f"rank{self.args.rank}.json").write_text(json.dumps(self.results))
        if self.args.rank == 0:
            print(f"   . {key}: {json.dumps(value)[:400]}", flush=True)

    def ids(self, rows: int, length: int, seed: int = 0) -> torch.Tensor:
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.shape.vocab_size, (rows, length), generator=draw).to(self.device)

    def synchronize(self) -> None:
        if self.args.gpus:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any]) -> float:
        self.synchronize()
        begun = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - begun


def load(rank: Rank) -> Any:
    """The product's load, with what it cost in time and in host memory."""
    last = None

    def progress(now: Any) -> None:
        nonlocal last
        last = now

    plan, before = ShardPlan.build(rank.shape, rank.args.tp), host_memory_gb()
    begun = time.perf_counter()
    engine = load_target(
        rank.args.folder,
        rank.shape,
        plan,
        rank.args.rank,
        rank.group,
        rank.device,
        rank.dtype,
        rank.taps,
        True,
        progress,
    )
    rank.synchronize()
    total = time.perf_counter() - begun
    assert last is not None
    rank.record(
        "load",
        {
            "gb": last.bytes_read / 1e9,
            "gb_per_s": last.gb_per_s,
            "seconds_reading": last.seconds,
            "seconds_in_all": total,
            "host_gb_before": before,
            "host_gb_after": host_memory_gb(),
        },
    )
    return engine


def measure(rank: Rank, capture: TapCapture, flop_per_token: float) -> None:
    """First call, then the median of ``repeat`` passes, per batch shape; all ranks together."""
    for rows, length in rank.args.batches:
        ids = rank.ids(rows, length)
        if rank.args.gpus:
            torch.cuda.reset_peak_memory_stats()
        first = rank.seconds(lambda ids=ids: capture.capture(ids))
        passes = sorted(rank.seconds(lambda ids=ids: capture.capture(ids)) for _ in range(rank.args.repeat))
        median = passes[len(passes) // 2]
        rank.record(
            f"{rows}x{length}",
            {
                "tokens_per_s": rows * length / median,
                "tflops": rows * length * flop_per_token / median / 1e12,
                "first_call_s": first,
                "passes_s": passes,
                "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if rank.args.gpus else 0.0,
            },
        )


def degree(rank: Rank) -> None:
    """Load at this degree, compare, measure."""
    engine = load(rank)
    capture = TapCapture(engine, rank.taps, True)
    ids = rank.ids(*rank.args.check, seed=7)
    rank.record("first_call_s", rank.seconds(lambda: capture.capture(ids)))
    taps = capture.capture(ids)
    again = capture.capture(ids)
    rank.record("repeatable", all(torch.equal(a, b) for a, b in zip(taps, again, strict=True)))
    truth_file = rank.args.folder / "truth.pt"
    if rank.args.tp == 1:
        truth = float32_taps(engine.module, ids, rank.taps)
        torch.save([tensor.cpu() for tensor in (*truth, *taps)], truth_file)
    if rank.args.rank == 0 and truth_file.exists():
        saved = [tensor.to(rank.device) for tensor in torch.load(truth_file)]
        rank.record("error_to_float32", [relative_error(a, b) for a, b in zip(taps, saved[: len(taps)], strict=True)])
        rank.record("error_to_tp1", [relative_error(a, b) for a, b in zip(taps, saved[len(taps) :], strict=True)])
        del saved
    if rank.group is not None:
        rank.record("ranks_agree_bit_for_bit", ranks_agree(taps))
    flop = 2.0 * matrix_parameters(rank.shape)
    if rank.args.tp == 1 or rank.args.gpus >= rank.args.world:
        measure(rank, capture, flop)
    if rank.args.tp == 1:
        reference(rank, engine.module, ids, taps, flop)
        if rank.args.profile and rank.args.gpus:
            profile(rank, capture)


def reference(rank: Rank, decoder: Any, ids: torch.Tensor, taps: list[torch.Tensor], flop_per_token: float) -> None:
    """transformers' own model over the same tensors: equal bits expected, and its speed for the ratio."""
    found = transformers_taps(rank.shape, decoder, ids, rank.taps)
    rank.record("equal_to_transformers", [torch.equal(a, b) for a, b in zip(taps, found.tensors, strict=True)])
    rows, length = rank.args.batches[0]
    big = rank.ids(rows, length)
    found.run(big)
    passes = sorted(rank.seconds(lambda: found.run(big)) for _ in range(rank.args.repeat))
    median = passes[len(passes) // 2]
    speed = {"tokens_per_s": rows * length / median, "tflops": rows * length * flop_per_token / median / 1e12}
    rank.record("transformers", speed | {"batch": f"{rows}x{length}", "passes_s": passes})


def profile(rank: Rank, capture: TapCapture, top: int = 16) -> None:
    """GPU time by kernel of one pass."""
    from torch.profiler import ProfilerActivity

    ids = rank.ids(*rank.args.batches[0])
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as trace:
        capture.capture(ids)
        torch.cuda.synchronize()
    events = sorted(trace.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    kernels = [[e.key[:90], e.count, round(e.self_device_time_total / total, 4)] for e in events[:top]]
    rank.record("kernels", {"ms": total / 1e3, "share": kernels})


def alone(rank: Rank) -> None:
    """Each rank's local layers of a degree, without the others: fla against float32, and the time of its share."""
    if not rank.args.gpus:
        use_torch_kernels_on_cpu()
    whole = ShardPlan.build(rank.shape, 1)
    results = run_alone(rank, whole, 0)
    rank.record("whole", results.numbers)
    total: list[torch.Tensor] | None = None
    for index in range(rank.args.tp):
        part = run_alone(rank, ShardPlan.build(rank.shape, rank.args.tp), index)
        rank.record(f"rank{index}", part.numbers)
        total = part.partial if total is None else [a + b for a, b in zip(total, part.partial, strict=True)]
    assert total is not None
    names = ("linear_attn", "self_attn")
    errors = (relative_error(a, b) for a, b in zip(total, results.partial, strict=True))
    rank.record("sum_over_ranks_to_whole", dict(zip(names, errors, strict=True)))


def ranks_agree(taps: list[torch.Tensor]) -> bool:
    """All ranks hold the same bits."""
    digest = hashlib.sha256()
    for tap in taps:
        digest.update(tap.reshape(-1).contiguous().view(torch.uint8).cpu().numpy())
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, digest.hexdigest())
    return len(set(found)) == 1


def matrix_parameters(shape: TargetShape) -> int:
    layer = layer_matrices(shape, ShardPlan.build(shape, 1), 0)
    kinds = mixers_and_mixtures(shape, shape.num_layers)
    return sum(layer[kind] + layer["mixture" if sparse else "mlp"] for kind, sparse in kinds)


def host_memory_gb() -> dict[str, float]:
    """This process's anonymous memory, and the most it ever had resident, mapped file pages included."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {key: int(status[name].split()[0]) / 1e6 for key, name in (("anonymous", "RssAnon"), ("peak", "VmHWM"))}


def main() -> None:
    options = argparse.ArgumentParser()
    for name in ("folder", "out"):
        options.add_argument(f"--{name}", type=Path)
    for name in ("tp", "world", "rank", "gpus", "repeat"):
        options.add_argument(f"--{name}", type=int)
    options.add_argument("--mode", choices=("degree", "alone"))
    options.add_argument("--check", type=parse_batch)
    options.add_argument("--batches", type=parse_batch, nargs="+")
    options.add_argument("--profile", action="store_true")
    args = options.parse_args()
    with torch.no_grad():
        (degree if args.mode == "degree" else alone)(Rank(args))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
