"""What a chat template shows of a conversation: many print nothing for a role, or only at some places.

Two things must hold of an answer's prompt. The text of every turn stands in it (`_absent`); and a conversation of the
same shape, with a word of its own in each turn, shows all of those words (`_vanishing`), because a short text may stand
in the template's own words.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from recipe.prepare.conversation import Chat
from recipe.prepare.manner import CALLED, PROBE, TOOLS, Messages, Render, asked
from recipe.prepare.messages import text_of
from recipe.prepare.report import Drop

_MOST_SHAPES = 4096
_SCENES: dict[str, tuple[Messages, int]] = {  # role → a conversation, and where in it the probed message goes
    "user": ([], 0),
    "system": (asked(), 0),
    "developer": (asked(), 0),
    "assistant": ([*asked(), *asked()], 1),
    "tool": (CALLED[:2], 2),
}
_THOUGHT_ENDS = re.compile(
    r"</[\w:-]*(?:think|thought|reason)[\w:-]*>|\[/THINK\w*\]|<\|END_THINK\w*\|>|<channel\|>|\[BEGIN FINAL RESPONSE\]",
    re.IGNORECASE,
)
_SWITCHES = re.compile("/(?:no_)?think")  # words that switch thinking; some templates take them out of a text


class Shown:
    """Learns from probes what a template takes, and tells what it left out. ``render`` raises Drop where it refuses."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._shapes: dict[Any, dict[int, bool]] = {}
        self._with_parts = {role for role in _SCENES if self._takes_parts(role)}
        self._knows_developer = PROBE in self._probe("developer", PROBE)
        function = {**TOOLS[0]["function"], "name": PROBE}
        self.tools = PROBE in self._text(
            [{"role": "user", "content": "question"}], [{**TOOLS[0], "function": function}]
        )

    def given(self, chat: Chat, notes: Counter[str]) -> Chat:
        """``chat`` as this template takes it: text parts joined where it reads none, and a developer turn as a system
        turn where it knows no developer and there is no other system turn."""
        messages = chat.messages
        renamed = not self._knows_developer and developer_as_system(messages)
        if renamed:
            messages = renamed
            notes["conversations whose developer turn is given to the template as a system turn"] += 1
        if any(not isinstance(m["content"], str) and m["role"] not in self._with_parts for m in messages):
            messages = [m if m["role"] in self._with_parts else {**m, "content": text_of(m)} for m in messages]
        return chat if messages is chat.messages else replace(chat, messages=messages)

    def check(self, messages: Messages, tools: list[Any] | None, prompt: str) -> bool:
        """Whether ``prompt`` shows all texts of ``messages``; False where one that stands beside a call is missing.
        Raises Drop for a turn of which nothing is shown: the target would never have seen what was answered."""
        absent = dict.fromkeys(_absent(messages, prompt), False) | self._vanishing(messages, tools)
        for place in sorted(absent):
            if absent[place] or not messages[place].get("tool_calls"):
                raise Drop("turn_not_rendered", f"role {messages[place]['role']}, message {place}")
        return not absent

    def _vanishing(self, messages: Messages, tools: list[Any] | None) -> dict[int, bool]:
        """Which messages lose something for what they are, whatever they say: True where a call is lost, too."""
        shape = (bool(tools), *map(_shape, messages))
        if shape not in self._shapes:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = self._tried(messages, tools)
        return self._shapes[shape]

    def _tried(self, messages: Messages, tools: list[Any] | None) -> dict[int, bool]:
        text = self._text([_marked(i, m) for i, m in enumerate(messages)], tools, add_generation_prompt=True)
        if not text:  # the probe is refused: only the real text is there to go by
            return {}
        lost = {}
        for at, message in enumerate(messages):
            calls = any(_mark(at, k) not in text for k in range(len(message.get("tool_calls", ()))))
            if calls or (text_of(message).strip() and _mark(at) not in text):
                lost[at] = calls
        return lost

    def _takes_parts(self, role: str) -> bool:
        """Whether each of two text parts is shown, and neither as a printed object."""
        whole, parts = self._probe(role, PROBE), [PROBE + "1", PROBE + "2"]
        text = self._probe(role, [{"type": "text", "text": part} for part in parts])
        shown = PROBE in whole and all(part in text for part in parts)
        return shown and all(text.count(key) == whole.count(key) for key in ("'type'", '"type"'))

    def _probe(self, role: str, content: Any) -> str:
        scene, at = _SCENES[role]
        return self._text([*scene[:at], {"role": role, "content": content, "name": "f"}, *scene[at:]], None)

    def _text(self, messages: Messages, tools: list[Any] | None, **arguments: Any) -> str:
        try:
            return self._render(messages, tools, **arguments)
        except Drop:
            return ""


def developer_as_system(messages: Messages) -> Messages | None:
    """The messages with every developer turn as a system turn; None without one, or beside a system turn."""
    roles = {m["role"] for m in messages}
    if "developer" not in roles or "system" in roles:
        return None
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]


def visible(message: dict[str, Any]) -> list[str]:
    """The stripped texts of a message that every rendering must show: of an answer, what follows its thought."""
    content = message["content"]
    if isinstance(content, str) and not (message["role"] == "assistant" and ("<" in content or "[" in content)):
        text = content.strip()
        return [text] if text else []
    texts: list[str] = []
    for text in [content] if isinstance(content, str) else [part["text"] for part in content]:
        _, *behind = _THOUGHT_ENDS.split(text) if message["role"] == "assistant" else (text,)
        texts = [behind[-1]] if behind else [*texts, text]
    return [stripped for text in texts if (stripped := text.strip())]


def _absent(messages: Messages, prompt: str) -> Iterator[int]:
    """The places of messages whose text is not in ``prompt``, which holds users' texts and answers in their order;
    templates may move system texts, results, and what stands beside a call."""
    at = 0
    for place, message in enumerate(messages):
        ordered = message["role"] in ("user", "assistant") and not message.get("tool_calls")
        for text in visible(message):
            begin = at if ordered else 0
            found = prompt.find(text, begin)
            if found >= 0:
                at = found + len(text) if ordered else at
            elif not _stands_otherwise(text, prompt, begin):
                yield place


def _stands_otherwise(text: str, prompt: str, begin: int) -> bool:
    """As JSON writes it, or without the words that switch thinking."""
    if any(json.dumps(text, ensure_ascii=ascii_only)[1:-1] in prompt for ascii_only in (False, True)):
        return True
    pieces = [piece.strip() for piece in _SWITCHES.split(text)]
    for piece in pieces:
        begin = prompt.find(piece, begin)
        if begin < 0:
            return False
        begin += len(piece)
    return len(pieces) > 1


def _shape(message: dict[str, Any]) -> tuple[Any, ...]:
    calls, thought = len(message.get("tool_calls", ())), bool(message.get("reasoning_content"))
    return message["role"], bool(text_of(message).strip()), calls, thought


def _mark(place: int, call: int | str = "") -> str:
    return f"zq{place}x{call}qz"


def _marked(place: int, message: dict[str, Any]) -> dict[str, Any]:
    """``message`` with a word of its own for its text, and for each call's arguments."""
    out = {**message, "content": _mark(place) if text_of(message).strip() else ""}
    if message.get("tool_calls"):
        out["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": {"zq": _mark(place, k)}}}
            for k, call in enumerate(message["tool_calls"])
        ]
    return out
