"""Whatever a row says reaches the tokens, or is counted by name: turns, marks, keys, parts, the held-out split."""

# ruff: noqa: E501  (one case, one line)

from __future__ import annotations

import json
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from recipe.errors import ConfigError
from recipe.prepare.chat_mask import ChatMask
from recipe.prepare.conversation import Chat, messages_of, normalise
from recipe.prepare.prepare import prepare
from recipe.prepare.regenerate import read_prompts
from recipe.prepare.report import Drop, Report
from recipe.prepare.work import Job, work
from tests.unit.prepare.chat_templates import FAMILIES, family_tokenizer, make_tokenizer, save_tokenizer
from tests.unit.prepare.test_data_masks import a, s, u
from tests.unit.prepare.test_data_published_templates import FOLDER, KNOWN, Server, digest, files
from tests.unit.prepare.test_data_templates import CALL, TOOLS

SAID = [f"Zq{i}said" for i in range(6)]


@lru_cache
def masker(name: str) -> ChatMask:
    return ChatMask(family_tokenizer(name))


def d(text: str) -> dict[str, Any]:
    return {"role": "developer", "content": text}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "name": "add", "tool_call_id": "call12345"}


def called(text: str = "") -> dict[str, Any]:
    return a(text, tool_calls=[CALL])


SHAPES = {
    "system": [s(SAID[0]), u(SAID[1])],
    "developer": [d(SAID[0]), u(SAID[1])],
    "system and developer": [s(SAID[0]), d(SAID[1]), u(SAID[2])],
    "system in mid-chat": [u(SAID[0]), a(SAID[1]), s(SAID[2]), u(SAID[3])],
    "two system turns": [s(SAID[0]), u(SAID[1]), a(SAID[2]), s(SAID[3]), u(SAID[4])],
    "developer in mid-chat": [u(SAID[0]), a(SAID[1]), d(SAID[2]), u(SAID[3])],
    "a result without a call": [u(SAID[0]), result(SAID[1])],
    "a result after an answer": [u(SAID[0]), a(SAID[1]), result(SAID[2]), u(SAID[3])],
    "a call": [u(SAID[0]), called(), result(SAID[1])],
    "a call in history": [u(SAID[0]), called(), result(SAID[1]), a(SAID[2]), u(SAID[3])],
    "a text beside a call": [u(SAID[0]), called(SAID[1]), result(SAID[2])],
    "system before a result": [s(SAID[0]), u(SAID[1]), called(), result(SAID[2])],
    "two users": [u(SAID[0]), u(SAID[1])],
    "two answers": [u(SAID[0]), a(SAID[1]), a(SAID[2]), u(SAID[3])],
}


def holds(mask: ChatMask, shape: str) -> str:
    """Mask the shape; the last answer's row must show every word, unless it is dropped or the loss is named."""
    before = SHAPES[shape]
    try:
        out = mask.mask(
            Chat([*before, a("The end.")], TOOLS if "call" in shape or "result" in shape else None), 100_000
        )
    except Drop as drop:
        return drop.reason
    texts = [mask.backend.decode(x.input_ids.tolist(), skip_special_tokens=False) for x in out.sequences]
    row = next((text for text in texts if "The end." in text), None)
    if row is None:
        return out.turns[-1].reason
    missing = [m for m in before if m["content"] not in row]
    if missing:
        assert [bool(m.get("tool_calls")) for m in missing] == [True] and any(
            "beside a call" in x for x in out.losses
        ), row
    return "named" if missing else "shown"


@pytest.mark.parametrize("shape", SHAPES)
def test_every_turn_is_shown_or_named(shape: str) -> None:
    found = Counter(holds(masker(name), shape) for name in FAMILIES)
    assert set(found) <= {
        "shown",
        "named",
        "template_refused",
        "turn_not_rendered",
        "not_rendered",
        "template_contradicts_prompt",
    }
    assert found["shown"], found


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="set DFLASH_TEMPLATES to a folder of published *.jinja templates (docs/data.md)")
def test_every_turn_is_shown_or_named_by_published_templates() -> None:
    for path in files(FOLDER):
        if digest(path) in KNOWN:
            mask = Server(path).mask
            for shape in SHAPES:
                holds(mask, shape)


