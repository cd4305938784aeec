"""One answer as it is served: the text of its prompt, and the text that the target generates after it.

The template renders the messages before the answer with its generation prompt (P), and the messages with the answer
(F), both under each setting of its switches. Where F continues P, the rest of F was generated. Many published templates
contradict themselves there: the prompt opens a thought, or closes an empty one, that the rendered answer does not show;
a system text moves; old thoughts are dropped. A server prints P whatever F looks like, so then P is followed by the
answer's own rendering. Nothing is searched for in text that users wrote.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from recipe.prepare.conversation import Chat
from recipe.prepare.manner import (
    PROBE,
    Ends,
    Manner,
    ends_of_turns,
    manner,
    only_prompt_depends_on,
    settings,
    shown_thought,
)
from recipe.prepare.messages import text_of
from recipe.prepare.render import Renderer
from recipe.prepare.report import Drop
from recipe.prepare.shown import Shown, visible
from recipe.prepare.thought import Frame, is_unfinished, take_apart, thought_of

_NO_THOUGHT = "answers without the thought that the prompt opens (prompt taken without its opening tag)"
_CLOSED_THOUGHT = (
    "answers without the thought that the prompt opens (prompt taken with the closing tag of the template)"
)


@dataclass(frozen=True)
class Turn:
    """``prompt`` + ``answer`` opens ``full``: the text up to the end of this turn. ``quotes``: the message's own text
    holds a control token, so that not every one in ``answer`` is the template's. ``index``: of the message."""

    prompt: str
    answer: str
    full: str
    quotes: bool = False
    index: int = 0


