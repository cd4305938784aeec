"""What each rank would hold and cost at tensor-parallel degrees 1 to 8, and which split of the GPUs to take.

Needs no weights, no GPU and no network: the shape comes from the model's config.json or from the bundled ones.
Speeds are estimates from rates that you give or that were measured on an H200, never a promise.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from recipe.check import resolve
from recipe.check.feasibility import DTYPE_BYTES, ring_size
from recipe.config import RunConfig, load_config
from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape
from recipe.target.architectures import ARCHITECTURES
from recipe.target.logits import needs_logits
from recipe.target.plan_cost import (
    H200_ALL_REDUCE_GB_S,
    H200_DRAFTER_TFLOPS,
    H200_TARGET_TFLOPS,
    PlanRow,
    drafter_flop_per_token,
    plan_table,
    recommend_splits,
    with_head,
)
from recipe.target.plan_stock import stock_table

MOST_GPUS = 64  # of a node, and so of a tensor-parallel group, which never spans nodes
SHOWN_SPLITS = 8
SMALL_HIDDEN = 2048  # below it a GPU does not come near the rates that were measured on large matrices
MEASURED = "measured on H200s with transformers' eager layers and fla, 2026-11-30; `bench target` measures yours"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="one run's JSON, e.g. ds_configs/qwen3.6_27b_5t3d.json")
    parser.add_argument("--tp", type=int, help="show this degree only (default: 1 to 8), rank by rank")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--gpus", type=int, help="GPUs of a node (default: those of the config's layout)")
    rates = (
        ("--tflops", H200_TARGET_TFLOPS, "TFLOP/s of one GPU in the target"),
        ("--drafter-tflops", H200_DRAFTER_TFLOPS, "TFLOP/s of one GPU that trains"),
        ("--all-reduce-gb-s", H200_ALL_REDUCE_GB_S, "GB/s that a rank sends in an all-reduce"),
        ("--gpu-memory-gb", 141.0, "memory of one GPU"),
    )
    for name, value, what in rates:
        parser.add_argument(name, type=float, default=value, help=f"{what} [%(default)s]")


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("tflops", "drafter_tflops", "all_reduce_gb_s", "gpu_memory_gb"):
        value = getattr(args, name)
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{name.replace('_', '-')}", value, "must be above 0 and finite", "give another number")
    for name, least in (("tp", 1), ("gpus", 2)):
        value = getattr(args, name)
        if value is not None and not least <= value <= MOST_GPUS:
            rule = f"must be {least} to {MOST_GPUS}: a target and its drafter share one node"
            raise ConfigError(f"--{name}", value, rule, "give another number")


def build_plan(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that the verb prints, as plain data. ConfigError for a bad config, model, degree or rate."""
    _check_numbers(args)
    config = load_config(args.config)
    ours = config.dflash
    gpus = args.gpus or len(ours.layout.target_gpus) + len(ours.layout.drafter_gpus)
    shape = TargetShape.resolve(ours.target.path, ours.target.revision)
    config = resolve(config, shape=shape, gpus=gpus)
    ours = config.dflash
    degrees = range(1, 9) if args.tp is None else (args.tp,)
    size, last, taps = DTYPE_BYTES[ours.target.dtype], needs_logits(ours) is not None, ours.target.target_layer_ids
    rates = (args.tflops, args.all_reduce_gb_s, ours.target.exact_sums)
    stock = shape.model_type not in ARCHITECTURES

    def table(wanted: Sequence[int]) -> list[PlanRow]:
        if not stock:
            found = plan_table(shape, wanted, size, taps, last, *rates)
        else:
            depth = shape.num_layers if last or not taps else max(taps) + 1
            found = stock_table(shape, wanted, size, depth, rates[:2])
        return with_head(found, shape, size) if ours.evaluation.every > 0 else found

    rows = table(degrees)
    if not rows:
        rule = f"AutoTP shares out whole key/value heads, and {shape.model_type} has {shape.num_key_value_heads}"
        raise ConfigError("--tp", args.tp, rule, "give at most as many")
    possible = table(range(1, min(gpus, 9))) if args.tp is None else rows
    flop = drafter_flop_per_token(config, shape)
    splits = recommend_splits(possible, gpus, flop, ours.ring.reuse, args.drafter_tflops, args.gpu_memory_gb * 1e9)
    return {
        "target": ours.target.path,
        "model_type": shape.model_type,
        "gpus": gpus,
        "layout": _layout_of(config),
        "ring_bytes": ring_size(config, shape).bytes,
        "reuse": ours.ring.reuse,
        "exact_sums": ours.target.exact_sums,
        "autotp": stock,
        "tflops": args.tflops,
        "drafter_tflops": args.drafter_tflops,
        "all_reduce_gb_s": args.all_reduce_gb_s,
        "small": shape.hidden_size < SMALL_HIDDEN,
        "degrees": [asdict(row) for row in rows],
        "splits": [asdict(split) for split in splits],
    }


