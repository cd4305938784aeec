"""Measure one stage on this machine: `python -m recipe bench ring --help`. The scripts live in benchmarks/."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from recipe.errors import ConfigError, nearest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", metavar="STAGE", help=f"one of: {', '.join(sorted(stages())) or 'none found'}")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="options of the stage's script")


def stages() -> dict[str, Path]:
    """Stage -> script."""
    return {path.stem.removeprefix("bench_"): path for path in FOLDER.glob("bench_*.py")}


def run(args: argparse.Namespace) -> int:
    found = stages()
    if args.stage not in found:
        rule = f"there is no benchmark of that stage.{nearest(args.stage, found)}"
        raise ConfigError("STAGE", args.stage, rule, f"one of {', '.join(sorted(found))}")
    return subprocess.run([sys.executable, str(found[args.stage]), *args.rest]).returncode
