"""Drafters of every kind that we train, exported in both layouts, for the tests of what servers make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from recipe.drafter.config import FULL, SLIDING, DrafterConfig
from recipe.drafter.export_layout import export_hf, tensor_shapes
from recipe.drafter.export_speculators import export_speculators
from tests.servers.table import TARGET

VOCAB, DEPTH = 120, 12
MIXED = "sliding causal, full both ways"
KINDS: dict[str, dict[str, Any]] = {
    "all full": {},
    "all full, block 16, bfloat16": {"block_size": 16, "dtype": "bfloat16"},
    MIXED: {"layer_types": (SLIDING, SLIDING, FULL), "sliding_window": 16, "in_block_causal": (True, True, False)},
    "sliding both ways": {"layer_types": (SLIDING, SLIDING, FULL), "sliding_window": 16},
    "all sliding causal": {"layer_types": (SLIDING,) * 3, "sliding_window": 16, "in_block_causal": (True,) * 3},
    "Gemma's rope": {"rope_theta": 1e6, "head_dim": 32, "block_size": 4, "rms_norm_eps": 1e-5},
    "five taps, base 1e7": {"target_layer_ids": (1, 3, 5, 7, 9), "rope_theta": 1e7, "max_position_embeddings": 262_144},
}


def drafter(kind: str) -> tuple[DrafterConfig, dict[str, torch.Tensor]]:
    """Config and random float32 weights."""
    values: dict[str, Any] = {
        "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 80, "vocab_size": VOCAB, "block_size": 8, "mask_token_id": 119,
        "target_layer_ids": (1, 5, 9), "num_target_layers": DEPTH, "layer_types": (FULL,) * 3,
        "in_block_causal": (False,) * 3, "dtype": "float32",
    }  # fmt: skip
    config = DrafterConfig(**{**values, **KINDS[kind]})
    draw = torch.Generator().manual_seed(len(kind))
    return config, {name: torch.randn(shape, generator=draw) for name, shape in tensor_shapes(config).items()}


def export(kind: str, layout: str, folder: Path) -> Path:
    config, weights = drafter(kind)
    place = folder / f"{kind}-{layout}".replace(" ", "_").replace(",", "").replace("'", "")
    if layout == "z-lab":
        return export_hf(weights, config, place, config.dtype)
    embed, head = torch.randn(2, VOCAB, config.hidden_size)
    return export_speculators(weights, config, place, config.dtype, TARGET, embed, head, ["Qwen3ForCausalLM"])


def exports() -> list[tuple[str, str]]:
    """(kind, layout) of everything that can be exported; test_export.py holds that the rest is refused."""
    return [(kind, layout) for kind in KINDS for layout in ("z-lab", "speculators")
            if kind != MIXED or layout == "z-lab"]  # fmt: skip