def _layout_of(config: RunConfig) -> dict[str, int]:
    """How the config itself uses the GPUs of a node."""
    layout = config.dflash.layout
    replicas = len(layout.target_gpus) // layout.target_tp
    return {"replicas": replicas, "tp": layout.target_tp, "drafters": len(layout.drafter_gpus)}


def print_table(plan: dict[str, Any]) -> None:
    """The plan as two tables and one recommendation."""
    print(f"{plan['target']} ({plan['model_type']}): weights and work by tensor-parallel degree")
    print(
        " tp  efficiency  FLOP share (most)  GB/rank (most)  all-reduce KB/token  est. tok/s"
        "  query heads / kv heads; value / key heads; MLP columns"
    )
    for row in plan["degrees"]:
        heads, columns = f"{_list(row['heads'])} / {_list(row['kv_heads'])}", _list(row["mlp_columns"])
        if row["value_heads"]:
            heads += f"; {_list(row['value_heads'])} / {_list(row['key_heads'])}"
        print(
            f"{row['tp']:3d}  {row['efficiency']:9.1%}  {max(row['flop_share']):17.2%}"
            f"  {max(row['rank_bytes']) / 1e9:14.2f}"
            f"  {row['all_reduce_bytes'] / 1e3:19.0f}  {row['tokens_per_s']:10,.0f}  {heads}; {columns}"
        )
    if plan["autotp"]:
        print("no shard plan for this type: DeepSpeed's AutoTP cuts it by whole key/value heads, if it can. Rows are")
        print("what that would be; `train --check` tries it without weights, and the ranks check it at their start")
    elif plan["exact_sums"]:
        print("exact sums: inputs are gathered and no sum is split over ranks (all-reduce stands for the gathers)")
    if len(plan["degrees"]) == 1:
        _print_ranks(plan["degrees"][0])
    print(f"ring: {plan['ring_bytes'] / 1e9:.1f} GB in /dev/shm")
    _print_splits(plan)
    defaults = (H200_TARGET_TFLOPS, H200_DRAFTER_TFLOPS, H200_ALL_REDUCE_GB_S)
    given = (plan["tflops"], plan["drafter_tflops"], plan["all_reduce_gb_s"])
    print(
        f"estimates from {given[0]:g} TFLOP/s a target GPU, {given[1]:g} a drafter GPU and {given[2]:g} GB/s all-reduce"
        f" ({MEASURED if given == defaults else 'partly given by you, the others ' + MEASURED})"
    )
    if plan["small"]:
        print("this model is small: no GPU reaches such rates on it, so take the speeds as upper bounds")


def _print_splits(plan: dict[str, Any]) -> None:
    print(f"\nsplits of {plan['gpus']} GPUs (reuse {plan['reuse']}), fastest first; * is the config's layout")
    print("   target        drafter GPUs  target tok/s  drafter tok/s  trains on tok/s  limited by")
    for place, split in enumerate(plan["splits"]):
        mine = {name: split[name] for name in plan["layout"]} == plan["layout"]
        if place >= SHOWN_SPLITS and not mine:
            continue
        target, drafter = split["target_tokens_per_s"], split["drafter_tokens_per_s"]
        print(
            f" {'*' if mine else ' '} {split['replicas']} x tp={split['tp']:<6d} {split['drafters']:12d}"
            f"  {target:12,.0f}  {drafter:13,.0f}  {split['tokens_per_s']:15,.0f}  {split['bound']}"
        )
    if not plan["splits"]:
        print("no split fits: more GPUs, more memory (--gpu-memory-gb) or a higher degree is needed")
        return
    best = plan["splits"][0]
    target = best["replicas"] * best["tp"]
    print(
        f"recommended: {target} target GPU{'s' * (target > 1)} (target_tp {best['tp']}), "
        f"{best['drafters']} drafter GPU{'s' * (best['drafters'] > 1)}; an estimate"
    )


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
