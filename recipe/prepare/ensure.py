"""Rows that a config says how to make are made when they are missing, so that a launch works by itself."""

from __future__ import annotations

from pathlib import Path

from recipe.config.deepspeed_keys import RunConfig
from recipe.config.paths import locate
from recipe.errors import ConfigError


def ensure_rows(config: RunConfig) -> None:
    """Prepare ``data.path`` from ``data.conversations`` if it is not there; one process of a launch calls it.

    Raises ConfigError when the conversations are missing or give no usable row.
    """
    data, tokenizer = config.dflash.data, config.dflash.target.path
    if data.conversations is None or Path(data.path, "meta.json").is_file():
        return
    source = locate(data.conversations)
    if source is None:
        rule = "no such file, and data.path is not there either"
        raise ConfigError("dflash.data.conversations", data.conversations, rule, "check the path")
    from recipe.prepare.prepare import prepare

    prepare([source], locate(tokenizer) or tokenizer, data.path, max_seq_len=data.max_seq_len)
