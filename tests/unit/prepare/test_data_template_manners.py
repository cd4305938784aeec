"""What published templates do that simple ones do not, each in a template of a few lines: where a turn ends, which
switch is served, how a thought is framed. Texts by hand; ⟦…⟧ is what the target generates.

All published templates together: test_data_published_templates.py (slow, needs a folder of them).
"""

# ruff: noqa: E501  (templates and rows are kept on one line)

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from recipe.prepare.chat_mask import ChatMask
from recipe.prepare.conversation import normalise
from tests.unit.prepare.chat_templates import published_tokenizer
from tests.unit.prepare.test_data_templates import CALL, TOOLS, a, runs, tool, u

LOOP, END = "{% for m in messages %}", "{% endfor %}"
PROMPT = "{% if add_generation_prompt %}"
#: GLM: the next role's token ends a turn; thinking off changes what the user is shown to have said.
GLM = (
    LOOP
    + "{% if m.role == 'user' %}{{ '<|user|>' + m.content }}{% if enable_thinking is defined and not enable_thinking %}/nothink{% endif %}"
    "{% elif m.role == 'tool' %}{{ '<|observation|>' + m.content }}{% else %}{{ '<|assistant|>\n<think>' + (m.reasoning_content or '') + '</think>\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name + (c.function.arguments | tojson) + '</tool_call>' }}{% endfor %}{% endif %}"
    + END
    + PROMPT
    + "<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n<think></think>' }}{% endif %}{% endif %}"
)
#: Cohere: two tokens end a turn, the second is the tokenizer's eos.
COHERE = (
    LOOP
    + "{{ '<|TURN|>' + m.role + ('<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' if m.role == 'assistant' else m.content) + '<|END_TURN|>' }}"
    + END
    + PROMPT
    + "<|TURN|>assistant<|START_RESPONSE|>{% endif %}"
)
#: Phi: an end of text after the last message only.
PHI = (
    LOOP
    + "{{ '<|' + m.role + '|>' + m.content + '<|end|>\n' }}"
    + END
    + PROMPT
    + "<|assistant|>{% else %}{{ eos_token }}{% endif %}"
)
#: Kimi: a finished answer shows an empty thought; only a call shows its own.
KIMI = (
    LOOP
    + "{% if m.role == 'assistant' %}{{ '<|im_assistant|><think>' + (m.reasoning_content or '' if m.tool_calls else '') + '</think>' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<|call|>' + c.function.name }}{% endfor %}{% else %}{{ '<|im_' + m.role + '|>' + m.content }}{% endif %}<|im_end|>"
    + END
    + PROMPT
    + "<|im_assistant|>{% endif %}"
)
#: DeepSeek-V3.1 as published for llama.cpp: the rendered answer shows a closed thought whatever the prompt opens.
V31 = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    + LOOP
    + "{{ '<|' + m.role + '|>' + ('<think></think>' if m.role == 'assistant' else '') + m.content }}"
    "{% if m.role == 'assistant' %}<|eos|>{% endif %}"
    + END
    + PROMPT
    + "<|assistant|><think>{% if not thinking %}</think>{% endif %}{% endif %}"
)
#: MiniMax-M3: a switch of words, which also goes into the system text.
MINIMAX = (
    "{{ '<|mode|>' + (thinking_mode | default('adaptive')) }}"
    + LOOP
    + "{% if m.role == 'assistant' %}{{ '<|ai|>' + ('<mm:think>' + m.reasoning_content if m.reasoning_content else '')"
    " + '</mm:think>' + m.content + '<|eos|>' }}{% else %}{{ '<|user|>' + m.content }}{% endif %}"
    + END
    + PROMPT
    + "<|ai|>"
    "{% if thinking_mode is defined and thinking_mode == 'disabled' %}</mm:think>{% elif thinking_mode is defined and thinking_mode == 'enabled' %}<mm:think>{% endif %}{% endif %}"
)
#: Solar: the token that ends a turn also stands between thought and answer.
SOLAR = (
    LOOP
    + "{{ '<|begin|>' + m.role }}{% if m.reasoning_content %}{{ '<|think|>' + m.reasoning_content + '<|end|><|begin|>assistant' }}{% endif %}"
    "{{ '<|content|>' + m.content + '<|end|>' }}" + END + PROMPT + "<|begin|>assistant{% endif %}"
)
#: Gemma 4: thinking is switched on by a system text alone.
GEMMA4 = (
    "{% if enable_thinking is defined and enable_thinking %}<|turn>system<|think|><turn|>{% endif %}"
    + LOOP
    + "{{ '<|turn>' + m.role }}"
    "{% if m.reasoning_content %}{{ '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{% endif %}{{ m.content + '<turn|>' }}"
    + END
    + PROMPT
    + "<|turn>assistant{% endif %}"
)
#: Nemotron-Nano-v2: the prompt opens a thought that an answer never shows closed.
NANO = (
    LOOP
    + "{{ '<|' + m.role + '|>' + ('<think>\n' if m.role == 'assistant' and loop.last else '') + m.content + '<|end|>' }}"
    + END
    + "{# </think> #}"
    + PROMPT
    + "<|assistant|><think>\n{% endif %}"
)
TEMPLATES = {
    "glm": (GLM, "<|endoftext|>"), "cohere": (COHERE, "<|END_TURN|>"), "phi": (PHI, "<|endoftext|>"), "kimi": (KIMI, "[EOS]"), "v31": (V31, "<|eos|>"),
    "minimax": (MINIMAX, "<|eos|>"), "solar": (SOLAR, "<|flush|>"), "gemma4": (GEMMA4, "<eos>"), "nano": (NANO, "<|end|>"),
}  # fmt: skip
FOUR, FINE = a("four"), a("fine")
HM = a("four", reasoning_content="hm so")
ASKED = [u("Hello"), a("", tool_calls=[CALL]), tool("2"), FOUR]

