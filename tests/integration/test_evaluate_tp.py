"""`evaluate --tp N` as a user calls it: real processes over gloo, and the result of one process."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipe.run.cli import main
from recipe.training.export import export_hf
from tests.numerics.decode_models import VOCAB, drafter_parts, tiny_target

CLOCKS = {"seconds", "speedup", "tokens_per_s", "plain_tokens_per_s", "settings"}
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU each would be asked for")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Target (hybrid), export and prompts."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tp")
    tiny_target("qwen3_5").save_pretrained(folder / "target")
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="0").save_pretrained(folder / "target")
    config, weights = drafter_parts(depth=5)
    export_hf(weights, config, folder / "export", "float32")
    rows = [{"prompt": text, "domain": ["odd", "even"][len(text) % 2]} for text in ("5 9 33 71", "44", "7 7 8")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "target", folder / "export", folder / "prompts.jsonl"


def arguments(folders: tuple[Path, Path, Path], *more: object) -> list[str]:
    target, export, prompts = folders
    fixed = ["evaluate", export, "--target", target, "--prompts", prompts, "--device", "cpu", *more]
    return [str(one) for one in fixed]


def in_a_process(arguments: list[str], log: Path, kill_after: float | None = None) -> int | None:
    """``main`` in a fork, which saves the imports; its exit code. ``kill_after``: rank 1 is killed."""

    def work() -> None:
        sys.stdout = sys.stderr = log.open("w", buffering=1)
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stdout.fileno(), 2)
        if kill_after is not None:
            threading.Thread(target=kill_rank, args=(kill_after,), daemon=True).start()
        code = main(arguments)
        sys.stderr.flush()
        os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(240)
    if process.is_alive():
        process.kill()
    return process.exitcode


def other_ranks(parent: int) -> list[int]:
    from recipe.process import children_of

    return [pid for _, pid in children_of(parent)]


def kill_rank(after_s: float) -> None:
    time.sleep(after_s)
    for pid in other_ranks(os.getpid()):
        os.kill(pid, signal.SIGKILL)


def test_two_ranks_measure_what_one_does(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Three prompts in batches of two: a batch and a sequence alone."""
    results: list[dict[str, Any]] = []
    for tp in (1, 2):
        out, log = tmp_path / f"{tp}.json", tmp_path / f"{tp}.log"
        more = ("--max-new-tokens", 9, "--batch-size", 2, "--json", out, "--tp", tp, *["--exact-sums"] * (tp > 1))
        code = in_a_process(arguments(folders, *more), log)
        assert code == 0, log.read_text()
        assert "Traceback" not in log.read_text() and "WARN" not in log.read_text().upper()
        results.append(json.loads(out.read_text()))
        for domain in results[-1]["domains"].values():
            del domain["speedup"]
    one, two = results
    assert (one["settings"]["target_tp"], two["settings"]["target_tp"]) == (1, 2)
    assert two["identical"] and two["tokens"] == 27 and two["state_replays"] > 0
    assert {k: v for k, v in one.items() if k not in CLOCKS} == {k: v for k, v in two.items() if k not in CLOCKS}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--tp", "0"], "must be at least 1"),
        (["--tp", "1000"], "cores"),
        (["--tp", "2", "--device", "cuda"], "--device"),
        (["--exact-sums"], "--exact-sums"),
    ],
)
def test_a_degree_that_cannot_be_had_is_one_message(
    folders: tuple[Path, Path, Path], capsys: pytest.CaptureFixture, more: list[str], named: str
) -> None:
    assert main(arguments(folders, *more)) == 2
    said = capsys.readouterr().err
    assert named in said and said.count("error:") == 1 and "Traceback" not in said and "Fix:" in said


def test_a_degree_with_nothing_left_for_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.decode.evaluate import check_degree
    from recipe.errors import ConfigError
    from recipe.model_files.shapes import TargetShape

    shape = TargetShape.resolve("Qwen/Qwen3.6-27B")
    monkeypatch.setattr(os, "cpu_count", lambda: 10**6)
    check_degree(8, shape, torch.device("cpu"), "cpu")
    with pytest.raises(ConfigError, match="would hold none"):
        check_degree(shape.intermediate_size + 1, shape, torch.device("cpu"), "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.5, 25.0])
def test_a_rank_that_is_killed_is_named(
    folders: tuple[Path, Path, Path], tmp_path: Path, after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it imports, and while it decodes: one line, exit 1, and no folder left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    more = ("--max-new-tokens", 400, "--tp", 2, "--json", tmp_path / "out.json")
    code = in_a_process(arguments(folders, *more), tmp_path / "log", after_s)
    said = (tmp_path / "log").read_text()
    assert code == 1 and "rank 1 of the target ended with exit code -9" in said and "Traceback" not in said
    assert not (tmp_path / "out.json").exists() and not list(tmp_path.glob("dflash-evaluate-*"))


def test_logits_that_are_not_finite_end_all_ranks_by_name(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    target, export, prompts = folders
    broken = tmp_path / "broken"
    shutil.copytree(target, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][44] = float("inf")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    out, log = tmp_path / "found.json", tmp_path / "log"
    more = ("--tp", 2, "--json", out, "--max-new-tokens", 4)
    assert in_a_process(arguments((broken, export, prompts), *more), log) == 1
    said = log.read_text()
    assert "error: prompt 1, position 1: the target's logits are not finite" in said and "Traceback" not in said
    assert not out.exists()
