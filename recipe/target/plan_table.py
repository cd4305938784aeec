"""What each rank would hold and cost at tensor-parallel degrees 1 to 8, and which split of the GPUs to take.

Needs no weights, no GPU and no network: the shape comes from the model's config.json or from the bundled ones.
Speeds are estimates from a TFLOP/s that you give or that was measured on an H200, never a promise.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from recipe.config import load_config, resolve
from recipe.config.feasibility import DTYPE_BYTES, ring_size
from recipe.errors import ConfigError
from recipe.shapes import TargetShape
from recipe.target.plan_cost import (
    H200_DRAFTER_TFLOPS,
    H200_TARGET_TFLOPS,
    drafter_flop_per_token,
    plan_table,
    recommend_splits,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="one run's JSON, e.g. ds_configs/qwen3.6_27b_5t3d.json")
    parser.add_argument("--tp", type=int, help="show this degree only (default: 1 to 8), rank by rank")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--gpus", type=int, help="GPUs of a node (default: those of the config's layout)")
    parser.add_argument(
        "--tflops", type=float, default=H200_TARGET_TFLOPS, help="of one GPU in the target [%(default)s]"
    )
    parser.add_argument("--drafter-tflops", type=float, default=H200_DRAFTER_TFLOPS, help="in training [%(default)s]")
    parser.add_argument("--gpu-memory-gb", type=float, default=141.0, help="memory of one GPU [%(default)s]")


def build_plan(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that the verb prints, as plain data. ConfigError for a bad config, model or degree."""
    config = load_config(args.config)
    ours = config.dflash
    for name in ("gpus", "tflops", "drafter_tflops", "gpu_memory_gb"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')}", value, "must be above 0", "give a positive number")
    gpus = args.gpus or len(ours.layout.target_gpus) + len(ours.layout.drafter_gpus)
    config = resolve(config, gpus=gpus)
    ours = config.dflash
    shape = TargetShape.resolve(ours.target.path, ours.target.revision)
    degrees = range(1, 9) if args.tp is None else (args.tp,)
    size, last, taps = DTYPE_BYTES[ours.target.dtype], ours.objective.soft_labels, ours.target.target_layer_ids
    rows = plan_table(shape, degrees, size, taps, last, args.tflops)
    flop = drafter_flop_per_token(config, shape)
    splits = recommend_splits(rows, gpus, flop, ours.ring.reuse, args.drafter_tflops, args.gpu_memory_gb * 1e9)
    return {
        "target": ours.target.path,
        "model_type": shape.model_type,
        "gpus": gpus,
        "ring_bytes": ring_size(config, shape).bytes,
        "reuse": ours.ring.reuse,
        "degrees": [asdict(row) for row in rows],
        "splits": [asdict(split) for split in splits],
    }


def print_table(plan: dict[str, Any]) -> None:
    """The plan as two tables and one recommendation."""
    print(f"{plan['target']} ({plan['model_type']}): weights and work by tensor-parallel degree")
    print(
        " tp  efficiency  GB/rank (most)  all-reduce KB/token  est. tok/s"
        "  query heads / kv heads; value / key heads; MLP columns"
    )
    for row in plan["degrees"]:
        heads, columns = f"{_list(row['heads'])} / {_list(row['kv_heads'])}", _list(row["mlp_columns"])
        if row["value_heads"]:
            heads += f"; {_list(row['value_heads'])} / {_list(row['key_heads'])}"
        print(
            f"{row['tp']:3d}  {row['efficiency']:9.1%}  {max(row['rank_bytes']) / 1e9:14.2f}"
            f"  {row['all_reduce_bytes'] / 1e3:19.0f}  {row['tokens_per_s']:10,.0f}  {heads}; {columns}"
        )
    if len(plan["degrees"]) == 1:
        _print_ranks(plan["degrees"][0])
    print(f"ring: {plan['ring_bytes'] / 1e9:.1f} GB in /dev/shm")
    print(f"\nsplits of {plan['gpus']} GPUs (reuse {plan['reuse']}), fastest first")
    print(" target        drafter GPUs  target tok/s  drafter tok/s  trains on tok/s  limited by")
    for split in plan["splits"][:8]:
        target, drafter = split["target_tokens_per_s"], split["drafter_tokens_per_s"]
        print(
            f" {split['replicas']} x tp={split['tp']:<6d} {split['drafters']:12d}  {target:12,.0f}  {drafter:13,.0f}"
            f"  {split['tokens_per_s']:15,.0f}  {split['bound']}"
        )
    if plan["splits"]:
        best = plan["splits"][0]
        target = best["replicas"] * best["tp"]
        print(
            f"recommended: {target} target GPUs (target_tp {best['tp']}), {best['drafters']} drafter GPUs; an estimate"
        )
    else:
        print("no split fits: more GPUs, more memory (--gpu-memory-gb) or a higher degree is needed")


def _print_ranks(row: dict[str, Any]) -> None:
    for rank, (size, share) in enumerate(zip(row["rank_bytes"], row["flop_share"], strict=True)):
        print(f"  rank {rank}: {size / 1e9:.2f} GB of weights, {share:.2%} of the FLOP (ideal {1 / row['tp']:.2%})")


def _list(values: Sequence[int]) -> str:
    """Runs shortened: 3520x2,3456x3."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return ",".join(f"{value}x{count}" if count > 1 else str(value) for value, count in runs)


def run(args: argparse.Namespace) -> int:
    """The verb ``plan``; 0 on success."""
    plan = build_plan(args)
    if args.json:
        print(json.dumps(plan, indent=2))
    else:
        print_table(plan)
    return 0