CASES: list[tuple[str, str, list[dict[str, Any]], list[str]]] = [
    ("the next role ends a turn", "glm", [u("Hello"), FOUR, u("x"), FINE],
     ["<|user|>Hello/nothink<|assistant|>\n<think></think>⟦\nfour<|user|>⟧x/nothink<|assistant|>\n<think></think>⟦\nfine<|user|>⟧"]),
    ("a tool's result ends a call", "glm", ASKED,
     ["<|user|>Hello/nothink<|assistant|>\n<think></think>⟦\n<tool_call>add{\"a\": 1, \"b\": \"two\"}</tool_call><|observation|>⟧2<|assistant|>\n<think></think>⟦\nfour<|user|>⟧"]),
    ("a thought is served with thinking on", "glm", [u("Hello"), HM], ["<|user|>Hello<|assistant|>⟦\n<think>hm so</think>\nfour<|user|>⟧"]),
    ("each turn under its own switch", "glm", [u("Hello"), HM, u("x"), FINE],
     ["<|user|>Hello<|assistant|>⟦\n<think>hm so</think>\nfour<|user|>⟧",
      "<|user|>Hello/nothink<|assistant|>\n<think>hm so</think>\nfour<|user|>x/nothink<|assistant|>\n<think></think>⟦\nfine<|user|>⟧"]),
    ("a turn that was cut has no end", "glm", [u("Hello"), a("four", truncated=True)], ["<|user|>Hello/nothink<|assistant|>\n<think></think>⟦\nfour⟧"]),
    ("two tokens end a turn", "cohere", [u("Hello"), FOUR],
     ["<|TURN|>userHello<|END_TURN|><|TURN|>assistant<|START_RESPONSE|>⟦four<|END_RESPONSE|><|END_TURN|>⟧"]),
    ("both are missing where it was cut", "cohere", [u("Hello"), a("four", truncated=True)],
     ["<|TURN|>userHello<|END_TURN|><|TURN|>assistant<|START_RESPONSE|>⟦four⟧<|END_RESPONSE|><|END_TURN|>"]),
    ("an end of text is not generated", "phi", [u("Hello"), FOUR, u("x"), FINE],
     ["<|user|>Hello<|end|>\n<|assistant|>⟦four<|end|>⟧\n<|user|>x<|end|>\n<|assistant|>⟦fine<|end|>⟧\n<|endoftext|>"]),
    ("the frame of a thought is known from calls", "kimi", [u("Hello"), HM], ["<|im_user|>Hello<|im_end|><|im_assistant|>⟦<think>hm so</think>four<|im_end|>⟧"]),
    ("an empty frame is the target's", "kimi", [u("Hello"), FOUR], ["<|im_user|>Hello<|im_end|><|im_assistant|>⟦<think></think>four<|im_end|>⟧"]),
    ("an opened thought that F shows closed", "v31", [u("Hello"), HM], ["<|user|>Hello<|assistant|><think>⟦hm so</think>four<|eos|>⟧"]),
    ("without a thought the prompt closes it", "v31", [u("Hello"), FOUR], ["<|user|>Hello<|assistant|><think></think>⟦four<|eos|>⟧"]),
    ("a switch of words: off", "minimax", [u("Hello"), FOUR], ["<|mode|>disabled<|user|>Hello<|ai|></mm:think>⟦four<|eos|>⟧"]),
    ("a switch of words: on", "minimax", [u("Hello"), HM], ["<|mode|>enabled<|user|>Hello<|ai|><mm:think>⟦hm so</mm:think>four<|eos|>⟧"]),
    ("an end inside of a turn is not its end", "solar", [u("Hello"), HM],
     ["<|begin|>user<|content|>Hello<|end|><|begin|>assistant⟦<|think|>hm so<|end|><|begin|>assistant<|content|>four<|end|>⟧"]),
    ("but one that the answer quotes is", "solar", [u("Hello"), a("two<|end|>three")],
     ["<|begin|>user<|content|>Hello<|end|><|begin|>assistant⟦<|content|>two<|end|>⟧three<|end|>"]),
    ("thinking switched on by the system text", "gemma4", [u("Hello"), HM],
     ["<|turn>system<|think|><turn|><|turn>userHello<turn|><|turn>assistant⟦<|channel>thought\nhm so\n<channel|>four<turn|>⟧"]),
    ("and not without a thought", "gemma4", [u("Hello"), FOUR], ["<|turn>userHello<turn|><|turn>assistant⟦four<turn|>⟧"]),
    ("an answer does not become the thought", "nano", [u("Hello"), FOUR], ["<|user|>Hello<|end|><|assistant|>⟦four<|end|>⟧"]),
    ("a thought that the prompt opens", "nano", [u("Hello"), HM], ["<|user|>Hello<|end|><|assistant|><think>\n⟦hm so\n</think>\n\nfour<|end|>⟧"]),
]  # fmt: skip


