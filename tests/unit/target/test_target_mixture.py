"""Mixtures of experts from disk: fused tensors and one tensor per expert give the same parameters; errors are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from recipe.errors import ConfigError, RunError
from recipe.model_files.shapes import TargetShape
from recipe.model_files.weights import Checkpoint
from recipe.target.loader import check_loaded, load_parameters
from recipe.target.model import build_meta_model, parameter_shapes
from recipe.target.pieces import pieces_of
from recipe.target.shard_plan import Cut, ShardPlan

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture") / "m"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SETTINGS)).save_pretrained(path)
    return path


def load(folder: Path) -> Any:
    """(model, its whole shapes, plan) at degree 1, loaded from ``folder``."""
    shape = TargetShape.resolve(str(folder))
    model, plan = build_meta_model(shape, 2, True, torch.float32), ShardPlan.build(shape, 1)
    full = parameter_shapes(model)
    load_parameters(model, full, Checkpoint(folder), plan, 0, CPU)
    return model, full, plan


def test_fused_and_separate_experts_load_alike(folder: Path, tmp_path: Path) -> None:
    separate, _, _ = load(folder)
    tensors = load_file(folder / "model.safetensors")
    names = [name for name in tensors if ".experts." in name]
    assert len(names) == 2 * 3 * 3  # layers, experts, projections
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {p: [tensors[f"{prefix}.{e}.{p}_proj.weight"] for e in range(3)] for p in ("gate", "up", "down")}
        pairs = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack(pairs)
        tensors[f"{prefix}.down_proj"] = torch.stack(parts["down"])
    save_file({k: v for k, v in tensors.items() if k not in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    fused = dict(load(tmp_path)[0].named_parameters())
    for name, parameter in separate.named_parameters():
        assert torch.equal(parameter, fused[name]), name


def test_pieces_of_a_rank_are_its_rows_and_columns_of_each_expert() -> None:
    names = ("layers.0.mlp.experts.0.gate_proj.weight",)
    cut = Cut(1, ((4, 10), (20, 26)))  # columns 4 to 10 of 16: of the gate, then of the up projection behind it
    pieces = pieces_of("layers.0.mlp.experts.gate_up_proj", (3, 32, 5), cut, names)
    whole = torch.arange(3 * 32 * 5).reshape(3, 32, 5)
    local = torch.full((3, 12, 5), -1)
    for piece in pieces:
        expert, projection = int(piece.source.split(".")[4]), piece.source.split(".")[5]
        source = whole[expert, :16] if projection == "gate_proj" else whole[expert, 16:]
        assert piece.full == tuple(source.shape) and piece.cut is not None and piece.cut.dim == 0
        ((start, stop),) = piece.cut.ranges
        local[piece.place] = source[start:stop]
    assert torch.equal(local, torch.cat([whole[:, 4:10], whole[:, 20:26]], dim=1))
    assert len(pieces_of("layers.0.mlp.down_proj.weight", (5, 16), Cut(1, ((0, 4),)), names)) == 1


def test_a_missing_or_misshapen_expert_is_named(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    save_file(tensors | {name: tensors[name][:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts\.2\.up_proj.*\[15, 32\].*\[16, 32\]"):
        load(tmp_path)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no tensor 'layers\.1\.mlp\.experts\.2\.up_proj"):
        load(tmp_path)


def test_the_assertions_of_a_loaded_mixture_can_fail(folder: Path) -> None:
    model, full, plan = load(folder)
    model.rotary_emb = type(model.rotary_emb)(config=model.config)
    check_loaded(model, full, plan, 0, CPU, torch.float32)
    experts = model.layers[1].mlp.experts
    experts.intermediate_dim = 8
    with pytest.raises(RunError, match="layer 1 has experts of 8 columns"):
        check_loaded(model, full, plan, 0, CPU, torch.float32)
    experts.intermediate_dim = 16
    experts.down_proj = torch.nn.Parameter(experts.down_proj[..., :8].clone(), requires_grad=False)
    with pytest.raises(RunError, match=r"layers\.1\.mlp\.experts\.down_proj is \(3, 32, 8\)"):
        check_loaded(model, full, plan, 0, CPU, torch.float32)
