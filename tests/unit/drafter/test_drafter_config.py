"""Drafter config: both spellings, derived geometry, refusals; and starting from an existing folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from recipe.config.schema import Drafter
from recipe.drafter.config import SLIDING, DrafterConfig
from recipe.drafter.init_from import load_drafter
from recipe.drafter.model import DFlashDrafter
from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape

QWEN = TargetShape(
    model_type="qwen3_5",
    hidden_size=5120,
    num_layers=64,
    vocab_size=248_320,
    intermediate_size=17408,
    num_attention_heads=24,
    num_key_value_heads=4,
    head_dim=256,
    rms_norm_eps=1e-6,
    rope_theta=1e7,
    max_position_embeddings=262_144,
    tie_word_embeddings=False,
    layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention") * 16,
    text_config={"rope_parameters": {"partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}},
)
DENSE = replace(
    QWEN,
    hidden_size=576,
    num_layers=30,
    vocab_size=49152,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    layer_types=("full_attention",) * 30,
)
TAPS = (1, 16, 31, 46, 61)


def small(**changes: object) -> DrafterConfig:
    shape = replace(DENSE, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=500)
    section = Drafter(num_layers=5, block_size=8, intermediate_size=96)
    return replace(DrafterConfig.build(section, shape, (1, 7, 13), 499, dtype="float32"), **changes)


def test_reference_drafter_of_the_hybrid() -> None:
    config = DrafterConfig.build(Drafter(sliding_window=2048), QWEN, TAPS, 248_070)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 128)
    assert config.layer_types == (SLIDING,) * 4 + ("full_attention",)
    written = json.dumps(config.to_dict())
    assert "partial" not in written and "mrope" not in written
    data = config.to_dict()
    assert data["rope_theta"] == 1e7 and data["num_target_layers"] == 64
    assert data["block_size"] == data["dflash_config"]["block_size"] == 32
    assert data["dflash_config"]["target_layer_ids"] == list(TAPS)
    assert data["is_causal"] is False and data["dflash_config"]["causal"] is False


def test_geometry_of_dense_small_hybrid_and_set_values() -> None:
    dense = DrafterConfig.build(Drafter(), DENSE, (1, 8), 1)
    assert (dense.num_attention_heads, dense.num_key_value_heads, dense.head_dim) == (9, 3, 64)
    tiny = DrafterConfig.build(Drafter(), replace(QWEN, hidden_size=256, head_dim=64), (1, 8), 1)
    assert (tiny.num_attention_heads, tiny.num_key_value_heads, tiny.head_dim) == (4, 1, 64)
    given = DrafterConfig.build(Drafter(num_attention_heads=8, num_key_value_heads=8, head_dim=32), DENSE, (1, 8), 1)
    assert (given.num_attention_heads, given.num_key_value_heads, given.head_dim) == (8, 8, 32)
    assert DrafterConfig.build(Drafter(head_dim=32), DENSE, (1, 8), 1).num_attention_heads == 18


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 64])
def test_dict_round_trip(window: int | None, causal: bool) -> None:
    config = DrafterConfig.build(Drafter(sliding_window=window), QWEN, TAPS, 5, sliding_is_causal=causal)
    assert DrafterConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_reads_old_and_new_spellings() -> None:
    config = small()
    data = config.to_dict()
    old = {**data, "torch_dtype": "float32", "dflash_config": {"mask_token_id": 499, "target_layer_ids": [1, 7, 13]}}
    del old["dtype"], old["is_causal"]
    assert DrafterConfig.from_dict(old) == config
    new = {**data, "rope_parameters": {"rope_type": "default", "rope_theta": data["rope_theta"]}}
    del new["block_size"], new["rope_theta"], new["rope_scaling"]
    assert DrafterConfig.from_dict(new) == config
    with pytest.raises(ConfigError, match="mask_token_id"):
        DrafterConfig.from_dict({**data, "dflash_config": {}})


def test_in_block_direction_without_a_switch_is_the_servers() -> None:
    data = DrafterConfig.build(Drafter(sliding_window=64), QWEN, TAPS, 5).to_dict()
    del data["is_causal"], data["dflash_config"]["causal"], data["dflash_config"]["in_block_causal"]
    assert DrafterConfig.from_dict(data).in_block_causal == (True,) * 4 + (False,)
    data["dflash_config"]["causal"] = False
    assert DrafterConfig.from_dict(data).in_block_causal == (False,) * 5


@pytest.mark.parametrize(
    "changes,field",
    [
        ({"block_size": 1}, "block_size"),
        ({"mask_token_id": 500}, "mask_token_id"),
        ({"target_layer_ids": (1, 29)}, "target_layer_ids"),
        ({"target_layer_ids": (3, 3)}, "target_layer_ids"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"layer_types": ("full_attention",)}, "layer_types"),
        ({"layer_types": (SLIDING,) * 5, "sliding_window": 7}, "sliding_window"),
        ({"in_block_causal": (True, False, False, False, False)}, "in_block_causal"),
    ],
)
def test_refuses_by_name(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        small(**changes)
    assert error.value.field == f"drafter.{field}"


def write(folder: Path, data: dict[str, object], weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data))
    save_file(weights, folder / "model.safetensors")
    return folder


def test_loads_the_zlab_layout(tmp_path: Path) -> None:
    config = small()
    state = DFlashDrafter(config).initialize(3).state_dict()
    assert len(state) == 58
    found, weights = load_drafter(write(tmp_path / "d", config.to_dict(), state), config)
    assert found == config and weights.keys() == state.keys()
    assert all(torch.equal(weights[name], state[name]) for name in state)


def test_loads_the_speculators_layout(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    config = small(in_block_causal=(False,) * 5)
    state = DFlashDrafter(config).initialize(3).state_dict()
    nested = Qwen3Config(**{**config.qwen3().to_dict(), "layer_types": list(config.layer_types)}).to_diff_dict()
    data = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": nested,
        "aux_hidden_state_layer_ids": [2, 8, 14],
        "mask_token_id": 499,
        "block_size": 8,
        "draft_vocab_size": 500,
        "dtype": "float32",
    }
    extra = {"lm_head.weight": torch.zeros(500, 64), "d2t": torch.zeros(500, dtype=torch.int64)}
    folder = write(tmp_path / "s", data, {**state, **extra})
    found, weights = load_drafter(folder, config)
    assert found.target_layer_ids == (1, 7, 13) and weights.keys() == state.keys()
    write(folder, {**data, "sample_from_anchor": True}, state)
    with pytest.raises(ConfigError, match="shifted"):
        load_drafter(folder, config)


@pytest.mark.parametrize(
    "name,value",
    [("block_size", 16), ("mask_token_id", 7), ("target_layer_ids", (1, 7, 14)), ("vocab_size", 600)],
)
def test_mismatch_names_both_values(tmp_path: Path, name: str, value: object) -> None:
    config = small()
    folder = write(tmp_path / "d", config.to_dict(), DFlashDrafter(config).state_dict())
    with pytest.raises(ConfigError) as error:
        load_drafter(folder, replace(config, **{name: value}))
    assert (
        name in error.value.rule and repr(value) in error.value.rule and repr(getattr(config, name)) in error.value.rule
    )


def test_every_tensor_is_consumed(tmp_path: Path) -> None:
    config = small()
    state = DFlashDrafter(config).state_dict()
    cases = {
        "lacks": {k: v for k, v in state.items() if k != "layers.2.mlp.up_proj.weight"},
        "unknown": {**state, "midlayer.weight": torch.zeros(1)},
        "misshapen": {**state, "norm.weight": torch.zeros(3)},
    }
    for message, weights in cases.items():
        with pytest.raises(ConfigError, match=message):
            load_drafter(write(tmp_path / "d", config.to_dict(), weights))
    (tmp_path / "d" / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_drafter(tmp_path / "d")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_drafter(tmp_path / "nowhere")
