"""One record, whatever its schema, as one of four plain kinds; anything else is a Drop with a named reason."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from recipe.data.report import Drop

SCHEMAS = ("auto", "messages", "conversations", "prompt", "text", "tokens")
_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_call": "function_call",
}
_PROMPTS = ("prompt",)
_COMPLETIONS = ("completion", "response", "answer", "output", "chosen")
_CHAT_PAIRS = (("question", "answer"), ("instruction", "output"), ("instruction", "response"), ("query", "response"))
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Chat:
    """Messages in the form that chat templates expect, and the tools offered."""

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


def normalise(row: Any, schema: str = "auto") -> Sample:
    """The sample that a record holds. ``schema``: one of SCHEMAS; "auto" looks at the record's keys."""
    if isinstance(row, list):
        row = {"messages": row}
    if not isinstance(row, dict):
        raise Drop("not_an_object", type(row).__name__)
    row = {k: v for k, v in row.items() if v is not None}
    if schema == "auto":
        schema = _guess(row)
    if schema in ("messages", "conversations"):
        return _chat(row, schema)
    if schema == "prompt":
        return _pair(row)
    if schema == "text":
        if not isinstance(row.get("text"), str) or not row["text"].strip():
            raise Drop("empty_conversation", "text is empty or no text")
        return Text(row["text"])
    return _tokens(row)


def messages_of(content: Any) -> tuple[str, Chat]:
    """(the record's own id or "", its messages): for `regenerate`, which needs no answer to be there yet."""
    row = parse(content)
    row = {"messages": row} if isinstance(row, list) else row
    if not isinstance(row, dict):
        raise Drop("not_an_object", type(row).__name__)
    row = {k: v for k, v in row.items() if v is not None}
    asked = next((row[k] for k in ("prompt", "question", "instruction", "query") if isinstance(row.get(k), str)), None)
    if not row.get("messages") and not row.get("conversations") and asked is not None:
        row = {"id": row.get("id"), "messages": [{"role": "user", "content": asked}]}
    elif not row.get("messages") and isinstance(row.get("prompt"), list):
        row = {"id": row.get("id"), "messages": row["prompt"], "tools": row.get("tools")}
    key = "messages" if row.get("messages") or "conversations" not in row else "conversations"
    if key not in row:
        raise Drop("unknown_schema", "keys: " + ", ".join(sorted(map(str, row)))[:200])
    messages = _messages(row[key])
    if not any(m["role"] == "user" for m in messages):
        raise Drop("empty_conversation", "nothing to answer")
    system = row.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    own = row.get("id")
    return str(own) if isinstance(own, str | int) else "", Chat(messages, _tools(row.get("tools")))


def _guess(row: dict[str, Any]) -> str:
    if "input_ids" in row:
        return "tokens"
    both = [row[k] for k in ("messages", "conversations") if row.get(k)]
    if len(both) == 2 and _messages(both[0]) != _messages(both[1]):
        raise Drop("ambiguous_schema")
    for name in ("messages", "conversations"):
        if row.get(name) or (name in row and "conversations" not in row) or (name in row and name == "conversations"):
            return name
    if ("prompt" in row and any(k in row for k in _COMPLETIONS)) or any(a in row and b in row for a, b in _CHAT_PAIRS):
        return "prompt"
    if "text" in row:
        return "text"
    raise Drop("unknown_schema", "keys: " + ", ".join(sorted(map(str, row)))[:200])


def _chat(row: dict[str, Any], key: str) -> Chat:
    if key not in row:
        raise Drop("unknown_schema", f"no {key!r}")
    messages = _messages(row[key])
    system = row.get("system")
    if isinstance(system, str) and system.strip() and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return Chat(_checked(messages), _tools(row.get("tools")))


