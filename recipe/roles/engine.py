"""The drafter's DeepSpeed engine: made, saved and loaded here, so that no other module has to know DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from recipe.roles.optimizer_state import load_state, save_state


def build_engine(module: nn.Module, config: dict[str, Any]) -> Any:
    """Wrap ``module`` (trainable parameters only) in a ZeRO engine over the drafter world."""
    import deepspeed

    device = next(module.parameters()).device
    # Otherwise DeepSpeed takes GPU LOCAL_RANK, which is not this rank's when ranks share GPUs.
    args = SimpleNamespace(device_rank=device.index) if device.type == "cuda" else None
    engine, _, _, _ = deepspeed.initialize(
        args=args, model=module, model_parameters=[p for p in module.parameters() if p.requires_grad], config=config
    )
    return engine


def gradient_norm(engine: Any) -> float:
    """Global norm before clipping, of the step just taken; NaN when that step was skipped for non-finite gradients."""
    norm = engine.get_global_grad_norm()
    if norm is None:
        return math.nan
    value = float(norm)
    return value if math.isfinite(value) and value >= 0 else math.nan


def learning_rate(engine: Any) -> float:
    return float(engine.get_lr()[0])


def save_engine(engine: Any, file: Path) -> dict[str, Any]:
    """Write this rank's part of masters and moments to ``file``; returns what all ranks share. Raises OSError."""
    return save_state(engine, file)


def load_engine(engine: Any, files: Sequence[Path], facts: dict[str, Any], lr_shift: int = 0) -> None:
    """Restore what `save_engine` of any number of ranks wrote. Every rank must call it."""
    load_state(engine, files, facts, lr_shift)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak bytes: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
