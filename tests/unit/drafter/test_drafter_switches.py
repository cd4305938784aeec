"""A drafter's config.json: both spellings of its rotary embedding, and what is not implemented is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from recipe.config.schema import Drafter
from recipe.drafter.config import DrafterConfig
from recipe.drafter.export_layout import export_hf, load_export
from recipe.drafter.export_speculators import export_speculators
from recipe.drafter.init_from import load_drafter
from recipe.drafter.model import DFlashDrafter
from recipe.drafter.rotary import RotaryTables
from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape
from recipe.training.role import refuse_another_drafter

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 9, "num_attention_heads": 4, "vocab_size": 100,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 4096,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LINEAR = {"rope_type": "linear", "factor": 8.0}


def drafter(**target: Any) -> DrafterConfig:
    section = Drafter(num_layers=2, block_size=8)
    return DrafterConfig.build(section, TargetShape.from_config(LLAMA | target), (1, 3), 99, dtype="float32")


@pytest.fixture
def export(tmp_path: Path) -> Path:
    config = drafter()
    return export_hf(DFlashDrafter(config).initialize(1).state_dict(), config, tmp_path / "export", "float32")


def change(folder: Path, **values: Any) -> Path:
    data = json.loads((folder / "config.json").read_text())
    for key, value in values.items():
        *parents, last = key.split("__")
        at = data
        for parent in parents:
            at = at[parent]
        at[last] = value
    (folder / "config.json").write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize("scaling", [LLAMA3, YARN])
def test_base_and_scaling_are_the_targets(scaling: dict[str, Any]) -> None:
    """The tables are those of transformers' own rotary embedding of the target, at positions far beyond training."""
    config = drafter(rope_theta=5e5, rope_scaling=scaling)
    assert config.rope_theta == 5e5 and config.rope_scaling == scaling
    target = AutoConfig.for_model(**LLAMA, rope_theta=5e5, rope_scaling=dict(scaling))
    positions = torch.tensor([0, 1, 700, 4000])
    expected = LlamaRotaryEmbedding(target)(torch.zeros(1), positions[None])
    for ours, theirs in zip(RotaryTables(config)(positions), expected, strict=True):
        assert torch.equal(ours[:, 0], theirs[0])
    plain = RotaryTables(replace(config, rope_scaling=None))(positions)
    assert not torch.allclose(plain[0][:, 0], expected[0][0], atol=0.1)


@pytest.mark.parametrize("scaling", [LINEAR, {**YARN, "mscale": 1.0}, {"rope_type": "dynamic", "factor": 2.0}])
def test_other_scalings_leave_the_base(scaling: dict[str, Any]) -> None:
    config = drafter(rope_theta=5e5, rope_scaling=scaling)
    assert config.rope_theta == 5e5 and config.rope_scaling is None


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN])
def test_both_spellings_are_written_and_each_is_read(scaling: dict[str, Any] | None) -> None:
    config = drafter(rope_theta=5e5, rope_scaling=scaling)
    data = json.loads(json.dumps(config.to_dict()))
    assert data["rope_theta"] == 5e5 and data["rope_scaling"] == scaling
    assert data["rope_parameters"] == {"rope_type": "default", **(scaling or {}), "rope_theta": 5e5}
    old = {key: value for key, value in data.items() if key != "rope_parameters"}
    new = {key: value for key, value in data.items() if key not in ("rope_theta", "rope_scaling")}
    nested = new | {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), data["rope_parameters"])}
    for one in (data, old, new, nested):
        assert DrafterConfig.from_dict(one) == config
        assert Qwen3Config(**{**one, "layer_types": None}).rope_parameters is not None


def test_a_config_saved_by_transformers_is_read_with_its_defaults() -> None:
    """Files may leave out what is Qwen3's default: head_dim 128, 32 key/value heads."""
    whole = drafter().to_dict() | {
        "hidden_size": 256,
        "num_attention_heads": 32,
        "head_dim": 128,
        "num_key_value_heads": 32,
    }
    sparse = json.loads(Qwen3Config(**whole).to_json_string(use_diff=True))
    sparse = {key: value for key, value in sparse.items() if key not in ("head_dim", "num_key_value_heads")}
    found = DrafterConfig.from_dict(sparse)
    assert (found.head_dim, found.num_key_value_heads) == (128, 32)


