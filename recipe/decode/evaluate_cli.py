"""Decode held-out prompts with a drafter and with the target alone, and print what the drafter is worth.

RUN is a run directory (its newest export, its target and its held-out prompts are used); EXPORT is an exported folder
and needs --target and --prompts. Prompts are JSONL rows with "messages" or "prompt", and "domain" if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from recipe.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m recipe evaluate`."""
    parser.add_argument("source", metavar="RUN|EXPORT", type=Path, help="run directory, or exported folder")
    parser.add_argument("--target", metavar="PATH", help="target folder or cached hub id (default: the run's)")
    parser.add_argument("--prompts", metavar="FILE", type=Path, help="JSONL (default: the run's held-out prompts)")
    parser.add_argument(
        "--num-prompts",
        type=int,
        metavar="N",
        help="use the first N prompts (default: the run's evaluation.num_prompts)",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="tokens for each (default: the run's evaluation.max_new_tokens)"
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", default=1, help="prompts decoded together (default: 1); same output"
    )
    parser.add_argument("--temperature", type=float, metavar="T", default=0.0, help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples at a temperature above 0 (default: 0)")
    parser.add_argument(
        "--template-kwargs", metavar="JSON", default="{}",
        help="for the chat template, as in the training data, e.g. '{\"enable_thinking\": false}'",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 … (default: a GPU if there is one)")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto",
                        help="of target and drafter (default: bfloat16 on a GPU, float32 on the CPU)")  # fmt: skip
    parser.add_argument("--tp", type=int, metavar="N", default=1,
                        help="cut the target over N processes of this machine, one GPU each (default: 1)")  # fmt: skip
    parser.add_argument("--exact-sums", action="store_true",
                        help="with --tp: compute what one process would, bit for bit; more to send")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the measurement there too")


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the table; exit code 0 when the output is the target's own, else 1."""
    from rich.console import Console
    from rich.progress import Progress

    from recipe.decode.evaluate import evaluate
    from recipe.tell.run_dir import write_json

    kwargs = _template_kwargs(args.template_kwargs)
    if args.json:
        _check_writable(args.json)
    with Progress(console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("loading", total=None)
        evaluation = evaluate(
            args.source,
            args.target,
            args.prompts,
            args.num_prompts,
            args.max_new_tokens,
            args.temperature,
            args.device,
            args.dtype,
            lambda done, total: bar.update(task, description="decoding", completed=done, total=total),
            template_kwargs=kwargs,
            seed=args.seed,
            batch_size=args.batch_size,
            tp=args.tp,
            exact_sums=args.exact_sums,
        )
    result = evaluation.to_dict()
    if args.json:
        write_json(args.json, result)
    Console().print(table(result))
    # Rounding may part two outputs where two tokens are equally likely; anything else is a fault.
    return 0 if all(one["numeric_tie"] for one in result["mismatches"]) else 1


def _check_writable(path: Path) -> None:
    """Before anything is decoded: ``--json`` names a file that can be written."""
    fix = "name a file in a folder that can be written"
    if path.is_dir():
        raise ConfigError("--json", str(path), "is a folder", fix)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--json", str(path), f"its folder cannot be made ({error.strerror})", fix) from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError("--json", str(path), "its folder cannot be written", fix)


def _template_kwargs(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError("--template-kwargs", text, "is no JSON object", "write e.g. '{\"enable_thinking\": false}'")
    return value


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _interval(pair: Any) -> str:
    return "" if pair is None else f"  (95 %: {pair[0]:.2f} to {pair[1]:.2f})"


def table(result: dict[str, Any]) -> Any:
    """A rich Table of ``Evaluation.to_dict()``."""
    from rich.table import Table

    rows = Table(show_header=False, title=f"{result['prompts']} prompts, {result['tokens']} tokens")
    rows.add_row(
        "tau", f"{_number(result['tau'])} of {result['settings'].get('block_size', '?')}{_interval(result['tau_ci'])}"
    )
    unmeasured = "nothing was measured: no answer was longer than the token of the prefill"
    rows.add_row("", result["tau_is"] if result["verify_forwards"] else unmeasured)
    rows.add_row("accept rate by draft", " ".join(_number(rate) for rate in result["accept_rate"]))
    ties = sum(one["numeric_tie"] for one in result["mismatches"])
    same = "yes" if result["identical"] else f"no: {len(result['mismatches'])} differ, {ties} of them by a numeric tie"
    rows.add_row("identical to plain", same)
    rows.add_row("target forwards / token", f"{_number(result['target_forwards_per_token'], 3)} (plain: 1)")
    speeds = f"{_number(result['plain_tokens_per_s'], 1)} -> {_number(result['tokens_per_s'], 1)} tokens/s"
    rows.add_row("speed-up here", f"{_number(result['speedup'])}x  ({speeds}, {result['settings'].get('device', '?')})")
    if len(result["domains"]) > 1:
        for name, domain in result["domains"].items():
            text = f"{_number(domain['tau'])}{_interval(domain['tau_ci'])}  {domain['prompts']} prompts"
            rows.add_row(f"  tau, {name}", text)
    if result["skipped_too_long"]:
        rows.add_row("skipped, too long", str(result["skipped_too_long"]))
    for one in result["mismatches"][:5]:
        why = "numeric tie" if one["numeric_tie"] else "NOT a tie"
        rows.add_row(
            f"  prompt {one['prompt']}", f"differs at {one['position']}: logit gap {_number(one['gap'], 6)}, {why}"
        )
    return rows