def test_what_each_family_loses() -> None:
    """By hand, from the templates' code."""
    assert (
        holds(masker("qwen3"), "system and developer")
        == holds(masker("harmony"), "system and developer")
        == "turn_not_rendered"
    )
    assert holds(masker("harmony"), "system in mid-chat") == "turn_not_rendered"
    assert holds(masker("qwen3_thinking"), "a result after an answer") == "turn_not_rendered"
    assert (
        holds(masker("chatml"), "a call") == "not_rendered"
        and holds(masker("llama3"), "a text beside a call") == "named"
    )
    assert holds(masker("chatml"), "system and developer") == "shown"


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "gemma3", "chatml"])
def test_a_developer_turn_becomes_a_system_turn_where_it_is_unknown(name: str) -> None:
    tokenizer, rest = family_tokenizer(name), [u("hello?"), a("fine three.")]
    out = masker(name).mask(normalise({"messages": [d("Be short"), *rest]}), 999)
    known = name == "chatml"
    as_given = [d("Be short") if known else s("Be short"), rest[0]]
    prompt = tokenizer.apply_chat_template(as_given, tokenize=False, add_generation_prompt=True)
    text = masker(name).backend.decode(out.sequences[0].input_ids.tolist(), skip_special_tokens=False)
    assert text.startswith(prompt.partition("<think>")[0]) and "Be short" in text
    assert sum("developer" in note for note in out.notes) == (not known)


# ---- text parts


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _gemma3_parts() -> ChatMask:
    """Written after Gemma 3's manner: each text part is trimmed by itself."""
    return ChatMask(make_tokenizer("gemma", template=(
        "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
        "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for p in m.content %}{{ p.text | trim }}{% endfor %}{% endif %}"
        "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    )))  # fmt: skip


@pytest.mark.parametrize("name", ["trimming", "qwen3_5", "demo"])
def test_text_parts_reach_the_template_as_parts(name: str) -> None:
    mask = _gemma3_parts() if name == "trimming" else masker(name)
    turns = [u(parts("one \n", " two")), a(parts(" a", "b ")), u(parts("three"))]
    last = a(parts("yes ", " no."))
    out = mask.mask(normalise({"messages": [*turns, last]}), 999)
    quiet = {"enable_thinking": False} if name == "qwen3_5" else {}
    prompt = mask.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **quiet)
    ids = mask.backend.encode(prompt, add_special_tokens=False).ids
    assert out.sequences[-1].input_ids[: len(ids)].tolist() == ids and out.sequences[-1].loss_mask[len(ids)]


def test_parts_are_joined_where_the_template_reads_text_only() -> None:
    for name in ("qwen3", "llama3", "harmony"):  # they pass over parts, print them as objects, refuse them
        got, wanted = (masker(name).mask(normalise({"messages": [u(x), a("fine four.")]}), 999).sequences[0].input_ids
                       for x in (parts("Hel", "lo there"), "Hello there"))  # fmt: skip
        assert got.tolist() == wanted.tolist(), name


# ---- marks


@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"loss": False}, {"train": False}, {"training": False}, {"weight": 1, "loss": False}]
)
def test_marked_answers_are_not_learnt_from(mark: dict[str, Any]) -> None:
    marked = {"messages": [u("one?"), a("BAD answer", **mark), u("two?"), a("good answer", weight=1, train=True)]}
    mask = masker("chatml")
    out = mask.mask(normalise(marked), 999)
    (row,) = out.sequences
    assert mask.backend.decode(row.input_ids[row.loss_mask].tolist()) == "good answer"
    assert "BAD answer" in mask.backend.decode(row.input_ids.tolist()) and not out.turns
    assert out.notes["answers marked not to be learnt from"] == 1


