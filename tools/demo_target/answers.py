"""What the trained demo target is worth, and its on-policy conversations: perplexity, greedy answers, the target card.

``python -m tools.demo_target.answers --model DIR --build data/demo_build --out DIR`` uses the stored (bf16-rounded)
weights in fp32 with transformers' own torch kernels, so that any other machine reads the same answers from the file.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as functional
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from recipe.target.cpu_kernels import use_torch_kernels_on_cpu
from tools.demo_target.corpus import free_text
from tools.demo_target.token_file import ENTRIES_FILE, TEXTS_FILE, TokenFile
from tools.demo_target.tokenizer import TURN_END
from tools.demo_target.train_target import IGNORED, chat_rows

MAX_NEW_TOKENS = 96
WINDOW = 512


def load_stored(folder: Path, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The stored weights in fp32 (their bf16 values, exactly) and the tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@torch.inference_mode()
def negative_log_likelihood(model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
    """(sum of -log p in nats, number of labelled tokens) of [rows, length]; the first token of a row is not scored."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1).float()
    targets = labels[:, 1:].flatten()
    loss = functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return float(loss), int((targets != IGNORED).sum())


def windows(stream: np.ndarray, length: int = WINDOW) -> torch.Tensor:
    """The stream cut into [rows, length], the incomplete rest left out."""
    return torch.from_numpy(stream[: len(stream) // length * length].astype(np.int64)).view(-1, length)


def unigram_log_probabilities(stream: np.ndarray, vocab_size: int) -> np.ndarray:
    """Add-one smoothed log-frequencies of the train text: the model that knows words but no order."""
    counts = np.bincount(stream, minlength=vocab_size) + 1.0
    return np.log(counts / counts.sum())


def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: TokenFile) -> dict[str, float]:
    """Held-out perplexity per token and bits per byte, the unigram's, and that of held-out reference answers."""
    device = model.device
    total, count = 0.0, 0
    cut = windows(data.held_out_text)
    for part in cut.split(32):
        loss, tokens = negative_log_likelihood(model, part.to(device), part.to(device))
        total, count = total + loss, count + tokens
    scored = cut[:, 1:].flatten().numpy()
    unigram = -unigram_log_probabilities(data.text, model.config.vocab_size)[scored].sum()
    size = sum(len(tokenizer.decode(row[1:].tolist()).encode()) for row in cut)
    chat_total, chat_count = 0.0, 0
    for rows in np.array_split(np.arange(len(data.held_out_chats.answers)), 16):
        ids, labels = chat_rows(data.held_out_chats, rows)
        loss, tokens = negative_log_likelihood(model, ids.to(device), labels.to(device))
        chat_total, chat_count = chat_total + loss, chat_count + tokens
    return {
        "heldout_tokens": count,
        "heldout_bytes": size,
        "heldout_perplexity": math.exp(total / count),
        "unigram_perplexity": math.exp(unigram / count),
        "heldout_perplexity_per_byte": math.exp(total / size),
        "unigram_perplexity_per_byte": math.exp(unigram / size),
        "heldout_bits_per_byte": total / size / math.log(2),
        "heldout_answer_perplexity": math.exp(chat_total / chat_count),
    }


def sample_perplexity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> float:
    """Perplexity per token of a few texts, each scored alone."""
    total, count = 0.0, 0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"].to(model.device)
        loss, tokens = negative_log_likelihood(model, ids, ids)
        total, count = total + loss, count + tokens
    return math.exp(total / count)


def sample_unigram_perplexity(
    log_probabilities: np.ndarray, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> float:
    """The unigram model's perplexity on the tokens that :func:`sample_perplexity` scores."""
    ids = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)[1:]]
    return math.exp(-float(log_probabilities[ids].mean()))


