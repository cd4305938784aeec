"""The drafter's DeepSpeed engine: made and asked here, so that no module above has to know DeepSpeed.

Saving and loading it: `optimizer_state.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recipe.engine.muon import GradientsBeforeMuon


def build_engine(module: nn.Module, config: dict[str, Any]) -> Any:
    """Wrap ``module`` (trainable parameters only) in a ZeRO engine over the drafter world."""
    import deepspeed

    device = next(module.parameters()).device
    if device.type == "cpu":
        # DeepSpeed compiles Muon's kernels at their first use, which needs a C++ compiler; a CPU run is for trying.
        torch.compiler.set_stance("force_eager")
    # Otherwise DeepSpeed takes GPU LOCAL_RANK, which is not this rank's when ranks share GPUs.
    args = SimpleNamespace(device_rank=device.index) if device.type == "cuda" else None
    muon, clip = config["optimizer"]["type"] == "Muon", config["gradient_clipping"]
    if muon:
        config = {**config, "gradient_clipping": 0.0}  # ours, before the momentum
    config, schedule = _own_schedule(config)
    engine, _, _, _ = deepspeed.initialize(
        args=args,
        model=module,
        model_parameters=[p for p in module.parameters() if p.requires_grad],
        lr_scheduler=schedule,
        config=config,
    )
    if muon:
        GradientsBeforeMuon(engine.optimizer, clip)
    return engine


def _own_schedule(config: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Optimizer], Any] | None]:
    """The config without a schedule that is ours, and that schedule's maker; None where DeepSpeed has it itself."""
    section = config.get("scheduler", {})
    if section.get("type") != "WarmupStableDecayLR":
        return config, None
    from recipe.engine.lr_schedule import WarmupStableDecayLR

    rest = {key: value for key, value in config.items() if key != "scheduler"}
    return rest, lambda optimizer: WarmupStableDecayLR(optimizer, **section["params"])


def gradient_norm(engine: Any) -> float:
    """Global norm before clipping, of the step just taken; NaN when that step was skipped for non-finite gradients."""
    norm = engine.get_global_grad_norm()
    if norm is None:
        return math.nan
    value = float(norm)
    return value if math.isfinite(value) and value >= 0 else math.nan


def name_bad_gradients(engine: Any) -> Callable[[], list[str]]:
    """From now on note, when a step is skipped, the parameters whose gradients (this rank's part) were not finite.

    Returns a function that gives the names and forgets them. DeepSpeed clears the gradients in the same call in which
    it finds them bad; the one moment between is when it tells its loss scaler.
    """
    optimizer, names = engine.optimizer, []
    tell_scaler = optimizer._update_scale

    def look(has_overflow: bool = False) -> None:
        if has_overflow:
            for group, gradients in optimizer.averaged_gradients.items():
                for parameter, gradient in zip(optimizer.params_in_partition[group], gradients or [], strict=False):
                    if gradient is not None and not torch.isfinite(gradient).all():
                        names.append(optimizer.param_names[parameter])
        tell_scaler(has_overflow)

    def taken() -> list[str]:
        found = list(names)
        names.clear()
        return found

    optimizer._update_scale = look
    return taken


def step_was_skipped(engine: Any) -> bool:
    """Whether DeepSpeed left the weights alone in the step just taken; the same on every rank."""
    return bool(engine.optimizer.overflow)


class MasterSample:
    """A few thousand of this rank's fp32 master weights, to notice a step that changes nothing."""

    SIZE = 4096

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._before = self._take()

    def moved(self) -> bool:
        """Whether any of them changed since the last call."""
        now = self._take()
        moved = not torch.equal(now, self._before)
        self._before = now
        return moved

    def _take(self) -> Tensor:
        flats = self.engine.optimizer.single_partition_of_fp32_groups
        return torch.cat([flat.detach()[:: max(1, flat.numel() // self.SIZE)].clone() for flat in flats])


def learning_rate(engine: Any) -> float:
    """Of the step that comes next; the largest, where groups of parameters have their own."""
    return max(map(float, engine.get_lr()))


def peak_memory_bytes(device: torch.device) -> int:
    """Peak bytes: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
