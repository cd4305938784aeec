"""The frozen target on this machine: load, agree with transformers and float32, and count tokens a second.

    python -m recipe bench target [--model Qwen/Qwen3.6-27B] [--layers N] [--tp 1 2] [--ranks-of 5] [--json FILE]

Random weights of the model's shape are written as a real sharded checkpoint (``--folder``, best a tmpfs) and go through
the product's own path: `load_target`, DeepSpeed's inference engine, `TapCapture`. In the degree-1 process transformers
then runs on the very same tensors, and a float32 pass with torch's own Gated DeltaNet gives the truth for all degrees.
Ranks use NCCL on a GPU each; where there are fewer GPUs than ranks they share them over gloo, which proves that they
agree but says nothing of speed. ``--ranks-of 5`` runs every rank's real local layers alone, on one GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from random_checkpoint import write_checkpoint

from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape

WORKER = Path(__file__).with_name("target_worker.py")


def parse_batch(text: str) -> tuple[int, int]:
    rows, _, length = text.partition("x")
    if not (rows.isdigit() and length.isdigit() and int(rows) and int(length)):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxLENGTH, e.g. 24x2048")
    return int(rows), int(length)


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="bench target", description=__doc__.splitlines()[0])
    options.add_argument("--model", default="Qwen/Qwen3.6-27B", help="folder, hub id or known shape [%(default)s]")
    options.add_argument("--layers", type=positive, help="only the first N layers of it")
    options.add_argument("--tp", type=positive, nargs="+", default=[1], help="degrees to run [%(default)s]")
    options.add_argument("--ranks-of", type=positive, help="also run each rank of this degree alone, on fla's kernels")
    options.add_argument("--batches", type=parse_batch, nargs="+", default=[(24, 2048), (6, 8192)], metavar="NxS")
    options.add_argument("--check", type=parse_batch, default=(2, 1024), metavar="NxS", help="batch of the comparisons")
    options.add_argument("--repeat", type=positive, default=3, help="timed passes per batch [%(default)s]")
    options.add_argument(
        "--folder", type=Path, default=Path("/dev/shm"), help="the weights get a folder of their own here [%(default)s]"
    )
    options.add_argument("--keep", action="store_true", help="leave the weights there")
    options.add_argument("--profile", action="store_true", help="name the largest kernels of one pass at degree 1")
    options.add_argument("--limit-s", type=positive, default=600, help="of each degree [%(default)s]")
    options.add_argument("--json", type=Path, help="write all numbers here")
    return options


def main() -> int:
    args = parser().parse_args()
    try:
        shape = TargetShape.resolve(args.model)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    layers = min(args.layers or shape.num_layers, shape.num_layers)
    text = shape.text_config | {"num_hidden_layers": layers, "layer_types": list(shape.layer_types[:layers])}
    shape = dataclasses.replace(TargetShape.from_config(text), text_config=text)
    gpus = torch.cuda.device_count()
    results: dict[str, Any] = {"model": args.model, "layers": layers, "gpus": gpus, "versions": versions()}
    begun = time.monotonic()
    dtype = torch.bfloat16 if gpus else torch.float32
    args.folder.mkdir(parents=True, exist_ok=True)
    args.folder = Path(tempfile.mkdtemp(prefix="bench_target-", dir=args.folder))
    try:
        size = write_checkpoint(args.folder, shape, dtype, "cuda" if gpus else "cpu")
        torch.cuda.empty_cache()
        results["checkpoint"] = {"gb": size / 1e9, "seconds": time.monotonic() - begun}
        show("checkpoint", results["checkpoint"])
        for tp in args.tp:
            results[f"tp{tp}"] = run_ranks(args, "degree", tp, tp, gpus)
        if args.ranks_of:
            results[f"ranks_of_{args.ranks_of}"] = run_ranks(args, "alone", args.ranks_of, 1, gpus)
    finally:
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))
        if not args.keep:
            shutil.rmtree(args.folder, ignore_errors=True)
    return 0 if all("error" not in value for value in results.values() if isinstance(value, dict)) else 1


def run_ranks(args: argparse.Namespace, mode: str, tp: int, world: int, gpus: int) -> dict[str, Any]:
    """Starts the ranks, waits for all of them, and returns rank 0's numbers with every rank's load beside them."""
    out = args.folder / f"{mode}-{tp}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    common = ["--folder", str(args.folder), "--out", str(out), "--mode", mode, "--tp", str(tp), "--world", str(world)]
    common += ["--gpus", str(gpus), "--repeat", str(args.repeat), "--check", "x".join(map(str, args.check))]
    common += ["--batches", *("x".join(map(str, batch)) for batch in args.batches)]
    common += ["--profile"] if args.profile else []
    ranks = [subprocess.Popen([sys.executable, str(WORKER), *common, "--rank", str(rank)]) for rank in range(world)]
    deadline = time.monotonic() + args.limit_s
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            if any(rank.poll() for rank in ranks):
                break
            time.sleep(0.1)
        codes = [rank.poll() for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()
    found = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("rank*.json"))}
    result: dict[str, Any] = dict(found.get("rank0", {}))
    result["loads"] = [found[name].get("load") for name in sorted(found)]
    if any(code != 0 for code in codes):
        result["error"] = f"exit codes {codes} (None: past {args.limit_s} s)"
    show(f"{mode} tp={tp}", result)
    return result


def show(title: str, values: dict[str, Any]) -> None:
    print(f"== {title}", flush=True)
    for key, value in values.items():
        print(f"   {key}: {json.dumps(value)}", flush=True)


def versions() -> dict[str, str]:
    """Of everything that decides the speed; "-" where it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none"}
    for package in ("torch", "transformers", "deepspeed", "fla-core", "triton", "causal-conv1d"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "-"
    return found


if __name__ == "__main__":
    raise SystemExit(main())
