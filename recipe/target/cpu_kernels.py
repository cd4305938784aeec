"""Keeps transformers on its own torch versions of the Gated DeltaNet functions where there is no GPU."""

from __future__ import annotations

import sys

import torch

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
