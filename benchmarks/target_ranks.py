"""Every rank of a tensor-parallel degree alone on one device: do the kernels accept its heads, do the parts add up?

    python benchmarks/target_ranks.py [--model Qwen/Qwen3.6-27B] [--tp 5] [--batch 4x2048] [--json FILE]

No large checkpoint: one period of layers (three Gated DeltaNet, one attention) with random weights and few words is
written to ``--folder`` and read back by the product's own plan and loader, once whole and once for each rank. Each
rank's DeltaNet, attention and MLP run in bf16 without the other ranks; their outputs, added in float32, are compared
with the whole layer in float32 (torch's own kernels), beside the whole layer in bf16. Ranks with the same head counts
share a process, since kernels compile for a head count; the processes compile side by side and are timed in turn.
Exit code 1: a part is not finite, or the sum is more than 1.5 times as far from float32 as the whole layer in bf16.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_target import parse_batch, versions
from random_checkpoint import write_checkpoint
from target_truth import _in_torch, _mrope, relative_error, torch_kernels

from recipe.model_files.shapes import TargetShape
from recipe.model_files.weights import Checkpoint
from recipe.target.cpu_kernels import use_torch_kernels_on_cpu
from recipe.target.loader import load_parameters, rebuild_rotary
from recipe.target.model import build_meta_model, parameter_shapes, shard_model
from recipe.target.shard_plan import ShardPlan

PARTS = ("linear_attn", "self_attn", "mlp")
SLACK = 1.5


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="target_ranks", description=__doc__.splitlines()[0])
    options.add_argument("--model", default="Qwen/Qwen3.6-27B", help="folder, hub id or known shape [%(default)s]")
    options.add_argument("--tp", type=int, default=5, help="[%(default)s]")
    options.add_argument("--batch", type=parse_batch, default=(4, 2048), metavar="NxS", help="[4x2048]")
    options.add_argument("--repeat", type=int, default=5, help="timed passes [%(default)s]")
    options.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="a folder is made here [%(default)s]")
    options.add_argument("--json", type=Path, help="write all numbers here")
    options.add_argument("--worker", type=int, nargs="+", help=argparse.SUPPRESS)  # ranks; -1: the whole layer
    return options


def main() -> int:
    args = parser().parse_args()
    if args.worker:
        work(args)
        return 0
    begun = time.monotonic()
    shape = one_period(TargetShape.resolve(args.model))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.folder.mkdir(parents=True, exist_ok=True)
    args.folder = Path(tempfile.mkdtemp(prefix="target_ranks-", dir=args.folder))
    try:
        write_checkpoint(args.folder, shape, torch.bfloat16, device, layers_per_file=1)
        if device == "cuda":
            torch.cuda.empty_cache()
        run_workers(args, groups(shape, args.tp))
        results = gather(args, device)
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)
    results |= {"model": args.model, "tp": args.tp, "batch": list(args.batch), "versions": versions()}
    results["seconds"] = time.monotonic() - begun
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    show(results)
    return 0 if results["ok"] else 1


def one_period(shape: TargetShape) -> TargetShape:
    """The layers up to the first full attention, with a vocabulary of 1024."""
    depth = shape.layer_types.index("full_attention") + 1
    text = shape.text_config | {
        "num_hidden_layers": depth,
        "layer_types": list(shape.layer_types[:depth]),
        "vocab_size": 1024,
    }
    return dataclasses.replace(TargetShape.from_config(text), text_config=text)


def groups(shape: TargetShape, tp: int) -> list[list[int]]:
    """The whole layer, then the ranks of each DeltaNet head count."""
    found: dict[tuple[int, int], list[int]] = {}
    for rank, part in enumerate(ShardPlan.build(shape, tp).ranks):
        assert part.delta is not None, "a hybrid target is needed"
        found.setdefault((part.delta.count, part.delta.used), []).append(rank)
    return [[-1], *found.values()]


def run_workers(args: argparse.Namespace, ranks: list[list[int]]) -> None:
    """One process per group, at the same time; RuntimeError when one fails."""
    common = [sys.executable, __file__, "--folder", str(args.folder), "--tp", str(args.tp)]
    common += ["--batch", "x".join(map(str, args.batch)), "--repeat", str(args.repeat), "--worker"]
    workers = [subprocess.Popen([*common, *map(str, group)]) for group in ranks]
    codes = [worker.wait() for worker in workers]
    if any(codes):
        raise RuntimeError(f"workers {ranks} ended with {codes}")


@torch.no_grad()
def work(args: argparse.Namespace) -> None:
    """Each rank of this process: first all compile, then, one process at a time, all are timed."""
    use_torch_kernels_on_cpu()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    store = torch.distributed.FileStore(str(args.folder / f"store{args.worker[0]}"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)  # the sharded layers want one
    shape = TargetShape.resolve(str(args.folder))
    runs = []
    for rank in args.worker:
        plan = ShardPlan.build(shape, 1 if rank < 0 else args.tp)
        modules, inputs = build(args, shape, plan, max(rank, 0), device)
        runs.append((rank, plan.ranks[max(rank, 0)], modules, inputs))
    records = []
    for rank, part, modules, inputs in runs:
        begun = time.perf_counter()
        outputs = {name: call(modules[name], inputs[name]) for name in PARTS}
        synchronize(device)
        record = {"rank": rank, "first_call_s": time.perf_counter() - begun}
        record |= {"value/key heads": f"{part.delta.count}/{part.delta.used}", "mlp columns": part.mlp[1] - part.mlp[0]}
        record["query/kv heads"] = f"{part.attention.count}/{part.attention.shared_count}"
        record["finite"] = all(bool(torch.isfinite(output).all()) for output in outputs.values())
        save = {"found": {name: output.cpu() for name, output in outputs.items()}}
        truth = in_float32(modules, inputs)
        record["error"] = {name: relative_error(outputs[name], truth[name]) for name in PARTS}
        if rank < 0:
            save["truth"] = {name: output.cpu() for name, output in truth.items()}
            record["kernels"] = kernels()
        torch.save(save, args.folder / f"outputs{rank}.pt")
        records.append(record)
    with (args.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for record, (_, _, modules, inputs) in zip(records, runs, strict=True):
            record["ms"] = {
                name: median_ms(lambda m=modules[name], i=inputs[name]: call(m, i), args.repeat, device)
                for name in PARTS
            }
            (args.folder / f"record{record['rank']}.json").write_text(json.dumps(record))
    torch.distributed.destroy_process_group()


def build(
    args: argparse.Namespace, shape: TargetShape, plan: ShardPlan, rank: int, device: torch.device
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A rank's first DeltaNet, its attention and first MLP, and each one's arguments; the same random input for all."""
    model: Any = build_meta_model(shape, shape.num_layers, True, torch.bfloat16)
    full = parameter_shapes(model)
    shard_model(model, shape, plan, rank, None)
    load_parameters(model, full, Checkpoint(args.folder), plan, rank, device)
    rebuild_rotary(model, device)
    model.to(device)
    draw = torch.Generator(device).manual_seed(3)
    rows, length = args.batch
    hidden = torch.randn(rows, length, shape.hidden_size, generator=draw, device=device).bfloat16()
    positions = torch.arange(length, device=device)[None]
    rotary = model.rotary_emb(hidden, positions[None].expand(3, -1, -1) if _mrope(model) else positions)
    arguments = {"position_embeddings": rotary, "attention_mask": None}
    last = model.layers[shape.num_layers - 1]
    modules = {"linear_attn": model.layers[0].linear_attn, "self_attn": last.self_attn, "mlp": model.layers[0].mlp}
    return modules, {"linear_attn": (hidden, {}), "self_attn": (hidden, arguments), "mlp": (hidden, {})}


