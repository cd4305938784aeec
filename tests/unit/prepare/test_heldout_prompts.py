"""tau is measured on the prompts of training: what `prepare` holds out, `evaluate` decodes, token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipe.data.rows import Rows
from recipe.data.tokenizer import load_tokenizer
from recipe.decode.prompts import encode_prompts, read_prompts, stop_ids
from recipe.errors import ConfigError
from recipe.prepare.prepare import prepare
from tests.unit.prepare.chat_templates import save_tokenizer

# As Qwen3.5's: the prompt opens a thought, which an answer without one shows as an empty pair; tools come first.
THINKING = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n"
    "{% endif %}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def said(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tokenizer(tmp_path_factory.mktemp("tok"), "chatml")
    (folder / "chat_template.jinja").write_text(THINKING)
    return folder


def test_prompts_are_the_tokens_before_the_last_answer(target: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"messages": said(f"How is day {n}?", "Fine, thank you.")} for n in range(12)]
    rows += [{"messages": said(f"Call {n}", "One", "And then?", f"Two of {n}"), "tools": TOOLS} for n in range(12)]
    rows += [{"prompt": f"Once {n}", "completion": " upon a time"} for n in range(12)]
    rows += [{"input_ids": [40 + n, 41, 42, 43, 44, 45, 46], "loss_mask": [0, 1, 1, 0, 0, 1, 1]} for n in range(12)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare([file], target, tmp_path / "out", holdout=0.5, num_proc=1, quiet=True)
    listed = read_prompts(tmp_path / "out" / "heldout_prompts.jsonl")
    prompts = encode_prompts(listed, load_tokenizer(target))
    held = Rows.open(tmp_path / "out", "heldout")
    trained = set()
    for index in range(len(held)):
        ids, mask = held[index]
        first = max(at for at in range(1, len(mask)) if mask[at] and not mask[at - 1])
        trained.add(tuple(ids[:first].tolist()))
    assert len(prompts) == 24 and {tuple(prompt.ids.tolist()) for prompt in prompts} <= trained
    kinds = {"prompt" in row: row for row in listed if "messages" not in row}
    assert len(kinds) == 2, "pairs of texts and rows of tokens are held out too"
    chats = [prompt.text for prompt, row in zip(prompts, listed, strict=True) if "messages" in row]
    assert all(text.endswith("<think>\n\n</think>\n\n") for text in chats), "the training rows open like this"
    two = [text for text in chats if "weather" in text]
    assert two and all("One" in text and "And then?" in text for text in two), "what comes before the last answer"


def test_a_chat_of_anybody_is_rendered_with_its_tools_and_arguments(target: Path) -> None:
    tokenizer = load_tokenizer(target)
    row = {"messages": said("Rain?"), "tools": TOOLS}
    assert "weather" in encode_prompts([row], tokenizer)[0].text
    known = {**row, "input_ids": [40, 41]}
    assert encode_prompts([known], tokenizer)[0].ids.tolist() == [40, 41]
    asked = encode_prompts([known], tokenizer, {"enable_thinking": False})[0].text
    assert "weather" in asked and asked.endswith("<think>\n\n</think>\n\n")


def test_mistakes_carry_the_name_of_their_field_and_no_list(target: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(target)
    file = tmp_path / "p.jsonl"
    file.write_text("[]\n")
    with pytest.raises(ConfigError, match=r"^dflash\.evaluation\.prompts"):
        read_prompts(file, "dflash.evaluation.prompts")
    with pytest.raises(ConfigError, match=r"^dflash\.evaluation\.prompts"):
        encode_prompts([{"x": 1}], tokenizer, field="dflash.evaluation.prompts")
    tokenizer.chat_template = "{{ raise_exception('no\nsystem') }}"
    with pytest.raises(ConfigError, match="TemplateError: no") as caught:
        encode_prompts([{"messages": said("a")}], tokenizer)
    assert "['" not in str(caught.value)


def test_decoding_ends_where_supervision_ends(target: Path, tmp_path: Path) -> None:
    """The end of turn of the template ends an answer, also when the tokenizer's end is another token."""
    tokenizer = load_tokenizer(target)
    tokenizer.eos_token = next(t for t in tokenizer.all_special_tokens if t != "<|im_end|>")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [7, 8]}}))
    assert stop_ids(tmp_path, tokenizer) == {end, tokenizer.eos_token_id, 7, 8}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert stop_ids(tmp_path, tokenizer) == {end, tokenizer.eos_token_id, 9}
