"""One answer as it is served: the text of its prompt, and the text that the target generates after it.

The template renders the messages before the answer with its generation prompt (P), and the messages with the answer
(F). Where F continues P, the rest of F was generated. Many published templates contradict themselves there: the prompt
opens a thought, or closes an empty one, that the rendered answer does not show; a system text moves; old thoughts are
dropped. A server prints P whatever F looks like, so then P is followed by the answer's own rendering, which is found by
rendering the same turn with a probe in the place of the answer. Nothing is searched for in text that users wrote.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from recipe.data.conversation import Chat
from recipe.data.render import Renderer
from recipe.data.report import Drop
from recipe.data.thought import Opened, is_unfinished, take_apart, thought_of

_PROBE = "zqanswerqz"
_SWITCHES = ("enable_thinking", "thinking")
_NO_THOUGHT = "answers without the thought that the prompt opens (prompt taken without its opening tag)"


@dataclass(frozen=True)
class Turn:
    """``prompt`` + ``answer`` opens ``full``: the text up to the end of this turn."""

    prompt: str
    answer: str
    full: str


@dataclass(frozen=True)
class _Manner:
    """What a template does with one setting of its switches, learnt from a probe. ``extra``: what its generation prompt
    prints beyond the opening of a rendered answer (a think tag). ``joint``: the reverse (a space)."""

    arguments: dict[str, Any]
    extra: str
    joint: str

    @property
    def opens(self) -> bool:
        """Whether the prompt opens a thought and leaves it open."""
        opened = Opened.at_end(self.extra)
        return opened is not None and not self.extra[: opened.start].strip()


class TurnRenderer:
    """Renders turns with one tokenizer's template. ``special``: matches the control tokens, or None without any."""

    def __init__(self, tokenizer: Any, special: re.Pattern[str] | None) -> None:
        self.tokenizer, self._special = tokenizer, special
        self.template = _default_template(tokenizer)
        self._renderer = Renderer(tokenizer, self.template)
        code = re.sub(r"\{#.*?#\}", "", self.template, flags=re.DOTALL)
        switches = [name for name in _SWITCHES if re.search(rf"(?<![\w.'\"]){name}(?![\w'\"])", code)]
        self._settings: list[dict[str, Any]] = [{}, *({name: on} for name in switches for on in (False, True))]
        self.suffix, self.ending = self._end_of_turn()
        self._manners = [m for m in map(self._manner, self._settings) if m] if self.template else []

    def turn(self, chat: Chat, index: int, notes: Counter[str]) -> Turn:
        """The assistant message ``index`` of ``chat`` as served. Raises Drop when the template refuses it."""
        before, said = chat.messages[:index], chat.messages[index]
        self._renderer.open(chat.messages, chat.tools)
        if "</think>" in self.template and is_unfinished(said):
            raise Drop("unfinished_thought", f"turn {index}")
        full = self.render([*before, said], chat.tools)
        prompts = {self.render(before, chat.tools, add_generation_prompt=True, **s) for s in self._settings}
        fitting = [p for p in prompts if full.startswith(p)]
        thought = thought_of(said)
        found: Turn | None = None
        if fitting:
            # The longest: with thinking off, a prompt supplies the empty tags that an answer without thought shows.
            prompt = max(fitting, key=len)
            found = Turn(prompt, self._generated(full[len(prompt) :]), full)
            if not thought:
                found = self._without_empty_thought(found, before, said, chat.tools)
        if found is None or thought not in found.answer:
            served = self._continued(before, said, chat.tools, notes)
            found = served if found is None or (served and thought in served.answer) else found
        if found is None:
            raise Drop("template_contradicts_prompt", f"turn {index}")
        _account(said, thought, found.answer, notes)
        if said.get("truncated"):
            found = Turn(found.prompt, found.answer.removesuffix(self.ending), found.full)
        if not found.answer:
            raise Drop("template_contradicts_prompt", f"turn {index}: the template renders nothing for it")
        return found

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, **arguments: Any) -> str:
        """The template's text. Raises Drop when it refuses the messages, or when no tokenizer can encode the text."""
        try:
            text = self._apply(messages, tools, arguments)
        except Exception as error:  # a template is a program of somebody else's: it may raise anything
            raise Drop("template_refused", f"{type(error).__name__}: {error}"[:200]) from error
        return encodable(text)

    def _apply(self, messages: list[dict[str, Any]], tools: list[Any] | None, arguments: dict[str, Any]) -> str:
        try:
            return self._renderer.text(messages, tools, **arguments)
        except TypeError:  # it joins a call's arguments to text: such templates want them as JSON
            return self._renderer.text([_with_text_arguments(m) for m in messages], tools, **arguments)

    # ---- what the template does, from probes

    def _end_of_turn(self) -> tuple[str, str]:
        """(what the template prints after an answer, the part of it that the target generates)."""
        if not self.template:
            return "", ""
        try:
            suffix = self.render(_asked(_PROBE), None).rpartition(_PROBE)[2]
        except Drop:
            return "", ""
        found = self._special.search(suffix) if self._special else None
        # Without a control token the end is text: the target writes it, but not the white space before the next turn.
        return suffix, suffix[: found.end()] if found else suffix.rstrip()

    def _manner(self, arguments: dict[str, Any]) -> _Manner | None:
        """None where prompt and answer have no common opening, or the template refuses even the probe."""
        try:
            asked = self.render(_asked(), None, **arguments)
            prompt = self.render(_asked(), None, add_generation_prompt=True, **arguments)
            shown = self.render(_asked(_PROBE), None, **arguments).rpartition(_PROBE)[0]
        except Drop:
            return None
        opening, supplied = shown[len(asked) :], prompt[len(asked) :]
        if not (shown.startswith(asked) and prompt.startswith(asked)):
            return None
        if supplied.startswith(opening):
            return _Manner(arguments, extra=supplied[len(opening) :], joint="")
        if opening.startswith(supplied):
            return _Manner(arguments, extra="", joint=opening[len(supplied) :])
        tag = Opened.at_end(supplied)  # the prompt opens a thought where a rendered answer shows only its end
        if tag and opening == supplied[: tag.start] + tag.closing:
            return _Manner(arguments, extra=supplied[tag.start :], joint="")
        return None

    # ---- the generated text

    def _generated(self, tail: str) -> str:
        """The generated part of what a rendered answer adds to its prompt."""
        if self.suffix and tail.endswith(self.suffix):
            return tail[: len(tail) - len(self.suffix) + len(self.ending)]
        ends = [m.end() for m in self._special.finditer(tail)] if self._special else []  # ends otherwise: a tool call
        return tail[: ends[-1]] if ends and not tail[ends[-1] :].strip() else tail.rstrip()

    def _without_empty_thought(
        self, turn: Turn, before: list[dict[str, Any]], said: dict[str, Any], tools: list[Any] | None
    ) -> Turn:
        """The prompt opens a thought and there is none: the template closes it, so that closing was not generated."""
        opened = Opened.at_end(turn.prompt)
        if opened is None:
            return turn
        shown = self._shown(before, said, tools)
        if shown is None or shown[len(turn.prompt) :].strip() != opened.closing or not turn.full.startswith(shown):
            return turn
        return Turn(shown, self._generated(turn.full[len(shown) :]), turn.full)

    def _shown(self, before: list[dict[str, Any]], said: dict[str, Any], tools: list[Any] | None) -> str | None:
        """All that the template prints before the text of the answer ``said``; None if it does not print that text."""
        text = self.render([*before, {**said, "content": _PROBE}], tools)
        return text.rpartition(_PROBE)[0] if _PROBE in text else None

    def _continued(
        self, before: list[dict[str, Any]], said: dict[str, Any], tools: list[Any] | None, notes: Counter[str]
    ) -> Turn | None:
        """The prompt as served, then thought and answer, where the rendered answer does not continue the prompt."""
        if not self._manners:
            return None
        opening = [m for m in self._manners if m.opens]
        closed = [m for m in self._manners if not m.opens]
        # A thought is best served by a prompt that opens one, an answer without by a prompt that does not.
        manner = ([*opening, *closed] if thought_of(said) else [*closed, *opening])[0]
        thinking = take_apart(said, manner.extra)
        rest = thinking.rest if thinking else said
        prompt = self.render(before, tools, add_generation_prompt=True, **manner.arguments)
        if not prompt.endswith(manner.extra):
            return None
        bare = prompt[: len(prompt) - len(manner.extra)]
        full, shown = self.render([*before, rest], tools), self._shown(before, rest, tools)
        if shown is None:  # a tool call for which the template prints no text
            shown = bare + manner.joint
        if not full.startswith(shown):
            return None
        tail = manner.joint + self._generated(full[len(shown) :])
        if thinking:
            tail = thinking.text + tail
        elif manner.opens:
            prompt = bare
            notes[_NO_THOUGHT] += 1
        return Turn(prompt, tail, prompt + tail)


def _account(said: dict[str, Any], thought: str, answer: str, notes: Counter[str]) -> None:
    """Refuse a turn whose call is not in its rendering; note thoughts and texts that are not."""
    for call in said.get("tool_calls", ()):
        if call["function"]["name"] not in answer:
            raise Drop("not_rendered", f"the call of {call['function']['name']!r}"[:80])
    if thought not in answer:
        notes["reasoning that the template does not render"] += 1
    text = said["content"].rpartition("</think>")[2].strip()
    if text not in answer:
        notes["answer text that the template does not render as it is"] += 1


def _asked(answer: str | None = None) -> list[dict[str, Any]]:
    turns = [{"role": "user", "content": "question"}]
    return turns if answer is None else [*turns, {"role": "assistant", "content": answer}]


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _default_template(tokenizer: Any) -> str:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default", "")
    return template if isinstance(template, str) else ""


def encodable(text: str) -> str:
    """``text``, unless it holds half of a UTF-16 pair: a Drop, because no tokenizer can encode that."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Drop("lone_surrogate", f"at character {error.start}") from error
    return text
