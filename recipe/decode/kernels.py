"""Which attention kernels decoding may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., object])


@contextmanager
def _without_cudnn() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def for_any_length(function: Function) -> Function:
    """Keep cuDNN's attention out of ``function``, here and in nothing that it was called from.

    On Hopper torch gives masked bf16 attention to cuDNN, which builds a plan for every new shape. While decoding, every
    token brings a new length: steps took 100 to 180 ms instead of 26 to 42 (benchmarks/results/quality_h200.md).
    """
    return _without_cudnn()(function)  # type: ignore[return-value]  # ContextDecorator keeps the signature
