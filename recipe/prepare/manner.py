"""What a chat template does, learnt from probes: its switches for thinking, what its generation prompt supplies, and
what ends an answer. Nothing here sees a user's text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jinja2 import nodes

from recipe.prepare.report import Drop
from recipe.prepare.thought import Frame

Messages = list[dict[str, Any]]
Render = Callable[..., str]  # (messages, tools, **arguments) -> text; raises Drop where the template refuses

PROBE = "zqanswerqz"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "f", "description": "g", "parameters": {"type": "object", "properties": {}}},
    }
]
_CALL = {"type": "function", "id": "call12345", "function": {"name": "f", "arguments": {"x": 1}}}
CALLED: Messages = [
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "result", "name": "f", "tool_call_id": "call12345"},
]
_PROBES: list[tuple[Messages, list[Any] | None]] = [
    ([{"role": "user", "content": "question"}], None),
    ([{"role": "user", "content": "question"}], TOOLS),
    (CALLED, TOOLS),
]
_SWITCHES = ("enable_thinking", "thinking")  # what most templates call it
_SWITCH = re.compile("think|reason")
_MOST_SETTINGS = 64


def asked(answer: str | None = None) -> Messages:
    """The probe: a question, and its answer if one is given."""
    turns: Messages = [{"role": "user", "content": "question"}]
    return turns if answer is None else [*turns, {"role": "assistant", "content": answer}]


# ---- switches


def settings(tree: nodes.Template | None, template: str, render: Render) -> list[dict[str, Any]]:
    """The template arguments with which its generation prompt differs, the default ({}) first; and those that switch
    thinking on by other words (a system text). Servers pass such switches on (`chat_template_kwargs`); their names and
    values are taken from the template's code."""
    kept: list[dict[str, Any]] = []
    supplies: list[list[str | None]] = []
    prompts: list[list[str | None]] = []
    for arguments in [{}, *_candidates(tree, template)][:_MOST_SETTINGS]:
        texts = [_prompt(render, *probe, arguments) for probe in _PROBES]
        supplied = [t and t.rpartition(probe[0][-1]["content"])[2] for t, probe in zip(texts, _PROBES, strict=True)]
        switched_on = any(arguments.get(name) is True for name in _SWITCHES) and texts not in prompts
        if not arguments or (any(texts) and (supplied not in supplies or switched_on)):
            kept.append(arguments)
            supplies.append(supplied)
            prompts.append(texts)
    return kept


def _candidates(tree: nodes.Template | None, template: str) -> list[dict[str, Any]]:
    if tree is None:  # code that jinja could not be asked for
        found = [name for name in _SWITCHES if name in template]
        return [{name: on} for name in found for on in (False, True)]
    names = sorted({n.name for n in tree.find_all(nodes.Name) if n.ctx == "load" and _SWITCH.search(n.name)})
    values: dict[str, list[Any]] = {name: [False, True] for name in names}
    for compared in tree.find_all(nodes.Compare):
        if isinstance(compared.expr, nodes.Name) and compared.expr.name in values:
            texts = [c.value for op in compared.ops for c in _constants(op.expr) if isinstance(c.value, str)]
            values[compared.expr.name] += [text for text in texts if text not in values[compared.expr.name]]
    return [{name: value} for name in names for value in values[name]]


def _constants(node: nodes.Node) -> list[nodes.Const]:
    return [node] if isinstance(node, nodes.Const) else list(node.find_all(nodes.Const))


def _prompt(render: Render, messages: Messages, tools: list[Any] | None, arguments: dict[str, Any]) -> str | None:
    try:
        return render(messages, tools, add_generation_prompt=True, **arguments)
    except Drop:
        return None


def only_prompt_depends_on(tree: nodes.Template | None, names: set[str]) -> bool:
    """Whether the code reads ``names`` nowhere but under ``if add_generation_prompt``: then what is rendered without a
    generation prompt is the same whatever they are."""
    return tree is not None and not _read_elsewhere(tree, names)


