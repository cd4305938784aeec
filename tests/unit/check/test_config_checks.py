"""``resolve`` and ``check``: what is derived, and what is refused before any model is loaded."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from recipe.check import check, resolve
from recipe.check.derive import default_gamma
from recipe.check.special_tokens import SpecialTokens
from recipe.config import RunConfig, load_config, load_config_text
from recipe.data.rows import Occurrences, Rows
from recipe.errors import ConfigError

SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 12,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": [1, 2],
    "bos_token_id": 3,
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A model folder without weights: config and tokenizer files only."""
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    vocabulary = {f"t{i}": i for i in range(90)}
    added = [{"id": 95, "content": "<|mask|>"}, {"id": 96, "content": "<|pad|>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    settings = {"mask_token": {"content": "<|mask|>"}, "pad_token": "<|pad|>", "eos_token": "t2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_rows(folder: Path, lengths: list[int], supervised: bool = True, vocab_bound: int = 90) -> Path:
    masks = [[0] * (n // 2) + [int(supervised)] * (n - n // 2) for n in lengths]
    return write_lists(folder, [[5] * n for n in lengths], masks, vocab_bound)


def write_lists(folder: Path, ids: list[list[int]], masks: list[list[int]], vocab_bound: int = 96) -> Path:
    from datasets import Dataset

    Dataset.from_dict({"input_ids": ids, "loss_mask": masks}).save_to_disk(folder / "train")
    (folder / "meta.json").write_text(json.dumps({"vocab_bound": vocab_bound, "fingerprint": "x"}))
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "data", [10 + i % 50 for i in range(300)])


def make(target: Path, data: Path, tmp_path: Path, *overrides: str) -> RunConfig:
    """A small valid run on CPU, with overrides."""
    config = {
        "dflash": {
            "run": {"name": "t", "output_dir": str(tmp_path / "runs"), "epochs": 2},
            "data": {"path": str(data), "token_budget": 256, "max_seq_len": 64, "max_batch_size": 8},
            "layout": {"target_gpus": [0, 1], "drafter_gpus": [2, 3], "target_tp": 2, "device": "cpu"},
            "target": {"path": str(target), "dtype": "float32"},
            "ring": {"min_ready": 2, "max_depth": 12},
            "drafter": {"num_layers": 2, "block_size": 8, "max_anchors": 16},
        }
    }
    return load_config_text(json.dumps(config), overrides)


def error_of(config: RunConfig, **how: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check(resolve(config, gpus=0), **how)
    return caught.value


class TestResolve:
    def test_fills_everything_and_is_idempotent(self, target: Path, data: Path, tmp_path: Path) -> None:
        resolved = resolve(make(target, data, tmp_path), gpus=0)
        ours = resolved.dflash
        assert ours.target.target_layer_ids == [1, 3, 5, 7, 9]
        assert ours.drafter.mask_token_id == 95
        assert ours.objective.gamma == 4.0
        dpace = make(target, data, tmp_path, "dflash.objective.loss=dpace")
        assert resolve(dpace, gpus=0).dflash.objective.gamma is None  # it does without
        heads = (ours.drafter.num_attention_heads, ours.drafter.num_key_value_heads, ours.drafter.head_dim)
        assert heads == (6, 2, 8) and ours.drafter.intermediate_size == 96
        assert ours.ring.page_tokens and ours.drafter.attention == "eager"
        assert resolve(load_config_text(resolved.to_json()), gpus=0) == resolved

    def test_device_follows_the_machine(self, target: Path, data: Path, tmp_path: Path) -> None:
        config = make(target, data, tmp_path, "dflash.layout.device=auto")
        assert resolve(config, gpus=0).dflash.layout.device == "cpu"
        on_gpus = resolve(config, gpus=8).dflash
        assert (on_gpus.layout.device, on_gpus.drafter.attention) == ("cuda", "flex")

    def test_given_values_stay(self, target: Path, data: Path, tmp_path: Path) -> None:
        given = ("dflash.target.target_layer_ids=[2, 4]", "dflash.drafter.mask_token_id=97", "dflash.objective.gamma=3")
        more = ("dflash.objective.loss=dflash", "dflash.ring.page_tokens=16")
        ours = resolve(make(target, data, tmp_path, *given, *more), gpus=0).dflash
        assert ours.target.target_layer_ids == [2, 4] and ours.drafter.mask_token_id == 97
        assert ours.objective.gamma == 3.0 and ours.ring.page_tokens == 16

    def test_no_mask_token_is_never_replaced_by_another(self, target: Path, data: Path, tmp_path: Path) -> None:
        settings = target / "tokenizer_config.json"
        settings.write_text(json.dumps({"pad_token": "<|pad|>", "eos_token": "t2"}))
        with pytest.raises(ConfigError) as caught:
            resolve(make(target, data, tmp_path), gpus=0)
        assert caught.value.field == "dflash.drafter.mask_token_id"

    def test_paths_mean_the_same_from_another_folder(
        self, target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        relative = ("dflash.data.path=data", "dflash.target.path=target", "dflash.run.output_dir=runs")
        resolved = resolve(make(target, data, tmp_path, *relative), gpus=0)
        monkeypatch.chdir("/")
        assert resolve(resolved, gpus=0) == resolved
        assert resolved.dflash.data.path == str(data) and resolved.dflash.run.output_dir == str(tmp_path / "runs")

    def test_secrets_stay_out(self, target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_API_KEY", "not-a-real-key")
        resolved = resolve(make(target, data, tmp_path), gpus=0)
        assert resolved.dflash.telemetry.wandb.mode == "auto"
        assert "not-a-real-key" not in resolved.to_json()

    @pytest.mark.parametrize(
        ("block", "gamma"), [(2, 4.0), (8, 4.0), (9, 5.0), (10, 5.0), (16, 7.0), (17, 10.0), (32, 10.0)]
    )
    def test_gamma(self, block: int, gamma: float) -> None:
        assert default_gamma(block) == gamma


def test_special_tokens_of_a_folder(target: Path) -> None:
    tokens = SpecialTokens.of(str(target))
    assert tokens.mask == 95
    assert tokens.reserved == {1: "eos", 2: "eos", 3: "bos", 96: "pad"}
    assert SpecialTokens.of("nobody/no-such-model") == SpecialTokens()


class TestStructure:
    """Rules that need neither data nor machine."""

    def test_the_base_is_valid(self, target: Path, data: Path, tmp_path: Path) -> None:
        notes = check(resolve(make(target, data, tmp_path), gpus=0), resume=False)
        assert any("300 rows" in note for note in notes)

    @pytest.mark.parametrize(
        ("overrides", "field", "words"),
        [
            (["dflash.layout.target_tp=3"], "dflash.layout.target_tp", "divide"),
            (["dflash.layout.target_tp=4"], "dflash.layout.target_tp", "1, 2"),
            (["dflash.layout.drafter_gpus=[1, 2]"], "dflash.layout.drafter_gpus", "[1]"),
            (["dflash.layout.drafter_gpus=[2, 4]"], "dflash.layout", "[3]"),
            (["dflash.layout.target_gpus=[0, 0]"], "dflash.layout.target_gpus", "twice"),
            (["dflash.target.target_layer_ids=[12]"], "dflash.target.target_layer_ids[0]", "0..11"),
            (["dflash.target.target_layer_ids=[1, 11]"], "dflash.target.target_layer_ids[1]", "last layer"),
            (["dflash.target.target_layer_ids=[1, 1]"], "dflash.target.target_layer_ids", "twice"),
            (["dflash.target.target_layer_ids=[5, 1]"], "dflash.target.target_layer_ids", "[1, 5]"),
            (["dflash.target.target_layer_ids=[]"], "dflash.target.target_layer_ids", "at least one"),
            (["dflash.drafter.mask_token_id=100"], "dflash.drafter.mask_token_id", "vocabulary of 100"),
            (["dflash.drafter.mask_token_id=2"], "dflash.drafter.mask_token_id", "eos"),
            (["dflash.drafter.mask_token_id=3"], "dflash.drafter.mask_token_id", "bos"),
            (["dflash.drafter.mask_token_id=96"], "dflash.drafter.mask_token_id", "pad"),
            (["dflash.drafter.block_size=65"], "dflash.drafter.block_size", "64"),
            (["dflash.data.max_seq_len=257"], "dflash.data.max_seq_len", "256"),
            (
                ["dflash.data.max_seq_len=300", "dflash.data.token_budget=512"],
                "dflash.data.max_seq_len",
                "positions up to 256",
            ),
            (["dflash.ring.min_ready=13"], "dflash.ring.min_ready", "max_depth = 12"),
            (["train_batch_size=4"], "train_batch_size", "1 x 1 x 2 = 2"),
            (["train_batch_size=8"], "train_batch_size", "gradient_accumulation_steps to 4"),
            (["train_batch_size=7"], "train_batch_size", "target ranks do not train"),
            (
                ['scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}'],
                "scheduler.params.warmup_max_lr",
                "one owner",
            ),
            (
                [
                    'optimizer={"type": "Muon", "params": {"muon_lr": 0.1}}',
                    'scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}',
                ],
                "scheduler.params.warmup_max_lr",
                "(0.1 and 0.0006)",
            ),
            (['optimizer={"type": "Muon"}', "zero_optimization.stage=1"], "zero_optimization.stage", "stage 2"),
            (["dflash.drafter.num_key_value_heads=4"], "dflash.drafter.num_key_value_heads", "divide"),
            (["dflash.drafter.sliding_window=4"], "dflash.drafter.sliding_window", "block_size = 8"),
            (["dflash.drafter.init_from=nowhere"], "dflash.drafter.init_from", "config.json"),
            (["dflash.drafter.attention=flex"], "dflash.drafter.attention", "on a CPU"),
            (["dflash.evaluation.prompts=nowhere.jsonl"], "dflash.evaluation.prompts", "no such file"),
        ],
    )
    def test_refused(
        self, target: Path, data: Path, tmp_path: Path, overrides: list[str], field: str, words: str
    ) -> None:
        error = error_of(make(target, data, tmp_path, *overrides), model=False)
        assert error.field == field
        assert words in str(error)

    def test_a_right_train_batch_size_passes(self, target: Path, data: Path, tmp_path: Path) -> None:
        config = make(target, data, tmp_path, "train_batch_size=12", "gradient_accumulation_steps=3")
        check(resolve(config, gpus=0), model=False, nodes=2)

    def test_several_at_once(self, target: Path, data: Path, tmp_path: Path) -> None:
        config = make(target, data, tmp_path, "dflash.layout.target_tp=3", "dflash.ring.min_ready=13")
        text = str(error_of(config, model=False))
        assert "target_tp" in text and "min_ready" in text

    def test_reference_layout_passes_anywhere(self) -> None:
        notes = check(resolve(load_config("ds_configs/qwen3.6_27b_5t3d.json"), gpus=0), model=False)
        assert "not checked" in notes[0]


class TestFeasibility:
    """Rules about data, ring, machine and run folder."""

    def test_a_mask_id_that_the_answers_use(self, target: Path, tmp_path: Path) -> None:
        """In 31 of 60 rows, as in the case that was reported; ids and masks are drawn, the counts are recounted."""
        draw, ids, masks = random.Random(3), [], []
        for row in range(60):
            line = [draw.randrange(5, 90) for _ in range(20)]
            if row % 2 == 0 or row == 59:
                line[draw.randrange(10, 20)] = 95
                line[draw.randrange(10)] = 95
            ids.append(line)
            masks.append([0] * 10 + [1] * 10)
        data = write_lists(tmp_path / "d", ids, masks)
        error = error_of(make(target, data, tmp_path))
        assert error.field == "dflash.drafter.mask_token_id"
        assert "in 31 of 60 rows (62 times), in 31 of them among the supervised tokens (31 times)" in str(error)
        assert check(resolve(make(target, data, tmp_path, "dflash.drafter.mask_token_id=94"), gpus=0))

    def test_a_mask_id_in_prompts_or_in_a_rare_answer_is_noted(self, target: Path, tmp_path: Path) -> None:
        ids = [[5, 95, 6, 7] if row % 3 == 0 else [5, 6, 7, 8] for row in range(3000)]
        ids[1] = [5, 6, 95, 95]
        masks = [[0, 0, 1, 1]] * 3000
        notes = check(resolve(make(target, write_lists(tmp_path / "d", ids, masks), tmp_path), gpus=0))
        wanted = "95 stands in 1001 of 3000 rows (1002 times), in 1 of them among the supervised tokens (2 times)"
        assert any(wanted in note for note in notes), notes

    def test_many_rows_are_sampled_and_that_is_said(self, tmp_path: Path) -> None:
        ids = [[5, 95 if row % 4 == 0 else 6] for row in range(100)]
        rows = Rows.open(write_lists(tmp_path / "d", ids, [[0, 1]] * 100))
        some = rows.occurrences(95, most=40)
        assert some.read == 40 and 1 < some.rows < 25 and some.rows == some.tokens == some.supervised_rows
        assert rows.occurrences(95) == Occurrences(100, 25, 25, 25, 25)

    def test_missing_data(self, target: Path, tmp_path: Path) -> None:
        assert error_of(make(target, tmp_path / "none", tmp_path)).field == "dflash.data.path"

    def test_rows_without_supervision(self, target: Path, tmp_path: Path) -> None:
        error = error_of(make(target, write_rows(tmp_path / "d", [10] * 9, supervised=False), tmp_path))
        assert error.field == "dflash.data.path" and "supervised" in str(error)

    def test_longer_rows_than_allowed(self, target: Path, tmp_path: Path) -> None:
        error = error_of(make(target, write_rows(tmp_path / "d", [10] * 9 + [70]), tmp_path))
        assert error.field == "dflash.data.max_seq_len" and "70" in str(error)

    def test_rows_of_another_vocabulary(self, target: Path, tmp_path: Path) -> None:
        error = error_of(make(target, write_rows(tmp_path / "d", [10] * 9, vocab_bound=101), tmp_path))
        assert error.field == "dflash.data.path" and "100" in str(error)

    def test_min_ready_that_the_ring_cannot_serve(self, target: Path, data: Path, tmp_path: Path) -> None:
        error = error_of(make(target, data, tmp_path, "dflash.ring.min_ready=8", "dflash.ring.max_depth=8"))
        assert error.field == "dflash.ring.min_ready"
        depth = int(str(error).split("max_depth to ")[1].split()[0])
        resolved = resolve(
            make(target, data, tmp_path, "dflash.ring.min_ready=8", f"dflash.ring.max_depth={depth}"), gpus=0
        )
        assert check(resolved)  # the fix that the message gives is a fix

    def test_min_ready_beyond_the_epoch_is_refused_and_the_fix_works(self, target: Path, tmp_path: Path) -> None:
        rows = write_rows(tmp_path / "d", [20] * 8)
        error = error_of(make(target, rows, tmp_path, "dflash.ring.min_ready=5"))
        assert error.field == "dflash.ring.min_ready" and "never be reached" in str(error)
        most = re.search(r"use (\d+) or less", str(error))
        assert most is not None
        assert check(resolve(make(target, rows, tmp_path, f"dflash.ring.min_ready={most.group(1)}"), gpus=0))

    def test_fewer_batches_than_nodes(self, target: Path, tmp_path: Path) -> None:
        error = error_of(make(target, write_rows(tmp_path / "d", [20] * 3), tmp_path), nodes=5)
        assert error.field == "dflash.data.path" and "nodes" in str(error)

    def test_ring_larger_than_the_machine(self, target: Path, data: Path, tmp_path: Path) -> None:
        depth = 2 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (256 * 6 * 48 * 4)
        error = error_of(make(target, data, tmp_path, f"dflash.ring.max_depth={depth}"))
        assert error.field == "dflash.ring" and "GiB" in str(error)

    def test_max_bytes_too_small_for_min_ready(self, target: Path, data: Path, tmp_path: Path) -> None:
        assert error_of(make(target, data, tmp_path, "dflash.ring.max_bytes=100000")).field.startswith("dflash.ring")

    def test_more_ranks_than_gpus(
        self, target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("recipe.check.feasibility.visible_gpus", lambda: 2)
        error = error_of(make(target, data, tmp_path, "dflash.layout.device=cuda"))
        assert error.field == "dflash.layout" and "2 are visible" in str(error)

    def test_target_without_weights_folder(self, target: Path, data: Path, tmp_path: Path) -> None:
        config = make(target, data, tmp_path, "dflash.target.path=Qwen/Qwen3.6-27B", "dflash.drafter.mask_token_id=7")
        assert error_of(config).field == "dflash.target.path"

    def test_another_dtype_than_the_checkpoints_is_said(self, target: Path, data: Path, tmp_path: Path) -> None:
        tensors = {
            "model.embed_tokens.weight": torch.zeros(100, 48, dtype=torch.float16),
            "model.layers.0.mlp.up_proj.weight": torch.zeros(96, 48, dtype=torch.float16),
            "model.norm.weight": torch.zeros(48, dtype=torch.float32),
        }
        save_file(tensors, target / "model.safetensors")
        notes = {}
        for dtype in ("bfloat16", "float32"):
            config = resolve(make(target, data, tmp_path, f"dflash.target.dtype={dtype}"), gpus=0)
            notes[dtype] = [note for note in check(config) if note.startswith("target: ")]
        half, single = sorted(notes["bfloat16"], key=lambda note: "float32 and" in note)
        assert half.startswith("target: 2 of 3 tensors are stored as float16 and become bfloat16, rounded from 11 to 8")
        assert single.startswith("target: 1 of 3 tensors are stored as float32 and become bfloat16, rounded from 24")
        (exact,) = notes["float32"]
        assert "2 of 3 tensors are stored as float16 and become float32, which is exact" in exact

    def test_of_several_nodes_the_leader_needs_the_key_of_wandb(
        self, target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
        config = make(target, data, tmp_path, "dflash.telemetry.wandb.mode=online")
        assert error_of(config).field == "dflash.telemetry.wandb.mode"
        assert check(resolve(config, gpus=0), nodes=2)  # the command line's host may be none of the nodes
        monkeypatch.setenv("CROSS_SIZE", "2")
        assert error_of(config, nodes=2).field == "dflash.telemetry.wandb.mode"


class TestRunFolder:
    def test_new_is_fine_and_nothing_is_made(self, target: Path, data: Path, tmp_path: Path) -> None:
        check(resolve(make(target, data, tmp_path), gpus=0), resume=False)
        assert not (tmp_path / "runs").exists()

    def test_existing_run_without_resume(self, target: Path, data: Path, tmp_path: Path) -> None:
        from recipe.tell.run_dir import RunDir

        RunDir.create(tmp_path / "runs", "t").close()
        error = error_of(make(target, data, tmp_path), resume=False)
        assert error.field == "dflash.run.name" and "--resume" in str(error)

    def test_resume_with_nothing_to_resume(self, target: Path, data: Path, tmp_path: Path) -> None:
        assert error_of(make(target, data, tmp_path), resume=True).field == "--resume"

    def test_output_dir_that_is_a_file(self, target: Path, data: Path, tmp_path: Path) -> None:
        (tmp_path / "runs").write_text("")
        assert error_of(make(target, data, tmp_path), resume=False).field == "dflash.run.output_dir"
