"""The whole way on this machine: prepare, train, evaluate, and one table at the end. `./run.sh` alone runs this.

About 5 minutes on 2 CPU cores; on a machine with two GPUs or more the same command uses them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from recipe.config import RunConfig, load_config

REPOSITORY = Path(__file__).resolve().parents[2]
ASSETS = Path(__file__).with_name("assets")
CONFIG = REPOSITORY / "ds_configs" / "demo.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default=str(CONFIG), metavar="FILE", help="default: ds_configs/demo.json")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override one key of the config; may be repeated")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    overrides = ["dflash.run.name=demo", *layout_for(_gpus()), *args.overrides]
    config = load_config(args.config, overrides, say=print)
    print(f"[1/3] prepare: the target's own answers -> {config.dflash.data.path}", flush=True)
    _prepare(config)
    print("[2/3] train: target -> ring -> drafter, one DeepSpeed launch", flush=True)
    code = _train(args.config, overrides)
    if code != 0:
        return code
    print("[3/3] evaluate: block-speculative decoding against plain greedy decoding", flush=True)
    run_dir = Path(config.dflash.run.output_dir) / config.dflash.run.name
    summary = _evaluate(run_dir, config)
    summary["wall_s"] = round(time.monotonic() - started, 1)
    from recipe.tell.run_dir import write_json
    from recipe.tell.table import print_summary

    write_json(run_dir / "summary.json", summary)
    print_summary(summary, title="Demo")
    return 0


def layout_for(gpus: int) -> list[str]:
    """Overrides that put the demo's 2 + 2 ranks on what is there: 4 GPUs as they are, 2 or 3 as 1 + 1, else the CPU."""
    if gpus < 2:
        return ["dflash.layout.device=cpu"]
    bf16 = ["bf16.enabled=true", "dflash.target.dtype=bfloat16"]
    if gpus >= 4:
        return bf16
    return [*bf16, "dflash.layout.target_gpus=[0]", "dflash.layout.drafter_gpus=[1]", "dflash.layout.target_tp=1"]


def _show(done: int, total: int) -> None:
    if done % 4 == 0 or done == total:
        print(f"decoded {done}/{total} prompts, plain and speculative", flush=True)


def _gpus() -> int:
    import torch

    count = torch.cuda.device_count()
    if count == 1:
        print("one GPU: target and drafter need one each, so the demo runs on the CPU", flush=True)
    return count


def _prepare(config: RunConfig) -> None:
    from recipe.prepare.prepare import prepare

    prepare(
        inputs=[str(ASSETS / "conversations.jsonl.gz")],
        tokenizer=str(ASSETS),
        output=config.dflash.data.path,
        max_seq_len=config.dflash.data.max_seq_len,
    )


def _train(config: str, overrides: list[str]) -> int:
    command = [sys.executable, "-m", "recipe", "train", config, "--replace"]
    for override in overrides:
        command += ["--set", override]
    return subprocess.run(command, cwd=REPOSITORY).returncode


def _evaluate(run_dir: Path, config: RunConfig) -> dict[str, Any]:
    """The summary of training, completed by real decoding on held-out prompts."""
    from recipe.decode.evaluate import evaluate

    summary = json.loads((run_dir / "summary.json").read_text())
    found = evaluate(
        Path(summary["export"]),
        Path(config.dflash.target.path),
        ASSETS / "heldout.jsonl.gz",
        num_prompts=config.dflash.evaluation.num_prompts,
        max_new_tokens=config.dflash.evaluation.max_new_tokens,
        dtype="float32",  # in bf16 equal logits are common in so small a model, and a tie is no loss of exactness
        progress=_show,
    )
    measured = found.to_dict()
    return summary | measured | {"seconds": summary["seconds"], "evaluation_seconds": measured["seconds"]}
