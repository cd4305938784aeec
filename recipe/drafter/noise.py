"""Noise on the taps: a drafter that has only seen exact features is brittle. Seeded per entry, annealed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recipe.config.schema import Noise
from recipe.drafter.anchors import NOISE, EntryKey, generator


def noise_scale(noise: Noise, progress: float) -> float:
    """Half-width (uniform) or standard deviation (gaussian) at ``progress`` in [0, 1] of the run; 0 without noise."""
    if noise.type == "none":
        return 0.0
    return noise.start + (noise.end - noise.start) * min(max(progress, 0.0), 1.0)


@torch.no_grad()
def add_noise(
    taps: Sequence[Tensor],
    spans: Sequence[tuple[int, int]],
    keys: Sequence[EntryKey],
    noise: Noise,
    progress: float,
    seed: int,
) -> None:
    """Add noise to the taps in place. Training only: evaluation does not call this.

    Args:
        taps: k tensors [C, H] of one device and dtype.
        spans: packed rows (start, stop) of each entry.
        keys: the entries. The draw depends on seed, key and device kind, not on the neighbours in the micro-batch.
        progress: fraction of the run that is done.
    """
    scale = noise_scale(noise, progress)
    if scale == 0.0:
        return
    source = torch.Generator(device=taps[0].device)
    for (start, stop), key in zip(spans, keys, strict=True):
        source.manual_seed(int(generator(seed, key, NOISE).integers(2**63 - 1)))
        for tap in taps:
            drawn = torch.empty_like(tap[start:stop])
            if noise.type == "uniform":
                drawn.uniform_(-scale, scale, generator=source)
            else:
                drawn.normal_(0.0, scale, generator=source)
            tap[start:stop] += drawn