def _checked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Refuse conversations in which nothing is answered, and those that begin with an answer."""
    if not messages:
        raise Drop("empty_conversation")
    opening = next((m["role"] for m in messages if m["role"] not in ("system", "developer")), None)
    if opening == "assistant":
        raise Drop("assistant_first")
    if not any(m["role"] == "assistant" for m in messages):
        raise Drop("no_answer", "roles: " + ", ".join(m["role"] for m in messages)[:100])
    return messages


def _messages(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise Drop("bad_content", "messages is text, not a list") from error
    if isinstance(value, dict):
        value = _rows_of_columns(value)
    if not isinstance(value, list):
        raise Drop("bad_content", f"messages is {type(value).__name__}, not a list")
    messages = [_message(m) for m in value]
    # An empty system text means "none"; rendered, it would be a system turn that nobody wrote.
    return [m for m in messages if not (m["role"] == "system" and not m["content"].strip())]


def _rows_of_columns(columns: dict[str, Any]) -> Any:
    """Messages as columns, {"role": […], "content": […]}, as `datasets` stores a list of objects."""
    lists = {name: values for name, values in columns.items() if isinstance(values, list)}
    if not lists or len({len(values) for values in lists.values()}) != 1 or len(lists) != len(columns):
        return columns
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def _message(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise Drop("bad_content", f"a message is {type(raw).__name__}, not an object")
    raw = {k: v for k, v in raw.items() if v is not None}
    name = raw.get("role", raw.get("from"))
    if not name:
        raise Drop("missing_role")
    role = _ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise Drop("unknown_role", repr(name)[:80])
    content = raw.get("content", raw.get("value"))
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": [_tool_call(_json_or_none(content))]}
    calls = [_tool_call(call) for call in _list(raw.get("tool_calls"), "bad_tool_call")]
    if content is None and not calls:
        raise Drop("missing_content", f"role {role}")
    message: dict[str, Any] = {"role": role, "content": _text(content) if content is not None else ""}
    if calls:
        message["tool_calls"] = calls
    message.update(_extras(raw, role))
    if not message["content"].strip() and not calls:
        if role == "assistant":
            raise Drop("empty_answer")
        if role == "user":
            raise Drop("empty_turn")
    return message


def _extras(raw: dict[str, Any], role: str) -> dict[str, Any]:
    extras: dict[str, Any] = {k: raw[k] for k in ("name", "tool_call_id") if isinstance(raw.get(k), str)}
    thought = next((raw[k] for k in _REASONING if k in raw), None)
    if thought is not None and not isinstance(thought, str):
        raise Drop("bad_reasoning", type(thought).__name__)
    if role == "assistant" and thought and thought.strip():
        extras.update(dict.fromkeys(_REASONING, thought))  # templates disagree on the name; each reads its own
    if role == "assistant" and raw.get("truncated") is True:  # cut at max_tokens: the target did not end this turn
        extras["truncated"] = True
    return extras


def _text(content: Any) -> str:
    """A message's text. Parts are joined; a part that is no text (an image) cannot be tokenised here."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Drop("bad_content", f"content is {type(content).__name__}")
    parts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or (isinstance(part, dict) and part.get("type", "text") != "text"):
            raise Drop(
                "bad_content", f"part of type {part.get('type') if isinstance(part, dict) else type(part).__name__}"
            )
        parts.append(text)
    return "".join(parts)


def _tool_call(call: Any) -> dict[str, Any]:
    """{"type": "function", "function": {"name", "arguments"}}; arguments as an object wherever they are one, because
    servers decode them before they render history."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Drop("bad_tool_call", str(call)[:100])
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        decoded = _json_or_none(arguments)
        arguments = decoded if isinstance(decoded, dict) else ({} if not arguments.strip() else arguments)
    if not isinstance(arguments, dict | str):
        raise Drop("bad_tool_call", f"arguments are {type(arguments).__name__}")
    out = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        out["id"] = call["id"]
    return out


def _tools(value: Any) -> list[Any] | None:
    tools = _list(value, "bad_tools")
    if any(not isinstance(tool, dict) for tool in tools):
        raise Drop("bad_tools", "a tool is not an object")
    return tools or None


def _list(value: Any, reason: str) -> list[Any]:
    if value is None or (isinstance(value, str) and not value.strip()):
        return []
    if isinstance(value, str):
        value = _json_or_none(value)
    if value is None or not isinstance(value, list):
        raise Drop(reason, "not a list")
    return value


def _json_or_none(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return None


def _pair(row: dict[str, Any]) -> Sample:
    for ask, answer in _CHAT_PAIRS:  # questions are asked through the template; a prompt is raw text
        if ask in row and answer in row and "prompt" not in row:
            question = row[ask]
            if isinstance(row.get("input"), str) and row["input"].strip():
                question = f"{question}\n\n{row['input']}"
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": row[answer]}]
            return Chat(_checked(_messages(turns)), _tools(row.get("tools")))
    prompt = row.get("prompt")
    completion = next((row[k] for k in _COMPLETIONS if k in row), None)
    if isinstance(prompt, list):
        said = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
        return Chat(_checked(_messages(prompt + said)), _tools(row.get("tools")))
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise Drop("bad_content", "prompt and completion must both be text, or lists of messages")
    if not prompt:
        raise Drop("empty_turn", "empty prompt")
    if not completion.strip():
        raise Drop("empty_answer")
    return Pair(prompt, completion)


def _tokens(row: dict[str, Any]) -> Tokens:
    ids = row.get("input_ids")
    mask = next((row[k] for k in ("loss_mask", "assistant_masks", "assistant_mask") if k in row), None)
    if mask is None and isinstance(row.get("labels"), list):
        mask = [int(label != -100) for label in row["labels"]]
    if not isinstance(ids, list) or not isinstance(mask, list):
        raise Drop("bad_tokens", "input_ids and loss_mask must be lists")
    if len(ids) != len(mask) or not ids:
        raise Drop("bad_tokens", f"{len(ids)} ids, {len(mask)} mask values")
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids) or any(m not in (0, 1) for m in mask):
        raise Drop("bad_tokens", "ids must be integers, the mask 0 or 1")
    return Tokens(ids, [int(m) for m in mask])
