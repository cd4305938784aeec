"""Every causal language model that transformers has, tiny and saved as transformers saves it (class defaults left out):
the shape that we read from that file is the shape of the model that transformers builds from it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape
from recipe.model_files.whole_model import embedding_scale

LAYERS = 8
WANTED = {
    "hidden_size": 64, "num_hidden_layers": LAYERS, "vocab_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 32, "pad_token_id": 0,
}  # fmt: skip
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
OWN: dict[str, dict[str, Any]] = {  # what a type needs beside or instead of WANTED to be built so small
    "axk2": {"num_key_value_heads": 4},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 4},
    "mamba2": {"num_heads": 2, "head_dim": 64},
    "longcat_flash": {"num_layers": LAYERS},
    "plbart": HEADS,
    "whisper": HEADS | {"d_model": 64},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 4},
}
NOT_BUILT = {
    "cohere_compass_text": "its class default for rope_parameters has no entry for full attention",
    "dbrx": "its class cannot be built from its own defaults",
    "dots3_note": "its vision part fits one hidden size only",
    "gemma3n": "its vision part needs Pillow",
    "gemma4_assistant": "its parts have to agree in settings of their own",
    "musicgen": "transformers cannot build the decoder from the whole config",
    "musicgen_melody": "transformers cannot build the decoder from the whole config",
    "qwen4_exp": "its class has no default for its layers' sizes",
    "qwen4_exp_text": "its class has no default for its layers' sizes",
    "reformer": "its axial positions fit one hidden size only",
    "xlnet": "its positions have no bound",
}
"""Types that cannot be built tiny, with the reason."""
REFUSED = {
    "num_attention_heads": ("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"),
    "max_position_embeddings": ("bloom", "cpmant", "recurrent_gemma", "whisper"),
    "hidden_size": ("blt",),
}
"""Types that are no target, by what their config lacks; a ConfigError says it."""
FAST = (
    "deepseek_v3", "falcon", "gemma2", "gemma3", "gemma3_text", "gemma4_text", "gpt2", "gpt_oss", "llama", "mistral",
    "phi3", "qwen3", "qwen3_5", "qwen3_5_moe_text",
)  # fmt: skip
ALIASES = {"hybrid_sliding": "sliding_attention", "hybrid": "full_attention"}  # Inkling's
LISTS = ("layers", "h", "blocks", "block", "layer")
ATTENTIONS = ("self_attn", "attn", "self_attention", "attention", "mixer", "self")
FUSED = ("qkv_proj", "query_key_value", "Wqkv")


def settings_of(model_type: str) -> dict[str, Any]:
    """Those of WANTED that the config class declares, and what the type needs."""
    default = CONFIG_MAPPING[model_type]()
    declared = {*default.to_dict(), *default.attribute_map}
    if isinstance(getattr(type(default), "head_dim", None), property):
        declared.discard("head_dim")
    return {key: value for key, value in WANTED.items() if key in declared} | OWN.get(model_type, {})


def tiny_config(model_type: str) -> Any:
    kind = CONFIG_MAPPING[model_type]
    if "text_config" not in kind.sub_configs:
        return kind(**settings_of(model_type))
    inner = kind().text_config.model_type
    return kind(text_config={"model_type": inner, **settings_of(inner)})


def saved(config: Any) -> dict[str, Any]:
    """The content of the config.json that transformers writes."""
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    return written


def layers_with(model: nn.Module, count: int) -> nn.ModuleList:
    """The list of the decoder's layers; of an image part's where that is as deep."""
    lists = [(name, found) for name, found in model.named_modules() if isinstance(found, nn.ModuleList)]
    text = [(name, found) for name, found in lists if not any(part in name for part in ("vision", "visual", "audio"))]
    named = {name: len(found) for name, found in text if name.rpartition(".")[2] in LISTS}
    return next((found for name, found in text if named.get(name) == count), nn.ModuleList())


def key_widths(layer: nn.Module) -> set[int]:
    """Columns that the keys of a layer's attention have; empty where they cannot be told from its weights."""
    found = set()
    for name, attention in layer.named_modules():
        if name.rpartition(".")[2] not in ATTENTIONS:
            continue
        for key in ("k_proj", "key_proj", "key"):
            if hasattr(getattr(attention, key, None), "weight"):
                found.add(int(getattr(attention, key).weight.shape[0]))
    return found


