"""Kinds of targets at real widths, two layers deep: degree 1 equals transformers, degree 2 agrees with degree 1.

    python benchmarks/target_kinds.py [--kinds qwen3_moe qwen3_5_moe gpt_neox qwen3 qwen3_exact] [--json FILE]

Random weights go through the product's own door (`open_target`): mixtures of experts by their shard plan, gpt_neox by
DeepSpeed's AutoTP with its self-check, a dense model with parts that are added and with exact sums. Degree 2 takes two
GPUs over NCCL where there are two, else both ranks share one device over gloo. Exit code 1: degree 1 is not
transformers' bits, ranks differ in a bit, or degree 2 is farther from degree 1 than rounding explains.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_target import parse_batch, versions
from random_checkpoint import write_checkpoint
from target_truth import transformers_taps
from target_worker import ranks_agree

from recipe.model_files.shapes import TargetShape
from recipe.target.architectures import ARCHITECTURES
from recipe.target.capture import TapCapture
from recipe.target.cpu_kernels import use_torch_kernels_on_cpu
from recipe.target.open import open_target

COMMON = {"num_hidden_layers": 2, "vocab_size": 4096, "max_position_embeddings": 4096, "tie_word_embeddings": False}
ATTENTION = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "rope_theta": 1e6}
KINDS: dict[str, dict[str, Any]] = {
    # the widths of Qwen3-30B-A3B
    "qwen3_moe": COMMON
    | ATTENTION
    | {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
    | {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1},
    # a hybrid mixture with a shared expert: one Gated DeltaNet layer, one of attention
    "qwen3_5_moe": COMMON
    | {"model_type": "qwen3_5_moe_text", "hidden_size": 2048, "moe_intermediate_size": 512, "num_experts": 256}
    | {"num_experts_per_tok": 8, "shared_expert_intermediate_size": 512, "num_attention_heads": 16, "head_dim": 256}
    | {"num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
    | {
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    # a type without a shard plan, with the widths of Pythia-1.4B
    "gpt_neox": COMMON
    | {"model_type": "gpt_neox", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}
    | {"bos_token_id": 0, "eos_token_id": 0},
    # a dense one with the widths of Qwen3-8B
    "qwen3": COMMON
    | ATTENTION
    | {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 8},
}
KINDS["qwen3_exact"] = KINDS["qwen3"]
TAPS = [0, 1]
FAR = 0.1  # relative error of a position
LIMITS = {
    False: (0.02, 0.02),
    True: (0.05, 0.2),
}  # median, share of far positions; rounding sends a mixture's tokens to
# other experts (the narrow ones: 3 % of them), a wrong cut gives a median of 0.3 and more


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="target_kinds", description=__doc__.splitlines()[0])
    options.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="[all]")
    options.add_argument("--batch", type=parse_batch, default=(4, 512), metavar="NxS", help="[4x512]")
    options.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="a folder is made here [%(default)s]")
    options.add_argument("--narrow", action="store_true", help="an eighth of the widths, to try it on a CPU")
    options.add_argument("--json", type=Path, help="write all numbers here")
    options.add_argument("--limit-s", type=int, default=300, help="of each degree [%(default)s]")
    options.add_argument("--worker", type=int, nargs=2, metavar=("TP", "RANK"), help=argparse.SUPPRESS)
    return options


def main() -> int:
    args = parser().parse_args()
    if args.worker:
        work(args, *args.worker)
        return 0
    begun = time.monotonic()
    args.folder.mkdir(parents=True, exist_ok=True)
    args.folder = Path(tempfile.mkdtemp(prefix="target_kinds-", dir=args.folder))
    try:
        for kind in args.kinds:
            write_kind(args, kind)
        seconds = {f"tp{tp}": run_workers(args, tp) for tp in (1, 2)}
        results = {kind: json.loads((args.folder / f"{kind}.json").read_text()) for kind in args.kinds}
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)
    verdicts = {kind: verdict(kind, result) for kind, result in results.items()}
    for kind, result in results.items():
        result["ok"] = not verdicts[kind]
    everything = {"kinds": results, "seconds": seconds, "in_all_s": time.monotonic() - begun, "versions": versions()}
    if args.json:
        args.json.write_text(json.dumps(everything, indent=1))
    show(everything, verdicts)
    return 1 if any(verdicts.values()) else 0


def write_kind(args: argparse.Namespace, kind: str) -> None:
    """config.json and random weights: by our writer, or as transformers writes a model of a type without a plan."""
    settings, folder = dict(KINDS[kind]), args.folder / kind
    if args.narrow:
        for name in ("hidden_size", "intermediate_size", "moe_intermediate_size", "num_experts", "head_dim"):
            if name in settings:
                settings[name] //= 8
        if "head_dim" in settings:
            settings["head_dim"] = max(settings["head_dim"], 16)
    shape = TargetShape.from_config(settings)
    gpu = torch.cuda.is_available()
    if shape.model_type in ARCHITECTURES:
        write_checkpoint(folder, shape, torch.bfloat16, "cuda" if gpu else "cpu", layers_per_file=1)
        if gpu:
            torch.cuda.empty_cache()
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    inner = {name: value for name, value in settings.items() if name != "model_type"}
    config = AutoConfig.for_model(settings["model_type"], **inner)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def run_workers(args: argparse.Namespace, tp: int) -> float:
    """All kinds at one degree; seconds. RuntimeError when a rank fails or takes longer than `--limit-s`."""
    begun = time.monotonic()
    common = [sys.executable, __file__, "--folder", str(args.folder), "--batch", "x".join(map(str, args.batch))]
    common += ["--kinds", *args.kinds]
    workers = [subprocess.Popen([*common, "--worker", str(tp), str(rank)]) for rank in range(tp)]
    try:
        while any(worker.poll() is None for worker in workers) and time.monotonic() < begun + args.limit_s:
            if any(worker.poll() for worker in workers):
                break
            time.sleep(0.1)
        codes = [worker.poll() for worker in workers]
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait()
    if codes != [0] * tp:
        raise RuntimeError(f"the ranks of degree {tp} ended with {codes} (None: too slow, or after another's failure)")
    return time.monotonic() - begun


@torch.no_grad()
def work(args: argparse.Namespace, tp: int, rank: int) -> None:
    """One rank of a degree: every kind, one after the other."""
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    use_torch_kernels_on_cpu()
    backend = "nccl" if gpus >= tp > 1 else "gloo"
    store = dist.FileStore(str(args.folder / f"store{tp}"), tp)
    dist.init_process_group(backend, store=store, rank=rank, world_size=tp)
    for kind in args.kinds:
        folder, begun = args.folder / kind, time.perf_counter()
        shape = TargetShape.resolve(str(folder))
        exact = kind.endswith("exact")
        group = dist.group.WORLD if tp > 1 else None
        engine = open_target(str(folder), shape, tp, rank, group, device, torch.bfloat16, TAPS, True, None, None, exact)
        draw = torch.Generator().manual_seed(5)
        ids = torch.randint(0, shape.vocab_size, args.batch, generator=draw).to(device)
        taps = TapCapture(engine, TAPS, True).capture(ids)
        agree = ranks_agree(taps)
        if rank == 0:
            record(args, kind, tp, engine.module, shape, ids, taps)
            note(
                args, kind, {f"tp{tp}_s": time.perf_counter() - begun, f"tp{tp}_backend": backend, "ranks agree": agree}
            )
        del engine, taps
        if gpus:
            torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


def record(
    args: argparse.Namespace,
    kind: str,
    tp: int,
    decoder: Any,
    shape: TargetShape,
    ids: torch.Tensor,
    taps: list[torch.Tensor],
) -> None:
    """At degree 1 whether transformers gives the same bits; at degree 2 how far each tap is from degree 1."""
    saved = args.folder / f"{kind}.pt"
    if tp == 1:
        if shape.model_type in ARCHITECTURES:
            wanted = transformers_taps(shape, decoder, ids, TAPS).tensors
        else:
            wanted = plain_taps(args.folder / kind, ids)
        # transformers reports its last entry after the final norm, as our last tensor is
        same = [torch.equal(a, b) for a, b in zip([taps[0], taps[-1]], [wanted[0], wanted[-1]], strict=True)]
        note(args, kind, {"equal to transformers": all(same)})
        torch.save([tap.cpu() for tap in taps], saved)
        return
    errors = {}
    for name, tap, one in zip([*map(str, TAPS), "last"], taps, torch.load(saved), strict=True):
        one = one.to(tap.device).float()
        error = ((tap.float() - one).norm(dim=-1) / one.norm(dim=-1)).flatten()
        errors[name] = {"median": float(error.median()), "far": float((error > FAR).float().mean())}
    note(args, kind, {"tp2 to tp1": errors})


def plain_taps(folder: Path, ids: torch.Tensor) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(ids.device).eval()
    output = model.get_decoder()(input_ids=ids, use_cache=False, output_hidden_states=True)
    return [*(output.hidden_states[tap + 1] for tap in TAPS), output.last_hidden_state]


def note(args: argparse.Namespace, kind: str, values: dict[str, Any]) -> None:
    path = args.folder / f"{kind}.json"
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


def verdict(kind: str, result: dict[str, Any]) -> str:
    """What is wrong with a kind, "" when nothing is."""
    wrong = [] if result["equal to transformers"] else ["tp=1 is not transformers"]
    wrong += [] if result["ranks agree"] else ["ranks differ"]
    for name, error in result["tp2 to tp1"].items():
        median, far = LIMITS["num_experts" in KINDS[kind]]
        if not (error["median"] <= median and error["far"] <= far):
            wrong.append(f"tap {name} is another one")
    return ", ".join(wrong)


def show(everything: dict[str, Any], verdicts: dict[str, str]) -> None:
    print(f"{'kind':14s}  tp=1 is transformers  tp=2 to tp=1: median (far) of each tap and last       tp=1 s  tp=2 s")
    for kind, result in everything["kinds"].items():
        errors = "  ".join(f"{e['median']:.4f} ({e['far']:.1%})" for e in result["tp2 to tp1"].values())
        same, times = str(result["equal to transformers"]), f"{result['tp1_s']:6.1f}  {result['tp2_s']:6.1f}"
        print(f"{kind:14s}  {same:20s}  {errors:50s}  {times}  {result['tp2_backend']}  {verdicts[kind] or 'OK'}")
    print(f"{everything['in_all_s']:.1f} s in all, {everything['versions']}")


if __name__ == "__main__":
    raise SystemExit(main())
