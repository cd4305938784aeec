"""``resolve``: every ``null`` and ``"auto"`` that follows from the target's shape or from this machine gets its value.

What depends on the data stays open (the scheduler's steps), so that the resolved file re-runs by itself on other data.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from recipe.check.feasibility import DTYPE_BYTES, visible_gpus
from recipe.check.special_tokens import SpecialTokens
from recipe.config.deepspeed_keys import RunConfig
from recipe.config.paths import locate
from recipe.drafter.config import default_gamma, head_geometry
from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape, default_target_layer_ids
from recipe.ring.sizing import derive_page_tokens


def resolve(config: RunConfig, *, shape: TargetShape | None = None, gpus: int | None = None) -> RunConfig:
    """The config with all derived values filled in; resolving it again changes nothing.

    ``shape``: of the target, read from ``dflash.target.path`` if not given. ``gpus``: CUDA devices of this node,
    counted if not given. Raises ConfigError when the target is unknown, or has no mask token and none is set.
    """
    raw = config.model_dump()
    ours = raw["dflash"]
    _resolve_paths(ours)
    if shape is None:
        shape = TargetShape.resolve(ours["target"]["path"], config.dflash.target.revision)
    _resolve_machine(ours, visible_gpus() if gpus is None else gpus)
    _resolve_shape(config, ours, shape)
    return RunConfig.model_validate(raw)


def _resolve_paths(ours: dict[str, Any]) -> None:
    """Absolute where something exists, so that the resolved file means the same from any folder."""
    for section, key in (
        ("data", "path"),
        ("data", "conversations"),
        ("target", "path"),
        ("drafter", "init_from"),
        ("evaluation", "prompts"),
    ):
        given = ours[section][key]
        found = locate(given) if given else None
        if found is not None:
            ours[section][key] = str(found)
    ours["run"]["output_dir"] = os.path.abspath(os.path.expanduser(ours["run"]["output_dir"]))
    prompts = Path(ours["data"]["path"]) / "heldout_prompts.jsonl"
    if ours["evaluation"]["prompts"] is None and prompts.is_file():
        ours["evaluation"]["prompts"] = str(prompts)


def _resolve_machine(ours: dict[str, Any], gpus: int) -> None:
    if ours["layout"]["device"] == "auto":
        ours["layout"]["device"] = "cuda" if gpus else "cpu"
    if ours["drafter"]["attention"] == "auto":
        ours["drafter"]["attention"] = "flex" if ours["layout"]["device"] == "cuda" else "eager"


def _resolve_shape(config: RunConfig, ours: dict[str, Any], shape: TargetShape) -> None:
    target, drafter, objective = config.dflash.target, config.dflash.drafter, config.dflash.objective
    if target.target_layer_ids is None:
        ours["target"]["target_layer_ids"] = list(default_target_layer_ids(shape.num_layers))
    if drafter.mask_token_id is None:
        ours["drafter"]["mask_token_id"] = _mask_token(ours["target"]["path"], target.revision)
    if objective.gamma is None and objective.loss == "dflash":
        ours["objective"]["gamma"] = default_gamma(drafter.block_size)
    heads, kv_heads, head_dim = head_geometry(drafter, shape)
    ours["drafter"] |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    ours["drafter"]["intermediate_size"] = drafter.intermediate_size or shape.intermediate_size
    if config.dflash.ring.page_tokens is None:
        row_bytes = shape.hidden_size * DTYPE_BYTES[target.dtype]
        ours["ring"]["page_tokens"] = derive_page_tokens(row_bytes, config.dflash.data.max_seq_len)


def _mask_token(path: str, revision: str | None) -> int:
    """The tokenizer's own mask token. Never a pad, eos or bos token in its place."""
    tokens = SpecialTokens.of(path, revision)
    if tokens.mask is None:
        rule = f"the tokenizer of {path} has no mask token, and none is invented"
        fix = "set it to an id that the vocabulary reserves and text never uses; not pad, eos or bos"
        raise ConfigError("dflash.drafter.mask_token_id", None, rule, fix)
    return tokens.mask