def fused_widths(layer: nn.Module) -> set[int]:
    """Columns of a layer's queries, keys and values together, where they are one matrix."""
    matrices = [module for name, module in layer.named_modules() if name.rpartition(".")[2] in FUSED]
    conv = [module for name, module in layer.named_modules() if name.rpartition(".")[2] == "c_attn"]  # [in, out]
    rows = {int(module.weight.shape[0]) for module in matrices if hasattr(module, "weight")}
    return rows | {max(module.weight.shape) for module in conv}


def bases(model: nn.Module) -> set[float]:
    """The bases of the model's rotary embeddings: frequency i of n is base ** (-i / n), unless scaled."""
    found = set()
    for module in model.modules():
        kind, config = type(module), getattr(module, "config", None)
        if not kind.__name__.endswith("RotaryEmbedding") or config is None or "Vision" in kind.__name__:
            continue
        with torch.device("cpu"):
            tables = dict(kind(config).named_buffers())
        for name, table in tables.items():
            if name.endswith("inv_freq") and "original" not in name and len(table) > 1:
                found.add(float((table[0].double() / table[1].double()) ** len(table)))
    return found


def compare(model_type: str) -> None:
    config = tiny_config(model_type)
    shape = TargetShape.from_config(saved(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    if model_type not in ("mllama", "moshi"):  # some rows more than the head has
        assert table.shape[0] == shape.vocab_size
    if model_type not in ("electra", "rembert"):  # encoders with a smaller embedding
        assert table.shape[1] == shape.hidden_size
    if model_type != "bigbird_pegasus":  # transformers ties its decoder's head only inside the whole model
        assert (head is not None and head.weight is table) == shape.tie_word_embeddings
    if model_type != "plbart":  # its decoder alone has no config that is read back
        check_embedding(model_type, config, shape)
    if model_type in ("hrm_text", "xlm"):  # runs its layers several times; has no list of layers
        return
    layers = layers_with(model, shape.num_layers)
    assert len(layers) == shape.num_layers == len(shape.layer_types)
    check_attention(shape, layers)
    rotary = bases(model)
    if rotary:
        assert any(abs(base / shape.rope_theta - 1) < 1e-3 for base in rotary), (rotary, shape.rope_theta)


def check_embedding(model_type: str, config: Any, shape: TargetShape) -> None:
    """Rows of the table times the scale are what the model's embedding module gives, in numbers."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config).get_input_embeddings()
    if model_type in ("emu3", "mllama"):
        with pytest.raises(ConfigError, match="has no causal model"):
            embedding_scale(shape)
        return
    if type(module) is nn.Embedding:
        assert embedding_scale(shape) == 1.0
        return
    if "Normed" in type(module).__name__:
        with pytest.raises(ConfigError, match="not a multiple of its table"):
            embedding_scale(shape)
        return
    small = {"vocab_size_per_layer_input": 8} if hasattr(config.get_text_config(), "vocab_size_per_layer_input") else {}
    for name, value in small.items():
        setattr(config.get_text_config(), name, value)
    module = AutoModelForCausalLM.from_config(config).get_input_embeddings()
    ids = torch.arange(1, 9)
    assert torch.allclose(module(ids), module.weight[ids] * embedding_scale(shape), rtol=1e-6)


def check_attention(shape: TargetShape, layers: nn.ModuleList) -> None:
    attending = [layer for layer, kind in zip(layers, shape.layer_types, strict=True) if kind != "linear_attention"]
    keys = {width for layer in attending for width in key_widths(layer)}
    if keys:
        assert shape.num_key_value_heads * shape.head_dim in keys
    together = {width for layer in attending for width in fused_widths(layer)}
    if together:
        assert (shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim in together
    for layer, kind in zip(layers, shape.layer_types, strict=True):
        own = getattr(layer, "layer_type", None) or getattr(layer, "attention_type", None)
        if own in ("full_attention", "sliding_attention", "linear_attention"):
            assert own == ALIASES.get(kind, kind)
        window = next((part.sliding_window for part in layer.modules() if hasattr(part, "sliding_window")), None)
        if window is not None and kind == "sliding_attention":
            assert window == shape.text_config["sliding_window"]


@pytest.mark.parametrize("model_type", FAST)
def test_shape_of_a_sparse_config_is_the_models(model_type: str) -> None:
    compare(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in FAST])
def test_shape_of_every_other_type(model_type: str) -> None:
    lacks = next((key for key, names in REFUSED.items() if model_type in names), None)
    if model_type in NOT_BUILT:
        pytest.skip(NOT_BUILT[model_type])
    if lacks is None:
        return compare(model_type)
    with pytest.raises(ConfigError, match=f"has no {lacks}"):
        TargetShape.from_config(saved(tiny_config(model_type)))
