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
from recipe.prepare.chat_mask import ChatMask

UNNAMED = "all"


@dataclass(frozen=True)
class Prompt:
    """``ids`` int64 [P ≥ 1], the ``text`` that they encode, and the ``domain`` that its tau is reported under."""

    ids: torch.Tensor
    text: str
    domain: str


def read_prompts(path: Path, field: str = "--prompts") -> list[dict[str, Any]]:
    """The rows of a JSONL file, or of one in gzip. ConfigError, as ``field``, names the line that is no object."""
    path = Path(path)
    try:
        content = path.read_bytes()
        lines = (gzip.decompress(content) if path.suffix == ".gz" else content).decode().split("\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        rule = f"the prompts file cannot be read ({error})"
        raise ConfigError(field, str(path), rule, "name a JSONL file") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(field, f"{path}:{number}", f"is no JSON ({error})", "one object a line") from None
        if not isinstance(row, dict):
            raise ConfigError(field, f"{path}:{number}", "is no JSON object", "one object a line")
        rows.append(row)
    return rows


def encode_prompts(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    template_kwargs: Mapping[str, Any] | None = None,
    field: str = "--prompts",
) -> list[Prompt]:
    """Rows with ``input_ids`` (what `prepare` holds out: the tokens that training has there), ``messages`` (a chat, an
    answer at its end dropped, with ``tools`` if there are some) or ``prompt`` (text), with ``domain`` if known.

    ``template_kwargs`` go to the chat template (for example ``{"enable_thinking": false}``): they must be those of the
    training data, or another distribution is measured. Given, a chat is rendered with them even if its row has tokens.
    ConfigError, under the name ``field``, for no rows, or a row with none of the three.
    """
    prompts = []
    for number, row in enumerate(rows, 1):
        try:
            ids, text = _encoded(row, tokenizer, template_kwargs or {})
        except _BadRowError as bad:
            raise ConfigError(field, f"row {number}", bad.rule, bad.fix) from None
        prompts.append(Prompt(torch.tensor(ids, dtype=torch.int64), text, str(row.get("domain") or UNNAMED)))
    if not prompts:
        raise ConfigError(field, len(rows), "there are no prompts", "name a file with at least one row")
    return prompts


class _BadRowError(Exception):
    """What is wrong with one row: the ``rule`` that it breaks, and the ``fix``."""

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(rule)
        self.rule, self.fix = rule, fix


def _encoded(row: Mapping[str, Any], tokenizer: Any, template_kwargs: Mapping[str, Any]) -> tuple[list[int], str]:
    """Token ids (at least one) of a row, and their text."""
    if row.get("input_ids") and not (template_kwargs and row.get("messages")):
        ids = _checked_ids(row["input_ids"], len(tokenizer))
        text = tokenizer.decode(ids)
    elif row.get("messages"):
        text = _render(row["messages"], row.get("tools"), tokenizer, template_kwargs)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    elif isinstance(row.get("prompt"), str):
        text = row["prompt"]
        ids = tokenizer(text)["input_ids"]
    else:
        fields = ", ".join(sorted(map(str, row))) or "none"
        raise _BadRowError(
            f"has neither 'messages' nor a text 'prompt' nor 'input_ids' (its fields: {fields})",
            "write one of the three",
        )
    if not ids:
        raise _BadRowError("the prompt has no tokens", "remove the row")
    return ids, text


def _checked_ids(ids: Any, vocabulary: int) -> list[int]:
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < vocabulary for one in ids):
        rule = f"its 'input_ids' are no list of token ids from 0 to {vocabulary - 1}"
        raise _BadRowError(rule, "use rows made with this target's tokenizer")
    return ids


def _render(messages: Any, tools: Any, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> str:
    """The chat up to where the target answers. _BadRowError for what is no chat, or none that the template takes."""
    if not (
        isinstance(messages, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
    ):
        rule = "its 'messages' are no list of objects with a 'role'"
        raise _BadRowError(rule, 'write e.g. [{"role": "user", "content": "…"}]')
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not tokenizer.chat_template:
        rule = "the row holds a chat, and the target's tokenizer has no chat template"
        raise _BadRowError(rule, "use rows with a 'prompt' text")
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True, **template_kwargs
        )
    except Exception as error:  # a template is a program of the target's makers and may raise anything
        rule = (
            f"the target's chat template does not take it ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        )
        raise _BadRowError(rule, "mend the row, or remove it") from None
    assert isinstance(text, str)
    return text


def stop_ids(folder: Path, tokenizer: Any) -> set[int]:
    """Every id that ends an answer of the target in ``folder``: those at which supervision ends in training too."""
    return ChatMask(tokenizer, str(folder)).stops
