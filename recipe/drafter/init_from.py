"""Starting from a drafter that exists: a folder in the z-lab layout, our own export, or that of speculators."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from recipe.drafter.config import FULL, SLIDING, DrafterConfig
from recipe.drafter.model import DFlashDrafter
from recipe.errors import ConfigError
from recipe.export_speculators import with_qwen3_defaults

FIELD = "dflash.drafter.init_from"
NOT_OURS = {"embed_tokens.weight", "lm_head.weight", "t2d", "d2t", "verifier_norm.weight", "verifier_lm_head.weight"}
"""Tensors that speculators stores beside the drafter: they belong to the target."""

SETTINGS = {
    "block_size": "dflash.drafter.block_size",
    "mask_token_id": "dflash.drafter.mask_token_id",
    "target_layer_ids": "dflash.target.target_layer_ids",
    "num_hidden_layers": "dflash.drafter.num_layers",
    "num_attention_heads": "dflash.drafter.num_attention_heads",
    "num_key_value_heads": "dflash.drafter.num_key_value_heads",
    "head_dim": "dflash.drafter.head_dim",
    "intermediate_size": "dflash.drafter.intermediate_size",
    "layer_types": "dflash.drafter.sliding_window",
    "sliding_window": "dflash.drafter.sliding_window",
}
"""What must agree and can be set. The fields below follow from the target or are fixed by the way we train."""
FROM_TARGET = ("hidden_size", "vocab_size", "num_target_layers", "rope_theta")
FIXED = ("in_block_causal", "rope_scaling", "hidden_act", "attention_bias", "rms_norm_eps")


def load_drafter(folder: str | Path, wanted: DrafterConfig | None = None) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Config and weights (on CPU, as stored, under z-lab names) of a drafter folder.

    Args:
        folder: holds ``config.json`` and safetensors files.
        wanted: the drafter to be trained. Whatever differs in the folder is refused, naming both values.

    Raises:
        ConfigError: no such folder, unreadable, not a DFlash drafter, other tensors than its config promises, or a
            mismatch with ``wanted``.
    """
    path = Path(os.path.expanduser(folder))
    data = _read_config(path)
    if data.get("speculators_model_type") is not None:
        data = _from_speculators(data, path, wanted)
    config = DrafterConfig.from_dict(data)
    if wanted is not None:
        _refuse_mismatch(path, config, wanted)
    return config, _read_weights(path, config)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(FIELD, str(path), "this folder has no config.json", "name an exported drafter folder")
    try:
        data = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(FIELD, str(path), f"config.json is not JSON ({error})", "export the drafter again") from None
    if not isinstance(data, dict):
        raise ConfigError(FIELD, str(path), "config.json is not an object", "export the drafter again")
    return data


def _from_speculators(data: Mapping[str, Any], path: Path, wanted: DrafterConfig | None) -> dict[str, Any]:
    """The z-lab spelling of a speculators config. Its taps count the embedding as 0: ours are one lower."""
    kind = data["speculators_model_type"]
    if kind != "dflash" or data.get("projector_type", "dflash") != "dflash":
        raise ConfigError(FIELD, str(path), f"holds a {kind!r} drafter, not plain DFlash", "name a DFlash drafter")
    if data.get("sample_from_anchor") or data.get("shift_label"):
        rule = "was trained with shifted labels (its anchor slot predicts), which DFlash does not use"
        raise ConfigError(FIELD, str(path), rule, "name a drafter trained without sample_from_anchor")
    taps = data.get("aux_hidden_state_layer_ids")
    if not taps or data.get("mask_token_id") is None:
        rule = "config.json lacks aux_hidden_state_layer_ids or mask_token_id"
        raise ConfigError(FIELD, str(path), rule, "add the values it was trained with")
    layers = with_qwen3_defaults(data.get("transformer_layer_config") or {})
    types = layers.get("layer_types") or [FULL] * layers["num_hidden_layers"]
    both_ways = bool(data.get("sliding_window_non_causal", False))
    depth = data.get("num_target_layers") or (wanted.num_target_layers if wanted else max(taps) + 1)
    return layers | {
        "num_target_layers": depth,
        "dtype": data.get("dtype") or data.get("torch_dtype") or layers.get("dtype"),
        "dflash_config": {
            "block_size": data.get("block_size", 8),
            "mask_token_id": data["mask_token_id"],
            "target_layer_ids": [tap - 1 for tap in taps],
            "in_block_causal": [kind == SLIDING and not both_ways for kind in types],
        },
    }


def _refuse_mismatch(path: Path, found: DrafterConfig, wanted: DrafterConfig) -> None:
    names = {**SETTINGS, **dict.fromkeys(FROM_TARGET, "dflash.target.path"), **dict.fromkeys(FIXED, FIELD)}
    for name, setting in names.items():
        theirs, ours = getattr(found, name), getattr(wanted, name)
        if theirs != ours:
            fix = f"set {setting} to match, or name another drafter"
            if name in FROM_TARGET:
                fix = "train with the target that this drafter was made for, or name another drafter"
            elif name in FIXED:
                fix = "name a drafter that agrees, or start from fresh weights"
            raise ConfigError(FIELD, str(path), f"its {name} is {theirs!r}, this run's is {ours!r}", fix)


def _read_weights(path: Path, config: DrafterConfig) -> dict[str, Tensor]:
    """All tensors of the folder; exactly those that the config promises, by name and shape."""
    weights: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            weights |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise ConfigError(FIELD, str(file), f"cannot be read ({error})", "copy the file again") from None
    weights = {name: tensor for name, tensor in weights.items() if name not in NOT_OURS}
    with torch.device("meta"):
        expected = {name: tuple(p.shape) for name, p in DFlashDrafter(config).named_parameters()}
    for name in sorted(expected.keys() ^ weights.keys()):
        state = "is missing" if name in expected else "is not part of a DFlash drafter"
        raise ConfigError(FIELD, str(path), f"tensor {name} {state}", "export the drafter again")
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            rule = f"tensor {name} has shape {tuple(weights[name].shape)}, its config says {shape}"
            raise ConfigError(FIELD, str(path), rule, "export the drafter again")
    return weights
