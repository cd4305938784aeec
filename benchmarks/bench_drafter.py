"""Time the drafter's forward and backward pass alone on one GPU: random weights, random taps, real masks and labels.

    python benchmarks/bench_drafter.py [--shape 27b|smollm2] [--tokens N] [--block B] [--anchors A] [--soft] [--profile]
    python benchmarks/bench_drafter.py --pieces eager --head torch     the same without our fused kernels

FLOP/s count useful work as docs/performance.md does: 6·(P - fc)·Q + 6·(fc + kv)·C + 4·H·V·Q with Q block rows and
C context tokens, and 2·H·V·Q more for the teacher of soft labels. The optimizer is not included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recipe.config.schema import Drafter as DrafterSection
from recipe.config.schema import Objective as ObjectiveSection
from recipe.drafter import pieces
from recipe.drafter.batch import MicroBatch, assemble
from recipe.drafter.config import DrafterConfig
from recipe.drafter.model import DFlashDrafter
from recipe.model_files.shapes import TargetShape, default_target_layer_ids
from recipe.objective import loss
from recipe.objective.objective import Objective

SHAPES = {"27b": "Qwen/Qwen3.6-27B", "smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
DEFAULTS = {"27b": (8192, 8192, 32, 1024), "smollm2": (17920, 280, 16, 3072)}  # tokens, document, block, anchors


def batch_of(shape: TargetShape, taps: int, args: argparse.Namespace, device: torch.device) -> MicroBatch:
    """Documents of equal length, all tokens supervised, anchors evenly spread, random features."""
    count = max(1, args.tokens // args.document)
    each = args.anchors // count
    anchors = [np.unique(np.linspace(0, args.document - 2, each).astype(np.int64)) for _ in range(count)]
    rows = count * args.document
    ids = np.random.default_rng(0).integers(0, shape.vocab_size, rows)
    generator = torch.Generator(device).manual_seed(0)
    features = [
        torch.randn(rows, shape.hidden_size, generator=generator, device=device, dtype=torch.bfloat16)
        for _ in range(taps + 1)
    ]
    return assemble(ids, np.ones(rows), [args.document] * count, anchors, features[:-1], features[-1])


def useful_flop(drafter: DFlashDrafter, shape: TargetShape, batch: MicroBatch, soft: bool) -> float:
    """Of one forward and backward pass; see the module's docstring."""
    rows = len(batch.anchors) * drafter.config.block_size
    context = len(batch.input_ids)
    parameters = sum(p.numel() for p in drafter.parameters())
    fc = drafter.fc.weight.numel()
    kv = sum(p.numel() for n, p in drafter.named_parameters() if "k_proj" in n or "v_proj" in n)
    head = shape.hidden_size * shape.vocab_size * rows
    return 6.0 * (parameters - fc) * rows + 6.0 * (fc + kv) * context + (4.0 + 2.0 * soft) * head


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda")
    shape = TargetShape.resolve(SHAPES[args.shape])
    section = DrafterSection(num_layers=5, block_size=args.block, max_anchors=args.anchors)
    config = DrafterConfig.build(section, shape, default_target_layer_ids(shape.num_layers), shape.vocab_size - 1)
    with torch.device(device):
        drafter = DFlashDrafter(config).to(torch.bfloat16)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim == 2 else torch.nn.init.ones_(parameter)
    table = torch.randn(shape.vocab_size, shape.hidden_size, device=device, dtype=torch.bfloat16) * 0.02
    batch = batch_of(shape, len(config.target_layer_ids), args, device)
    objective = Objective(ObjectiveSection(loss=args.loss, soft_labels=args.soft), args.block)

    def step() -> torch.Tensor:
        for parameter in drafter.parameters():
            parameter.grad = None
        sums = objective.sums(drafter(batch, table), batch, table)
        sums.loss_sum.backward()
        return sums.loss_sum.detach()

    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    value = step()
    last.record()
    torch.cuda.synchronize()
    start_up = first.elapsed_time(last)
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(args.steps):
        first.record()
        value = step()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last))
    ms = statistics.median(times)
    if args.profile:
        profile(step, args.profile)
    flop = useful_flop(drafter, shape, batch, args.soft)
    norm = torch.stack([p.grad.float().norm() for p in drafter.parameters() if p.grad is not None]).norm()
    return {
        "shape": args.shape, "tokens": len(batch.input_ids), "blocks": len(batch.anchors), "block": args.block,
        "loss": args.loss, "soft": args.soft, "pieces": args.pieces, "head": args.head,
        "ms": round(ms, 1), "spread_ms": round(max(times) - min(times), 1), "first_ms": round(start_up),
        "tflops": round(flop / ms / 1e9), "context_tokens_per_s": round(len(batch.input_ids) / ms * 1e3),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        "loss_sum": float(value), "gradient_norm": float(norm),
    }  # fmt: skip


def profile(step: Any, lines: int) -> None:
    """The kernels that take longest, of one step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        step()
        torch.cuda.synchronize()
    averages = [e for e in recorded.key_averages() if e.device_type.name == "CUDA"]
    for entry in sorted(averages, key=lambda e: -e.self_device_time_total)[:lines]:
        print(f"  {entry.self_device_time_total / 1e3:8.2f} ms {entry.count:5d} x  {entry.key[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="27b")
    for name in ("tokens", "document", "block", "anchors"):
        parser.add_argument(f"--{name}", type=int, help="default: the shape's")
    parser.add_argument("--loss", choices=["dflash", "dpace"], default="dflash")
    parser.add_argument("--soft", action="store_true")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--profile", type=int, nargs="?", const=25, default=0, metavar="LINES")
    parser.add_argument("--pieces", choices=["compiled", "eager"], default="compiled", help="norms, SwiGLU, rotation")
    parser.add_argument("--head", choices=["fused", "torch"], default="fused", help="what follows the logits")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU found: this measures GPU kernels")
    for name, value in zip(("tokens", "document", "block", "anchors"), DEFAULTS[args.shape], strict=True):
        setattr(args, name, getattr(args, name) or value)
    if args.pieces == "eager":
        pieces._compiled = lambda function: function  # type: ignore[assignment]
    if args.head == "torch":
        loss._rows_of = lambda hidden, wide: loss.rows_in_torch
    result = measure(args)
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
