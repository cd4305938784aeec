"""The thought of an answer: where it stands, which tags frame it, and what the target writes of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from recipe.prepare.messages import text_of

# How published formats open a thought: <think>, <seed:think>, [THINK], <|START_THINKING|>, <|channel>thought.
_OPENING = re.compile(
    r"<(?P<name>[\w:-]*(?:think|thought|reason)[\w:-]*)>|\[(?P<square>THINK\w*)\]"
    r"|<\|START_(?P<start>THINK\w*)\|>|<\|channel>thought\n",
    re.IGNORECASE,
)
_NEAR = 120  # characters from the end of a prompt in which its frame can begin
_BEGUN = re.compile(r"\s*<think>")
_FIELDS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Frame:
    """The tags of a thought at the end of a text: it is left open there, or ``closed`` at once. ``gap``: the white
    space after the opening tag; ``after``: after the closing one; ``start``: where in the text the opening begins;
    ``line``: what stands between thought and closing tag, where a template has shown that."""

    opening: str
    gap: str
    closing: str
    closed: bool
    after: str
    start: int
    line: str | None = None

    @classmethod
    def seen(cls, text: str, thought: str) -> Frame | None:
        """The frame that ``text`` puts around ``thought``; None where it does not show it in one."""
        before, found, behind = text.partition(thought)
        frame = cls.at_end(before) if found else None
        if frame is None or frame.closed:
            return None
        close = re.match(rf"(\s*){re.escape(frame.closing)}(\s*)", behind)
        return replace(frame, closed=True, line=close[1], after=close[2]) if close else None

    @classmethod
    def at_end(cls, text: str) -> Frame | None:
        """None where ``text`` does not end in an opening tag or in an empty pair of them."""
        tags = list(_OPENING.finditer(text, max(0, len(text) - _NEAR)))
        if not tags:
            return None
        found = tags[-1]
        opening, closing = found.group(), _closing(found)
        rest = text[found.end() :]
        gap = rest[: len(rest) - len(rest.lstrip())]
        rest = rest[len(gap) :]
        if not rest:
            return cls(opening, gap, closing, False, "", found.start())
        if rest.startswith(closing) and not rest[len(closing) :].strip():
            return cls(opening, gap, closing, True, rest[len(closing) :], found.start())
        return None

    def around(self, thought: str) -> str:
        """``thought`` as the target writes it where no prompt has opened it."""
        first = self.gap if self.line is not None else "\n" if "\n" in self.gap else ""
        return self.opening + first + thought + self.end()

    def end(self) -> str:
        """What the target writes after a thought in this frame."""
        line = "\n" if "\n" in self.gap or self.opening.endswith("\n") else ""
        return (line if self.line is None else self.line) + self.closing + self.after

    def dropped_from(self, text: str) -> str:
        """``text`` without the frame, empty or with its opening alone, that it begins with."""
        opening, closing = re.escape(self.opening), re.escape(self.closing)
        found = re.match(rf"\s*(?:(?:{opening})?\s*{closing}|{opening})", text)
        return text[found.end() :] if found else text


def _closing(found: re.Match[str]) -> str:
    if found["name"]:
        return f"</{found['name']}>"
    if found["square"]:
        return f"[/{found['square']}]"
    return f"<|END_{found['start']}|>" if found["start"] else "<channel|>"


@dataclass(frozen=True)
class Thinking:
    """An answer taken apart: its thought as the target writes it after a prompt, and the message without it."""

    text: str
    rest: dict[str, Any]


def thought_of(said: dict[str, Any]) -> str:
    """The text of a message's thought, wherever it stands; empty without one."""
    if said.get("reasoning_content"):
        return str(said["reasoning_content"]).strip()
    before, closed, _ = text_of(said).partition("</think>")
    return before.strip().removeprefix("<think>").strip() if closed else ""


def is_unfinished(said: dict[str, Any]) -> bool:
    """Whether the text opens a thought and never closes it."""
    text = text_of(said)
    return "</think>" not in text and bool(_BEGUN.match(text))


def take_apart(said: dict[str, Any], opened: Frame | None, shown: Frame | None) -> Thinking | None:
    """``said`` taken apart for a prompt that ends in the open thought ``opened`` (the text then need not repeat the
    tag), or that opens none (None). ``shown``: how the template frames a thought, if it shows that anywhere.
    None when there is no thought that could be generated there."""
    rest = {k: v for k, v in said.items() if k not in _FIELDS}
    if said.get("reasoning_content"):
        thought = said["reasoning_content"].strip()
        if opened:
            known = shown and shown.line is not None and shown.closing == opened.closing
            usual = f"\n{opened.closing}\n\n" if opened.gap.endswith("\n") else opened.closing
            return Thinking(thought + (shown.end() if shown and known else usual), rest)
        return Thinking(shown.around(thought), rest) if shown else None
    closing = opened.closing if opened else "</think>"
    thought, closed, answer = text_of(said).partition(closing)
    if not closed:
        return None
    if opened and thought.lstrip().startswith(opened.opening):
        thought = thought.lstrip().removeprefix(opened.opening).lstrip("\n")
    blank = answer[: len(answer) - len(answer.lstrip())]
    return Thinking(thought + closing + blank, {**rest, "content": answer.lstrip()})
