"""A chat template's text for all beginnings of a conversation, as `apply_chat_template` prints it but without its cost.

Masking asks for every beginning of a conversation twice or more. `apply_chat_template` copies and checks all messages
each time (most of its time), so the compiled template is called directly with messages that were made ready once. And
where the template prints message after message, one rendering of the whole conversation holds all of its beginnings.
Neither is assumed: the first is compared with the public call on probes, the second follows from the template's code
(`recipe.prepare.sequential`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jinja2 import Template
from transformers.utils import chat_template_utils

from recipe.prepare.sequential import is_sequential

Messages = list[dict[str, Any]]

_CALL = {"function": {"name": "f", "arguments": {"x": [1, None]}}}
_PROBES: list[Messages] = [
    [{"role": "user", "content": " Ask\n"}],
    [{"role": "system", "content": "Be."}, {"role": "user", "content": "a"}, {"role": "assistant", "content": " b "}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "c", "name": None},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "", "thinking": "c", "tool_calls": [_CALL]},
        {"role": "tool", "content": "e"},
        {"role": "assistant", "content": "f"},
    ],
]
_TOOLS = [{"type": "function", "function": {"name": "f", "description": "g", "parameters": {"type": "object"}}}]


@dataclass(frozen=True)
class _Beginnings:
    """The first k messages are ``whole[:ends[k]]`` and then the tail without or with a generation prompt."""

    whole: str
    ends: list[int]
    tails: tuple[str, str]


class _Traced(list[dict[str, Any]]):
    """Messages that call ``asked`` each time that a loop wants one more of them."""

    asked: Callable[[], None]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for message in list.__iter__(self):
            self.asked()
            yield message
        self.asked()


class Renderer:
    """Calls a tokenizer's chat template. Not thread-safe: it remembers the conversation that was opened last."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        self.tokenizer = tokenizer
        self._special = dict(tokenizer.special_tokens_map)
        self._compiled = _compile(template) if template else None
        if self._compiled and not self._agrees():
            self._compiled = None
        self.tree = self._compiled.environment.parse(template) if self._compiled else None
        self.sequential = self.tree is not None and is_sequential(self.tree)
        self._open: Messages = []
        self._tools: list[Any] | None = None
        self._ready: Messages = []
        self._texts: dict[tuple[Any, ...], _Beginnings | None] = {}

    def open(self, messages: Messages, tools: list[Any] | None) -> None:
        """Say which conversation's beginnings are wanted next. Only speed depends on it."""
        if messages is not self._open or tools is not self._tools:
            self._open, self._tools, self._texts = messages, tools, {}
            self._ready = _ready(messages) if self._compiled else []

    def text(self, messages: Messages, tools: list[Any] | None, **arguments: Any) -> str:
        """What ``apply_chat_template(messages, tools=tools, tokenize=False, **arguments)`` returns or raises."""
        if self._compiled and messages:
            try:
                return self._direct(messages, tools, arguments)
            except Exception:  # whatever it is, the public call is the one to say it
                pass
        return str(self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **arguments))

    # ---- without apply_chat_template

    def _direct(self, messages: Messages, tools: list[Any] | None, arguments: dict[str, Any]) -> str:
        count = len(messages)
        opened = tools is self._tools and messages == self._open[:count]
        if opened and self.sequential:
            prompted = bool(arguments.get("add_generation_prompt"))
            key = tuple(sorted((name, on) for name, on in arguments.items() if name != "add_generation_prompt"))
            if key not in self._texts:
                self._texts[key] = self._beginnings(dict(key))
            if (found := self._texts[key]) is not None:
                return found.whole[: found.ends[count]] + found.tails[prompted]
        return "".join(self._chunks(self._ready[:count] if opened else _ready(messages), tools, arguments))

    def _chunks(self, ready: Messages, tools: list[Any] | None, arguments: dict[str, Any]) -> Iterator[str]:
        assert self._compiled is not None
        given = {"add_generation_prompt": False, **self._special, **arguments}
        return self._compiled.generate(messages=ready, tools=tools, documents=None, **given)

    def _beginnings(self, arguments: dict[str, Any]) -> _Beginnings | None:
        """None where the template refuses the whole conversation: it may take the beginnings."""
        try:
            whole, ends = self._trace(self._ready, arguments)
            first, first_ends = self._trace(self._ready[:1], {**arguments, "add_generation_prompt": True})
        except Exception:
            return None
        if len(ends) != len(self._ready) + 1 or len(first_ends) != 2:  # its loop was not reached
            return None
        return _Beginnings(whole, ends, (whole[ends[-1] :], first[first_ends[-1] :]))

    def _trace(self, ready: Messages, arguments: dict[str, Any]) -> tuple[str, list[int]]:
        """The text, and how much of it is printed when the template asks for message 0, 1, … and for one too many."""
        printed, ends, chunks = 0, [], []
        traced = _Traced(ready)
        traced.asked = lambda: ends.append(printed)
        for chunk in self._chunks(traced, self._tools, arguments):
            chunks.append(chunk)
            printed += len(chunk)
        return "".join(chunks), ends

    def _agrees(self) -> bool:
        """Whether the direct call prints what the public one prints, and refuses what that refuses."""
        for messages in _PROBES:
            for tools in (None, _TOOLS):
                for arguments in ({}, {"add_generation_prompt": True, "enable_thinking": False}):
                    try:
                        public = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **arguments)
                    except Exception:
                        continue  # refused: `text` asks the public call after any failure of the direct one
                    try:
                        if "".join(self._chunks(_ready(messages), tools, arguments)) != public:
                            return False
                    except Exception:
                        return False
        return True


def _compile(template: str) -> Template | None:
    """transformers' own sandboxed compilation; None when a version of transformers has it no more."""
    try:
        compiled = chat_template_utils._compile_jinja_template(template)
    except Exception:  # a template that cannot be compiled is reported by the public call
        return None
    return compiled if isinstance(compiled, Template) else None


def _ready(messages: Messages) -> Messages:
    """What templates see of plain JSON messages: no key that is None, and thoughts under all of their names."""
    plain = [{name: value for name, value in message.items() if value is not None} for message in messages]
    alias = getattr(chat_template_utils, "_alias_reasoning_fields", None)
    return list(alias(plain)) if alias else plain
