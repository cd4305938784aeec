"""prepare end to end on real files: every row accounted for, no row touches another, never a torn folder."""

# ruff: noqa: E501  (rows and templates are kept on one line)

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from recipe.data.rows import Rows
from recipe.errors import ConfigError
from recipe.prepare import prepare as verb
from recipe.prepare.prepare import prepare
from tests.unit.prepare.chat_templates import CHATML, save_tokenizer


@pytest.fixture(scope="module")
def tok(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tok"), "chatml")


def turn(question: str, answer: str = "The answer is four.") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def jsonl(path: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def contents(folder: Path, split: str = "train") -> list[tuple[list[int], list[bool]]]:
    rows = Rows.open(folder, split)
    return [(rows[i][0].tolist(), rows[i][1].tolist()) for i in range(len(rows))]


NASTY = [
    turn("one"), b"", b"{broken", b"[]", {"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]},
    {"messages": [{"role": "system", "content": "x"}]}, {"messages": [{"role": "user", "content": "x"}]}, turn("two"),
    turn("three", ""), b'{"text": "\xff"}', turn("four\ud800"), turn("long " * 4000), {"text": "Hello there friend"},
    {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, {"foo": 1}, turn("five"),
]  # fmt: skip


def test_every_row_is_accounted_for(tok: Path, tmp_path: Path) -> None:
    report = prepare([jsonl(tmp_path / "a.jsonl", NASTY)], tok, tmp_path / "out", max_seq_len=1024)
    assert report.rows_in == 15 == report.rows_out + sum(report.dropped.values())  # the blank line is no row
    assert dict(report.dropped) == {
        "broken_json": 1, "empty_conversation": 1, "assistant_first": 1, "no_answer": 2, "empty_answer": 1,
        "bad_encoding": 1, "lone_surrogate": 1, "answer_after_max_seq_len": 1, "unknown_schema": 1,
    }  # fmt: skip
    stored = json.loads((tmp_path / "out" / "report.json").read_text())
    assert stored["rows_in"] == 15 and stored["rows_out"] == 5 and stored["dropped"] == dict(report.dropped)
    assert stored["examples"]["broken_json"]["row"] == 3
    rows = Rows.open(tmp_path / "out")
    assert stored["tokens"] == rows.lengths.sum() and stored["supervised_tokens"] == rows.supervised.sum()
    assert (tmp_path / "out" / "meta.json").exists() and os.listdir(tmp_path).count("out") == 1
    assert not [n for n in os.listdir(tmp_path) if "partial" in n]


def test_a_row_is_tokenised_as_if_it_were_alone(tok: Path, tmp_path: Path) -> None:
    prepare([jsonl(tmp_path / "a.jsonl", NASTY)], tok, tmp_path / "all", max_seq_len=1024)
    good = [row for row in NASTY if row in (turn("one"), turn("two"), turn("five")) or (isinstance(row, dict) and
            ("text" in row or "input_ids" in row))]  # fmt: skip
    alone = []
    for i, row in enumerate(good):
        prepare([jsonl(tmp_path / f"{i}.jsonl", [row])], tok, tmp_path / f"out{i}", max_seq_len=1024)
        alone += contents(tmp_path / f"out{i}")
    assert contents(tmp_path / "all") == alone and len(alone) == 5


def test_processes_give_the_same_rows_in_the_same_order(tok: Path, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [turn(f"question {i}", "fine " * (i % 7 + 1)) for i in range(900)] + [b"{"])
    one = prepare([source], tok, tmp_path / "one", num_proc=1)
    two = prepare([source], tok, tmp_path / "two", num_proc=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert (one.rows_in, one.rows_out, one.tokens) == (two.rows_in, two.rows_out, two.tokens) == (901, 900, one.tokens)


def _write(path: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    writers = {
        "a.jsonl": lambda: path.write_bytes(lines),
        "bom.jsonl": lambda: path.write_bytes(b"\xef\xbb\xbf" + lines),
        "crlf.jsonl": lambda: path.write_bytes(lines.replace(b"\n", b"\r\n")),
        "a.jsonl.gz": lambda: path.write_bytes(gzip.compress(lines)),
        "a.jsonl.zst": lambda: path.write_bytes(zstandard.compress(lines[:40]) + zstandard.compress(lines[40:])),
        "array.json": lambda: path.write_text(json.dumps(rows, indent=1)),
        "object.json": lambda: path.write_text(json.dumps({"data": rows})),
        "lines.json": lambda: path.write_bytes(lines),
        "array.json.gz": lambda: path.write_bytes(gzip.compress(json.dumps(rows).encode())),
        "a.parquet": lambda: pq.write_table(pa.Table.from_pylist(rows), path),
    }
    if kind in writers:
        writers[kind]()
    elif kind == "a.csv":
        with path.open("w", newline="") as out:
            table = csv.writer(out)
            table.writerow(["messages", "other"])
            table.writerows([json.dumps(row["messages"]), "x,\n"] for row in rows)
    elif kind in ("stream.arrow", "file.arrow"):
        table = pa.Table.from_pylist(rows)
        new = pa.ipc.new_stream if kind == "stream.arrow" else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        import datasets

        made = datasets.Dataset.from_list(rows)
        (datasets.DatasetDict({"train": made}) if kind == "dict" else made).save_to_disk(str(path))
    return path


KINDS = ["a.jsonl", "bom.jsonl", "crlf.jsonl", "a.jsonl.gz", "a.jsonl.zst", "array.json", "object.json", "lines.json",
         "array.json.gz", "a.parquet", "a.csv", "stream.arrow", "file.arrow", "dataset", "dict"]  # fmt: skip


def test_all_formats_hold_the_same_rows(tok: Path, tmp_path: Path) -> None:
    from recipe.prepare.formats import read_records

    rows = [turn("one é"), turn("two"), {**turn("three"), "id": None}]
    from recipe.prepare.conversation import normalise, parse

    expected = [normalise(row) for row in rows]
    for kind in KINDS:
        path = _write(tmp_path / kind, kind, rows)
        assert [normalise(parse(record.content)) for record in read_records([path])] == expected, kind


def test_a_damaged_file_is_counted_and_the_rest_used(tok: Path, tmp_path: Path) -> None:
    packed = gzip.compress(b"".join(json.dumps(turn(f"q{i}" * 50)).encode() + b"\n" for i in range(2000)))
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    report = prepare([tmp_path / "*.gz", jsonl(tmp_path / "b.jsonl", [turn("one")])], tok, tmp_path / "out")
    assert report.dropped["damaged_file"] == 1 and 1 < report.rows_out < 2000
    assert report.sources[str(tmp_path / "b.jsonl")] == {"kept": 1, "dropped": 0}


def test_unchanged_is_up_to_date_and_every_input_is_in_the_key(tok: Path, tmp_path: Path) -> None:
    source, out = jsonl(tmp_path / "a.jsonl", [turn("one"), turn("two " * 30)]), tmp_path / "out"
    assert not prepare([source], tok, out).up_to_date
    stamp = (out / "meta.json").stat().st_mtime_ns
    again = prepare([source], tok, out)
    assert again.up_to_date and again.rows_in == 2 and (out / "meta.json").stat().st_mtime_ns == stamp

    def key(**settings: Any) -> str:
        where = settings.pop("tokenizer", tok)
        assert not prepare([source], where, out, **settings).up_to_date
        return json.loads((out / "meta.json").read_text())["key"]

    first = json.loads((out / "meta.json").read_text())["key"]
    keys = [first, key(max_seq_len=64), key(seed=1), key(holdout=1), key(schema="messages"), key(max_samples=1)]
    keys.append(key(weights=[0.5]))
    stops = save_tokenizer(tmp_path / "t1", "chatml")
    (stops / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    keys.append(key(tokenizer=stops))
    keys.append(
        key(tokenizer=save_tokenizer(tmp_path / "t2", "chatml", template=CHATML.replace("<|im_end|>", "<|im_end|> ")))
    )
    keys.append(key(tokenizer=save_tokenizer(tmp_path / "t3", "chatml", adds_bos=True)))
    jsonl(source, [turn("one"), turn("tvo " * 30)])
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_rows_of_another_tokenizer_are_refused(tok: Path, tmp_path: Path) -> None:
    prepare([jsonl(tmp_path / "a.jsonl", [turn("one")])], tok, tmp_path / "out")
    rows = Rows.open(tmp_path / "out")
    rows.check_tokenizer(tok)
    rows.check_tokenizer(save_tokenizer(tmp_path / "copy", "chatml"))
    for other in (save_tokenizer(tmp_path / "o1", "gemma"), save_tokenizer(tmp_path / "o2", "chatml", adds_bos=True)):
        with pytest.raises(ConfigError, match="another"):
            rows.check_tokenizer(other)


def test_a_strangers_file_is_never_deleted(tok: Path, tmp_path: Path) -> None:
    source, out = jsonl(tmp_path / "a.jsonl", [turn("one")]), tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="did not make"):
            prepare([source], tok, out, overwrite=overwrite)
    (out / "thesis.txt").rename(tmp_path / "thesis.txt")
    prepare([source], tok, out)
    (tmp_path / "thesis.txt").rename(out / "thesis.txt")
    with pytest.raises(ConfigError, match="thesis"):
        prepare([source], tok, out, overwrite=True)
    assert (out / "thesis.txt").read_text() == "years of work" and len(Rows.open(out)) == 1


def test_a_smaller_rerun_leaves_nothing_of_the_larger(tok: Path, tmp_path: Path) -> None:
    source, out = jsonl(tmp_path / "a.jsonl", [turn(f"q{i}") for i in range(300)]), tmp_path / "out"
    prepare([source], tok, out, holdout=0.1)
    prepare([jsonl(source, [turn("one")])], tok, out)
    assert len(Rows.open(out)) == 1 and sorted(os.listdir(out)) == ["meta.json", "report.json", "train"]
    assert sum(name.endswith(".arrow") for name in os.listdir(out / "train")) == 1


def test_no_usable_row_is_an_error_that_names_the_reasons(tok: Path, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [turn("x " * 300), b"{"])
    with pytest.raises(ConfigError, match="0 usable rows of 2") as error:
        prepare([source], tok, tmp_path / "out", max_seq_len=64)
    assert "answer_after_max_seq_len × 1" in str(error.value) and "broken_json" in str(error.value)
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl"]
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="the input is empty"):
        prepare([tmp_path / "empty.jsonl"], tok, tmp_path / "out")


def test_strict_names_the_row(tok: Path, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [turn("one"), b"{"])
    with pytest.raises(ConfigError, match=r"a\.jsonl:2") as error:
        prepare([source], tok, tmp_path / "out", strict=True)
    assert error.value.field == "--strict" and not (tmp_path / "out").exists()
    prepare([source], tok, tmp_path / "out")
    with pytest.raises(ConfigError, match="broken_json"):  # a cached result is held to it too
        prepare([source], tok, tmp_path / "out", strict=True)


@pytest.mark.parametrize("holdout,expected", [(20, 20), (0.1, 20)])
def test_holdout_is_deterministic_and_shares_nothing(tok: Path, tmp_path: Path, holdout: float, expected: int) -> None:
    rows = [turn(f"question {i % 150}", f"answer {i}") for i in range(199)]
    rows.append({"messages": [*turn("question 3")["messages"], *turn("and then")["messages"]], "id": "long"})
    a = prepare([jsonl(tmp_path / "a.jsonl", rows)], tok, tmp_path / "a", holdout=holdout)
    prepare([jsonl(tmp_path / "b.jsonl", rows[::-1])], tok, tmp_path / "b", holdout=holdout)
    held, train = contents(tmp_path / "a", "heldout"), contents(tmp_path / "a")
    assert a.heldout_rows == expected == len(held) and len(train) == 200 - expected
    assert sorted(held) == sorted(contents(tmp_path / "b", "heldout"))  # content decides, not place
    assert not {str(r) for r in held} & {str(r) for r in train}
    lines = [json.loads(line) for line in (tmp_path / "a" / "heldout_prompts.jsonl").read_text().splitlines()]
    assert len(lines) == expected and all(line["messages"][-1]["role"] == "user" and line["id"] for line in lines)
    asked = {json.dumps(line["messages"][0]) for line in lines}
    left = {i for i in range(200) if json.dumps(rows[i]["messages"][0]) not in asked}
    assert len(left) == len(train)  # no prompt of the held-out side is left in training


def test_max_samples_draws_from_all_sources(tok: Path, tmp_path: Path) -> None:
    for name in "ab":
        jsonl(tmp_path / f"{name}.jsonl", [turn(f"{name} {i}") for i in range(100)])
    report = prepare([tmp_path / "?.jsonl"], tok, tmp_path / "out", max_samples=100)
    kept = [s["kept"] for s in report.sources.values()]
    assert sum(kept) == 100 and min(kept) > 30
    prepare([tmp_path / "?.jsonl"], tok, tmp_path / "same", max_samples=100)
    assert contents(tmp_path / "out") == contents(tmp_path / "same")
    weighted = prepare([tmp_path / "?.jsonl"], tok, tmp_path / "w", max_samples=100, weights=[9, 1])
    assert next(iter(weighted.sources.values()))["kept"] > 70
    shares = prepare([tmp_path / "?.jsonl"], tok, tmp_path / "v", weights=[1, 0.5])
    kept = [s["kept"] for s in shares.sources.values()]
    assert kept[0] == 100 and 30 < kept[1] < 70


@pytest.mark.parametrize(
    "change,field",
    [
        ({"inputs": ["nowhere*.jsonl"]}, "--input"),
        ({"inputs": [__file__]}, "--input"),
        ({"tokenizer": "/no/such/folder"}, "--tokenizer"),
        ({"max_seq_len": 1}, "--max-seq-len"),
        ({"schema": "mesages"}, "--format"),
        ({"holdout": -1}, "--holdout"),
        ({"holdout": 5}, "--holdout"),
        ({"holdout": float("nan")}, "--holdout"),
        ({"holdout": float("inf")}, "--holdout"),
        ({"inputs": [""]}, "--input"),
        ({"inputs": ["a\0b"]}, "--input"),
        ({"inputs": ["/dev/null"]}, "--input"),
        ({"tokenizer": "~nosuchuser/x"}, "--tokenizer"),
        ({"tokenizer": "a\0b"}, "--tokenizer"),
        ({"weights": [float("nan")]}, "--weights"),
        ({"max_samples": 0}, "--max-samples"),
        ({"weights": [1.0, 2.0]}, "--weights"),
    ],
)
def test_mistakes_are_named(tok: Path, tmp_path: Path, change: dict[str, Any], field: str) -> None:
    settings = {"inputs": [jsonl(tmp_path / "a.jsonl", [turn("one"), turn("two")])], "tokenizer": tok, **change}
    with pytest.raises(ConfigError) as error:
        prepare(output=tmp_path / "out", **settings)
    assert error.value.field == field and sorted(os.listdir(tmp_path)) == ["a.jsonl"]


def test_options_of_the_command_line_alone(tok: Path, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    for words, field in ((["--output", str(tmp_path), "--show=-1"], "--show"), (["--output", " "], "--output")):
        with pytest.raises(ConfigError) as error:
            verb.run(parser.parse_args(words))
        assert error.value.field == field


def test_a_killed_job_goes_on(tok: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL of the whole process group in the middle; the next run reuses finished parts and gives the same rows."""
    source = jsonl(tmp_path / "a.jsonl", [turn(f"question {i}", "fine " * 20) for i in range(3000)])
    code = (
        "import recipe.prepare.prepare as p; p._PART_ROWS = 500\n"
        f"p.prepare([{str(source)!r}], {str(tok)!r}, {str(tmp_path / 'out')!r}, num_proc=2)"
    )
    job = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, cwd=Path(verb.__file__).parents[2])
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.partial-*/part-00001.json")) and time.monotonic() < deadline:
        assert job.poll() is None
        time.sleep(0.01)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    parts = list(tmp_path.glob(".out.partial-*/part-*.json"))
    assert parts and not (tmp_path / "out").exists()
    monkeypatch.setattr(verb, "_PART_ROWS", 500)
    report = prepare([source], tok, tmp_path / "out", num_proc=2)
    prepare([source], tok, tmp_path / "clean", num_proc=1)
    assert report.rows_in == 3000 and contents(tmp_path / "out") == contents(tmp_path / "clean")
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "clean", "out"]


def test_command_line_and_show(tok: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    source, out = jsonl(tmp_path / "a.jsonl", [turn("one"), b"{"]), tmp_path / "out"
    words = ["--input", str(source), "--tokenizer", str(tok), "--output", str(out), "--show", "5"]
    assert verb.run(parser.parse_args(words)) == 0
    text = capsys.readouterr().out
    assert "rows in=2 out=1 dropped=1" in text and "⟦The answer is four.<|im_end|>⟧" in text and "broken_json" in text
    assert verb.run(parser.parse_args(words)) == 0 and "up to date" in capsys.readouterr().out
    assert verb.run(parser.parse_args(["--output", str(out), "--show", "1"])) == 0


def test_open_names_what_is_wrong(tok: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a folder made by"):
        Rows.open(tmp_path)
    prepare([jsonl(tmp_path / "a.jsonl", [turn("one")])], tok, tmp_path / "out")
    with pytest.raises(ConfigError, match="heldout"):
        Rows.open(tmp_path / "out", "heldout")
    rows = Rows.open(tmp_path / "out")
    with pytest.raises(IndexError):
        rows[1]
    for file in (tmp_path / "out" / "train").glob("*.arrow"):
        file.write_bytes(b"not arrow")
    with pytest.raises(ConfigError, match="damaged"):
        Rows.open(tmp_path / "out")


def test_rows_without_our_count_columns(tmp_path: Path) -> None:
    """A folder with the two columns of the surface alone, booleans as mask, in several chunks."""
    import datasets

    ids = [[1, 2, 3], [4], [5, 6]]
    masks = [[False, True, True], [True], [False, False]]
    features = datasets.Features(
        input_ids=datasets.List(datasets.Value("int64")), loss_mask=datasets.List(datasets.Value("bool"))
    )
    parts = [
        datasets.Dataset.from_dict({"input_ids": [i], "loss_mask": [m]}, features)
        for i, m in zip(ids, masks, strict=True)
    ]
    datasets.concatenate_datasets(parts).select([2, 0, 1]).save_to_disk(str(tmp_path / "train"))
    (tmp_path / "meta.json").write_text("{}")
    rows = Rows.open(tmp_path)
    assert rows.lengths.tolist() == [2, 3, 1] and rows.supervised.tolist() == [0, 2, 1]
    assert [rows[i][0].tolist() for i in range(3)] == [[5, 6], [1, 2, 3], [4]] and rows[1][1].tolist() == masks[0]
