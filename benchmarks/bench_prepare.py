"""Speed of the whole ``python -m recipe prepare`` command: wall clock, with start-up stated apart.

    python benchmarks/bench_prepare.py TOKENIZER FILE [FILE …] [--chitchat] [--markdown OUT] [--repeat 3]

``--chitchat`` adds the chats of the package `chitchat-dataset`, if it is installed (or CHITCHAT names its
dataset.json): real conversations of very many very short turns. Start-up is the wall clock of the same command on one
row. The load average is printed with each result: a number from a busy machine says little.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import itertools
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def chitchat(target: Path) -> Path:
    """Write the chats as `messages`; each speaker's utterances in a row are one message. Trailing users are cut."""
    named = os.environ.get("CHITCHAT")
    if not named:
        spec = importlib.util.find_spec("chitchat_dataset")
        if spec is None or spec.origin is None:
            raise SystemExit("pip install chitchat-dataset, or set CHITCHAT to its dataset.json")
        named = str(Path(spec.origin).parent / "dataset.json")
    with open(named, encoding="utf-8") as file, target.open("w", encoding="utf-8") as out:
        for name, chat in json.load(file).items():
            messages = [
                {
                    "role": ("user", "assistant")[i % 2],
                    "content": " ".join(part["text"] for part in said).strip(),
                }
                for i, said in enumerate(chat["messages"])
            ]
            if len(messages) % 2:
                messages.pop()
            if messages:
                out.write(json.dumps({"id": name, "messages": messages}) + "\n")
    return target


def prepare(tokenizer: str, file: Path, folder: Path) -> tuple[float, float, dict[str, Any]]:
    """(wall clock of the command in seconds, processor seconds of all its processes, its report)."""
    words = ["--input", str(file), "--tokenizer", tokenizer, "--output", str(folder), "--overwrite"]
    begun, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "recipe", "prepare", *words], cwd=ROOT, check=True, capture_output=True)
    wall, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return wall, cpu, json.loads((folder / "report.json").read_text(encoding="utf-8"))


def one_row(file: Path, target: Path) -> Path:
    """The first row of a JSONL file, alone."""
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
        target.write_bytes(b"".join(itertools.islice(lines, 1)))
    return target


def measure(tokenizer: str, file: Path, repeat: int, folder: Path) -> str:
    """A row of the table; the best of ``repeat`` runs, since all that disturbs makes a run slower."""
    alone = one_row(file, folder / "one.jsonl")
    start_wall, start_cpu = min(run[:2] for run in runs(tokenizer, alone, repeat, folder))
    wall, cpu, report, load = min(runs(tokenizer, file, repeat, folder), key=lambda run: run[0])
    tokens = report["tokens"]
    rows = f"{report['rows_in']} rows, {tokens:,} tokens"
    return (
        f"| {file.name} | {rows} | {wall:.1f} s | {start_wall:.1f} s | {tokens / wall / 1000:.0f} k | "
        f"**{tokens / (wall - start_wall) / 1000:.0f} k** | {tokens / (cpu - start_cpu) / 1000:.0f} k | {load:.1f} |"
    )


def runs(tokenizer: str, file: Path, repeat: int, folder: Path) -> list[tuple[float, float, dict[str, Any], float]]:
    """`prepare`'s results, each with the load average at its end."""
    return [(*prepare(tokenizer, file, folder / "out"), os.getloadavg()[0]) for _ in range(repeat)]


def machine() -> str:
    """Hardware and versions."""
    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.split(":")[1].strip() for line in facts if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    packages = ", ".join(f"{name} {version(name)}" for name in ("transformers", "tokenizers", "datasets"))
    return f"{date.today()}, {cores} cores of {names[0] if names else platform.machine()}, {packages}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--chitchat", action="store_true")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files = [*args.files, *([chitchat(folder / "chitchat.jsonl")] if args.chitchat else [])]
        lines = [
            "# Speed of `prepare`",
            "",
            f"{machine()}. Tokenizer: {Path(args.tokenizer).name}. Best of {args.repeat} runs of the real command.",
            "",
            "| input | | wall clock | of which start-up | tokens/s, all | tokens/s without start-up "
            "| per core-second | load average |",
            "|---|---|---|---|---|---|---|---|",
            *(measure(str(Path(args.tokenizer).resolve()), f.resolve(), args.repeat, folder) for f in files),
        ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
