"""Puts transformers' own torch versions of the Gated DeltaNet functions back on machines without a GPU."""

from __future__ import annotations

import importlib

import torch

MODULES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
FUNCTIONS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)


def use_torch_kernels_on_cpu(force: bool = False) -> list[str]:
    """Rebinds the names that transformers bound to fla's Triton kernels (or causal_conv1d's) to their torch versions.

    transformers (5.17 to 5.24) takes fla's kernels whenever fla can be imported, and these need a GPU: on a CPU
    machine the first forward of a Qwen3.5 model would die with "0 active drivers". Its own torch version stays behind
    each function as ``__wrapped__``. Does nothing where there is a GPU, unless ``force``; calling it again does
    nothing either. Call it before the first forward (models built earlier are served too).

    Returns the names that were put back, as ``module.function``.
    """
    if torch.cuda.is_available() and not force:
        return []
    changed = []
    for module_name in MODULES:
        try:
            module = importlib.import_module(f"transformers.models.{module_name}.modeling_{module_name}")
        except ImportError:  # a transformers without this architecture
            continue
        for name in FUNCTIONS:
            original = getattr(getattr(module, name, None), "__wrapped__", None)
            if original is not None:
                setattr(module, name, original)
                changed.append(f"{module_name}.{name}")
    return changed
