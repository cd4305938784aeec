"""The exported folder: exactly the drafter's tensors, one dtype, nothing guessed when it is read."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipe.drafter.config import DrafterConfig
from recipe.drafter.export_layout import export_hf, load_export, tensor_shapes
from recipe.drafter.export_speculators import export_speculators
from recipe.drafter.model import DFlashDrafter
from recipe.errors import ConfigError
from recipe.training.export import serve_commands


def small(**changes: object) -> DrafterConfig:
    values: dict = {
        "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 48, "vocab_size": 100, "block_size": 8, "mask_token_id": 99, "num_target_layers": 12,
        "target_layer_ids": (1, 3, 5, 7, 9), "layer_types": ("full_attention",) * 5, "in_block_causal": (False,) * 5,
        "rope_theta": 1e7, "dtype": "float32",
    }  # fmt: skip
    return DrafterConfig(**{**values, **changes})


SLIDING = {
    "layer_types": ("sliding_attention",) * 4 + ("full_attention",),
    "sliding_window": 16,
    "in_block_causal": (True,) * 4 + (False,),
}


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return dict(DFlashDrafter(small()).initialize(3).state_dict())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_tensor_is_written_and_consumed(tmp_path: Path, weights: dict, dtype: str) -> None:
    folder = export_hf(weights, small(), tmp_path / "out", dtype)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "a temporary folder was left"
    stored = load_file(folder / "model.safetensors")
    assert len(stored) == 58 and stored.keys() == tensor_shapes(small()).keys()
    assert {str(t.dtype) for t in stored.values()} == {f"torch.{dtype}"}
    config, read = load_export(folder)
    assert config == small(dtype=dtype)
    module = DFlashDrafter(config)
    module.load_state_dict(read, strict=True)
    for name, tensor in weights.items():
        assert torch.equal(read[name], tensor.to(getattr(torch, dtype)))


def test_config_has_what_the_loaders_read(tmp_path: Path, weights: dict) -> None:
    data = json.loads((export_hf(weights, small(), tmp_path / "out", "bfloat16") / "config.json").read_text())
    assert data["architectures"] == ["DFlashDraftModel"] and data["model_type"] == "qwen3"
    assert data["block_size"] == data["dflash_config"]["block_size"] == 8
    assert data["dflash_config"]["mask_token_id"] == 99
    assert data["dflash_config"]["target_layer_ids"] == [1, 3, 5, 7, 9]
    assert data["dflash_config"]["sample_from_anchor"] is False
    assert data["num_target_layers"] == 12 and data["num_hidden_layers"] == 5
    assert data["rope_theta"] == 1e7 and data["dtype"] == "bfloat16" and len(data["layer_types"]) == 5
    text = json.dumps(data)
    assert "partial_rotary" not in text and "mrope" not in text and "auto_map" not in text


def test_export_replaces_an_export_and_nothing_else(tmp_path: Path, weights: dict) -> None:
    folder = export_hf(weights, small(), tmp_path / "out", "float32")
    export_hf({name: tensor + 1 for name, tensor in weights.items()}, small(), folder, "float32")
    assert torch.equal(load_export(folder)[1]["norm.weight"], weights["norm.weight"] + 1)
    other = tmp_path / "precious"
    other.mkdir()
    (other / "thesis.txt").write_text("text")
    with pytest.raises(ConfigError, match="is no export"):
        export_hf(weights, small(), other, "float32")
    assert (other / "thesis.txt").read_text() == "text"


def test_wrong_tensors_are_refused_before_anything_is_written(tmp_path: Path, weights: dict) -> None:
    lacking = {name: tensor for name, tensor in weights.items() if name != "fc.weight"}
    for broken in (lacking, {**weights, "lm_head.weight": torch.zeros(2)}, {**weights, "norm.weight": torch.ones(31)}):
        with pytest.raises(ConfigError):
            export_hf(broken, small(), tmp_path / "out", "float32")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("dflash_config", "target_layer_ids"), None, "target_layer_ids"),
        (("dflash_config", "mask_token_id"), None, "mask_token_id"),
        (("block_size",), None, "block_size"),
        (("dflash_config", "sample_from_anchor"), True, "sample_from_anchor"),
        (("architectures",), ["SomethingElse"], "architectures"),
        (("architectures",), None, "architectures"),
        (("num_hidden_layers",), 4, "in_block_causal|layer_types"),
        (("intermediate_size",), 40, "misshapen"),
    ],
)
def test_reading_refuses_instead_of_guessing(
    tmp_path: Path, weights: dict, path: tuple, value: object, named: str
) -> None:
    folder = export_hf(weights, small(), tmp_path / "out", "float32")
    data = json.loads((folder / "config.json").read_text())
    if path == ("block_size",):
        data["dflash_config"].pop("block_size")
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner.pop(path[-1])
    if value is not None:
        inner[path[-1]] = value
    (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=named):
        load_export(folder)


def test_a_missing_surplus_or_damaged_weight_file_is_named(tmp_path: Path, weights: dict) -> None:
    folder = export_hf(weights, small(), tmp_path / "out", "float32")
    save_file({**load_file(folder / "model.safetensors"), "extra": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="unknown"):
        load_export(folder)
    (folder / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load_export(folder)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_export(tmp_path)


BOTH_WAYS = {**SLIDING, "in_block_causal": (False,) * 5}
ALL_CAUSAL = {**SLIDING, "layer_types": ("sliding_attention",) * 5, "in_block_causal": (True,) * 5}


@pytest.mark.parametrize("layers", [{}, BOTH_WAYS, ALL_CAUSAL], ids=["full", "both ways", "causal"])
@pytest.mark.parametrize("tied", [True, False])
def test_speculators_layout(tmp_path: Path, weights: dict, layers: dict, tied: bool) -> None:
    config = small(**layers)
    embed = torch.randn(100, 32)
    head = embed if tied else torch.randn(100, 32)
    folder = export_speculators(
        weights, config, tmp_path / "s", "float32", "org/target", embed, head, ["LlamaForCausalLM"]
    )
    data, stored = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert data["aux_hidden_state_layer_ids"] == [2, 4, 6, 8, 10]
    assert data["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert data["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert data["draft_vocab_size"] == data["transformer_layer_config"]["vocab_size"] == 100
    assert stored.keys() - tensor_shapes(config).keys() == {"embed_tokens.weight", "lm_head.weight"}
    assert torch.equal(stored["embed_tokens.weight"], embed) and torch.equal(stored["lm_head.weight"], head)
    back, own = load_export(folder)
    assert back == config and own.keys() == weights.keys()


def test_what_speculators_cannot_say_is_refused(tmp_path: Path, weights: dict) -> None:
    table = torch.randn(100, 32)
    for layers in ({"in_block_causal": (True,) * 5}, SLIDING):  # vLLM would run the full layer of SLIDING causally
        with pytest.raises(ConfigError, match="--format hf"):
            export_speculators(weights, small(**layers), tmp_path / "s", "float32", "t", table, table, [])
    with pytest.raises(ConfigError, match="embedding"):
        export_speculators(weights, small(), tmp_path / "s", "float32", "t", table[:99], table, [])


def test_servers_count_drafts_differently() -> None:
    vllm, sglang = serve_commands(Path("/d"), small(), "org/target")
    program, verb, target, option, speculative = shlex.split(vllm)
    assert (program, verb, target, option) == ("vllm", "serve", "org/target", "--speculative-config")
    assert json.loads(speculative) == {
        "method": "dflash", "model": "/d", "num_speculative_tokens": 7, "attention_backend": "flash_attn"
    }  # fmt: skip
    assert sglang.endswith("--speculative-num-draft-tokens 8")
    hybrid = serve_commands(Path("/d"), small(), "org/target", hybrid=True)[1]
    assert hybrid.endswith(" --mamba-radix-cache-strategy extra_buffer")
    assert serve_commands(Path("/d"), small(), "org/target", "speculators") == [vllm], (
        "SGLang does not read that layout"
    )
