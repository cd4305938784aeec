"""Files as they come: cut, damaged, packed, of column formats; and prepared folders that others made or damaged."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from recipe.check.special_tokens import SpecialTokens
from recipe.data.rows import Rows
from recipe.data.tokenizer import load_tokenizer
from recipe.errors import ConfigError
from recipe.prepare import work
from recipe.prepare.chat_mask import ChatMask
from recipe.prepare.compressed import unpacked
from recipe.prepare.conversation import Chat, Pair, normalise, parse
from recipe.prepare.formats import Record, read_records
from recipe.prepare.prepare import prepare
from recipe.prepare.report import REASONS, Drop
from tests.unit.prepare import test_data_masks, test_data_templates
from tests.unit.prepare.chat_templates import make_tokenizer, save_tokenizer


@pytest.fixture(scope="module")
def tok(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tok"), "chatml")


def turn(question: str, answer: str = "The answer is four.") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def lines(count: int, width: int = 0) -> bytes:
    rng = np.random.default_rng(0)
    noise = ("".join(map(chr, rng.integers(97, 122, width))) for _ in range(count))
    return b"".join(json.dumps({**turn(f"q{i}"), "noise": n}).encode() + b"\n" for i, n in enumerate(noise))


def test_a_cut_or_foreign_zst_file_is_counted(tok: Path, tmp_path: Path) -> None:
    """The library's own reader ends silently at the cut: every row behind it would vanish."""
    packed = zstandard.compress(lines(3000, 300))
    (tmp_path / "cut.jsonl.zst").write_bytes(packed[: len(packed) // 2])
    (tmp_path / "noise.jsonl.zst").write_bytes(os.urandom(3000))
    (tmp_path / "good.jsonl.zst").write_bytes(zstandard.compress(lines(1)) + zstandard.compress(lines(1)))
    (tmp_path / "empty.jsonl").write_bytes(b"")
    report = prepare([tmp_path / "*.zst", tmp_path / "empty.jsonl"], tok, tmp_path / "out")
    assert dict(report.dropped) == {"damaged_file": 2} and 100 < report.rows_out < 2900
    assert report.rows_in == report.rows_out + 2
    assert report.sources[str(tmp_path / "good.jsonl.zst")]["kept"] == 2
    assert "no row was read from " + str(tmp_path / "empty.jsonl") in report.text()


@pytest.mark.parametrize(
    ("begin", "good"),
    [(b"", 3), (b"\n", 3), (b"  \n\n", 3), (b"{broken\n", 3), (b"\n{broken\n\n", 3), (b"{broken\n{too\n", 3)],
)
def test_json_lines_under_the_name_json(tmp_path: Path, begin: bytes, good: int) -> None:
    """Blank or broken first lines hide none of the others, whose numbers are those of the file."""
    (tmp_path / "a.json").write_bytes(begin + lines(3))
    read = list(read_records([tmp_path / "a.json"]))
    whole = [record for record in read if b"broken" not in record.content and b"too" not in record.content]
    assert len(whole) == good and [json.loads(one.content) for one in whole] == list(
        map(json.loads, lines(3).split(b"\n")[:3])
    )
    assert [record.number for record in whole] == [begin.count(b"\n") + i for i in (1, 2, 3)]


@pytest.mark.parametrize("text", ['{\n "messages": [\n {"role": "user",', "{\n}}\n", "[1, 2"])
def test_one_object_that_is_cut_off_is_a_damaged_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    *before, last = read_records([tmp_path / "a.json"])
    assert last.content.reason == "damaged_file" and [record.content for record in before] == [1, 2][: len(before)]


def test_zst_equals_its_library() -> None:
    content = np.random.default_rng(1).integers(0, 9, 300_000, dtype=np.uint8).tobytes()
    frames = b"".join(zstandard.compress(content[i : i + 70_000]) for i in range(0, len(content), 70_000))
    assert unpacked(io.BytesIO(frames), ".zst").read() == content


def test_nulls_of_column_formats_are_no_keys(tmp_path: Path) -> None:
    """A Parquet file gives every call the arguments of all calls; each row must be what it was in JSONL."""

    def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"function": {"name": name, "arguments": arguments}}
        row = {"messages": [turn("q")["messages"][0], {"role": "assistant", "content": "x", "tool_calls": [call]}]}
        return {**row, "tools": [{"function": {"name": name, "parameters": dict.fromkeys(arguments, "any")}}]}

    rows = [called("add", {"a": 1}), called("find", {"b": ["x"], "c": {"d": 2}}), turn("plain")]
    for packing in ("", ".gz"):
        path = tmp_path / "a.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        if packing:
            import gzip

            path = tmp_path / "a.parquet.gz"
            path.write_bytes(gzip.compress((tmp_path / "a.parquet").read_bytes()))
        read = [normalise(parse(record.content)) for record in read_records([path])]
        assert read == [normalise(row) for row in rows]


def test_messages_as_columns_and_one_row_alone(tmp_path: Path) -> None:
    expected = normalise(turn("Hello"))
    columns = {"messages": {"role": ["user", "assistant"], "content": ["Hello", "The answer is four."]}}
    assert normalise(columns) == expected
    with pytest.raises(Drop, match="bad_content"):
        normalise({"messages": {"role": ["user"], "content": ["Hello", "x"]}})
    (tmp_path / "one.json").write_text(json.dumps(turn("Hello")))  # not an object that wraps rows
    (record,) = read_records([tmp_path / "one.json"])
    assert normalise(parse(record.content)) == expected


def test_parquet_is_read_one_row_group_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    noise = np.random.default_rng(0).bytes(10 * 1_000_000).hex()
    table = pa.table({"text": [noise[i : i + 20_000] for i in range(0, len(noise), 20_000)]})
    pq.write_table(table, path, row_group_size=100, compression="none", use_dictionary=False)
    size = path.stat().st_size
    del table, noise
    tracemalloc.start()  # what is read through a Python file is held as Python bytes
    try:
        count = sum(1 for _ in read_records([path]))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 1000 and size > 15e6 and most < size / 4


def test_strict_refuses_single_turns_too(tok: Path, tmp_path: Path) -> None:
    call = {"function": {"name": "add", "arguments": {}}}
    messages = [*turn("x")["messages"], turn("q")["messages"][0], {"role": "assistant", "tool_calls": [call]}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    report = prepare([tmp_path / "a.jsonl"], tok, tmp_path / "out")
    assert report.rows_out == 1 and dict(report.dropped_turns) == {"not_rendered": 1}
    with pytest.raises(ConfigError, match="turn not supervised: not_rendered"):
        prepare([tmp_path / "a.jsonl"], tok, tmp_path / "out", strict=True)


@pytest.mark.parametrize("name", ["out", "o[u]t*"])
def test_what_killed_jobs_left_is_cleared(tok: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(3))
    left = tmp_path / f".{name}.partial-0123456789abcdef"
    left.mkdir()
    (left / "lock").touch()
    (left / "part-00000.stream").write_bytes(b"x")
    prepare([tmp_path / "a.jsonl"], tok, tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == sorted(["a.jsonl", name])


def test_a_kill_while_an_output_is_replaced_loses_neither(tok: Path, tmp_path: Path) -> None:
    """Between the two renames the name is gone: the old rows get it back, and are up to date."""
    (tmp_path / "a.jsonl").write_bytes(lines(3))
    prepare([tmp_path / "a.jsonl"], tok, tmp_path / "out")
    os.rename(tmp_path / "out", tmp_path / ".out.old-4194999")  # no pid is that high
    assert prepare([tmp_path / "a.jsonl"], tok, tmp_path / "out").up_to_date
    (tmp_path / ".out.old-4194999").mkdir()  # after the second rename
    prepare([tmp_path / "a.jsonl"], tok, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "out"]


# ---- every reason


def test_a_tokenizer_without_template() -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = None
    with pytest.raises(Drop, match="no_chat_template"):
        ChatMask(tokenizer).mask(normalise(turn("q")), 99)


def test_a_template_whose_answer_is_not_its_prompts() -> None:
    template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}{% if add_generation_prompt %}bot{% endif %}"
    with pytest.raises(Drop, match="template_contradicts_prompt"):
        ChatMask(make_tokenizer("chatml", template=template)).mask(normalise(turn("q")), 99)


def test_an_answer_that_no_tokens_tell_apart() -> None:
    """Every text of this tokenizer begins with a space, and it has no control token to hide it behind."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(
        models.BPE({"▁": 0, "a": 1, "b": 2, "▁a": 3, "▁ab": 4, "▁b": 5}, [("▁", "a"), ("▁a", "b"), ("▁", "b")])
    )
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    with pytest.raises(Drop, match="answer_not_separable"):
        ChatMask(PreTrainedTokenizerFast(tokenizer_object=backend)).mask(Pair("a", "b"), 99)


def test_our_own_fault_costs_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, real = ChatMask(make_tokenizer("chatml")), ChatMask.mask

    def breaks(self: ChatMask, sample: Any, limit: int) -> Any:
        if isinstance(sample, Chat) and sample.messages[0]["content"] == "bad":
            raise ZeroDivisionError("ours")
        return real(self, sample, limit)

    monkeypatch.setattr(ChatMask, "mask", breaks)
    records = [(i, Record("a", i, turn(q))) for i, q in enumerate(("good", "bad", "fine"))]
    batch, report = work.work(records, mask, work.Job("auto", 99, False))
    assert len(batch) == 2 and dict(report.dropped) == {"internal_error": 1}


def test_every_reason_has_a_test() -> None:
    here = {"damaged_file", "no_chat_template", "template_contradicts_prompt", "answer_not_separable", "internal_error"}
    families = {r for *_, expected in test_data_templates.ROWS for r in expected.values() if isinstance(r, str)}
    assert set(REASONS) == here | families | {case[-1] for case in test_data_masks.BAD}


# ---- damaged tokenizers and folders


@pytest.mark.parametrize(
    "file,content",
    [
        ("tokenizer.json", {"added_tokens": ["x", {"id": 1}, 5], "model": [1]}),
        ("tokenizer.json", {"added_tokens": 5}),
        ("tokenizer.json", {"model": {"vocab": {"a": "x"}}}),
        ("tokenizer_config.json", {"eos_token": ["a"], "pad_token": {"content": ["x"]}, "added_tokens_decoder": "x"}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "<a>"}}}),
        ("tokenizer_config.json", {"chat_template": 5}),
        ("config.json", {"text_config": 5}),
        ("generation_config.json", [1]),
    ],
)
def test_damaged_model_files_are_no_traceback(tok: Path, tmp_path: Path, file: str, content: Any) -> None:
    folder = save_tokenizer(tmp_path / "tok", "chatml")
    (folder / "config.json").write_text("{}")
    (folder / file).write_text(json.dumps(content))
    assert isinstance(SpecialTokens.of(str(folder)), SpecialTokens)
    # config.json and generation_config.json say only which tokens end an answer; chat_template.jinja comes first.
    refused = file.startswith("tokenizer") and "chat_template" not in content
    with pytest.raises(ConfigError) if refused else contextlib.nullcontext() as caught:
        ChatMask(load_tokenizer(folder), str(folder))
    assert not refused or caught.value.field == "--tokenizer"


def _folder(path: Path, columns: dict[str, Any], meta: str = "{}") -> Path:
    import datasets

    datasets.Dataset.from_dict(columns).save_to_disk(str(path / "train"))
    (path / "meta.json").write_text(meta)
    return path


@pytest.mark.parametrize(
    "columns,meta,word",
    [
        ({"input_ids": [1, 2], "loss_mask": [[1], [1]]}, "{}", "not lists"),
        ({"input_ids": [["a"]], "loss_mask": [[1]]}, "{}", "not lists of integers"),
        ({"input_ids": [[1, 2]]}, "{}", "loss_mask"),
        ({"input_ids": [[1, 2], None], "loss_mask": [[1, 1], [1]]}, "{}", "empty cells"),
        ({"input_ids": [[1, 2]], "loss_mask": [[1]]}, "{}", "different lengths"),
        ({"input_ids": [[1, 2]], "loss_mask": [[1, 1]]}, "[]", "not an object"),
    ],
)
def test_folders_that_are_no_rows(tmp_path: Path, columns: dict[str, Any], meta: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Rows.open(_folder(tmp_path, columns, meta))


def test_vocab_bound_is_stored_or_scanned(tok: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(3))
    prepare([tmp_path / "a.jsonl"], tok, tmp_path / "out")
    rows = Rows.open(tmp_path / "out")
    largest = max(int(rows[i][0].max()) for i in range(len(rows)))
    assert rows.meta["vocab_bound"] == largest + 1 == rows.vocab_bound()
    for meta in ("{}", '{"vocab_bound": "x"}'):
        folder = _folder(
            tmp_path / meta.strip("{}")[:3], {"input_ids": [[1, 7], [3]], "loss_mask": [[1, 1], [0]]}, meta
        )
        assert Rows.open(folder).vocab_bound() == 8


def test_the_home_of_nobody_is_a_path_like_any_other() -> None:
    from recipe.config.paths import locate
    from recipe.model_files.shapes import model_folder

    assert locate("~nosuchuser/x") is None
    with pytest.raises(ConfigError):
        model_folder("~nosuchuser/x")