def test_a_blank_answer_or_an_odd_weight_costs_one_turn() -> None:
    for bad, reason in (
        (a(" "), "empty_answer"),
        (a("x y z", weight=0.5), "bad_weight"),
        (a("x y z", loss="no"), "bad_weight"),
    ):
        out = masker("chatml").mask(normalise({"messages": [u("one?"), bad, u("two?"), a("good answer")]}), 999)
        assert [turn.reason for turn in out.turns] == [reason] and out.sequences[0].loss_mask.sum() > 1


# ---- keys


def read(row: dict[str, Any]) -> tuple[Any, set[str]]:
    unused: set[str] = set()
    return normalise(row, unused=unused), unused


HISTORY = [u("first?"), a("answer one"), u("second?"), a("answer two")]
TURN = [u("q?"), a("fine.")]
OTHER = [{"type": "function", "function": {"name": "old", "parameters": {}}}]
USED: list[tuple[dict[str, Any], list[dict[str, Any]], Any]] = [
    ({"instruction": "third?", "input": "", "output": "answer three", "history": [["first?", "answer one"], ["second?", "answer two"]], "system": "be kind"},
     [s("be kind"), *HISTORY, u("third?"), a("answer three")], None),
    ({"query": "third?", "response": "answer three", "history": json.dumps(HISTORY)}, [*HISTORY, u("third?"), a("answer three")], None),
    ({"system_prompt": "be kind", "question": "q?", "response": "fine."}, [s("be kind"), *TURN], None),
    ({"prompt": [u("q?")], "completion": [a("fine.")], "system": "SYS"}, [s("SYS"), *TURN], None),
    ({"messages": [{**s("sys"), "tools": json.dumps(TOOLS)}, *TURN]}, [s("sys"), *TURN], TOOLS),
    ({"messages": TURN, "functions": [OTHER[0]["function"]]}, TURN, OTHER),
    ({"prompt": "q?", "prompt_id": "7", "messages": TURN}, TURN, None),
    ({"prompt": [u("q?")], "chosen": [a("fine.")], "rejected": [a("bad")]}, TURN, None),
    ({"messages": [u([{"type": "input_text", "text": "q?"}]), a("fine.")]}, [u(parts("q?")), a("fine.")], None),
    ({"messages": [u("q?"), {"role": "tool_call", "content": '{"name": "f", "arguments": {}}'}, {"role": "tool_response", "content": "3"}, a("fine.")]},
     [u("q?"), a("", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {}}}]), {"role": "tool", "content": "3"}, a("fine.")], None),
    ({"messages": [u("q?"), a(None, function_call={"name": "f", "arguments": "{}"}), {"role": "function", "name": "f", "content": "3"}, a("fine.")]},
     [u("q?"), a("", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {}}}]), {"role": "tool", "content": "3", "name": "f"}, a("fine.")], None),
    ({"messages": [u("q?"), a("fine.", reasoning_details=[{"type": "reasoning.text", "text": "de"}, {"type": "reasoning.text", "text": "ep"}])]},
     [u("q?"), a("fine.", reasoning_content="deep", reasoning="deep", thinking="deep")], None),
]  # fmt: skip


@pytest.mark.parametrize(("row", "messages", "tools"), USED, ids=[", ".join(row) for row, *_ in USED])
def test_keys_that_carry_context_are_used(row: dict[str, Any], messages: Any, tools: Any) -> None:
    chat, unused = read(row)
    assert chat == Chat(messages, tools) and not unused


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"messages": TURN, "id": 1, "source": "x", "images": [], "note": None}, set()),
        ({"messages": TURN, "topic": "x", "chat_template_kwargs": {"enable_thinking": False}}, {"topic", "chat_template_kwargs"}),
        ({"messages": [u("q?"), a("fine.", train_detail=[{"train": False}])]}, {"train_detail"}),
        ({"messages": [{**u("q?"), "weight": 0}, a("fine.")]}, set()),
        ({"messages": [{**u("q?"), "train": True}, a("fine.")]}, {"train"}),
        ({"messages": [s("one"), *TURN], "system": "two"}, {"system"}),
        ({"prompt": "raw", "completion": " text", "system": "x", "history": [["a", "b"]]}, {"system", "history"}),
        ({"text": "Hello there", "label": 1}, {"label"}),
        ({"input_ids": [1, 2], "loss_mask": [0, 1], "attention_mask": [1, 1], "pixels": [3]}, {"pixels"}),
    ],
)  # fmt: skip
def test_all_other_keys_are_named(row: dict[str, Any], names: set[str]) -> None:
    assert read(row)[1] == names


