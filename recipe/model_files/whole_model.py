"""A plain transformers model from a local folder: whole, or one message that names what is damaged.

And what the model's own embedding module does to the rows of its table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape, quiet_transformers

FIX = "fetch the model again, or name a complete folder"


def load_whole_model(folder: str | Path, dtype: torch.dtype, field: str) -> Any:
    """The causal language model in ``folder`` (or of a hub id in the local cache) in host memory, in evaluation mode.

    ConfigError under the name ``field`` when its files are no model: it names the weight file that cannot be read.
    transformers makes up missing tensors at random; here they are a mistake too.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # one bar per rank would only tear the log
    try:
        with quiet_transformers():  # what it would report of missing tensors is said below
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # transformers, safetensors and json raise many types for damaged files
        raise ConfigError(field, str(folder), _what_is_wrong(Path(folder), error), FIX) from error
    finally:
        if bars:
            logging.enable_progress_bar()
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ConfigError(field, str(folder), f"lacks {len(missing)} tensors, the first: {missing[0]}", FIX)
    return model.eval()


def embedding_scale(shape: TargetShape) -> float:
    """What the target's embedding module multiplies rows of its table by (Gemma: the root of the hidden size).

    1.0 where it hands them out as they are, whatever the model does to them behind the module (Granite's multiplier).

    Builds the model without weights. ConfigError for a module that does something else to them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: value for key, value in shape.text_config.items() if key != "model_type"}
    config = AutoConfig.for_model(shape.text_config["model_type"], **settings)
    try:
        with quiet_transformers(), torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config).get_input_embeddings()
    except ValueError as error:  # Emu3, Mllama: only together with images
        rule = f"transformers has no causal model of {shape.model_type} ({_first_line(error)})"
        raise ConfigError("dflash.target.path", shape.model_type, rule, "use another target") from error
    # Buffers have no values on the meta device, the numbers that they are made from do.
    numbers = (getattr(module, name, None) for name in ("scalar_embed_scale", "embed_scale"))
    scale = next((float(number) for number in numbers if isinstance(number, int | float)), None)
    if scale is None and type(module) is not torch.nn.Embedding:
        rule = f"the embedding of {shape.model_type} ({type(module).__name__}) is not a multiple of its table"
        raise ConfigError(
            "dflash.target.path", shape.model_type, rule, "use another target: no server feeds that drafter"
        )
    return 1.0 if scale is None else scale


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
