"""Shared by all tests: one torch thread, no network, no compiler, and a /dev/shm that is left as it was found."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Set before anything imports torch, transformers or deepspeed.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("DS_BUILD_OPS", "0")
os.environ.setdefault("DS_ACCELERATOR", "cpu" if not Path("/dev/nvidia0").exists() else "cuda")

if not Path("/dev/nvidia0").exists():
    # The product hides fla on CPU machines when it loads a target (recipe/target/cpu_kernels.py, tested in processes
    # of its own). Here plain transformers models run too, in any order, and must not find it.
    sys.modules.setdefault("fla", None)  # type: ignore[arg-type]

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder of the checkout."""
    return REPOSITORY


@pytest.fixture
def clean_shm() -> Iterator[None]:
    """Fails the test that leaves a file of its own in /dev/shm behind."""
    shm = Path("/dev/shm")
    before = {entry.name for entry in shm.iterdir()} if shm.is_dir() else set()
    yield
    mine = [entry for entry in shm.iterdir() if entry.name not in before] if shm.is_dir() else []
    left = [entry.name for entry in mine if entry.stat().st_uid == os.getuid() and entry.name.startswith("dflash")]
    assert not left, f"left in /dev/shm: {left}"
