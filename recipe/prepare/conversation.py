"""One record, whatever its schema, as one of four plain kinds; anything else is a Drop with a named reason.

Whoever reads a key takes it out of the row: what is left over at the end and not known to be harmless is counted by
name, so nothing that a row says vanishes in silence.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from recipe.prepare.messages import (
    is_blank,
    is_trained,
    left_over,
    list_of,
    read_messages,
    refuse_media,
    text_of,
    tools_of,
)
from recipe.prepare.report import Drop

SCHEMAS = ("auto", "messages", "conversations", "prompt", "text", "tokens")
_COMPLETIONS = ("completion", "response", "answer", "output", "chosen")
_CHAT_PAIRS = (
    ("question", "answer"),
    ("question", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("query", "response"),
)
_SYSTEM = ("system", "system_prompt", "system_message")
_BAD_LABELS = ("label", "kto_tag")


@dataclass(frozen=True)
class Chat:
    """Messages as `read_messages` makes them, and the tools offered."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None


@dataclass(frozen=True)
class Pair:
    """Raw text and its raw continuation; no template is applied."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """Plain text: everything is supervised but what opens it."""

    text: str


@dataclass(frozen=True)
class Tokens:
    """Already tokenised."""

    input_ids: list[int]
    loss_mask: list[int]


Sample = Chat | Pair | Text | Tokens


def parse(content: Any) -> Any:
    """The Python value of a record: decodes a line of JSON, refuses what JSON itself leaves undefined."""
    if isinstance(content, Drop):
        raise content
    if not isinstance(content, bytes):
        return content
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except UnicodeDecodeError as error:
        raise Drop("bad_encoding", str(error)) from error
    except (ValueError, RecursionError) as error:
        raise Drop("broken_json", str(error)) from error


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [k for k, _ in pairs]
        raise Drop("duplicate_keys", f"{next(k for k in names if names.count(k) > 1)!r}")
    return out


def normalise(row: Any, schema: str = "auto", unused: set[str] | None = None) -> Sample:
    """The sample that a record holds. ``schema``: one of SCHEMAS; "auto" looks at the record's keys. ``unused``
    collects the names of keys that nobody reads."""
    row = _fields(row)
    unused = set() if unused is None else unused
    for name in _BAD_LABELS:
        if isinstance(row.get(name), bool) and not row.pop(name):
            raise Drop("label_false", f"{name}: false")
    if schema == "auto":
        schema = _guess(row)
    sample = _read(row, schema, unused)
    left = left_over(row)
    if left and isinstance(sample, Chat):  # what a message says, too, is no loss
        said = {text_of(m).strip() for m in sample.messages}
        left = {name for name in left if not (isinstance(row.get(name), str) and row[name].strip() in said)}
    unused |= left
    return sample


def _read(row: dict[str, Any], schema: str, unused: set[str]) -> Sample:
    refuse_media(row)
    if schema in ("messages", "conversations"):
        return _answered(_chat(row, schema, unused))
    if schema == "prompt":
        return _pair(row, unused)
    if schema == "text":
        text = row.pop("text", None)
        if not isinstance(text, str) or not text.strip():
            raise Drop("empty_conversation", "text is empty or no text")
        return Text(text)
    return _tokens(row)


def messages_of(content: Any, unused: set[str] | None = None) -> tuple[str, Chat]:
    """(the record's own id or "", its messages): for `regenerate`, which needs no answer to be there yet."""
    row = _fields(parse(content))
    unused = set() if unused is None else unused
    own = row.get("id")
    refuse_media(row)
    for name in (*_BAD_LABELS, "rejected", "chosen"):  # of answers that are given anew
        row.pop(name, None)
    questions = dict.fromkeys(["prompt", *(ask for ask, _ in _CHAT_PAIRS)])
    asked = next((k for k in questions if row.get(k) and isinstance(row[k], str | list)), None)
    if row.get("messages") or row.get("conversations") or asked is None:
        chat = _chat(row, _guess_messages(row) or "messages", unused)
    else:
        question = row.pop(asked)
        for answer in _COMPLETIONS:
            row.pop(answer, None)
        turns = question if isinstance(question, list) else [*_history(row), _question(row, question)]
        chat = _with_context(row, turns, unused)
    if not any(m["role"] == "user" for m in chat.messages):
        raise Drop("empty_conversation", "nothing to answer")
    unused |= left_over(row)
    return str(own) if isinstance(own, str | int) else "", chat


def answers_in(row: Any) -> int:
    """How many answers of a record could have been learnt from, had it not been dropped."""
    lists = [row.get(name) for name in ("messages", "conversations")] if isinstance(row, dict) else []
    count = 0
    for raw in (raw for messages in lists if isinstance(messages, list) for raw in messages):
        try:
            count += sum(map(is_trained, read_messages([raw], set())[0]))
        except Drop:
            continue
    return count


def _fields(row: Any) -> dict[str, Any]:
    if isinstance(row, list):
        row = {"messages": row}
    if not isinstance(row, dict):
        raise Drop("not_an_object", type(row).__name__)
    return {k: v for k, v in row.items() if v is not None}


def _guess(row: dict[str, Any]) -> str:
    if "input_ids" in row:
        return "tokens"
    if name := _guess_messages(row):
        return name
    if ("prompt" in row and any(k in row for k in _COMPLETIONS)) or any(a in row and b in row for a, b in _CHAT_PAIRS):
        return "prompt"
    if "text" in row:
        return "text"
    raise Drop("unknown_schema", "keys: " + ", ".join(sorted(map(str, row)))[:200])


def _guess_messages(row: dict[str, Any]) -> str | None:
    """The key under which the messages are. Of two that agree, or one that is empty, the other is taken out."""
    names = [name for name in ("messages", "conversations") if name in row]
    if len(names) == 2:
        if row["messages"] and row["conversations"] and _said(row["messages"]) != _said(row["conversations"]):
            raise Drop("ambiguous_schema")
        del row["conversations" if row["messages"] else "messages"]
        return "messages" if "messages" in row else "conversations"
    return names[0] if names else None


def _said(value: Any) -> list[tuple[str, str, Any]]:
    return [(m["role"], text_of(m), m.get("tool_calls")) for m in read_messages(value, set())[0]]


def _chat(row: dict[str, Any], key: str, unused: set[str]) -> Chat:
    if key not in row:
        raise Drop("unknown_schema", f"no {key!r}; keys: " + ", ".join(sorted(map(str, row)))[:200])
    return _with_context(row, row.pop(key), unused)


def _with_context(row: dict[str, Any], turns: Any, unused: set[str]) -> Chat:
    """The conversation ``turns`` with what stands beside it: system text and tools."""
    messages, inside = read_messages(turns, unused)
    for name in _SYSTEM:
        text = row.get(name)
        if not isinstance(text, str):
            continue
        if not text.strip() or not messages or messages[0]["role"] != "system":
            del row[name]
            messages = [{"role": "system", "content": text}, *messages] if text.strip() and messages else messages
    tools = tools_of(row)
    if tools and inside and tools != inside:
        raise Drop("bad_tools", "those of the row and of a message differ")
    return Chat(messages, tools or inside or None)


def _answered(chat: Chat) -> Chat:
    """Refuse conversations in which nothing is answered, and those that begin with an answer."""
    messages = chat.messages
    if not messages:
        raise Drop("empty_conversation")
    opening = next((m["role"] for m in messages if m["role"] not in ("system", "developer")), None)
    if opening == "assistant":
        raise Drop("assistant_first")
    if not any(m["role"] == "assistant" for m in messages):
        raise Drop("no_answer", "roles: " + ", ".join(m["role"] for m in messages)[:100])
    if all(is_blank(m) for m in messages if m["role"] == "assistant"):
        raise Drop("empty_answer")
    return chat


def _pair(row: dict[str, Any], unused: set[str]) -> Sample:
    for ask, answer in _CHAT_PAIRS:  # questions are asked through the template; a prompt is raw text
        if ask in row and answer in row and "prompt" not in row:
            turns = [*_history(row), _question(row, row.pop(ask)), {"role": "assistant", "content": row.pop(answer)}]
            return _answered(_with_context(row, turns, unused))
    prompt = row.pop("prompt", None)
    name = next((k for k in _COMPLETIONS if k in row), None)
    completion = row.pop(name) if name else None
    if name == "chosen":
        row.pop("rejected", None)
    if isinstance(prompt, list):
        said = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
        return _answered(_with_context(row, prompt + said, unused))
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise Drop("bad_content", "prompt and completion must both be text, or lists of messages")
    if not prompt:
        raise Drop("empty_turn", "empty prompt")
    if not completion.strip():
        raise Drop("empty_answer")
    return Pair(prompt, completion)


def _question(row: dict[str, Any], question: Any) -> dict[str, Any]:
    more = row.get("input")
    if isinstance(more, str) and isinstance(question, str):
        del row["input"]
        question = f"{question}\n\n{more}" if more.strip() else question
    return {"role": "user", "content": question}


def _history(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The turns before the question: pairs of texts, or messages."""
    turns: list[dict[str, Any]] = []
    for turn in list_of(row.pop("history", None), "bad_content"):
        if isinstance(turn, dict):
            turns.append(turn)
        elif isinstance(turn, list) and len(turn) == 2:
            turns += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
        else:
            raise Drop("bad_content", "history must hold pairs of texts, or messages")
    return turns


def _tokens(row: dict[str, Any]) -> Tokens:
    ids = row.pop("input_ids", None)
    mask = next((row.pop(k) for k in ("loss_mask", "assistant_masks", "assistant_mask") if k in row), None)
    if mask is None and isinstance(row.get("labels"), list):
        mask = [int(label != -100) for label in row.pop("labels")]
    if not isinstance(ids, list) or not isinstance(mask, list):
        raise Drop("bad_tokens", "input_ids and loss_mask must be lists")
    if len(ids) != len(mask) or not ids:
        raise Drop("bad_tokens", f"{len(ids)} ids, {len(mask)} mask values")
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids) or any(m not in (0, 1) for m in mask):
        raise Drop("bad_tokens", "ids must be integers, the mask 0 or 1")
    return Tokens(ids, [int(m) for m in mask])
