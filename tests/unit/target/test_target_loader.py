"""What loading refuses: broken plans, checkpoints and arguments, and a model that is not what it has to be."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from recipe.errors import ConfigError, RunError
from recipe.model_files.shapes import TargetShape
from recipe.model_files.weights import Checkpoint
from recipe.target.capture import TapCapture
from recipe.target.loader import check_loaded, load_parameters, load_target
from recipe.target.model import build_meta_model, parameter_shapes
from recipe.target.shard_plan import ShardPlan

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="DeepSpeed would move the model to the GPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "m"
    settings = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 19}
    settings |= {"num_hidden_layers": 3, "intermediate_size": 64, "max_position_embeddings": 64}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **settings)).save_pretrained(path)
    return path


def load(folder: Path, plan: ShardPlan | None = None, **changes: Any) -> Any:
    shape = TargetShape.resolve(str(folder))
    arguments: dict[str, Any] = {"path": folder, "shape": shape, "plan": plan or ShardPlan.build(shape, 1)}
    arguments |= {"tp_rank": 0, "group": None, "device": "cpu", "dtype": torch.float32, "taps": [1]}
    return load_target(**(arguments | {"need_last_hidden": False} | changes))


def test_trimmed_model_reads_nothing_behind_the_deepest_tap(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    kept = {
        k: v for k, v in tensors.items() if ".layers.2." not in k and k not in ("model.norm.weight", "lm_head.weight")
    }
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(kept, tmp_path / "model.safetensors")
    ids = torch.arange(10)[None]
    whole = TapCapture(load(folder, need_last_hidden=True), [1]).capture(ids)[0]
    assert torch.equal(TapCapture(load(tmp_path), [1]).capture(ids)[0], whole)
    with pytest.raises(ConfigError, match=r"no tensor 'layers\.2\."):
        load(tmp_path, need_last_hidden=True)


def test_misshapen_tensor_names_the_file(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:-1].clone()
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors.*layers\.1\.mlp\.up_proj.*\[63, 32\].*\[64, 32\]"):
        load(tmp_path)


def test_broken_plan_and_wrong_group_are_refused(folder: Path) -> None:
    plan = ShardPlan.build(TargetShape.resolve(str(folder)), 1)
    rank = plan.ranks[0]
    half = dataclasses.replace(rank.cuts["mlp.up_proj.weight"], ranges=((0, 32),))
    broken = dataclasses.replace(rank, cuts=rank.cuts | {"mlp.up_proj.weight": half})
    with pytest.raises(RunError, match=r"mlp\.up_proj"):
        load(folder, dataclasses.replace(plan, ranks=(broken,)))
    with pytest.raises(RunError, match="tp=2"):
        load(folder, ShardPlan.build(TargetShape.resolve(str(folder)), 2))


def test_taps_must_be_inside_the_target(folder: Path) -> None:
    for taps in ([3], [-1], []):
        with pytest.raises(ConfigError, match="target_layer_ids"):
            load(folder, taps=taps)


def test_every_assertion_of_a_loaded_model_can_fail(folder: Path) -> None:
    shape = TargetShape.resolve(str(folder))
    plan = ShardPlan.build(shape, 1)
    full = parameter_shapes(build_meta_model(shape, 2, False, torch.float32))

    def check(change: Any, match: str) -> None:
        model = load(folder).module
        check_loaded(model, full, plan, 0, CPU, torch.float32)
        change(model)
        with pytest.raises(RunError, match=match):
            check_loaded(model, full, plan, 0, CPU, torch.float32)

    def parameter(value: torch.Tensor) -> torch.nn.Parameter:
        return torch.nn.Parameter(value, requires_grad=False)

    check(lambda m: setattr(m.layers[1].mlp.up_proj, "weight", parameter(torch.zeros(32, 32))), "shard plan says")
    check(lambda m: m.layers[0].to(torch.bfloat16), "bfloat16")
    check(lambda m: m.layers[0].to("meta"), "meta")
    check(lambda m: m.rotary_emb.to(torch.bfloat16), "inv_freq")
    check(lambda m: setattr(m.layers[0].self_attn, "num_key_value_groups", 1), "head counts")
    check(lambda m: delattr(m.layers[0].mlp.up_proj, "weight"), "parameter names")


def test_progress_counts_layers_and_bytes(folder: Path) -> None:
    shape = TargetShape.resolve(str(folder))
    model, seen = build_meta_model(shape, 3, True, torch.bfloat16), []
    full = parameter_shapes(model)
    load_parameters(model, full, Checkpoint(folder), ShardPlan.build(shape, 1), 0, CPU, seen.append)
    assert seen[-1].layers_done == seen[-1].layers == 3
    assert seen[-1].bytes_read == sum(p.nbytes for p in model.parameters())
    assert [p.layers_done for p in seen] == sorted(p.layers_done for p in seen) and seen[-1].gb_per_s > 0
