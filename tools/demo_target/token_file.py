"""The prepared training file of the demo target: running text and conversations as token ids, both already split."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from tools.demo_target.corpus import QUESTIONS, Corpus, Entry
from tools.demo_target.tokenizer import END_OF_TEXT, save_tokenizer, train_tokenizer

#: An answer and its end-of-turn token fit into the 96 new tokens of one generation.
MAX_ANSWER_TOKENS = 92
#: Longest sentence of the documentation within an answer; entries with longer ones are left out.
MAX_FREE_TOKENS = 36
TOKENS_FILE, ENTRIES_FILE, TEXTS_FILE = "tokens.npz", "entries.jsonl", "heldout_texts.json"


@dataclass(frozen=True)
class Conversations:
    """Conversations in one stream: row i is ``tokens[starts[i]:starts[i + 1]]``, its answer from ``answers[i]`` on."""

    tokens: np.ndarray
    starts: np.ndarray
    answers: np.ndarray


@dataclass(frozen=True)
class TokenFile:
    """What the training needs: uint16 text streams and conversations, for training and held out."""

    text: np.ndarray
    held_out_text: np.ndarray
    chats: Conversations
    held_out_chats: Conversations

    @staticmethod
    def load(folder: Path) -> TokenFile:
        """Read ``tokens.npz`` of a folder that :func:`build` wrote."""
        with np.load(folder / TOKENS_FILE) as arrays:
            chats, held_out = (
                Conversations(*(arrays[f"{split}_{part}"] for part in ("tokens", "starts", "answers")))
                for split in ("chat", "held_out_chat")
            )
            return TokenFile(arrays["text"], arrays["held_out_text"], chats, held_out)


def build(corpus: Corpus, folder: Path) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the train split and write it, the token arrays and the list of entries to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    train = [entry for entry in corpus.entries if not entry.held_out]
    samples = [f"{entry.question(index)} {entry.answer()}" for index, entry in enumerate(train)]
    # The answers weigh three times: their words are what the target writes in the demo.
    tokenizer = train_tokenizer([*corpus.train_texts.values(), *samples, *samples, *samples])
    save_tokenizer(tokenizer, folder)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    answered = [(entry, entry.answer()) for entry in corpus.entries]
    pairs = [
        (entry, answer)
        for entry, answer in answered
        if count(answer) <= MAX_ANSWER_TOKENS and count(entry.sentences[0]) <= MAX_FREE_TOKENS
    ]
    arrays = {
        "text": _stream(tokenizer, corpus.train_texts.values()),
        "held_out_text": _stream(tokenizer, corpus.held_out_texts.values()),
        **_conversations(tokenizer, [pair for pair in pairs if not pair[0].held_out], range(len(QUESTIONS)), "chat"),
        **_conversations(tokenizer, [pair for pair in pairs if pair[0].held_out], range(1), "held_out_chat"),
    }
    np.savez_compressed(folder / TOKENS_FILE, **arrays)  # type: ignore[arg-type]
    with (folder / ENTRIES_FILE).open("w", encoding="utf-8") as file:
        for entry, answer in pairs:
            file.write(json.dumps(_row(entry, answer), ensure_ascii=False) + "\n")
    (folder / TEXTS_FILE).write_text(json.dumps(corpus.held_out_texts, ensure_ascii=False), encoding="utf-8")
    return tokenizer


def _row(entry: Entry, answer: str) -> dict[str, object]:
    """One line of the list of entries: what can be asked, and what the documentation says."""
    questions = [entry.question(phrasing) for phrasing in range(len(QUESTIONS))]
    return {"id": entry.name, "held_out": entry.held_out, "questions": questions, "reference": answer}


def _stream(tokenizer: PreTrainedTokenizerFast, texts: object) -> np.ndarray:
    """All documents as one stream, each closed by the end-of-text token."""
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[call-overload]
    return np.concatenate([np.array([*ids, end], dtype=np.uint16) for ids in encoded])


def _conversations(
    tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[Entry, str]], phrasings: range, name: str
) -> dict[str, np.ndarray]:
    """Render every (entry, answer) pair in every phrasing through the chat template."""
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": entry.question(phrasing)}], tokenize=False, add_generation_prompt=True
        )
        for entry, _ in pairs
        for phrasing in phrasings
    ]
    answers = [answer + "<|im_end|>\n" for _, answer in pairs for _ in phrasings]
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    answer_ids = tokenizer(answers, add_special_tokens=False)["input_ids"]
    lengths = [len(p) + len(a) for p, a in zip(prompt_ids, answer_ids, strict=True)]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    flat = [token for p, a in zip(prompt_ids, answer_ids, strict=True) for token in (*p, *a)]
    return {
        f"{name}_tokens": np.array(flat, dtype=np.uint16),
        f"{name}_starts": starts,
        f"{name}_answers": starts[:-1] + np.array([len(p) for p in prompt_ids], dtype=np.int64),
    }
