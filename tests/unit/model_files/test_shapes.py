"""The target's shape: from the bundled files, from folders, and what bad input gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.errors import ConfigError
from recipe.model_files.shapes import KNOWN_SHAPES, TargetShape, default_target_layer_ids


def test_qwen36_27b_is_bundled() -> None:
    shape = TargetShape.resolve("Qwen/Qwen3.6-27B")
    assert (shape.model_type, shape.num_layers, shape.hidden_size, shape.vocab_size) == ("qwen3_5", 64, 5120, 248320)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (24, 4, 256)
    assert (shape.linear_num_key_heads, shape.linear_num_value_heads) == (16, 48)
    assert (shape.intermediate_size, shape.rope_theta, shape.linear_conv_kernel_dim) == (17408, 1e7, 4)
    assert [i for i, kind in enumerate(shape.layer_types) if kind == "full_attention"] == list(range(3, 64, 4))
    assert shape.text_config["rope_parameters"]["partial_rotary_factor"] == 0.25


@pytest.mark.parametrize("name", sorted(path.stem for path in KNOWN_SHAPES.glob("*.json")))
def test_bundled_shapes_are_what_transformers_understands(name: str) -> None:
    from transformers import AutoConfig

    shape = TargetShape.resolve(name.replace("--", "/", 1))
    settings = {key: value for key, value in shape.text_config.items() if key != "model_type"}
    config = AutoConfig.for_model(shape.text_config["model_type"], **settings)
    assert config.head_dim == shape.head_dim and config.rope_parameters["rope_theta"] == shape.rope_theta
    if shape.hybrid:
        assert tuple(config.layer_types) == shape.layer_types


def test_vision_language_config_and_old_rope_key(tmp_path: Path) -> None:
    text = {"model_type": "qwen3_5_text", "hidden_size": 64, "num_hidden_layers": 8, "vocab_size": 10}
    text |= {"intermediate_size": 32, "num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": 128}
    text |= {"rope_theta": 5e5, "num_key_value_heads": 2, "full_attention_interval": 2, "linear_num_key_heads": 2}
    text |= {
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    }
    outer = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    shape = TargetShape.resolve(str(tmp_path))
    assert (shape.model_type, shape.rope_theta, shape.tie_word_embeddings) == ("qwen3_5", 5e5, True)
    assert shape.layer_types == ("linear_attention", "full_attention") * 4


def test_default_taps_follow_the_published_rule() -> None:
    assert default_target_layer_ids(36) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(64) == (1, 16, 31, 46, 61)
    assert default_target_layer_ids(32) == (1, 8, 15, 22, 29)
    assert default_target_layer_ids(40) == (1, 10, 19, 28, 37)
    assert default_target_layer_ids(64, 1) == (32,)
    assert default_target_layer_ids(8) == (1, 2, 3, 4, 5)
    for layers in range(8, 100):
        taps = default_target_layer_ids(layers)
        assert len(set(taps)) == 5 and max(taps) == layers - 3
    with pytest.raises(ConfigError, match="at least 8 layers"):
        default_target_layer_ids(7)


def test_unknown_and_broken_models_are_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a folder nor a model"):
        TargetShape.resolve("nobody/nothing")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        TargetShape.resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not readable as JSON"):
        TargetShape.resolve(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ConfigError, match="decoder-only"):
        TargetShape.resolve(str(tmp_path))


GEMMA3_12B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}  # fmt: skip


def test_what_a_file_leaves_to_the_class_is_the_class_default() -> None:
    """Gemma 3 12B as it is published."""
    shape = TargetShape.from_config(GEMMA3_12B)
    assert (shape.head_dim, shape.tie_word_embeddings, shape.vocab_size) == (256, True, 262_208)
    assert shape.layer_types.count("sliding_attention") == 40 and shape.layer_types[5] == "full_attention"
    assert shape.rope_theta == 1e6 and shape.rope_scaling == {"rope_type": "linear", "factor": 8.0}
    assert shape.inherited_scaling is None
    assert TargetShape.from_config(shape.text_config) == shape


def test_a_rotary_embedding_for_each_kind_of_layer() -> None:
    """As transformers 5 saves it: the layers that see the whole text count, whatever comes first."""
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 7e6},
    }
    shape = TargetShape.from_config({"model_type": "gemma3_text", "num_hidden_layers": 12, "rope_parameters": rope})
    assert shape.rope_theta == 7e6 and shape.rope_scaling is None


def test_a_window_without_layer_types_holds_for_all_layers() -> None:
    assert set(TargetShape.from_config({"model_type": "mistral"}).layer_types) == {"sliding_attention"}
    plain = TargetShape.from_config({"model_type": "mistral", "sliding_window": None})
    assert set(plain.layer_types) == {"full_attention"}


def test_infinity_as_transformers_spells_it() -> None:
    limits = [0.0, {"__float__": "Infinity"}]
    assert TargetShape.from_config({"model_type": "falcon_h1", "time_step_limit": limits}).model_type == "falcon_h1"
