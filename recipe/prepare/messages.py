"""One message of a conversation, whatever its schema, in the form that chat templates expect."""

from __future__ import annotations

import json
from typing import Any

from recipe.prepare.report import Drop

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
    "tool_response": "tool",
    "function_call": "function_call",
    "tool_call": "function_call",
}
REASONING = ("reasoning_content", "reasoning", "thinking")
_MARKS = ("train", "training", "loss", "weight")  # axolotl (two names), ms-swift, OpenAI and Mistral
_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA = frozenset(("images", "image", "videos", "video", "audios", "audio"))
#: Keys of rows and messages that say nothing to a target; every other key that nobody reads is counted by name.
_NAMES = """
    _id conv_id conversation_id custom_id example_id hash id idx index message_id parent_id prompt_id question_id
    row_id sample_id session_id uid uuid author category created created_at data_source dataset dataset_name date
    difficulty domain finish_reason generator lang language license locale meta metadata model model_name origin
    quality rating score source split subset tags task timestamp url usage version answer_token_ids attention_mask
    length num_tokens num_turns position_ids special_tokens_mask token_count token_type_ids
"""
HARMLESS = frozenset(_NAMES.split())


def text_of(message: dict[str, Any]) -> str:
    """A message's text; several parts joined."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def is_blank(message: dict[str, Any]) -> bool:
    """Whether it has neither text nor tool calls."""
    return not message.get("tool_calls") and not text_of(message).strip()


def is_trained(message: dict[str, Any]) -> bool:
    """Whether it is an answer to learn from: not blank, and not marked otherwise."""
    return message["role"] == "assistant" and message.get("train", True) is True and not is_blank(message)


def left_over(raw: dict[str, Any]) -> set[str]:
    """The names of keys that nobody took, that hold something and are not known to be harmless."""
    return {str(k) for k, v in raw.items() if v not in (None, "", [], {}) and str(k).lower() not in HARMLESS}


def read_messages(value: Any, unused: set[str]) -> tuple[list[dict[str, Any]], list[Any]]:
    """(messages, tools that stood inside of them). ``unused`` collects the names of keys that nobody reads.

    A message has `role`, `content` (text, or a list of {"type": "text", "text"}), and perhaps `tool_calls`, `name`,
    `tool_call_id`, `reasoning_content` (under all of its names), `truncated`, and `train`: False for an answer that
    must not be learnt from, or the weight that cannot be given to it. Raises Drop.
    """
    if isinstance(value, str):
        value = json_or_none(value)
        if value is None:
            raise Drop("bad_content", "messages is text, not a list")
    if isinstance(value, dict):
        value = _rows_of_columns(value)
    if not isinstance(value, list):
        raise Drop("bad_content", f"messages is {type(value).__name__}, not a list")
    tools: list[Any] = []
    messages = [_message(m, tools, unused) for m in value]
    # An empty system text means "none"; rendered, it would be a system turn that nobody wrote.
    return [m for m in messages if not (m["role"] in ("system", "developer") and is_blank(m))], tools


def _rows_of_columns(columns: dict[str, Any]) -> Any:
    """Messages as columns, {"role": […], "content": […]}, as `datasets` stores a list of objects."""
    lists = {name: values for name, values in columns.items() if isinstance(values, list)}
    if not lists or len({len(values) for values in lists.values()}) != 1 or len(lists) != len(columns):
        return columns
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def _message(raw: Any, tools: list[Any], unused: set[str]) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise Drop("bad_content", f"a message is {type(raw).__name__}, not an object")
    raw = {k: v for k, v in raw.items() if v is not None}
    name, content = raw.pop("role", None), raw.pop("content", None)
    if raw:
        name = raw.pop("from", name) if not name or raw.get("from") == name else name
        content = raw.pop("value", content) if content is None or raw.get("value") == content else content
        refuse_media(raw)
    role = _role(name)
    calls = [_tool_call(call) for call in list_of(raw.pop("tool_calls", None), "bad_tool_call")]
    if role == "function_call":
        role, said, content = "assistant", json_or_none(content), ""
        calls += [_tool_call(call) for call in (said if isinstance(said, list) else [said])]
    elif "function_call" in raw:  # OpenAI's older form
        calls.append(_tool_call(raw.pop("function_call")))
    if content is None and not calls:
        raise Drop("missing_content", f"role {role}")
    message: dict[str, Any] = {"role": role, "content": _content(content) if content is not None else ""}
    if calls:
        message["tool_calls"] = calls
    if raw:
        message |= {k: raw.pop(k) for k in ("name", "tool_call_id") if isinstance(raw.get(k), str)}
        if role == "assistant":
            message |= _of_answer(raw)
        else:
            tools += tools_of(raw)
        _drop_idle_marks(raw)
        unused |= left_over(raw)
    if role == "user" and is_blank(message):
        raise Drop("empty_turn")
    return message


def _role(name: Any) -> str:
    if not name:
        raise Drop("missing_role")
    role = _ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise Drop("unknown_role", repr(name)[:80])
    return role


def refuse_media(raw: dict[str, Any]) -> None:
    """Drop what comes with pictures or sound: the target would see tokens that are not made here."""
    held = [name for name in _MEDIA & raw.keys() if raw[name]]
    if held:
        raise Drop("not_text", ", ".join(sorted(held)))


# ---- what only answers have


def _of_answer(raw: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    thought = _thought(raw)
    if thought.strip():
        out = dict.fromkeys(REASONING, thought)  # templates disagree on the name; each reads its own
    if raw.get("truncated") is True:  # cut at max_tokens: the target did not end this turn
        out["truncated"] = raw.pop("truncated")
    marks = [raw.pop(name) for name in _MARKS if name in raw]
    if any(mark in (0, False) for mark in marks):
        out["train"] = False
    elif odd := [mark for mark in marks if mark not in (1, True)]:
        out["train"] = odd[0]
    return out


def _drop_idle_marks(raw: dict[str, Any]) -> None:
    """Only answers are learnt from, so "do not train" on another message is obeyed; "train" on one is not."""
    for name in _MARKS:
        if raw.get(name) in (0, False):
            raw.pop(name, None)
    if raw.get("truncated") is False:
        del raw["truncated"]


def _thought(raw: dict[str, Any]) -> str:
    """The text of the reasoning fields. A second field that says something else stays, to be counted."""
    thoughts = [raw[name] for name in REASONING if name in raw]
    for thought in thoughts:
        if not isinstance(thought, str):
            raise Drop("bad_reasoning", type(thought).__name__)
    thought = next((t for t in thoughts if t.strip()), "")
    for name in REASONING:
        if raw.get(name) == thought or not raw.get(name, "").strip():
            raw.pop(name, None)
    details = list_of(raw.pop("reasoning_details", None), "bad_reasoning")
    return thought if thought or not details else "".join(map(_detail, details))


def _detail(detail: Any) -> str:
    """One of OpenRouter's reasoning_details. A summary, or what is encrypted, is not what the target thought."""
    kind = detail.get("type") if isinstance(detail, dict) else type(detail).__name__
    if kind != "reasoning.text" or not isinstance(detail.get("text"), str):
        raise Drop("bad_reasoning", f"reasoning_details of type {kind}")
    return str(detail["text"])