class TurnRenderer:
    """Renders turns with one tokenizer's template. ``special``: matches the control tokens, or None without any;
    ``stops``: the texts of those that end a generation."""

    def __init__(self, tokenizer: Any, special: re.Pattern[str] | None, stops: set[str]) -> None:
        self.tokenizer, self._special = tokenizer, special
        self.template = _default_template(tokenizer)
        self._renderer = Renderer(tokenizer, self.template)
        self._settings: list[dict[str, Any]] = [{}]
        self._manners: list[Manner] = []
        self._steady = True
        self._ends = Ends()
        self.shown = Shown(self.render)
        if not self.template:
            return
        for tools in (False, True):  # some templates are for conversations with tools and refuse all others
            self._ends = ends_of_turns(self.render, special, stops, tools)
            if self._ends != Ends():
                break
        tree = self._renderer.tree
        self._settings = settings(tree, self.template, self.render)
        self._steady = only_prompt_depends_on(tree, {name for arguments in self._settings for name in arguments})
        found = (manner(self.render, s, False) or manner(self.render, s, True) for s in self._settings)
        self._manners = [m for m in found if m]
        shown = [shown_thought(self.render, m.arguments) for m in self._manners]
        self._empty = next((f for f in (*shown, *(m.empty for m in self._manners)) if f), None)

    @property
    def stops(self) -> set[str]:
        """The control tokens that end an answer in this template."""
        texts = (self._ends.ending, *self._ends.by_next.values())
        ends = [self._special.findall(text) for text in texts] if self._special else []
        return {found[-1] for found in ends if found}

    def turn(self, chat: Chat, index: int, notes: Counter[str]) -> Turn:
        """The assistant message ``index`` of ``chat`` as served. Raises Drop when the template refuses it."""
        before, said = chat.messages[:index], chat.messages[index]
        after = chat.messages[index + 1] if index + 1 < len(chat.messages) else None
        self._renderer.open(chat.messages, chat.tools)
        if "</think>" in self.template and is_unfinished(said):
            raise Drop("unfinished_thought", f"turn {index}")
        scene = _Scene(before, said, after, chat.tools)
        foreign = "</think>" not in self.template and not said.get("reasoning_content")
        thought = "" if foreign else thought_of(said)  # another family's tags are only text here
        found = self._served(scene, thought, notes)
        if thought and (found is None or thought not in found.answer):  # the template shows it nowhere
            found = self._served(scene, "", notes)
        if found is None:
            raise Drop("template_contradicts_prompt", f"turn {index}")
        _account(said, thought, found.answer, notes)
        if said.get("truncated"):
            found = replace(found, answer=found.answer.removesuffix(self._ends.ending))
        elif self._ends.suffix.strip() or self._ends.by_next:
            self._note_end(found.answer, notes)
        if not found.answer:
            raise Drop("template_contradicts_prompt", f"turn {index}: the template renders nothing for it")
        return replace(found, quotes=self._special is not None and _quotes(said, self._special), index=index)

    def _served(self, scene: _Scene, thought: str, notes: Counter[str]) -> Turn | None:
        """The turn with ``thought``, or as one without any; None where no prompt and answer fit together."""
        found, arguments = self._continuing(scene, bool(thought))
        best = min(self._manners, key=lambda m: self._rank(m, bool(thought)), default=None)
        if found and not thought:
            found = self._without_empty_thought(found, scene, notes)
        # With thinking off a prompt closes an empty thought; that it is not shown later is no reason to switch it on.
        closes = not thought and best is not None and best.extra and not best.opened and best.arguments != arguments
        if best and (found is None or closes or not _tells(found, thought)):
            served = self._continued(scene, best, bool(thought), notes)
            found = served if found is None or (served and thought in served.answer) else found
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

    # ---- the generated text

    def _continuing(self, scene: _Scene, with_thought: bool) -> tuple[Turn | None, dict[str, Any]]:
        """The turn where the rendered answer continues a prompt, and the setting. Of several, the one whose prompt
        supplies most: with thinking off, a prompt supplies the empty tags that an answer without a thought shows."""
        fitting = []
        for number, arguments in enumerate(self._settings):
            try:
                prompt = self.render(scene.before, scene.tools, add_generation_prompt=True, **arguments)
                full = self._full(scene, scene.said, {} if self._steady else arguments)
            except Drop:
                if not arguments:
                    raise
                continue
            if full.startswith(prompt):
                known = next((m for m in self._manners if m.arguments == arguments), None)
                supplied, on = (len(known.supplied), known.switched_on and with_thought) if known else (0, False)
                fitting.append((len(full) - len(prompt), -supplied, not on, number, prompt, full))
        if not fitting:
            return None, {}
        *_, number, prompt, full = min(fitting)
        return Turn(prompt, self._generated(full[len(prompt) :]), full), self._settings[number]

    def _full(self, scene: _Scene, said: dict[str, Any], arguments: dict[str, Any]) -> str:
        """The messages with the answer. Where only the next message's text ends it, that end is part of it."""
        full = self.render([*scene.before, said], scene.tools, **arguments)
        if not self._ends.by_next or said.get("truncated"):
            return full
        follows = scene.after["role"] if scene.after else ""
        if follows not in self._ends.by_next:
            follows = "tool" if said.get("tool_calls") else "user"
        return full + self._ends.by_next[follows]

    def _note_end(self, answer: str, notes: Counter[str]) -> None:
        """Say so where the end of a turn could not be told."""
        if self._special and not any(found.end() == len(answer) for found in self._special.finditer(answer)):
            notes["answers after which the template shows no end of turn (none supervised)"] += 1

    def _generated(self, tail: str) -> str:
        """The generated part of what a rendered answer adds to its prompt."""
        if self._ends.suffix and tail.endswith(self._ends.suffix):
            return tail[: len(tail) - len(self._ends.suffix) + len(self._ends.ending)]
        ends = [m.end() for m in self._special.finditer(tail)] if self._special else []  # ends otherwise: a tool call
        return tail[: ends[-1]] if ends and not tail[ends[-1] :].strip() else tail.rstrip()

    def _without_empty_thought(self, turn: Turn, scene: _Scene, notes: Counter[str]) -> Turn:
        """The prompt opens a thought and there is none. Where the template closes it, that closing was not generated;
        where it does not, the prompt is taken without the tag: else the answer would be the thought."""
        opened = Frame.at_end(turn.prompt)
        if opened is None or opened.closed:
            return turn
        shown = self._shown(scene, scene.said)
        if shown is None or not (shown.startswith(turn.prompt) and turn.full.startswith(shown)):
            return turn
        between = shown[len(turn.prompt) :].strip()
        if between == opened.closing:
            notes[_CLOSED_THOUGHT] += 1
            return Turn(shown, self._generated(turn.full[len(shown) :]), turn.full)
        if between:
            return turn
        notes[_NO_THOUGHT] += 1
        bare = turn.prompt[: opened.start]
        return Turn(bare, turn.answer, bare + turn.answer)

    def _shown(self, scene: _Scene, said: dict[str, Any], arguments: dict[str, Any] | None = None) -> str | None:
        """All that the template prints before the text of the answer ``said``; None if it does not print that text."""
        text = self.render([*scene.before, {**said, "content": PROBE}], scene.tools, **(arguments or {}))
        return text.rpartition(PROBE)[0] if PROBE in text else None

    def _continued(self, scene: _Scene, chosen: Manner, with_thought: bool, notes: Counter[str]) -> Turn | None:
        """The prompt as served, then thought and answer, where the rendered answer does not continue the prompt."""
        thinking = take_apart(scene.said, chosen.opened, self._empty) if with_thought else None
        rest = thinking.rest if thinking else scene.said
        try:
            prompt = self.render(scene.before, scene.tools, add_generation_prompt=True, **chosen.arguments)
            full = self._full(scene, rest, chosen.arguments)
        except Drop:
            return None
        if not prompt.endswith(chosen.extra):
            return None
        bare = prompt[: len(prompt) - len(chosen.extra)]
        tail = self._own(scene, rest, chosen, bare, full)
        if tail is None:
            return None
        if thinking:
            tail = thinking.text + tail
        elif chosen.opened:
            prompt = bare
            notes[_NO_THOUGHT] += 1
        return Turn(prompt, tail, prompt + tail)

    def _rank(self, one: Manner, with_thought: bool) -> tuple[int, bool]:
        """A thought is best served by a prompt that opens one, an answer without by one that closes an empty one."""
        if with_thought:
            rank = 0 if one.opened else 1 if not one.extra and self._empty else 2 if one.extra else 3
            return rank, not one.switched_on
        return 2 if one.opened else 0 if one.extra else 1, one.switched_on

    def _own(self, scene: _Scene, said: dict[str, Any], chosen: Manner, bare: str, full: str) -> str | None:
        """What ``full`` shows of the answer itself, behind the prompt without what it supplies of a thought."""
        frame = Frame.at_end(chosen.extra) or self._empty
        if full.startswith(bare):
            tail = self._generated(full[len(bare) :])
            bare_tail = frame.dropped_from(tail) if frame else tail
            spaced = frame is not None and bare_tail != tail and bool(frame.gap or frame.after)
            return bare_tail.lstrip() if spaced else bare_tail
        # The history is not shown as it was served. A bare answer in the same place says where this one begins.
        plain = self._shown(scene, {"role": "assistant"}, chosen.arguments)
        if plain is not None and plain.endswith(chosen.joint):
            begin = len(plain) - len(chosen.joint)
            if full[:begin] == plain[:begin]:
                return self._generated(full[begin:])
        shown = self._shown(scene, said, chosen.arguments)
        if shown is None or not full.startswith(shown):
            return None
        return chosen.joint + self._generated(full[len(shown) :])


