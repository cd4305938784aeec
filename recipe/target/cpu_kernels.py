"""The kernels of the Gated DeltaNet: transformers' own torch functions where there is no GPU, and never unsaid."""

from __future__ import annotations

import importlib
import sys

import torch

from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape

MODULES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
FUNCTIONS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)


def use_torch_kernels_on_cpu(force: bool = False) -> list[str]:
    """Call it before the first forward of a Qwen3.5 model, best before transformers' module for it is imported.

    transformers (5.17 to 5.24) takes fla's Triton kernels whenever fla can be imported, and these need a GPU: on a CPU
    machine the first forward would die with "0 active drivers". So fla is hidden from later imports of this process
    (which also saves its 7 s of import), and in modules that are imported already each function is put back to the
    torch version that stands behind it as ``__wrapped__``. Does nothing where there is a GPU, unless ``force``.

    Returns the names that were put back, as ``module.function``.
    """
    if torch.cuda.is_available() and not force:
        return []
    sys.modules.setdefault("fla", None)  # type: ignore[arg-type]  # None: `import fla` raises ImportError
    changed = []
    for module_name in MODULES:
        module = sys.modules.get(f"transformers.models.{module_name}.modeling_{module_name}")
        for name in FUNCTIONS if module is not None else ():
            original = getattr(getattr(module, name, None), "__wrapped__", None)
            if original is not None:
                setattr(module, name, original)
                changed.append(f"{module_name}.{name}")
    return changed


def why_torch_kernels(shape: TargetShape, device: str) -> str | None:
    """Why a hybrid's linear-attention layers run in torch's slow functions; None where fla's kernels do it, and for a
    target without such layers. ``device``: "cuda" or "cpu". Imports what transformers imports, which falls back in
    silence whatever that import raises.
    """
    if not shape.hybrid:
        return None
    if device != "cuda":
        return "fla's kernels need a GPU"
    try:
        kernel = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except Exception as error:
        return f"flash-linear-attention cannot be used: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None if callable(kernel) else "flash-linear-attention has no chunk_gated_delta_rule"


def refuse_torch_kernels(why: str) -> ConfigError:
    """What a user reads whose GPUs would run a hybrid without fla: some times slower, and by nothing to be seen."""
    rule = f"its linear-attention layers would run in torch's functions, several times slower: {why}"
    fix = "pip install flash-linear-attention, or set dflash.target.allow_torch_kernels to true"
    return ConfigError("dflash.target.allow_torch_kernels", False, rule, fix)
