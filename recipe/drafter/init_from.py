"""Starting from a drafter that exists: a folder in the z-lab layout, our own export, or that of speculators."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from recipe.drafter.config import DrafterConfig
from recipe.drafter.export_layout import load_export, read_config
from recipe.errors import ConfigError

FIELD = "dflash.drafter.init_from"

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
FROM_TARGET = (
    "hidden_size", "vocab_size", "num_target_layers", "rope_theta", "rope_scaling", "input_embedding_scale",
)  # fmt: skip
FIXED = ("in_block_causal", "hidden_act", "attention_bias", "rms_norm_eps")


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
    try:
        config, weights = load_export(path)
        depth_known = "num_target_layers" in read_config(path)
    except ConfigError as error:
        raise ConfigError(FIELD, str(path), f"{error.field} = {error.value!r}: {error.rule}", error.fix) from None
    if wanted is not None:
        if not depth_known:  # speculators does not store it
            config = replace(config, num_target_layers=wanted.num_target_layers)
        _refuse_mismatch(path, config, wanted)
    return config, weights


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
