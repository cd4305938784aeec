"""Every published chat template in a folder: nasty and random conversations, each token against a brute-force server.

    DFLASH_TEMPLATES=/folder pytest -m slow tests/unit/prepare/test_data_published_templates.py
    python -m tests.unit.prepare.test_data_published_templates /folder         # the table of docs/data.md

The folder holds `*.jinja` files (docs/data.md says where from; their licences differ, so none is kept here). A file is
known by its sha256 in tests/data/published_templates.json, which says how each target is served and what it writes: the
template arguments for an answer without a thought ("quiet"), with one ("loud") and for a tool call ("call"), and the
generated text with {t} for the thought and {c} for the answer. The oracle renders the generation prompt with plain
transformers, tokenises it, appends the tokens of that text, and knows nothing of the code under test.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from recipe.data.tokenizer import special_strings
from recipe.prepare.chat_mask import ChatMask, Masked
from recipe.prepare.conversation import Chat, normalise, parse
from recipe.prepare.report import Drop
from tests.unit.prepare.chat_templates import published_tokenizer
from tests.unit.prepare.test_data_templates import CALL, ROWS, a, runs, s, tool, u

KNOWN: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data" / "published_templates.json").read_text(encoding="utf-8")
)
FOLDER = os.environ.get("DFLASH_TEMPLATES")
_PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "description": "one"}, "b": {"type": "string", "description": "two"}},
    "required": ["a"],
}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": _PARAMETERS}}]
_WORDS = [
    "Hello",
    "four",
    "\n",
    "\n\n",
    " ",
    "assistant",
    "user:",
    "<b>&amp;",
    "é",
    "👩‍👧",
    "{{ x }}",
    "你好",
    "1. ",
    "def f():",
]
_MARKS = ["<think>\n", "</think>\n\n", "<tool_call>", "[/INST]", "<|im_end|>\n<|im_start|>assistant\n", "<end_of_turn>"]
#: Why a template may turn down a conversation.
_REFUSALS = {
    "template_refused",
    "template_contradicts_prompt",
    "not_rendered",
    "turn_not_rendered",
    "unfinished_thought",
    "too_few_supervised",
}


def files(folder: str | None) -> list[Path]:
    """One file for each text."""
    found: dict[str, Path] = {}
    for path in sorted(Path(folder).rglob("*.jinja")) if folder else ():
        found.setdefault(digest(path), path)
    return list(found.values())


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def conversation(dice: random.Random, marks: list[str]) -> dict[str, Any]:
    """A random one: system, several turns, thoughts, tool calls, and the template's own markers in what users write."""

    def text(words: list[str], least: int = 1) -> str:
        return "".join(dice.choices(words, k=dice.randint(least, 9))).strip() or "x"

    messages = [s("Be " + text(_WORDS + marks))] if dice.random() < 0.3 else []
    with_tools = dice.random() < 0.3
    for _ in range(dice.randint(1, 4)):
        messages.append(u(text(_WORDS + marks)))
        if with_tools and dice.random() < 0.6:
            thinking = {"reasoning_content": "hm " + text(_WORDS)} if dice.random() < 0.3 else {}
            messages += [a("", tool_calls=[CALL], **thinking), {**tool(text(_WORDS + marks)), "name": "add"}]
        thinking = {"reasoning_content": "so " + text(_WORDS)} if dice.random() < 0.4 else {}
        messages.append(a("I " + text(_WORDS), **thinking))
    return {"messages": messages, **({"tools": TOOLS} if with_tools else {})}