def call(module: Any, inputs: tuple[torch.Tensor, dict[str, Any]]) -> torch.Tensor:
    output = module(inputs[0], **inputs[1])
    return output[0] if isinstance(output, tuple) else output


def in_float32(modules: dict[str, Any], inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same modules and input, computed in float32 with torch's own functions."""
    outputs = {}
    with torch_kernels():
        for name in PARTS:
            hidden, arguments = inputs[name]
            wide = dict(arguments)
            if "position_embeddings" in wide:
                wide["position_embeddings"] = tuple(table.float() for table in wide["position_embeddings"])
            outputs[name] = call(_in_torch(modules[name]), (hidden.float(), wide))
    return outputs


def kernels() -> str:
    """Whose delta rule has run: importing transformers alone does not import fla's."""
    return "fla" if any(name.startswith("fla.ops.gated_delta_rule") for name in sys.modules) else "torch"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def median_ms(run: Callable[[], Any], repeat: int, device: torch.device) -> float:
    times = []
    for _ in range(repeat):
        synchronize(device)
        begun = time.perf_counter()
        run()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - begun))
    return sorted(times)[len(times) // 2]


def gather(args: argparse.Namespace, device: str) -> dict[str, Any]:
    """The records of all ranks, and how far the sum of their outputs is from the whole layer."""
    records = [json.loads((args.folder / f"record{rank}.json").read_text()) for rank in range(-1, args.tp)]
    whole = torch.load(args.folder / "outputs-1.pt")
    parts = [torch.load(args.folder / f"outputs{rank}.pt")["found"] for rank in range(args.tp)]
    sums: dict[str, dict[str, float]] = {}
    for name in PARTS:
        total = torch.stack([part[name].to(device).float() for part in parts]).sum(0)
        one, truth = whole["found"][name].to(device), whole["truth"][name].to(device)
        sums[name] = {
            "sum_to_float32": relative_error(total, truth),
            "whole_to_float32": relative_error(one, truth),
            "sum_to_whole": relative_error(total, one),
        }
    fine = all(error["sum_to_float32"] <= SLACK * error["whole_to_float32"] for error in sums.values())
    return {"ranks": records, "sums": sums, "ok": fine and all(record["finite"] for record in records)}


def show(results: dict[str, Any]) -> None:
    print(f"{results['model']}, tp={results['tp']}, batch {results['batch']}, {results['versions']}")
    print("rank   value/key  query/kv  mlp cols   ms: delta, attn, mlp     error to own float32  first call s")
    for record in results["ranks"]:
        ms = " ".join(f"{record['ms'][name]:7.2f}" for name in PARTS)
        error = " ".join(f"{record['error'][name]:.4f}" for name in PARTS)
        name = "whole" if record["rank"] < 0 else str(record["rank"])
        heads = f"{record['value/key heads']:>9s}  {record['query/kv heads']:>8s}  {record['mlp columns']:8d}"
        print(f"{name:5s}  {heads}   {ms}   {error}  {record['first_call_s']:12.1f}")
    whole, ranks = results["ranks"][0], results["ranks"][1:]
    for name in PARTS:
        error, slowest = results["sums"][name], max(record["ms"][name] for record in ranks)
        print(
            f"{name}: sum of {results['tp']} ranks to float32 {error['sum_to_float32']:.5f} (whole layer in bf16 "
            f"{error['whole_to_float32']:.5f}), to the whole in bf16 {error['sum_to_whole']:.5f}; "
            f"whole / ({results['tp']} x slowest rank) = {whole['ms'][name] / results['tp'] / slowest:.1%}"
        )
    print(f"{'OK' if results['ok'] else 'WRONG'}; delta rule: {whole['kernels']}; {results['seconds']:.1f} s in all")


if __name__ == "__main__":
    raise SystemExit(main())
