"""Small tokenizers with the families' chat templates; trained here, nothing comes from a network.

`TEMPLATES` are minimal texts, one manner each; `FAMILIES` are those of tests/data/templates, written after the published
formats, each with its opening and end-of-turn token.
"""

# ruff: noqa: E501  (rows and templates are kept on one line)

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Thinking and tools; drops the thoughts of old turns; an answer without a thought shows empty tags; the prompt has the
# opening tag (thinking on) or the empty tags (off).
QWEN = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}"
    "{% endif %}{{ '# Tools\n' }}{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% if ns.last < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}{% set thought = m.reasoning_content | default('') %}{% set said = m.content %}"
    "{% if '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1] %}"
    "{% set said = said.split('</think>')[-1] %}{% endif %}{% set said = said.lstrip('\n') %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last %}"
    "{{ '<think>\n' + thought.strip() + '\n</think>\n\n' }}{% endif %}{{ said }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>\n' + c.function.name + ' ' + (c.function.arguments | tojson)"
    " + '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}"
    "{% else %}{{ '<think>\n' }}{% endif %}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name + '<|eom_id|>' }}{% else %}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim"
    " + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# No control tokens at all; the prompt ends in text that could merge with the answer.
PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
VICUNA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# Shows users and answers, and passes over all others in silence.
USERS = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ '<|im_start|>' + m.role + '\n' + m.content"
    " + '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "</s>"),
    *("<s>", "[INST]", "[/INST]", "<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>"),
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
]
WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TEMPLATES = {
    "chatml": (CHATML, "<|endoftext|>", "<|im_end|>"),
    "users": (USERS, "<|endoftext|>", "<|im_end|>"),
    "qwen": (QWEN, "<|endoftext|>", "<|im_end|>"),
    "llama3": (LLAMA3, "<|begin_of_text|>", "<|eot_id|>"),
    "gemma": (GEMMA, "<bos>", "<eos>"),
    "plain": (PLAIN, "<|endoftext|>", "<|endoftext|>"),
    "vicuna": (VICUNA, "<|begin_of_text|>", "</s>"),
}
FAMILIES = {  # file of tests/data/templates → (bos, eos)
    "chatml": ("<|endoftext|>", "<|im_end|>"),
    "smollm2": ("<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|endoftext|>", "<|im_end|>"),
    "qwen3_thinking": ("<|endoftext|>", "<|im_end|>"),
    "qwen3_5": ("<|endoftext|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "gemma": ("<bos>", "<eos>"),
    "gemma3": ("<bos>", "<eos>"),
    "gemma4": ("<bos>", "<eos>"),
    "deepseek_r1": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "deepseek_v3_1": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "mistral": ("<s>", "</s>"),
    "harmony": ("<|endoftext|>", "<|return|>"),
    "demo": ("<|endoftext|>", "<|im_end|>"),
}
_FOLDER = Path(__file__).parents[2] / "data" / "templates"
_DEMO = Path(__file__).parents[3] / "recipe" / "demo" / "assets" / "tokenizer_config.json"
_CORPUS = [
    "Hello there, how are you today? I am fine. The answer is four. What is two plus two? assistant: user: system:",
    "The quick brown fox jumps over the lazy dog.\n\nThen it sleeps.\n def add(a, b): return a + b. ASSISTANT: USER:",
] * 20


@lru_cache(maxsize=1)
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=640, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in WORDS])
    return tokenizer.to_str()


def make_tokenizer(name: str = "chatml", adds_bos: bool = False, template: str | None = None) -> Any:
    """A tokenizer with the template ``name``; pad is eos. ``adds_bos``: it puts a BOS before every text by itself."""
    text, bos, eos = TEMPLATES[name]
    backend = Tokenizer.from_str(_trained())
    if adds_bos:
        opening = (bos, backend.token_to_id(bos))
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[opening])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=eos)
    made.add_special_tokens({"additional_special_tokens": SPECIAL}) if hasattr(made, "add_special_tokens") else None
    made.chat_template = template or text
    return made


def family_template(name: str) -> str:
    """The text of a family's template; the demo's is the real one."""
    if name == "demo":
        return str(json.loads(_DEMO.read_text(encoding="utf-8"))["chat_template"])
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def family_tokenizer(name: str) -> Any:
    """The small tokenizer with a family's template and control tokens; pad is eos."""
    bos, eos = FAMILIES[name]
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()), bos_token=bos, eos_token=eos, pad_token=eos
    )
    made.chat_template = family_template(name)
    return made


def save_tokenizer(folder: Path, name: str = "chatml", **kind: Any) -> Path:
    make_tokenizer(name, **kind).save_pretrained(folder)
    return folder


_CONTROL = re.compile(
    r"<[|｜][^<>|｜{}\n' ]{1,40}[|｜]>|</?s>|<bos>|<eos>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>|<\|channel>|<channel\|>"
    r"|<\|?tool(?:_call|_response)?\|?>|\[/?[A-Z_]{4,}\]|<seed:\w+>|\[gMASK\]|<sop>|\]~!?b\]?\[?|\[e~\[|<SPECIAL_\d+>|<sep>"
    r"|<end_of_sentence>|</assistant>"
)


def published_tokenizer(template: str, bos: str, eos: str, control: Iterable[str] = ()) -> Any:
    """The small tokenizer for any template: its control tokens are found in its text, and ``control`` adds others."""
    backend = Tokenizer.from_str(_trained())
    found = sorted({*_CONTROL.findall(template), bos, eos, *control} - set(WORDS))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in found])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=eos)
    made.chat_template = template
    return made