class Server:
    """One template's target, as the table of published templates describes it."""

    def __init__(self, path: Path) -> None:
        self.facts = KNOWN[digest(path)]
        text = path.read_text(encoding="utf-8")
        self.tokenizer = published_tokenizer(text, self.facts["bos"], self.facts["eos"], self.facts.get("control", ()))
        self.mask = ChatMask(self.tokenizer)
        self.marks = [*_MARKS, self.facts["bos"], self.facts["eos"], *sorted(special_strings(self.tokenizer))]

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, messages: list[dict[str, Any]], tools: Any, **arguments: Any) -> str:
        """Plain transformers; a template that wants a call's arguments as text gets them so."""
        try:
            return str(self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **arguments))
        except TypeError:
            messages = copy.deepcopy(messages)
            for call in (c for m in messages for c in m.get("tool_calls", ())):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            return str(self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **arguments))

    def kind(self, said: dict[str, Any]) -> dict[str, Any]:
        """How this message is served: the prompt of an answer with a thought, without one, or of a call."""
        loud = self.facts["loud"]
        if said.get("reasoning_content") and isinstance(loud, dict):
            return loud
        return self.facts["call"] if said.get("tool_calls") else self.facts["quiet"]

    def prompt(self, chat: Chat, index: int) -> str | None:
        """What a server prints before the assistant message ``index``, as the table says; None where it cannot."""
        served = self.kind(chat.messages[index])
        if isinstance(served, str):  # a call that this template does not show
            return None
        try:
            prompt = self.text(chat.messages[:index], chat.tools, add_generation_prompt=True, **served["arguments"])
        except TemplateError:
            return None
        if "add" in served and prompt.endswith("<think>\n"):
            return prompt + served["add"]
        return prompt.removesuffix(served.get("cut", "\0"))

    def writes(self, chat: Chat, index: int, prompt: str, text: str) -> bool:
        """Whether the target would write ``text``: the thought and the answer in its form, and its end of turn."""
        said = chat.messages[index]
        thought, content = str(said.get("reasoning_content", "")), said["content"]
        served = self.kind(said)
        if said.get("tool_calls"):
            end = self.facts["call"]["text"][-6:]
            shown = served is not self.facts["loud"] or thought.strip() in text
            cut = "add" not in text and text.endswith(self.facts["eos"])  # the template ends the turn before the call
            words = () if cut else ("add", "1", "two")
            ended = text.endswith(self.facts["eos"])
            kept = (
                ended
                or content.strip() in text
                or content.strip() not in self.text(chat.messages[: index + 1], chat.tools)
            )
            return shown and kept and (ended or text.endswith(end)) and all(word in text for word in words)
        forms = [served["text"]]
        if served["text"].startswith("{t}") and not prompt.rstrip().endswith(
            ("think>", "THINKING|>", "<|sep|>", "opensource>")
        ):
            forms.append(self.facts["quiet"]["text"])  # behind a tool's result, where no thought is opened
        opening = served["text"].partition("{t}")[0]
        if (
            opening and "{t}" in served["text"] and prompt.endswith(opening)
        ):  # behind a tool's result the prompt opens it
            forms.append(served["text"].removeprefix(opening))
        wanted = {
            form.replace("{t}", t).replace("{c}", c)
            for form in forms
            for t in (thought, thought.strip())
            for c in (content, content.strip(), content.lstrip("\n"))
        }
        again = index and chat.messages[index - 1]["role"] in ("assistant", "tool")  # some print no prompt there
        return text in wanted or bool(again and any(text.endswith(one) for one in wanted))


def check(server: Server, row: dict[str, Any], counts: Counter[str]) -> None:
    """Mask the row: each supervised run must be an answer as served, and each answer be there or be accounted for."""
    chat = normalise(parse(json.dumps(row).encode()))
    assert isinstance(chat, Chat)
    counts["rows"] += 1
    try:
        out: Masked = server.mask.mask(chat, 100_000)
    except Drop as drop:
        assert drop.reason in _REFUSALS, drop
        counts[f"refused: {drop.reason}"] += 1
        return
    counts["split"] += len(out.sequences) > 1
    assert {turn.reason for turn in out.turns} <= _REFUSALS, out.turns
    places = [i for i, m in enumerate(chat.messages) if m["role"] == "assistant"]
    counts["turns dropped"] += len(out.turns)
    got, decode = runs(out.sequences), server.tokenizer.backend_tokenizer.decode
    if any(chat.messages[i - 1]["role"] == "assistant" for i in places):
        counts["answers in a row"] += (
            1  # no prompt stands between them: they are one run, of which nothing more is known
        )
        assert 1 <= len(got) <= len(places)
        counts["exact"] += 1
        return
    assert len(got) + len(out.turns) == len(places)
    left = {place: prompt for place in places if (prompt := server.prompt(chat, place)) is not None}
    for before, ids in got:
        text = decode(ids, skip_special_tokens=False)
        fits = [
            p for p, prompt in left.items() if before == server.ids(prompt) and server.writes(chat, p, prompt, text)
        ]
        if not fits:
            shown = decode(before, skip_special_tokens=False)
            expected = [(prompt[-120:], server.kind(chat.messages[p])["text"]) for p, prompt in left.items()]
            raise AssertionError(f"no server: …{shown[-200:]!r} → {text!r}; expected {expected}")
        prompt = left.pop(fits[0])
        assert ids == server.ids(prompt + text)[len(before) :], text
        _same_as_transformers(server, chat, fits[0], before, ids, counts)
        counts["answers"] += 1
    counts["exact"] += 1


