"""Many short trainings of a SmolLM2 drafter in one process: which optimizer, rate and schedule are worth a launch?

The target's taps of all rows are captured once and kept on the device (12 GB for 7,217 rows), so a step is the
drafter's alone, 37 ms on an H200. Mathematics, data, anchors and objective are the product's; optimizer, schedule and
the order of the rows are written out here. What looks good goes through the real pipeline (`quality_smollm2.py`).

    python benchmarks/quality_sweep.py [NAME ...] [--json FILE] [--seconds 500] [--part 0/2]
    python benchmarks/quality_sweep.py adamw muon-4 --cpu     a rehearsal: 3 steps of one layer

Held-out ``tau_est`` as in `quality_smollm2.py measure`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quality_smollm2 import BLOCK, ROWS, TARGET, held_out_batches

from recipe.config.schema import Drafter, Noise
from recipe.config.schema import Objective as Section
from recipe.data.rows import Rows
from recipe.drafter.anchors import EntryKey, plan_anchors
from recipe.drafter.batch import MicroBatch, assemble
from recipe.drafter.config import DrafterConfig
from recipe.drafter.model import DFlashDrafter
from recipe.model_files.shapes import TargetShape
from recipe.objective.objective import Objective
from recipe.target.capture import TapCapture

TAPS, MASK_ID = [1, 8, 14, 20, 27], 49151
# Changes to the defaults of `train`. ``muon``: rate in units of AdamW's (torch's "match_rms_adamw"): 4e-3 moves a
# square matrix of this drafter as far as DeepSpeed's 0.02 does, a wide one 1.6 to 2.2 times as far.
JOBS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw-init-.01": {"std": 0.01},
    "adamw-init-.04": {"std": 0.04},
    "adamw-out-zero": {"zero_out": True},
    "adamw-beta-.99": {"betas": (0.9, 0.99)},
    "muon-1": {"muon": 1e-3},
    "muon-2": {"muon": 2e-3},
    "muon-4": {"muon": 4e-3},
    "muon-8": {"muon": 8e-3},
    "muon-2-init-.04": {"muon": 2e-3, "std": 0.04},
    "muon-2-out-zero": {"muon": 2e-3, "zero_out": True},
    "muon-4-out-zero": {"muon": 4e-3, "zero_out": True},
    "muon-2-decay-.1": {"muon": 2e-3, "weight_decay": 0.1},
    "muon-2-momentum-.9": {"muon": 2e-3, "momentum": 0.9},
    "muon-2-stable-decay": {"muon": 2e-3, "schedule": "stable-decay"},
    "muon-2-anchors96": {"muon": 2e-3, "anchors": 96},
    "muon-2-alpha-.3": {"muon": 2e-3, "alpha": 0.3},
    "muon-4-600": {"muon": 4e-3, "steps": 600},
    "muon-3-linear-600": {"muon": 3e-3, "schedule": "linear", "steps": 600},
    "muon-2-stable-decay-600": {"muon": 2e-3, "schedule": "stable-decay", "steps": 600},
    "muon-4-stable-decay-600": {"muon": 4e-3, "schedule": "stable-decay", "steps": 600},
    "muon-4-original": {"muon": 0.02, "scale": "original"},
    "muon-4-unclipped": {"muon": 4e-3, "clip": math.inf},
}


class Bench:
    """Target, rows and their taps on one device."""

    def __init__(self, cpu: bool) -> None:
        from transformers import AutoModelForCausalLM

        self.device = torch.device("cpu" if cpu else "cuda")
        self.dtype = torch.float32 if cpu else torch.bfloat16
        target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=self.dtype).to(self.device).eval()
        self.embedding, self.head = (
            module.weight.detach() for module in (target.get_input_embeddings(), target.get_output_embeddings())
        )
        capture, rows = TapCapture(target, TAPS), Rows.open(ROWS, split="train")
        self.rows = [rows[index] for index in range(min(len(rows), 6 if cpu else len(rows)))]
        self.taps = self._capture(capture)
        few, size = (2, 2) if cpu else (None, 64)
        self.held_out = held_out_batches(ROWS, capture, self.device, self.dtype, size, few)

    @torch.no_grad()
    def _capture(self, capture: TapCapture, together: int = 128) -> list[Tensor]:
        """k x [T, H] of each row, stacked."""
        found: list[Any] = [None] * len(self.rows)
        order = np.argsort([len(ids) for ids, _ in self.rows])
        for start in range(0, len(order), together):
            chosen = order[start : start + together]
            ids = torch.zeros(len(chosen), max(len(self.rows[i][0]) for i in chosen), dtype=torch.int64)
            for place, i in enumerate(chosen):
                ids[place, : len(self.rows[i][0])] = torch.as_tensor(np.asarray(self.rows[i][0], dtype=np.int64))
            taps = capture.capture(ids.to(self.device))
            for place, i in enumerate(chosen):
                found[i] = torch.stack([tap[place, : len(self.rows[i][0])] for tap in taps])
        return found

    def batch(self, pick: np.ndarray, anchors: int, step: int) -> MicroBatch:
        rows = [self.rows[i] for i in pick]
        masks = [np.asarray(mask) for _, mask in rows]
        places = plan_anchors(masks, [EntryKey(step, int(i)) for i in pick], len(pick) * anchors, 1)
        ids = np.concatenate([np.asarray(ids) for ids, _ in rows])
        taps = torch.cat([self.taps[i] for i in pick], dim=1)
        return assemble(ids, np.concatenate(masks), [len(ids) for ids, _ in rows], places, list(taps))

    @torch.no_grad()
    def measure(self, drafter: DFlashDrafter) -> dict[str, float]:
        objective, sums = Objective(Section(loss="dflash", soft_labels=False, gamma=7.0), BLOCK), {}
        for batch in self.held_out:
            metrics = objective.sums(drafter(batch, self.embedding), batch, self.head).metrics
            for key in ("tau_est", "loss"):
                above, below = sums.get(key, (0.0, 0.0))
                sums[key] = (above + float(metrics[key][0]), below + float(metrics[key][1]))
        return {key: round(above / below, 4) for key, (above, below) in sums.items()}


def ratio(schedule: str, step: int, steps: int) -> float:
    """Of the highest rate: linear rise over 4 % of the steps, then down to 0."""
    falling = {
        "cosine": 0.5 * (1 + math.cos(math.pi * step / steps)),
        "linear": 1 - step / steps,
        "stable-decay": min(1.0, (1 - step / steps) / 0.4),
    }
    return min((step + 1) / (0.04 * steps), falling[schedule])


def train(bench: Bench, steps: int = 300, sequences: int = 64, anchors: int = 48, lr: float = 6e-4,
          muon: float | None = None, scale: str = "match_rms_adamw", momentum: float = 0.95, weight_decay: float = 0.01,
          betas: tuple[float, float] = (0.9, 0.95), schedule: str = "cosine", std: float = 0.02, zero_out: bool = False,
          alpha: float = 0.5, clip: float = 1.0, layers: int = 5) -> dict[str, Any]:  # fmt: skip
    """One training; weights in the device's dtype with fp32 masters. Held-out numbers, tau_est on the way."""
    section = Drafter(num_layers=layers, block_size=BLOCK, mask_token_id=MASK_ID)
    name = str(bench.dtype).removeprefix("torch.")
    config = DrafterConfig.build(section, TargetShape.resolve(str(TARGET)), TAPS, MASK_ID, dtype=name)
    drafter = DFlashDrafter(config).initialize(1, std)
    for layer in drafter.layers if zero_out else ():
        for matrix in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            torch.nn.init.zeros_(matrix)
    drafter = drafter.to(bench.device)
    masters = {key: torch.nn.Parameter(value.detach().float().clone()) for key, value in drafter.named_parameters()}
    drafter = drafter.to(bench.dtype)
    weights = dict(drafter.named_parameters())
    matrices = [m for m in masters.values() if muon is not None and m.ndim == 2]
    others = [m for m in masters.values() if muon is None or m.ndim != 2]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=lr, betas=betas, weight_decay=weight_decay)]
    if muon is not None:
        optimizers.append(
            torch.optim.Muon(matrices, lr=muon, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn=scale)
        )
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    loss = Section(loss="dpace", dpace_alpha=alpha, soft_labels=False, noise=Noise(type="none", start=0, end=0))
    objective, order, trail = Objective(loss, BLOCK), np.zeros(0, dtype=np.int64), []
    rng, began = np.random.default_rng(1), time.perf_counter()
    for step in range(steps):
        while len(order) < sequences:
            order = np.concatenate([order, rng.permutation(len(bench.rows))])
        pick, order = order[:sequences], order[sequences:]
        batch = bench.batch(pick, anchors, step)
        sums = objective.sums(drafter(batch, bench.embedding), batch, bench.head)
        drafter.zero_grad()
        (sums.loss_sum / objective.supervised_weight(batch)).backward()
        for key, weight in weights.items():
            masters[key].grad = None if weight.grad is None else weight.grad.float()
        torch.nn.utils.clip_grad_norm_(list(masters.values()), clip)
        for group, highest in groups:
            group["lr"] = highest * ratio(schedule, step, steps)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for key, weight in weights.items():
                weight.copy_(masters[key])
        if step + 1 in (steps // 3, 2 * steps // 3):
            trail.append(bench.measure(drafter)["tau_est"])
    return bench.measure(drafter) | {"on the way": trail, "seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of JOBS [all]")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no training after so many")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th job from i on, to share a GPU among processes")
    parser.add_argument("--cpu", action="store_true", help="a rehearsal")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began, (part, parts) = time.perf_counter(), map(int, args.part.split("/"))
    bench, table = Bench(args.cpu), {}
    for name in (args.names or list(JOBS))[part::parts]:
        if time.perf_counter() - began > args.seconds:
            break
        table[name] = train(
            bench, **JOBS[name] | ({"steps": 3, "sequences": 2, "anchors": 4, "layers": 1} if args.cpu else {})
        )
        print(f"{name:26s} {json.dumps(table[name])}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
