"""Prompts to decode: JSONL rows to token ids, rendered by the target's own chat template."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recipe.errors import ConfigError

UNNAMED = "all"


@dataclass(frozen=True)
class Prompt:
    """``ids`` int64 [P ≥ 1], the ``text`` that they encode, and the ``domain`` that its tau is reported under."""

    ids: torch.Tensor
    text: str
    domain: str


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file, or of one in gzip. ConfigError names the line that is no object."""
    path = Path(path)
    try:
        content = path.read_bytes()
        lines = (gzip.decompress(content) if path.suffix == ".gz" else content).decode().split("\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        rule = f"the prompts file cannot be read ({error})"
        raise ConfigError("--prompts", str(path), rule, "name a JSONL file") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError("--prompts", f"{path}:{number}", f"is no JSON ({error})", "one object a line") from None
        if not isinstance(row, dict):
            raise ConfigError("--prompts", f"{path}:{number}", "is no JSON object", "one object a line")
        rows.append(row)
    return rows


def encode_prompts(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None
) -> list[Prompt]:
    """Rows with ``messages`` (a chat, an answer at its end dropped), ``prompt`` (text) or ``input_ids`` (what `prepare`
    holds out of rows that were tokens already), with ``domain`` if known.

    ``template_kwargs`` go to the chat template (for example ``{"enable_thinking": false}``): they must be those of the
    training data, or another distribution is measured. ConfigError for no rows, or a row with none of the fields.
    """
    prompts = []
    for number, row in enumerate(rows, 1):
        if row.get("messages"):
            text = _render(row["messages"], f"row {number}", tokenizer, template_kwargs or {})
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        elif isinstance(row.get("prompt"), str):
            text = row["prompt"]
            ids = tokenizer(text)["input_ids"]
        elif row.get("input_ids"):
            ids = _checked_ids(row["input_ids"], f"row {number}", len(tokenizer))
            text = tokenizer.decode(ids)
        else:
            rule = f"has neither 'messages' nor a text 'prompt' nor 'input_ids' (its fields: {sorted(map(str, row))})"
            raise ConfigError("--prompts", f"row {number}", rule, "write one of the three")
        if not ids:
            raise ConfigError("--prompts", f"row {number}", "the prompt has no tokens", "remove the row")
        prompts.append(Prompt(torch.tensor(ids, dtype=torch.int64), text, str(row.get("domain") or UNNAMED)))
    if not prompts:
        raise ConfigError("--prompts", len(rows), "there are no prompts", "name a file with at least one row")
    return prompts


def _checked_ids(ids: Any, place: str, vocabulary: int) -> list[int]:
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < vocabulary for one in ids):
        rule = f"its 'input_ids' are no list of token ids from 0 to {vocabulary - 1}"
        raise ConfigError("--prompts", place, rule, "use rows made with this target's tokenizer")
    return ids


def _render(messages: Any, place: str, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> str:
    """The chat up to where the target answers. ConfigError for what is no chat, or none that the template takes."""
    if not (
        isinstance(messages, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
    ):
        rule = "its 'messages' are no list of objects with a 'role'"
        raise ConfigError("--prompts", place, rule, 'write e.g. [{"role": "user", "content": "…"}]')
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not tokenizer.chat_template:
        rule = "the row holds a chat, and the target's tokenizer has no chat template"
        raise ConfigError("--prompts", place, rule, "use rows with a 'prompt' text")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template_kwargs)
    except Exception as error:  # a template is a program of the target's makers and may raise anything
        rule = f"the target's chat template does not take it ({type(error).__name__}: {str(error).splitlines()[:1]})"
        raise ConfigError("--prompts", place, rule, "mend the row, or remove it") from None
    assert isinstance(text, str)
    return text


def stop_ids(folder: Path, tokenizer: Any) -> set[int]:
    """Every id that ends an answer of the target in ``folder``: what transformers' generation would stop at, and the
    tokenizer's end token."""
    from transformers import AutoConfig, GenerationConfig

    if (folder / "generation_config.json").is_file():
        known = GenerationConfig.from_pretrained(folder)
    else:
        known = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    ids: set[int] = set()
    for source in (known, tokenizer):
        value = getattr(source, "eos_token_id", None)
        ids |= set() if value is None else {value} if isinstance(value, int) else set(value)
    return ids