def test_the_report_counts_and_strict_refuses(tmp_path: Path) -> None:
    tok = save_tokenizer(tmp_path / "tok", "users")
    rows = [{"messages": TURN, "topic": i} for i in range(3)] + [{"messages": [*TURN, s("x"), *TURN]}, {"messages": TURN}, {"messages": TURN, "tools": TOOLS},
            {"messages": [*TURN, u("?"), {"role": "narrator"}]}]  # fmt: skip

    def made(name: str, some: list[Any], **more: Any) -> Report:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        return prepare([tmp_path / f"{name}.jsonl"], tok, tmp_path / name, **more)

    report = made("all", rows)
    assert report.losses == {"unused_key: topic": 3, "unused_key: tools (this chat template shows none)": 1}
    assert report.dropped == {"unknown_role": 1} and report.dropped_turns == {"turn_not_rendered": 1}
    assert report.notes["answers in dropped rows"] == 1
    assert "not used, 3 × unused_key: topic (e.g. " in report.text() and "role system, message 2" in report.text()
    assert Report.from_json(json.loads((tmp_path / "all" / "report.json").read_text())).losses == report.losses
    made("good", rows[4:5], strict=True)
    for at, word in ((0, "unused_key: topic"), (3, "turn_not_rendered"), (5, "tools"), (6, "unknown_role")):
        with pytest.raises(ConfigError, match=word):
            made(f"strict{at}", rows[at : at + 1] + rows[4:5], strict=True)


def test_names_of_keys_cannot_fill_the_report() -> None:
    from recipe.prepare.formats import Record

    records = [(i, Record("a", i, {"messages": TURN, f"key {i} " + "x" * 99: 1})) for i in range(400)]
    _, report = work(records, masker("chatml"), Job("auto", 99, False))
    assert len(report.losses) <= 201 and sum(report.losses.values()) == 400


# ---- held out


def test_a_split_that_holds_out_too_few_says_so(tmp_path: Path) -> None:
    tok = save_tokenizer(tmp_path / "tok", "chatml")
    rows = [{"messages": [u("hello"), a(f"yes {i % 7}?"), u(f"q {i}"), a(f"answer {i}")]} for i in range(40)]
    rows += [{"messages": [u("hi"), a(f"answer {i}")]} for i in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for asked, held in ((2, 0), (3, 3), (10, 3)):
        report = prepare([tmp_path / "a.jsonl"], tok, tmp_path / str(asked), holdout=asked)
        assert report.heldout_rows == held and bool(report.heldout_short) == (held < asked)
        assert (f"held out {held} rows, {asked} were asked for" in report.text()) == (held < asked)


# ---- regenerate


def test_regenerate_reads_the_same_context(tmp_path: Path) -> None:
    for row, messages, tools in USED:
        _, chat = messages_of(row)
        shown = [m for m in chat.messages if m["role"] != "assistant"]
        assert shown == [m for m in messages if m["role"] != "assistant"] and chat.tools == tools
    assert messages_of({"instruction": "Add.", "input": "1 2"})[1].messages == [u("Add.\n\n1 2")]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [d("Be short"), *TURN], "topic": 1}) + "\n")
    counted: Counter[str] = Counter()
    (prompt,) = read_prompts([tmp_path / "a.jsonl"], counted)
    assert prompt.chat.messages[0] == s("Be short") and counted == {"unused_key: topic": 1}
