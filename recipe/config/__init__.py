"""One JSON is one run: schema, loading, and (imported where needed) ``resolve`` and ``checks``."""

from __future__ import annotations

from recipe.config.deepspeed_keys import RunConfig
from recipe.config.load import ConfigErrors, load_config

__all__ = ["ConfigErrors", "RunConfig", "load_config"]