# ---- content, calls, tools


def _content(content: Any) -> str | list[dict[str, str]]:
    """Text as it is, parts as parts: some templates treat each by itself. A part that is no text (an image) cannot be
    tokenised here."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Drop("bad_content", f"content is {type(content).__name__}")
    parts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or (isinstance(part, dict) and part.get("type", "text") not in _TEXT_PARTS):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise Drop("bad_content", f"part of type {kind}")
        parts.append({"type": "text", "text": text})
    return parts


def _tool_call(call: Any) -> dict[str, Any]:
    """{"type": "function", "function": {"name", "arguments"}}; arguments as an object, because servers decode them
    before they render history (and refuse what is not JSON)."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Drop("bad_tool_call", str(call)[:100])
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise Drop("bad_tool_call", f"the arguments of {function['name']!r} are not JSON: {error}"[:150]) from error
    if not isinstance(arguments, dict):
        raise Drop("bad_tool_call", f"arguments are {type(arguments).__name__}, not an object")
    out = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        out["id"] = call["id"]
    return out


def tools_of(raw: dict[str, Any]) -> list[Any]:
    """The tools offered by a row or by one of its messages, taken out of it; `functions` is OpenAI's older form."""
    tools = list_of(raw.pop("tools", None), "bad_tools")
    older = list_of(raw.pop("functions", None), "bad_tools")
    if any(not isinstance(tool, dict) for tool in tools + older):
        raise Drop("bad_tools", "a tool is not an object")
    return tools or [{"type": "function", "function": function} for function in older]


def list_of(value: Any, reason: str) -> list[Any]:
    """A list, as it is or as JSON text; an empty one for nothing. Raises Drop(``reason``)."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return []
    if isinstance(value, str):
        value = json_or_none(value)
    if value is None or not isinstance(value, list):
        raise Drop(reason, "not a list")
    return value


def json_or_none(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return None