ASKED = [
    ("is_neox_style", False), ("rope_is_neox_style", False), ("partial_rotary_factor", 0.25), ("mlp_bias", True),
    ("hidden_act", "gelu"), ("model_type", "llama"), ("quantization_config", {"bits": 4}), ("attention_sinks", True),
    ("dflash_config__attention_sink_bias", True), ("dflash_config__attention_value_scale", 0.7),
    ("dflash_config__output_multiplier", 0.2), ("dflash_config__final_logit_softcapping", 30.0),
    ("dflash_config__projector_type", "domino"), ("dflash_config__conv_kernel_size", 2),
    ("dflash_config__selector_rank", 256), ("dflash_config__some_new_thing", "on"), ("use_v_norm", True),
    ("rope_parameters__partial_rotary_factor", 0.5), ("rope_parameters__rope_dim", 8),
    ("rope_parameters__rope_theta", 1e6), ("rope_scaling", {"rope_type": "longrope", "factor": 2.0}),
    ("rope_scaling", {"rope_type": "linear", "factor": 2.0, "odd": 1}),
]  # fmt: skip


@pytest.mark.parametrize("key,value", ASKED)
def test_what_is_not_implemented_is_refused_by_name(export: Path, key: str, value: Any) -> None:
    change(export, **{key: value})
    last = key.split("__")[-1]
    name = {"rope_scaling": r"rope_type|odd"}.get(key, last)
    for read in (load_export, load_drafter):
        with pytest.raises(ConfigError, match=name):
            read(export)


def test_neutral_and_harmless_keys_are_not_refused(export: Path) -> None:
    before = load_export(export)[0]
    change(
        export, is_neox_style=True, partial_rotary_factor=1.0, auto_map={"AutoModel": "dflash.DFlashDraftModel"},
        transformers_version="4.57.0", initializer_range=0.01, bos_token_id=5,
        id2label={"0": "LABEL_0", "1": "LABEL_1"},
        dflash_config__output_multiplier=1.0, dflash_config__conv_kernel_size=0, dflash_config__projector_type=None,
        rope_parameters__mrope_section=[2, 3, 3],
    )  # fmt: skip
    assert load_export(export)[0] == before


def test_speculators_switches_are_refused_by_name(tmp_path: Path) -> None:
    config, table = drafter(), torch.randn(100, 64)
    weights = DFlashDrafter(config).initialize(1).state_dict()
    folder = export_speculators(weights, config, tmp_path / "s", "float32", "t", table, table, ["LlamaForCausalLM"])
    harmless = {"projector_type": "dflash", "pure_draft_prefix_len": 1, "emb_dim": 256, "auf": True}
    assert load_export(change(folder, **harmless))[0] == config
    for key in ("output_multiplier", "transformer_layer_config__use_gemma_norm"):
        with pytest.raises(ConfigError, match=key.split("__")[-1]):
            load_export(change(folder, **{key: 0.5}))
        change(folder, **{key: None})
    with pytest.raises(ConfigError, match="projector_type"):
        load_export(change(folder, projector_type="domino"))


def test_a_scaled_table_travels_scaled_in_the_speculators_layout(tmp_path: Path) -> None:
    """Its readers take the table as it is; ours takes the target's and needs the scale."""
    config, table = replace(drafter(), input_embedding_scale=8.0), torch.randn(100, 64)
    weights = DFlashDrafter(config).initialize(1).state_dict()
    folder = export_speculators(weights, config, tmp_path / "s", "float32", "t", table, table, ["Gemma3ForCausalLM"])
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(stored["embed_tokens.weight"], 8.0 * table) and torch.equal(stored["lm_head.weight"], table)
    assert load_export(folder)[0] == config
    data = json.loads((export_hf(weights, config, tmp_path / "h", "float32") / "config.json").read_text())
    assert data["dflash_config"]["input_embedding_scale"] == 8.0


def test_a_checkpoint_of_another_drafter_is_not_resumed(tmp_path: Path) -> None:
    """Older versions read base and embedding scale of some targets differently: a resume would mix the two."""
    config = drafter(rope_theta=1e6)
    folder = tmp_path / "checkpoints" / "step_00000003"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    refuse_another_drafter(tmp_path, config, 3)
    for name, value in {"rope_theta": 1e4, "input_embedding_scale": 8.0}.items():
        with pytest.raises(ConfigError, match=rf"{name} = .*would have {value}"):
            refuse_another_drafter(tmp_path, replace(config, **{name: value}), 3)
