"""The renderer against `apply_chat_template` itself, beginning by beginning, for every family of templates."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from jinja2 import Environment

from recipe.prepare.render import Renderer
from recipe.prepare.sequential import is_sequential
from tests.unit.prepare.chat_templates import FAMILIES, TEMPLATES, family_tokenizer, make_tokenizer

CALL = {"type": "function", "function": {"name": "sum", "arguments": {"a": [1, 2], "b": None}}}
TOOLS = [{"type": "function", "function": {"name": "sum", "description": "d", "parameters": {"type": "object"}}}]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user" if i % 2 == 0 else "assistant", "content": f" turn {i}\n"} for i in range(9)],
    [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": "<|im_end|> {{ 1 }} x"},
        {"role": "assistant", "content": "b", "reasoning_content": "why", "truncated": True},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "<think>t</think>\n\nc", "thinking": None},
    ],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "name": "sum"},
        {"role": "assistant", "content": "three"},
    ],
    [{"role": "assistant", "content": "first"}, {"role": "user", "content": "u"}, {"role": "user", "content": "v"}],
]
SETTINGS: list[dict[str, Any]] = [
    {"add_generation_prompt": prompted, **more}
    for prompted in (False, True)
    for more in ({}, {"enable_thinking": False}, {"enable_thinking": True})
]


def outcome(call: Any) -> str:
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("family", [*FAMILIES, *(f"minimal {name}" for name in TEMPLATES)])
def test_every_beginning_is_what_transformers_prints(family: str) -> None:
    small = family.startswith("minimal ")
    tokenizer = make_tokenizer(family.removeprefix("minimal ")) if small else family_tokenizer(family)
    renderer = Renderer(tokenizer, tokenizer.chat_template)
    for chat, tools in itertools.product(CHATS, (None, TOOLS)):
        renderer.open(chat, tools)
        cases = [chat[:k] for k in range(len(chat) + 1)] + [[*chat[:2], {"role": "assistant", "content": "other"}]]
        for messages, setting in itertools.product(cases, SETTINGS):
            expected = outcome(
                lambda m=messages, t=tools, s=setting: tokenizer.apply_chat_template(m, tools=t, tokenize=False, **s)
            )
            assert outcome(lambda m=messages, t=tools, s=setting: renderer.text(m, t, **s)) == expected


BODY = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}A:{% endif %}"


@pytest.mark.parametrize(
    "template",
    [
        BODY + PROMPT,
        "{{ bos_token }}{% if messages[0].role == 'system' %}S{% endif %}" + BODY + PROMPT,
        "{% for m in messages %}{% set x = m.content | trim %}{% if loop.first %}F{% endif %}{{ x ~ loop.index0 }}"
        "{% for t in m.tool_calls or [] %}{{ t.function.name }}{% endfor %}{% endfor %}" + PROMPT,
    ],
)
def test_templates_that_print_message_after_message(template: str) -> None:
    assert is_sequential(Environment().parse(template))


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% if loop.last %}L{% endif %}{% endfor %}",
        "{% for m in messages %}{{ loop.length }}{% endfor %}",
        "{% for m in messages %}{{ loop['last'] }}{% endfor %}",
        "{% for m in messages %}{% set l = loop %}{{ l.last }}{% endfor %}",
        "{% for m in messages %}{{ loop.nextitem }}{% endfor %}",
        "{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% else %}none{% endfor %}",
        "{% for m in messages %}{{ messages[-1].content }}{% endfor %}",
        "{% for m in messages %}{{ messages[loop.index0 + 1].content }}{% endfor %}",
        "{{ messages | length }}" + BODY,
        BODY + "{% if messages[-1].role == 'user' %}A:{% endif %}",
        BODY + BODY,
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% for m in messages %}{% if add_generation_prompt %}p{% endif %}{{ m.content }}{% endfor %}",
        "{% set p = add_generation_prompt %}" + BODY + "{{ p }}",
        "{{ messages }}" + BODY,
        "{% set t = tools | map('upper') %}{% for m in messages %}{{ t | first }}{% endfor %}{{ t | first }}",
        "{% set c = cycler('a', 'b') %}{% for m in messages %}{{ c.next() }}{% endfor %}{{ c.next() }}",
        "{% macro f(m) %}{{ m.content }}{% endmacro %}" + BODY,
        "{% if tools %}" + BODY + "{% endif %}",
    ],
)
def test_in_doubt_a_template_is_not_sequential(template: str) -> None:
    assert not is_sequential(Environment().parse(template))


def test_the_quick_way_is_taken() -> None:
    """Speed rests on it: simple templates print whole conversations once, none falls back to the public call."""
    sequential = {n for n in FAMILIES if Renderer(t := family_tokenizer(n), t.chat_template).sequential}
    assert {"chatml", "smollm2", "demo"} <= sequential and "qwen3" not in sequential
    for name in FAMILIES:
        tokenizer = family_tokenizer(name)
        renderer = Renderer(tokenizer, tokenizer.chat_template)
        tokenizer.apply_chat_template = None  # would raise: every call must be direct
        renderer.open(CHATS[0], None)
        assert renderer.text(CHATS[0][:3], None, add_generation_prompt=True)
