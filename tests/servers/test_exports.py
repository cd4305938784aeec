"""Our exports against the list of what servers read, docs/servers.md, which test_wheels.py holds to the servers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from recipe.drafter.export_layout import VERSIONS
from tests.servers.drafters import drafter, export, exports
from tests.servers.table import DOCUMENT, meant, rows, value


@pytest.mark.parametrize(("kind", "layout"), exports())
def test_every_key_that_a_server_reads_holds_what_the_list_says(tmp_path: Path, kind: str, layout: str) -> None:
    written = json.loads((export(kind, layout, tmp_path) / "config.json").read_text())
    config = drafter(kind)[0]
    read = [row for row in rows() if row.layout == layout]
    assert len(read) > 20
    wrong = {str(row): (value(written, row.key), meant(row.written, config)) for row in read
             if value(written, row.key) != meant(row.written, config)}  # fmt: skip
    assert not wrong


def test_nothing_is_written_that_would_switch_something_on(tmp_path: Path) -> None:
    """Keys by which the three releases turn a plain drafter into another one."""
    switches = {"use_swa", "swa_window_size", "use_aux_hidden_state", "attention_sink_bias", "attention_value_scale",
                "projector_type", "conv_kernel_size", "selector_rank", "output_multiplier", "final_logit_softcapping",
                "partial_rotary_factor", "mrope_section", "is_neox_style", "rope_is_neox_style", "rope_dim",
                "no_rope_layers",
                "logit_scale", "has_own_lm_head", "use_gemma_norm", "has_embed_tokens", "n_predict", "text_config",
                "eagle_config", "target_hidden_size", "quantization_config", "mask_token"}  # fmt: skip
    for layout in ("z-lab", "speculators"):
        text = (export("all full", layout, tmp_path) / "config.json").read_text()
        assert not switches & set(re.findall(r'"(\w+)":', text))


def test_the_list_names_the_releases_that_the_commands_are_for() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, version in VERSIONS.items():
        assert re.search(rf"{name} {re.escape(version)}", text, re.IGNORECASE)
