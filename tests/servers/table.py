"""docs/servers.md as data: which key each server reads in each layout, what we write there, and where it is read."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.drafter.config import SLIDING, DrafterConfig
from recipe.drafter.export_layout import VERSIONS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "servers.md"
ABSENT = object()
TARGET = "org/target"


@dataclass(frozen=True)
class Row:
    server: str
    layout: str
    key: str
    written: str
    file: str
    function: str

    def __str__(self) -> str:
        return f"{self.server} {self.layout} {self.key}"


def rows() -> list[Row]:
    """Every row of the four tables."""
    found, text = [], DOCUMENT.read_text(encoding="utf-8")
    for server, layout, body in re.findall(r"^## (\w+): ([\w-]+) layout\n(.*?)(?=^## |\Z)", text, re.M | re.S):
        assert server in VERSIONS
        for line in re.findall(r"^\| (?!key |--)(.*) \|$", body, re.M):
            key, written, _, where = line.split(" | ")
            found.append(Row(server, layout, key, written, *where.split(" ")))
    return found


def meant(sign: str, config: DrafterConfig) -> Any:
    """The value that the column "we write" stands for. ABSENT: the key must not be there."""
    if sign.startswith("`"):
        return json.loads(sign.strip("`"))
    causal = ABSENT if config.is_causal is None else config.is_causal
    return {
        "B": config.block_size, "B - 1": config.block_size - 1, "D": config.num_target_layers,
        "L": list(config.target_layer_ids), "L + 1": [tap + 1 for tap in config.target_layer_ids],
        "N": config.num_hidden_layers, "H": config.hidden_size, "V": config.vocab_size, "mask": config.mask_token_id,
        "W": config.sliding_window if SLIDING in config.layer_types else None, "types": list(config.layer_types),
        "causal": causal, "not causal": not causal, "theta": config.rope_theta, "eps": config.rms_norm_eps,
        "heads": config.num_attention_heads, "kv heads": config.num_key_value_heads, "head_dim": config.head_dim,
        "dtype": config.dtype, "target": TARGET,
    }[sign]  # fmt: skip


def value(written: Any, key: str) -> Any:
    """What an export's config.json holds under a dotted key, ABSENT if nothing."""
    for part in key.split("."):
        if isinstance(written, list):
            written = written[int(part)]
        elif part in written:
            written = written[part]
        else:
            return ABSENT
    return written