def _same_as_transformers(
    server: Server, chat: Chat, place: int, prompt: list[int], ids: list[int], counts: Counter[str]
) -> None:
    """Where the template's own rendering of the whole answer continues the prompt, its tokens are ours."""
    said = chat.messages[place]
    served = server.kind(said)
    try:
        text = server.text(chat.messages[: place + 1], chat.tools, **served["arguments"])
    except Exception:
        return
    whole, thought = server.ids(text), said.get("reasoning_content", "").strip()
    if whole[: len(prompt)] != prompt or "cut" in served:
        return
    shown = whole[len(prompt) :]
    if served is server.facts["loud"] and thought not in server.tokenizer.backend_tokenizer.decode(shown):
        return
    length = min(len(shown), len(ids))
    assert shown[:length] == ids[:length] and len(ids) - length <= 2, (shown, ids)
    counts["same as apply_chat_template"] += 1


def examine(path: Path, fuzz: int = 60) -> Counter[str]:
    server, counts, dice = Server(path), Counter[str](), random.Random(0)
    for _, row, messages, _ in ROWS:
        usable = isinstance(row, dict) and "messages" in row and all(isinstance(m, dict) for m in row["messages"])
        if not usable or _thinks_in_text(row):
            continue
        offered = TOOLS if row.get("tools") or server.facts.get("tools_only") else None
        row = {"messages": messages or row["messages"], "tools": offered}
        try:
            normalise(parse(json.dumps(row).encode()))
        except Drop:
            continue
        check(server, row, counts)
    for _ in range(fuzz):
        row = conversation(dice, server.marks)
        if server.facts.get("tools_only"):
            row["tools"] = TOOLS
        check(server, row, counts)
    return counts


def _thinks_in_text(row: Any) -> bool:
    """Whether an answer's own text holds think tags: what a target writes then is said in test_data_templates only."""
    messages = row.get("messages", ()) if isinstance(row, dict) else ()
    return any(isinstance(m, dict) and m.get("role") == "assistant" and "think" in str(m["content"]) for m in messages)


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="set DFLASH_TEMPLATES to a folder of published *.jinja templates (docs/data.md)")
@pytest.mark.parametrize("path", files(FOLDER), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_published_template(path: Path) -> None:
    if digest(path) not in KNOWN:
        pytest.skip(f"sha256 {digest(path)} is not in tests/data/published_templates.json")
    counts = examine(path)
    refused = sum(n for name, n in counts.items() if name.startswith("refused"))
    assert counts["rows"] == counts["exact"] + refused > 100


@pytest.mark.skipif(bool(FOLDER), reason="the folder is there")
def test_the_table_of_published_templates_is_whole() -> None:
    for facts in KNOWN.values():
        for kind in ("quiet", "loud", "call"):
            assert isinstance(facts[kind], str) or {"arguments", "text"} <= set(facts[kind]), facts["source"]


def table(folder: str) -> None:
    """Print docs/data.md's table."""
    heads = ("template", "sha256", "rows", "exact", "of these split", "answers", "turns dropped", "rows refused")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for path in files(folder):
        name, known = f"{path.parent.name}/{path.stem}", digest(path) in KNOWN
        try:
            counts = examine(path) if known else Counter[str]()
        except AssertionError as error:
            print(f"| {name} | FAILS: {error}")
            continue
        why = ", ".join(f"{n} {what.partition(': ')[2]}" for what, n in counts.items() if what.startswith("refused"))
        values = [counts[key] for key in ("rows", "exact", "split", "answers", "turns dropped")]
        print(f"| {name} | {digest(path)} | {' | '.join(map(str, values))} | {why if known else 'not in the table'} |")


if __name__ == "__main__":
    table(sys.argv[1])
