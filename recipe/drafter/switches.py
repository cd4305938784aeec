"""Reading a drafter's config.json without overlooking a switch: what it asks for is computed here, or it is refused.

Readers of this format take keys from it that change what is computed (convolutions, a selector, scales of logits or
values, attention sinks, other rotary embeddings). A key that nobody here understands may be such a one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping
from typing import Any

from recipe.errors import ConfigError

UNDERSTOOD = {
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "layer_types",
    "in_block_causal", "is_causal", "causal", "sliding_window", "use_sliding_window", "max_window_layers", "rope_theta",
    "rope_scaling", "rope_parameters", "input_embedding_scale", "rms_norm_eps", "attention_bias",
    "max_position_embeddings", "dtype", "torch_dtype", "dflash_config", "sample_from_anchor", "architectures",
}  # fmt: skip
HARMLESS = {
    # of a model that owns no embedding, and of training
    "tie_word_embeddings", "initializer_range", "attention_dropout", "num_anchors", "max_anchors", "loss_decay_gamma",
    # of the file, of tokenizers and of generating
    "auto_map", "_name_or_path", "transformers_version", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
    "mask_token",
}  # fmt: skip
NEUTRAL: dict[str, Any] = {
    "model_type": "qwen3", "hidden_act": "silu", "is_neox_style": True, "rope_is_neox_style": True,
    "partial_rotary_factor": 1.0, "output_multiplier": 1.0, "logit_scale": 1.0, "attention_value_scale": 1.0,
    "projector_type": "dflash",
}  # fmt: skip
"""The one value, beside null, at which these keys ask for nothing; unknown keys do so when null, false, 0 or empty."""
ROPES = {"default", "linear", "yarn", "llama3"}  # those of dynamic and longrope change with the length of the text
ROPE_KEYS = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor",
    "mrope_section", "mrope_interleaved",  # of text, all axes have the same position
}  # fmt: skip
FIX = "use a drafter without it, or remove the key if it has no effect"


def refuse_switches(data: Mapping[str, Any], also: Collection[str] = (), where: str = "") -> None:
    """ConfigError for the first key (of ``dflash_config`` too) that is neither understood, nor harmless, nor neutral.

    ``also``: further keys that the caller knows. ``where``: the object of the file that holds ``data``.
    """
    for key, value in data.items():
        if key in NEUTRAL:
            fine = value is None or value == NEUTRAL[key]
        else:
            fine = key in UNDERSTOOD or key in HARMLESS or key in also or value in (None, False, "", [], {})
        if not fine and value != _qwen3_defaults().get(key, ...):
            raise ConfigError(f"{where}{key}", value, "asks for something that is not implemented here", FIX)
    inner = data.get("dflash_config")
    if isinstance(inner, Mapping):
        refuse_switches(inner, also, "dflash_config.")


def one_rope(data: Mapping[str, Any]) -> dict[str, Any]:
    """The one rotary embedding of all layers, as ``rope_parameters``, from any of its spellings.

    ConfigError where spellings disagree, or ask for more than one embedding, a partial one or an unknown scaling.
    """
    found: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        given = data.get(key) or {}
        kinds = [value for value in given.values() if isinstance(value, Mapping)]
        if any(kind != kinds[0] for kind in kinds):
            raise ConfigError(
                key, given, "gives kinds of layers different rotary embeddings, and drafters have one", FIX
            )
        for name, value in (kinds[0] if kinds else given).items():
            _agree(key, found, "rope_type" if name == "type" else name, value)
    if data.get("rope_theta") is not None:
        _agree("rope_theta", found, "rope_theta", data["rope_theta"])
    width = found.pop("rope_dim", None)
    if width is not None and width != data.get("head_dim"):
        raise ConfigError(
            "rope_parameters.rope_dim", width, "only part of each head is rotated, which is not done here", FIX
        )
    if found.get("rope_type", "default") not in ROPES:
        raise ConfigError(
            "rope_type", found["rope_type"], f"is not implemented: known are {', '.join(sorted(ROPES))}", FIX
        )
    for name in found.keys() - ROPE_KEYS:
        if found[name] not in (None, False) and found[name] != NEUTRAL.get(name):
            raise ConfigError(f"rope_parameters.{name}", found[name], "is not implemented here", FIX)
        del found[name]
    for name in ("mrope_section", "mrope_interleaved"):
        found.pop(name, None)
    return found


def _agree(key: str, found: dict[str, Any], name: str, value: Any) -> None:
    if value is None:
        return
    # An entry of the kind "default" beside a scaling says nothing.
    if found.get(name, value) != value and not (name == "rope_type" and "default" in (value, found[name])):
        rule = f"config.json says {name} twice, once as {found[name]!r}: readers differ in which they take"
        raise ConfigError(key, value, rule, "leave one of them")
    if name not in found or found[name] == "default":
        found[name] = value


def with_qwen3_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """What is left out of a config that transformers saved, put back. ConfigError where it refuses a value."""
    from transformers import Qwen3Config

    known = {key: value for key, value in data.items() if key not in ("model_type", "transformers_version")}
    try:
        filled: dict[str, Any] = Qwen3Config(**known).to_dict()
    except Exception as error:  # of transformers' own checks, in types of several libraries
        said = " ".join(str(error).split())[:160]
        raise ConfigError("config.json", data.get("model_type"), f"is no Qwen3 config: {said}", "mend it") from error
    return filled


@functools.cache
def _qwen3_defaults() -> dict[str, Any]:
    defaults: dict[str, Any] = json.loads(json.dumps(with_qwen3_defaults({})))  # with a file's kinds of keys
    return defaults