@torch.inference_mode()
def greedy_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], batch_size: int
) -> list[list[int]]:
    """Greedy answers as token ids, end-of-turn included where it came within ``MAX_NEW_TOKENS``.

    Prompts are rendered by the chat template, sorted by length and padded on the left under an attention mask.
    """
    rendered = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    ]
    encoded = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
    answers: list[list[int]] = [[] for _ in encoded]
    for first in range(0, len(order), batch_size):
        rows = order[first : first + batch_size]
        batch = tokenizer.pad({"input_ids": [encoded[i] for i in rows]}, padding_side="left", return_tensors="pt")
        output = model.generate(**batch.to(model.device), max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        for row, tokens in zip(rows, output[:, batch["input_ids"].shape[1] :].tolist(), strict=True):
            answers[row] = cut_at_end(tokens, tokenizer)
    return answers


def cut_at_end(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The answer up to and including its first end-of-turn token."""
    end = tokenizer.convert_tokens_to_ids(TURN_END)
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def distinct(texts: Iterable[Sequence[int]], n: int) -> float:
    """Mean share of different n-grams within each text: near 0 for a loop, 1 where nothing repeats."""
    shares = []
    for text in texts:
        grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        if grams:
            shares.append(len(set(grams)) / len(grams))
    return float(np.mean(shares))


def conversations(
    entries: Sequence[dict], answers: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[dict], dict[str, float]]:
    """(rows in ``messages`` form, statistics); kept are answers that ended and re-encode to the very same tokens."""
    end, rows, finished, matching = tokenizer.convert_tokens_to_ids(TURN_END), [], 0, 0
    free_tokens, kept_tokens = 0, 0
    for entry, tokens in zip(entries, answers, strict=True):
        if not tokens or tokens[-1] != end:
            continue
        finished += 1
        text = tokenizer.decode(tokens[:-1])
        if tokenizer.encode(text, add_special_tokens=False) != tokens[:-1]:
            continue
        matching += text == entry["reference"]
        free_tokens += len(tokenizer.encode(free_text(text), add_special_tokens=False))
        kept_tokens += len(tokens)
        messages = [{"role": "user", "content": entry["prompt"]}, {"role": "assistant", "content": text}]
        rows.append({"id": entry["id"], "messages": messages})
    statistics = {
        "prompts": len(entries),
        "ended_by_themselves": finished / len(entries),
        "kept": len(rows),
        "equal_to_documentation": matching / len(entries),
        "mean_answer_tokens": float(np.mean([len(tokens) for tokens in answers])),
        "free_text_share": free_tokens / max(1, kept_tokens),
        "distinct_2": distinct(answers, 2),
        "distinct_4": distinct(answers, 4),
    }
    return rows, statistics


def read_entries(folder: Path) -> list[dict]:
    """The entries of the build folder, each with one fixed phrasing as its ``prompt``."""
    with (folder / ENTRIES_FILE).open(encoding="utf-8") as file:
        entries = [json.loads(line) for line in file]
    for entry in entries:
        questions = entry["questions"]
        entry["prompt"] = questions[hashlib.sha256(b"phrasing " + entry["id"].encode()).digest()[0] % len(questions)]
    return entries


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    """Gzipped JSON lines without a time stamp, so that equal rows give equal bytes."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_bytes(gzip.compress(lines.encode(), 9, mtime=0))


def run(args: argparse.Namespace) -> None:
    """Evaluate, answer, write ``conversations.jsonl.gz``, ``heldout.jsonl.gz`` and ``target_card.json``."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    use_torch_kernels_on_cpu(force=True)
    model, tokenizer = load_stored(args.model, device)
    data = TokenFile.load(args.build)
    card: dict = {"training": json.loads((args.model / "training.json").read_text())}
    card["perplexity"] = measure(model, tokenizer, data)
    print(json.dumps(card["perplexity"]), flush=True)
    texts = json.loads((args.build / TEXTS_FILE).read_text(encoding="utf-8"))
    sample = [text[200:1400] for _, text in sorted(texts.items()) if len(text) > 3000][:: max(1, len(texts) // 6)][:4]
    unigram = unigram_log_probabilities(data.text, model.config.vocab_size)
    card["heldout_sample"] = {
        "texts": sample,
        "perplexity": sample_perplexity(model, tokenizer, sample),
        "unigram_perplexity": sample_unigram_perplexity(unigram, tokenizer, sample),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    entries = read_entries(args.build)
    for name, held_out, limit in (("heldout", True, args.held_out), ("conversations", False, args.conversations)):
        chosen = sorted((e for e in entries if e["held_out"] == held_out), key=_shuffle_key)[:limit]
        started = time.monotonic()
        answers = greedy_answers(model, tokenizer, [entry["prompt"] for entry in chosen], args.batch_size)
        rows, card[name] = conversations(chosen, answers, tokenizer)
        write_rows(args.out / f"{name}.jsonl.gz", rows)
        card[name]["samples"] = rows[:4]
        print(f"{name}: {time.monotonic() - started:.0f} s", json.dumps(card[name], ensure_ascii=False), flush=True)
    card["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    card["versions"]["python"] = platform.python_version()
    (args.out / "target_card.json").write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _shuffle_key(entry: dict) -> str:
    """A fixed order without any relation to the documentation's."""
    return hashlib.sha256(b"order " + entry["id"].encode()).hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.demo_target.answers", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder that train_target wrote")
    parser.add_argument("--build", type=Path, default=Path("data/demo_build"), help="folder that prepare wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--conversations", type=int, default=6000)
    parser.add_argument("--held-out", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=1024)
    run(parser.parse_args())
