"""How good a drafter becomes on a real small model, in the setting of docs/quality.md, through the real pipeline.

Target: SmolLM2-135M-Instruct (`./run.sh fetch-smollm2`). Data: its own greedy answers to the GSM8K training questions
(JSONL with ``prompt``, rendered, and ``answer``; 7,473 rows), 256 of them held out. One optimizer step: one micro-batch
of about 64 sequences x 48 anchors, block 16, 5 layers, AdamW, cosine, 600 steps. Every run is a real launch: one target
rank, the ring, one drafter rank under ZeRO-2.

    python benchmarks/quality_smollm2.py rows ANSWERS.jsonl.gz       answers -> data/quality-rows (CPU)
    python benchmarks/quality_smollm2.py mix CHATS.jsonl             and chats as a second domain -> data/quality-mixed
    python benchmarks/quality_smollm2.py train NAME [NAME ...]       runs named as WORDS says, several at once
    python benchmarks/quality_smollm2.py measure [NAME ...]          held-out tau_est of finished runs -> results.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
TARGET, ROWS = Path("data/smollm2-135m-instruct"), Path("data/quality-rows")
BLOCK, HELD_OUT, ANCHORS_PER_ROW = 16, 256, 48
SEQUENCES, MEAN_TOKENS = 64, 280  # of a step, and of a row (278 and half a row that does not fit)
MUON, WSD = {"optimizer": "Muon", "lr": 0.02}, {"optimizer": "Muon", "lr": 0.014, "decay": "WarmupStableDecayLR"}
NOISE = {"objective.noise": {"type": "uniform", "start": 0.05, "end": 0.01}}
SOFT = {"objective.soft_labels": True}
CE = {"objective.loss": "dflash"}

# A run is named by what differs from D-PACE on hard labels with AdamW, joined by "-": words, and words with a number.
WORDS: dict[str, dict[str, Any]] = {
    "dpace": {},
    "ce": CE,
    "soft": SOFT,
    "published": {**CE, **SOFT, **NOISE, "objective.gamma": 10.0},
    "muon": MUON,
    "wsd": WSD,
    "linear": {"decay": "WarmupDecayLR"},
    "sqrt": {"decay_type": "1-sqrt"},
    "noise": NOISE,
    "mixed": {"rows": "data/quality-mixed"},
    "unclipped": {"clip": 0.0},
}
# "lr" in thousandths with Muon and in ten-thousandths with AdamW, the others without a unit in hundredths.
NUMBERS: dict[str, tuple[str, float]] = {
    "lr": ("lr", 1e-3),
    "adam": ("lr", 1e-4),
    "anchors": ("anchors", 1),
    "reuse": ("ring.reuse", 1),
    "ready": ("ring.min_ready", 1),
    "steps": ("steps", 1),
    "seed": ("run.seed", 1),
    "layers": ("drafter.num_layers", 1),
    "block": ("drafter.block_size", 1),
    "sequences": ("sequences", 1),
    "gamma": ("objective.gamma", 1.0),
    "alpha": ("objective.dpace_alpha", 0.01),
    "accept": ("objective.acceptance_weight", 0.01),
    "soft": ("objective.soft_weight", 0.01),
    "ratio": ("decay_ratio", 0.01),
    "momentum": ("momentum", 0.01),
    "decay": ("weight_decay", 0.01),
}


def changes_of(name: str) -> dict[str, Any]:
    """What a run's name says, as keys of ``run_config``."""
    changes: dict[str, Any] = {}
    for part in name.split("-"):
        if part in WORDS:
            changes |= WORDS[part]
            continue
        word = part.rstrip("0123456789")
        if word not in NUMBERS or word == part:
            raise SystemExit(f"{name}: {part!r} is none of {', '.join(WORDS)}, or {', '.join(NUMBERS)} with a number")
        key, unit = NUMBERS[word]
        changes |= {key: round(int(part[len(word) :]) * unit, 6) if isinstance(unit, float) else int(part[len(word) :])}
        changes |= SOFT if word == "soft" else {}
    return changes