@dataclass(frozen=True)
class _Scene:
    """An answer among its messages; ``after``: the next one, if there is any."""

    before: list[dict[str, Any]]
    said: dict[str, Any]
    after: dict[str, Any] | None
    tools: list[Any] | None


def _tells(turn: Turn, thought: str) -> bool:
    """Whether the answer holds its thought once: not behind an empty one, nor behind a second opening tag."""
    if not thought:
        return True
    opened = Frame.at_end(turn.prompt)
    if opened and turn.answer.lstrip().startswith(opened.opening):
        return False
    ahead, found, _ = turn.answer.partition(thought)
    frame = Frame.at_end(ahead)
    if frame and not frame.closed:
        frame = Frame.at_end(ahead[: frame.start])
    return bool(found) and not (frame and frame.closed)


def _quotes(said: dict[str, Any], special: re.Pattern[str]) -> bool:
    calls = said.get("tool_calls")
    texts = (
        text_of(said),
        said.get("reasoning_content") or "",
        json.dumps(calls, ensure_ascii=False) if calls else "",
    )
    return any(special.search(text) for text in texts)


def _account(said: dict[str, Any], thought: str, answer: str, notes: Counter[str]) -> None:
    """Refuse a turn whose call or text is not in its rendering; note thoughts that are not."""
    calls = [call["function"]["name"] for call in said.get("tool_calls", ())]
    for name in calls:
        if answer.count(name) < calls.count(name):  # some templates show the first of several
            raise Drop("not_rendered", f"the call of {name!r}"[:80])
    if thought not in answer:
        notes["reasoning that the template does not render"] += 1
    if not calls and any(text not in answer for text in visible(said)):
        raise Drop("turn_not_rendered", "role assistant: the answer's own text")


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