@lru_cache
def masker(name: str) -> ChatMask:
    text, eos = TEMPLATES[name]
    return ChatMask(published_tokenizer(text, "<s>", eos))


def shown(mask: ChatMask, row: dict[str, Any]) -> list[str]:
    """Each sequence's text, what is supervised in ⟦…⟧."""
    out = []
    for sequence in mask.mask(normalise(row), 4096).sequences:
        ids, text, at = sequence.input_ids.tolist(), "", 0
        for before, said in runs([sequence]):
            start, stop = len(before), len(before) + len(said)
            text += mask.backend.decode(ids[at:start], skip_special_tokens=False)
            text, at = text + f"⟦{mask.backend.decode(said, skip_special_tokens=False)}⟧", stop
        out.append(text + mask.backend.decode(ids[at:], skip_special_tokens=False))
    return out


@pytest.mark.parametrize("name,template,messages,expected", CASES, ids=[c[0] for c in CASES])
def test_manner(name: str, template: str, messages: list[dict[str, Any]], expected: list[str]) -> None:
    row = {"messages": messages, **({"tools": TOOLS} if any("tool_calls" in m for m in messages) else {})}
    assert shown(masker(template), row) == expected


def test_a_switch_that_only_the_prompt_reads_costs_no_rendering() -> None:
    """Qwen3: what is rendered without a generation prompt is the same whatever the switch says; GLM's is not."""
    from tests.unit.prepare.chat_templates import family_tokenizer

    assert ChatMask(family_tokenizer("qwen3_5")).turns._steady
    assert not masker("glm").turns._steady