def rows(answers: Path) -> None:
    """Tokenise prompt and answer apart (the answer is what the target generated) and let `prepare` make the rows."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    tokens = ROWS.parent / "quality-tokens.jsonl"
    with gzip.open(answers, "rt") as source, tokens.open("w") as out:
        for line in source:
            row = json.loads(line)
            prompt, answer = (
                tokenizer(row[part], add_special_tokens=False)["input_ids"] for part in ("prompt", "answer")
            )
            mask = [0] * len(prompt) + [1] * len(answer)
            out.write(json.dumps({"input_ids": prompt + answer, "loss_mask": mask}) + "\n")
    prepare(tokens, ROWS, HELD_OUT)


def prepare(source: Path, output: Path, held_out: int) -> None:
    """`python -m recipe prepare` for this target."""
    command = [sys.executable, "-m", "recipe", "prepare", "--input", source, "--tokenizer", TARGET, "--output", output]
    subprocess.run([*map(str, command), "--max-seq-len", "512", "--holdout", str(held_out)], check=True)


def mix(chats: Path) -> None:
    """Rows of a second domain (the target's answers, from `regenerate`), and both domains' training rows together."""
    from recipe.data.rows import Rows

    other, mixed, tokens = (ROWS.with_name(f"quality-{name}") for name in ("chat", "mixed", "mixed-tokens.jsonl"))
    prepare(chats, other, HELD_OUT // 2)
    with tokens.open("w") as out:
        for part in (ROWS, other):
            both = Rows.open(part, split="train")
            for ids, mask in (both[i] for i in range(len(both))):
                row = {"input_ids": [int(x) for x in ids], "loss_mask": [int(x) for x in mask]}
                out.write(json.dumps(row) + "\n")
    prepare(tokens, mixed, 0)


def run_config(name: str, swap: bool, steps: int, cpu: bool) -> dict[str, Any]:
    """The DeepSpeed JSON of one run. ``swap`` exchanges the two GPUs, so that runs beside each other share them."""
    changes = {"optimizer": "AdamW", "decay": "WarmupCosineLR", **changes_of(name)}
    anchors, own_steps = changes.pop("anchors", ANCHORS_PER_ROW), changes.pop("steps", steps)
    steps = steps if cpu else own_steps
    schedule = {"total_num_steps": "auto", "warmup_num_steps": "auto"}
    schedule |= {key: changes.pop(key) for key in ("decay_ratio", "decay_type") if key in changes}
    params = {"weight_decay": 0.01, "betas": [0.9, 0.95]}
    params |= {key: changes.pop(key) for key in ("weight_decay", "momentum") if key in changes}
    kind, lr = changes.pop("optimizer"), changes.pop("lr", 6e-4)
    params |= {"muon_lr": lr, "adam_lr": 6e-4} if kind == "Muon" else {"lr": lr}
    reuse, sequences = changes.get("ring.reuse", 1), changes.pop("sequences", SEQUENCES)
    sequences = 2 if cpu else sequences
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": changes.pop("clip", 1.0),
        "bf16": {"enabled": not cpu},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 2, "contiguous_gradients": True, "overlap_comm": False},
        "optimizer": {"type": kind, "params": params},
        "scheduler": {"type": changes.pop("decay"), "params": schedule},
        "dflash": {
            "run": {
                "name": name, "output_dir": "runs/quality", "seed": 1, "epochs": 50, "max_steps": steps,
                "warmup_ratio": 0.04, "log_every": 20, "save_every": 10_000, "keep": 1,
            },
            "data": {
                "path": changes.pop("rows", str(ROWS)), "token_budget": sequences * MEAN_TOKENS, "max_seq_len": 512,
                "max_batch_size": 2 * sequences,
            },
            "layout": {"target_gpus": [int(swap)], "drafter_gpus": [int(not swap)], "target_tp": 1,
                       "share_gpus": torch.cuda.device_count() == 1},
            "target": {"path": str(TARGET), "dtype": "float32" if cpu else "bfloat16"},
            "ring": {"min_ready": 12 if reuse > 1 else 4, "max_depth": 44, "reuse": reuse, "timeout_s": 300},
            "drafter": {
                "num_layers": 1 if cpu else 5, "block_size": BLOCK, "max_anchors": sequences * anchors,
                "mask_token_id": 49151,
            },
            "objective": {"loss": "dpace", "soft_labels": False, "noise": {"type": "none", "start": 0.0, "end": 0.0}},
            "telemetry": {"wandb": {"mode": "disabled"}, "gpu": False},
        },
    }  # fmt: skip
    for key, value in changes.items():
        section, field = key.split(".")
        config["dflash"][section][field] = value
    return config


def train(names: list[str], steps: int, at_once: int, cpu: bool, seconds: float) -> int:
    """Launch the runs, ``at_once`` beside each other; their logs lie beside their configs. Returns how many failed.

    After ``seconds`` no run is begun; those in progress end.
    """
    folder = Path("runs/quality-configs")
    folder.mkdir(parents=True, exist_ok=True)
    failed, start = 0, time.time()
    waiting, running, gpus = deque(enumerate(names)), [], max(1, torch.cuda.device_count())
    while waiting or running:
        if waiting and time.time() - start > seconds:
            print(f"not begun: {' '.join(name for _, name in waiting)}", flush=True)
            waiting.clear()
        while waiting and len(running) < at_once:
            index, name = waiting.popleft()
            path = folder / f"{name}.json"
            path.write_text(json.dumps(run_config(name, index % gpus == 1, steps, cpu), indent=1))
            with (folder / f"{name}.log").open("w") as log:
                command = [sys.executable, "-m", "recipe", "train", str(path), "--replace"]
                running.append((name, time.time(), subprocess.Popen(command, stdout=log, stderr=log)))
        time.sleep(0.5)
        for entry in [e for e in running if e[2].poll() is not None]:
            running.remove(entry)
            name, began, process = entry
            failed += process.returncode != 0
            tail = (folder / f"{name}.log").read_text().strip().splitlines()[-1:]
            print(
                f"{name}: exit {process.returncode} after {time.time() - began:.0f} s  {''.join(tail)[:150]}",
                flush=True,
            )
    return failed


def held_out_batches(
    rows: Path,
    capture: Any,
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    limit: int | None = None,
    block: int = BLOCK,
) -> list[Any]:
    """The first ``limit`` held-out rows (None: all), ``size`` a micro-batch: blocks inside the answer, 48 a row."""
    from recipe.data.rows import Rows
    from recipe.drafter.batch import assemble

    held_out, batches = Rows.open(rows, split="heldout"), []
    count = min(len(held_out), limit or len(held_out))
    for start in range(0, count, size):
        chosen = [held_out[i] for i in range(start, min(start + size, count))]
        anchors, taps = [], []
        for ids, mask in chosen:
            whole = np.lib.stride_tricks.sliding_window_view(mask, block).all(1) if len(mask) >= block else np.zeros(0)
            places = np.flatnonzero(whole)
            take = np.linspace(0, len(places) - 1, min(len(places), ANCHORS_PER_ROW)).round().astype(int)
            anchors.append(places[np.unique(take)] if len(places) else places)
            taps.append([t[0] for t in capture.capture(torch.as_tensor(ids, device=device)[None])])
        joined = [torch.cat([row[k] for row in taps]).to(dtype) for k in range(len(taps[0]))]
        ids, masks = (np.concatenate([np.asarray(row[k]) for row in chosen]) for k in (0, 1))
        batches.append(assemble(ids, masks, [len(row[0]) for row in chosen], anchors, joined))
    return batches


@torch.no_grad()
def measure(names: list[str], rows: Path, cpu: bool) -> dict[str, Any]:
    """Teacher-forced tau_est of each finished run on the held-out answers, with accept rates by position."""
    from transformers import AutoModelForCausalLM

    from recipe.config.schema import Objective as Section
    from recipe.drafter.export_layout import load_export
    from recipe.drafter.model import DFlashDrafter
    from recipe.objective.objective import Objective
    from recipe.target.capture import TapCapture

    device, dtype = (torch.device("cpu"), torch.float32) if cpu else (torch.device("cuda"), torch.bfloat16)
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=dtype).to(device).eval()
    table, batches, last = {}, [], None
    for name in names:
        exports = sorted(Path("runs/quality", name, "export").glob("step_*"))
        if not exports:
            raise SystemExit(f"{name}: no export in runs/quality; train it first")
        config, tensors = load_export(exports[-1])
        drafter = DFlashDrafter(config)
        drafter.load_state_dict({k: v for k, v in tensors.items() if k in drafter.state_dict()})
        drafter = drafter.to(device, dtype).eval()
        block = config.block_size
        if (config.target_layer_ids, block) != last:
            last = config.target_layer_ids, block
            capture = TapCapture(target, config.target_layer_ids)
            batches = held_out_batches(rows, capture, device, dtype, 2 if cpu else 64, 4 if cpu else None, block)
            capture.close()
        objective, sums = Objective(Section(loss="dflash", soft_labels=False, gamma=7.0), block), {}
        prefix, blocks = np.zeros(block - 1), 0.0
        embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
        for batch in batches:
            hidden = drafter(batch, embedding)
            for key, (above, below) in objective.sums(hidden, batch, head).metrics.items():
                got = sums.setdefault(key, [0.0, 0.0])
                got[0] += float(above)
                got[1] += float(below)
            shape = (len(batch.host.keep), block, -1)
            guess = (hidden.view(shape)[:, 1:] @ head.T).argmax(-1)
            truth = batch.input_ids[batch.anchors[:, None] + torch.arange(1, block, device=device)]
            accepted = (guess == truth).cumprod(1)[batch.keep]
            prefix += accepted.sum(0).cpu().numpy()
            blocks += float(len(accepted))
        table[name] = {
            "tau_est": round(sums["tau_est"][0] / sums["tau_est"][1], 4),
            "accept": [round(float(p / blocks), 3) for p in prefix[:4]],
            "blocks": int(blocks),
            "loss": round(sums["loss"][0] / sums["loss"][1], 4),
        }
        print(f"{name:20s} {json.dumps(table[name])}", flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["rows", "mix", "train", "measure"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so many")
    parser.add_argument("--cpu", action="store_true", help="a rehearsal: one layer, two sequences a step, float32")
    parser.add_argument("--rows", type=Path, default=ROWS, help="whose held-out split is measured [%(default)s]")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.action == "rows":
        return rows(Path(args.names[0]))
    if args.action == "mix":
        return mix(Path(args.names[0]))
    if args.action == "train":
        raise SystemExit(1 if train(args.names, args.steps, args.at_once, args.cpu, args.seconds) else 0)
    finished = sorted({path.parent.parent.name for path in Path("runs/quality").glob("*/export/step_*")})
    table = measure(args.names or finished, args.rows, args.cpu)
    if args.json:
        args.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
