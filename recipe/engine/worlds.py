"""Each role's own collective world, made on a prefix of the control store. No collective ever spans roles.

A single world with subgroups hangs inside DeepSpeed (docs/deepspeed.md), so every role sees a world of its own:
RANK, WORLD_SIZE and LOCAL_SIZE are set by role before `deepspeed.init_distributed` adopts it. LOCAL_RANK (the device
index) and CUDA_VISIBLE_DEVICES are never touched.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from recipe.errors import ConfigError
from recipe.watch.role import Role
from recipe.watch.store import ControlStore


def pick_device(role: Role, wanted: str, share: bool = False) -> torch.device:
    """The device of this rank: LOCAL_RANK's GPU (with ``share``: modulo the GPUs visible), or the CPU. Sets it as the
    current CUDA device.

    Raises:
        ConfigError: ``cuda`` asked for on a machine whose visible GPUs do not include LOCAL_RANK.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if role.local_rank >= count and not share:
        raise ConfigError(
            "dflash.layout",
            f"GPU {role.local_rank}",
            f"only {count} GPUs are visible on node {role.node}",
            "name GPUs that exist, set dflash.layout.share_gpus to true, or dflash.layout.device to 'cpu'",
        )
    device = torch.device("cuda", role.local_rank % count)
    torch.cuda.set_device(device)
    return device


def disable_shm_all_reduce() -> None:
    """Keep DeepSpeed from building its CPU shared-memory all-reduce: it compiles for minutes, ignores groups, leaks.

    Must run before `deepspeed.init_distributed`; gloo's own all-reduce is used instead (docs/deepspeed.md).
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def init_world(role: Role, store: ControlStore, device: torch.device, timeout_s: float) -> None:
    """Make this role's world: gloo on CPU, NCCL on GPU. `torch.distributed`'s default group is then the role's."""
    name, rank, size = role.group
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_SIZE=str(min(size, role.world_size // role.nodes)))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(name, store.raw),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed

    disable_shm_all_reduce()
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False)


def sum_over_world(values: list[float], device: torch.device) -> list[float]:
    """Sum each value over this role's world, in float64. Every rank of the world must call it."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def share_from_first(values: torch.Tensor) -> None:
    """Make ``values`` on every rank of this role's world what they are on its first, in place."""
    dist.broadcast(values, 0)


def world_place() -> tuple[int, int]:
    """(rank, size) within this role's world."""
    return dist.get_rank(), dist.get_world_size()


def gather_over_world(value: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The lists of all ranks of this role's world, one after the other. Every rank must call it; for rare events."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return [item for part in gathered for item in part]


def world_barrier() -> None:
    """All ranks of this role's world."""
    dist.barrier()


def leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def world_group() -> dist.ProcessGroup | None:
    """The process group of this role's world; None when it has one rank, which then needs no collective at all."""
    return dist.group.WORLD if dist.get_world_size() > 1 else None
