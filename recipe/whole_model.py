"""A plain transformers model from a local folder: whole, or one message that names what is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from recipe.errors import ConfigError

FIX = "fetch the model again, or name a complete folder"


def load_whole_model(folder: str | Path, dtype: torch.dtype, field: str) -> Any:
    """The causal language model in ``folder`` (or of a hub id in the local cache) in host memory, in evaluation mode.

    ConfigError under the name ``field`` when its files are no model: it names the weight file that cannot be read.
    transformers makes up missing tensors at random; here they are a mistake too.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # what it would report of missing tensors is said below, and it repeats itself
    logging.disable_progress_bar()  # one bar per rank would only tear the log
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # transformers, safetensors and json raise many types for damaged files
        raise ConfigError(field, str(folder), _what_is_wrong(Path(folder), error), FIX) from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ConfigError(field, str(folder), f"lacks {len(missing)} tensors, the first: {missing[0]}", FIX)
    return model.eval()


def _what_is_wrong(folder: Path, error: Exception) -> str:
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except Exception as damage:  # SafetensorError for what is cut or no such file, OSError for what cannot be read
            return f"{file.name} cannot be read ({type(damage).__name__}: {_first_line(damage)})"
    if "ignore_mismatched_sizes" in str(error):
        return "the weights in it have other shapes than its config.json says"
    return f"cannot be loaded ({type(error).__name__}: {_first_line(error)})"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
