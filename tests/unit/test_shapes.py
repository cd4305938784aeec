"""The target's shape: from the bundled files, from folders, and what bad input gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.errors import ConfigError
from recipe.shapes import KNOWN_SHAPES, TargetShape, default_target_layer_ids


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
