"""The committed demo target: loads in plain transformers, is a language model, and writes what its files say."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig

from recipe.target.cpu_kernels import use_torch_kernels_on_cpu
from tools.demo_target.answers import MAX_NEW_TOKENS, greedy_answers, load_stored, read_entries, sample_perplexity
from tools.demo_target.corpus import QUESTIONS, Corpus, Entry, entries_of, free_text, is_held_out
from tools.demo_target.rst import clean_document, clean_inline
from tools.demo_target.token_file import TokenFile, build
from tools.demo_target.tokenizer import MASK, SPECIAL_TOKENS, VOCAB_SIZE, mask_token_id

ASSETS = Path(__file__).resolve().parents[2] / "recipe" / "demo" / "assets"
CARD = json.loads((ASSETS / "target_card.json").read_text(encoding="utf-8"))


@cache
def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in gzip.decompress((ASSETS / name).read_bytes()).decode().splitlines()]


@pytest.fixture(scope="module")
def stored():
    use_torch_kernels_on_cpu()
    return load_stored(ASSETS, "cpu")


def test_files_are_small_and_the_weights_are_bf16():
    assert (ASSETS / "model.safetensors").stat().st_size <= 10e6
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) <= 14e6
    with safe_open(ASSETS / "model.safetensors", "pt") as file:
        tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        assert {tensor.get_dtype() for tensor in tensors.values()} == {"BF16"}
        sizes = [torch.Size(tensor.get_shape()).numel() for tensor in tensors.values()]
    assert sum(sizes) == CARD["training"]["parameters"]


def test_shape_makes_tensor_parallelism_uneven():
    config = AutoConfig.from_pretrained(ASSETS)
    assert config.model_type == "qwen3_5_text" and config.num_hidden_layers == 8 and config.tie_word_embeddings
    assert Counter(config.layer_types) == {"linear_attention": 6, "full_attention": 2}
    assert (config.num_attention_heads, config.num_key_value_heads) == (6, 2)
    assert (config.linear_num_key_heads, config.linear_num_value_heads) == (4, 12)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (VOCAB_SIZE, 192, 384)


def test_every_stored_tensor_is_used_and_none_is_missing():
    from transformers import AutoModelForCausalLM

    _, info = AutoModelForCausalLM.from_pretrained(ASSETS, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


def test_held_out_perplexity_is_the_recorded_one_and_far_below_a_unigram(stored):
    sample = CARD["heldout_sample"]
    measured = sample_perplexity(*stored, sample["texts"])
    assert measured == pytest.approx(sample["perplexity"], rel=0.05)
    assert measured < sample["unigram_perplexity"] / 10
    whole = CARD["perplexity"]
    assert whole["heldout_perplexity"] < whole["unigram_perplexity"] / 10
    assert whole["heldout_perplexity_per_byte"] < whole["unigram_perplexity_per_byte"] / 3


def test_greedy_answers_are_the_recorded_ones(stored):
    model, tokenizer = stored
    recorded = [*rows("conversations.jsonl.gz")[:2], rows("heldout.jsonl.gz")[0]]
    answers = greedy_answers(model, tokenizer, [row["messages"][0]["content"] for row in recorded], 3)
    end = tokenizer.eos_token_id
    assert [tokens[-1] for tokens in answers] == [end] * 3
    assert [tokenizer.decode(tokens[:-1]) for tokens in answers] == [row["messages"][1]["content"] for row in recorded]


def test_splits_are_disjoint_and_large_enough():
    train, held_out = rows("conversations.jsonl.gz"), rows("heldout.jsonl.gz")
    assert len(train) >= 2000 and len(held_out) >= 150
    train_ids = {row["id"] for row in train}
    assert len(train_ids) == len(train) and train_ids.isdisjoint(row["id"] for row in held_out)
    assert not any(is_held_out(name) for name in train_ids)
    questions = {row["messages"][0]["content"] for row in train}
    assert questions.isdisjoint(row["messages"][0]["content"] for row in held_out)
    for row in (*train, *held_out):
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert all(message["content"].strip() for message in row["messages"])


def test_mask_token_is_reserved(stored):
    _, tokenizer = stored
    assert tokenizer.mask_token == MASK and tokenizer.mask_token_id == mask_token_id(tokenizer) == 3
    texts = [message["content"] for name in ("conversations.jsonl.gz", "heldout.jsonl.gz")
             for row in rows(name) for message in row["messages"]]  # fmt: skip
    ids = tokenizer([*texts, *CARD["heldout_sample"]["texts"]], add_special_tokens=False)["input_ids"]
    assert not any(token < len(SPECIAL_TOKENS) for row in ids for token in row)


def test_tokenizer_round_trips_any_text_and_renders_chats(stored):
    _, tokenizer = stored
    text = "def f(x):\n\treturn 'é中🙂' * 1234  # \x00 \r\n"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [{"type": "text", "text": "Yo"}]}]
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == rendered
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_markup_becomes_plain_text():
    assert clean_inline("See :func:`~os.path.join`, :ref:`files <f>`, *src* and ``x``.") == (
        "See `join()`, files, src and `x`."
    )
    source = ".. index:: a\n\n.. _b:\n\nTitle\n=====\n\n.. versionadded:: 3.4\n\nText::\n\n   code\n"
    assert clean_document(source) == "Title\n\nNew in version 3.4.\n\nText:\n\n   code\n"


def test_entries_carry_their_qualified_name_and_own_text():
    source = (
        ".. module:: m\n\n.. class:: C(a)\n\n   A class of things.\n\n   .. method:: go(n)\n\n"
        "      Go *n* steps.  Then stop.\n\n.. function:: f()\n\n   .. versionadded:: 3.2\n"
    )
    found = list(entries_of(source, "library/m"))
    assert [(entry.name, entry.sentences) for entry in found] == [
        ("m.C", ("A class of things.",)),
        ("m.C.go", ("Go n steps.", "Then stop.")),
    ]
    assert found[1].answer() == (
        "`m.C.go` is a method of the Python standard library. The Python 3.11 documentation describes this method as "
        "follows: Go n steps. You can read more about it on the page library/m of the Python 3.11 documentation. "
        "What else would you like to know?"
    )
    assert free_text(found[1].answer()) == "Go n steps."
    assert free_text("no form at all") == "no form at all"


def test_answers_keep_the_form_and_little_of_them_is_free_text(stored):
    _, tokenizer = stored
    for name, key in (("conversations.jsonl.gz", "conversations"), ("heldout.jsonl.gz", "heldout")):
        answers = [row["messages"][1]["content"] for row in rows(name)]
        free = [free_text(answer) for answer in answers]
        assert sum(a != f for a, f in zip(answers, free, strict=True)) >= 0.99 * len(answers)
        sizes = [[len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
                 for texts in (answers, free)]  # fmt: skip
        assert max(sizes[0]) < MAX_NEW_TOKENS
        share = sum(sizes[1]) / (sum(sizes[0]) + len(answers))  # the end-of-turn token counts too
        assert share == pytest.approx(CARD[key]["free_text_share"]) and share < 0.3


def test_long_sentences_and_long_answers_become_no_conversation(tmp_path):
    long_name = "_".join("abcdefghijklmnopqrstuvwxyz" * 6)
    entries = tuple(
        Entry(name, "function", f"{name}()", "the module `m`", "library/m", (sentence,), (0, 1), held_out)
        for name, sentence, held_out in (
            ("m.f", "Return one.", False),
            ("m.g", "Return " + "one and " * 40 + "one.", False),
            (long_name, "Return two.", False),
            ("m.h", "Return three.", True),
        )
    )
    build(Corpus({"a": "Some text of the documentation."}, {"b": "Other text."}, entries), tmp_path)
    assert [entry["id"] for entry in read_entries(tmp_path)] == ["m.f", "m.h"]
    data = TokenFile.load(tmp_path)
    assert len(data.chats.answers) == len(QUESTIONS) and len(data.held_out_chats.answers) == 1
