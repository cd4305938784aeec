"""The thought of an answer: where it stands, which tag a prompt opened for it, and what the target writes of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_OPENING = re.compile(r"(?:<([A-Za-z][\w:-]*)>|\[([A-Z_]+)\])\s*\Z")
_BEGUN = re.compile(r"\s*<think>")
_FIELDS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Opened:
    """A think tag that ends a text and is left open there: its two tags, and where in the text it begins."""

    opening: str
    closing: str
    start: int

    @classmethod
    def at_end(cls, text: str) -> Opened | None:
        near = max(0, len(text) - 80)
        found = _OPENING.search(text, near)
        if found is None:
            return None
        name, square = found.groups()
        tags = (f"<{name}>", f"</{name}>") if name else (f"[{square}]", f"[/{square}]")
        return cls(*tags, found.start())


@dataclass(frozen=True)
class Thinking:
    """An answer taken apart: its thought as the target writes it after a prompt, and the message without it."""

    text: str
    rest: dict[str, Any]


def thought_of(said: dict[str, Any]) -> str:
    """The text of a message's thought, wherever it stands; empty without one."""
    if said.get("reasoning_content"):
        return str(said["reasoning_content"]).strip()
    before, closed, _ = str(said["content"]).partition("</think>")
    return before.strip().removeprefix("<think>").strip() if closed else ""


def is_unfinished(said: dict[str, Any]) -> bool:
    """Whether the text opens a thought and never closes it."""
    return "</think>" not in said["content"] and bool(_BEGUN.match(said["content"]))


def take_apart(said: dict[str, Any], prompt_extra: str) -> Thinking | None:
    """``said`` taken apart for a prompt that ends in ``prompt_extra``, which may open a thought; the text then need not
    repeat the tag. None when there is no thought that could be generated there."""
    rest = {k: v for k, v in said.items() if k not in _FIELDS}
    opened = Opened.at_end(prompt_extra)
    if said.get("reasoning_content"):
        if opened is None:
            return None
        closing = f"\n{opened.closing}\n\n" if prompt_extra.endswith("\n") else opened.closing
        return Thinking(said["reasoning_content"].strip() + closing, rest)
    closing = opened.closing if opened else "</think>"
    thought, closed, answer = said["content"].partition(closing)
    if not closed:
        return None
    if opened and thought.lstrip().startswith(opened.opening):
        thought = thought.lstrip().removeprefix(opened.opening).lstrip("\n")
    blank = answer[: len(answer) - len(answer.lstrip())]
    return Thinking(thought + closing + blank, {**rest, "content": answer.lstrip()})
