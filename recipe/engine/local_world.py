"""A world of the processes of one machine, for a verb that no launcher started (`evaluate --tp`)."""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from recipe.watch.network import settle_interface

TIMEOUT_S = 1800.0  # of one collective: a big target is still being read by another rank


def join_local_world(folder: Path, rank: int, size: int, device: torch.device) -> None:
    """Meet the ``size`` ranks through a file in ``folder``: gloo on the CPU, NCCL on GPUs, nothing but loopback.

    The default process group of this process is then that world; `recipe.engine.worlds.leave_world` ends it.
    """
    settle_interface("127.0.0.1", 1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_SIZE": size}
    os.environ.update({name: str(value) for name, value in places.items()})
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif "deepspeed" not in sys.modules:
        os.environ["DS_ACCELERATOR"] = "cpu"  # else it moves the target to a GPU of this machine
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder.resolve() / 'meeting'}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
        device_id=device if device.type == "cuda" else None,
    )
    for logger in ("DeepSpeed", "deepspeed"):
        logging.getLogger(logger).setLevel(logging.WARNING)