def _read_elsewhere(node: nodes.Node, names: set[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.If) and _asks_for_prompt(node.test):
        return any(_read_elsewhere(child, names) for child in [node.test, *node.elif_, *node.else_])
    return any(_read_elsewhere(child, names) for child in node.iter_child_nodes())


def _asks_for_prompt(test: nodes.Node) -> bool:
    if isinstance(test, nodes.And):
        return _asks_for_prompt(test.left) or _asks_for_prompt(test.right)
    return isinstance(test, nodes.Name) and test.name == "add_generation_prompt"


# ---- prompts


@dataclass(frozen=True)
class Manner:
    """What a template does with one setting of its switches. ``supplied``: all that its generation prompt prints;
    ``extra``: the end of it that a rendered answer does not show (a think tag); ``joint``: what an answer shows beyond
    the prompt (a space, an empty thought)."""

    arguments: dict[str, Any]
    supplied: str
    extra: str = ""
    joint: str = ""

    @property
    def switched_on(self) -> bool:
        """Whether thinking was asked for by name."""
        return any(self.arguments.get(name) is True for name in _SWITCHES)

    @property
    def opened(self) -> Frame | None:
        """The thought that the prompt opens and leaves open."""
        frame = Frame.at_end(self.extra)
        return frame if frame and not frame.closed and not self.extra[: frame.start].strip() else None

    @property
    def empty(self) -> Frame | None:
        """How an empty thought looks, where the prompt or a rendered answer shows one."""
        frames = (Frame.at_end(self.extra), Frame.at_end(self.joint))
        return next((frame for frame in frames if frame and frame.closed), None)


def manner(render: Render, arguments: dict[str, Any], tools: bool) -> Manner | None:
    """None where prompt and answer have no common opening, or the template refuses even the probe."""
    given = TOOLS if tools else None
    try:
        before = render(asked(), given, **arguments)
        prompt = render(asked(), given, add_generation_prompt=True, **arguments)
        shown = render(asked(PROBE), given, **arguments).rpartition(PROBE)[0]
    except Drop:
        return None
    if not (shown.startswith(before) and prompt.startswith(before)):
        return None
    opening, supplied = shown[len(before) :], prompt[len(before) :]
    frame = Frame.at_end(supplied)
    if frame and opening.startswith(supplied[: frame.start]):
        rest = opening[frame.start :]
        return Manner(arguments, supplied, supplied[frame.start :], frame.dropped_from(rest).lstrip())
    if supplied.startswith(opening):
        return Manner(arguments, supplied, extra=supplied[len(opening) :])
    if opening.startswith(supplied):
        return Manner(arguments, supplied, joint=opening[len(supplied) :])
    return None


def shown_thought(render: Render, arguments: dict[str, Any]) -> Frame | None:
    """How the template frames a thought before a tool call: some show thoughts nowhere else."""
    thought = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), PROBE)
    call = {**CALLED[1], "content": "said", **thought}
    try:
        return Frame.seen(render([CALLED[0], call], TOOLS, **arguments), PROBE)
    except Drop:
        return None


# ---- ends


@dataclass(frozen=True)
class Ends:
    """``suffix``: what the template prints after the last answer; ``ending``: the part of it that the target generates.
    ``by_next``: where the answer itself shows no end, the control token with which a next message of this role begins
    (GLM: "user" → `<|user|>`, "tool" → `<|observation|>`): the target generates it to end its turn."""

    suffix: str = ""
    ending: str = ""
    by_next: dict[str, str] = field(default_factory=dict)


def ends_of_turns(render: Render, special: re.Pattern[str] | None, stops: set[str], tools: bool) -> Ends:
    """The generated part of an end stays when a next message comes: what is printed after the last answer alone (Phi's
    end of text) was not generated. In it the first token that stops a generation counts. Where none is known, the last
    one counts if all of it stays, else the first."""
    given = TOOLS if tools else None
    try:
        last = render(asked(PROBE), given).rpartition(PROBE)[2]
    except Drop:
        return Ends()
    if special is None:
        return Ends(last, last.rstrip())
    try:
        follows = render([*asked(PROBE), {"role": "user", "content": "next"}], given).rpartition(PROBE)[2]
    except Drop:
        follows = last
    ends = list(special.finditer(last))
    if not ends:
        user = _next_end(special, last, follows)
        return Ends(last, last.rstrip(), {"user": user, "tool": _tool_end(render, special)} if user else {})
    kept = _shared(last, follows)
    staying = [end for end in ends if end.end() <= kept] or ends
    chosen = next((end for end in staying if end.group() in stops), staying[-1 if kept == len(last) else 0])
    return Ends(last, last[: chosen.end()])


def _tool_end(render: Render, special: re.Pattern[str]) -> str:
    try:
        return _next_end(special, render(CALLED[:2], TOOLS), render(CALLED, TOOLS))
    except Drop:
        return ""


def _next_end(special: re.Pattern[str], text: str, longer: str) -> str:
    """The control token, and white space before it, with which ``longer`` goes on after ``text``; empty without."""
    if not longer.startswith(text):
        return ""
    blank = len(longer) - len(longer[len(text) :].lstrip())
    found = special.match(longer, blank)
    return longer[len(text) : found.end()] if found else ""


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
