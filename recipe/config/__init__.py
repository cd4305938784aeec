"""One JSON is one run: its schema and reading it. Pure: `recipe.check` fills what is derived and checks the rest."""

from recipe.config.deepspeed_keys import RunConfig
from recipe.config.load import ConfigErrors, load_config, load_config_text
from recipe.config.paths import locate

__all__ = ["ConfigErrors", "RunConfig", "load_config", "load_config_text", "locate"]
