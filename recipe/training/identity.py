"""What a checkpoint belongs to. A resume under another identity would repeat or lose rows, or could not load at all."""

from __future__ import annotations

from typing import Any

from recipe.config import RunConfig
from recipe.config.deepspeed_keys import Muon
from recipe.model_files.fingerprint import fingerprint
from recipe.model_files.shapes import model_folder


def identity(config: RunConfig, rows: str) -> dict[str, Any]:
    """Key -> value, JSON-ready. ``rows``: the fingerprint of the training rows. The target is known by its bytes.

    Not part of it, because it may change: where the target lies, number and place of target and drafter ranks, nodes,
    accumulation, ZeRO stage, optimizer and schedule settings, objective, epochs. AdamW and Adam keep the same moments.
    """
    ours = config.dflash
    drafter = ours.drafter
    return {
        "the weights in dflash.target.path": fingerprint(model_folder(ours.target.path, ours.target.revision)),
        "dflash.target.target_layer_ids": list(ours.target.target_layer_ids or []),
        "dflash.drafter.block_size": drafter.block_size,
        "dflash.drafter.mask_token_id": drafter.mask_token_id,
        "dflash.drafter.num_layers": drafter.num_layers,
        "dflash.drafter.num_attention_heads": drafter.num_attention_heads,
        "dflash.drafter.num_key_value_heads": drafter.num_key_value_heads,
        "dflash.drafter.head_dim": drafter.head_dim,
        "dflash.drafter.intermediate_size": drafter.intermediate_size,
        "dflash.drafter.sliding_window": drafter.sliding_window,
        "the rows in dflash.data.path": rows,
        "dflash.data.token_budget": ours.data.token_budget,
        "dflash.data.max_batch_size": ours.data.max_batch_size,
        "optimizer.type": "Muon" if isinstance(config.optimizer, Muon) else "AdamW",
        "dflash.run.seed": ours.run.seed,
        "dflash.ring.reuse": ours.ring.reuse,
        "dflash.ring.min_ready": ours.ring.min_ready,
    }
