"""One JSON is one run: its schema, reading it, filling what is derived, and checking it before anything is loaded.

``resolve`` and ``check`` need the target's shape, the data's plan and the ring's size. They are imported on first use:
modules below them can import the schema.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recipe.config.deepspeed_keys import RunConfig
from recipe.config.load import ConfigErrors, load_config, load_config_text
from recipe.config.paths import locate

if TYPE_CHECKING:
    from recipe.config.checks import check
    from recipe.config.derive import resolve

__all__ = ["ConfigErrors", "RunConfig", "check", "load_config", "load_config_text", "locate", "resolve"]


def __getattr__(name: str) -> Any:
    if name == "check":
        from recipe.config.checks import check

        return check
    if name == "resolve":
        from recipe.config.derive import resolve

        return resolve
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
