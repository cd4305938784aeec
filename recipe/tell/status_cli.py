"""``python -m recipe status RUN``: is it healthy, and what is it doing? One screen, and an exit code for scripts."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from recipe.errors import ConfigError
from recipe.tell.logline import rate
from recipe.tell.run_dir import RunDir
from recipe.tell.status import Status, duration, read_status

DESCRIPTION = "Say whether a run is healthy and what it is doing, also from another shell or host, also after its end."
EPILOG = """exit codes:
  0  healthy (STARTING, FILLING, TRAINING) or DONE
  2  RUN is not a run folder
  3  STALLED: alive, but no progress for longer than expected, or stopped
  4  DIVERGED: the loss is not finite, too many steps were skipped, or nothing was trained
  5  DEAD: a process of the run is gone

example: python -m recipe status runs/demo --watch"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb, on a parser of `recipe.run.cli`."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", metavar="RUN", help="run folder, for example runs/demo (or just its name)")
    parser.add_argument("--watch", action="store_true", help="show it every --interval seconds until the run ends")
    parser.add_argument("--interval", type=float, default=2.0, metavar="S", help="seconds between looks (default: 2)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the screen")


def run(args: argparse.Namespace) -> int:
    """Print the status; returns the exit code. Raises ConfigError if RUN is no run or the interval makes no sense."""
    if not (math.isfinite(args.interval) and args.interval > 0):
        raise ConfigError("--interval", args.interval, "must be more than 0 seconds", "leave it out: the default is 2")
    run_dir = RunDir.open(args.run)
    while True:
        status = read_status(run_dir)
        if args.watch and not args.json and sys.stdout.isatty():
            print("\033[H\033[2J", end="")
        print(json.dumps(status.to_json()) if args.json else screen(run_dir, status), flush=True)
        if not args.watch or status.state in ("DONE", "DEAD", "DIVERGED"):
            return status.exit_code
        try:
            time.sleep(args.interval)
        except KeyboardInterrupt:
            return status.exit_code


def screen(run_dir: RunDir, status: Status) -> str:
    """The status as a few aligned lines; what is not known is left out."""
    rows: list[tuple[str, str]] = [(status.state, f"{run_dir.path}: {status.message}")]
    if status.step is not None:
        share = f" ({100 * status.step / status.steps:.1f} %)" if status.steps else ""
        rows.append(("step", f"{status.step}/{status.steps}{share}"))
    if status.loss is not None:
        rows.append(("loss", f"{status.loss:.4f}"))
    if status.tokens_per_s is not None:
        rows.append(("speed", f"{rate(status.tokens_per_s)} tokens/s"))
    if status.eta_s is not None and status.state in ("STARTING", "FILLING", "TRAINING"):
        rows.append(("time left", f"about {duration(status.eta_s)}"))
    if status.waiting_side is not None:
        slower = {"drafter": "the target is the bottleneck", "target": "the drafters are the bottleneck"}
        rows.append(("waits", f"{status.waiting_side} ({slower.get(status.waiting_side, 'balanced')})"))
    rows += [("gpus", _gpu_line(row)) for row in status.gpus]
    if status.kernels is not None:
        rows.append(("kernels", status.kernels))
    if status.last_progress_s is not None:
        rows.append(("progress", f"{duration(status.last_progress_s)} ago"))
    if status.heartbeat_s is not None and status.state not in ("DONE", "DEAD", "DIVERGED"):
        rows.append(("heartbeat", f"{duration(status.heartbeat_s)} ago"))
    if status.process is not None:
        rows.append(("process", status.process))
    return "\n".join(f"{name:<10}{value}" for name, value in rows)


def _gpu_line(row: Mapping[str, Any]) -> str:
    """``node 0 target: 5 GPUs, 93 % busy (lowest 88 %), 61.2/139.8 GiB, 540 W each, 64 °C``."""
    parts = [f"{row['gpus']:.0f} GPUs"] if "gpus" in row else []
    if "util_pct" in row:
        lowest = f" (lowest {row['util_min_pct']:.0f} %)" if "util_min_pct" in row else ""
        parts.append(f"{row['util_pct']:.0f} % busy{lowest}")
    if "mem_used" in row and "mem_total" in row:
        parts.append(f"{row['mem_used'] / 2**30:.1f}/{row['mem_total'] / 2**30:.1f} GiB")
    parts += [f"{row['power_w']:.0f} W each"] * ("power_w" in row)
    parts += [f"{row['temperature_c']:.0f} °C"] * ("temperature_c" in row)
    return f"node {row['node']} {row['role']}: {', '.join(parts)}"
