"""The ring's pages as pinned memory of a GPU, and the hand-off into them under stress."""

from __future__ import annotations

import os
import time

import pytest
import torch

from benchmarks.bench_handoff import VARIANTS, Consumers, default_setting, stress
from recipe.ring import Ring, RingSpec, ring_path


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_registered_pages_copy_at_the_rate_of_pinned_memory_and_bit_for_bit() -> None:
    spec = RingSpec(6, 5120, "bfloat16", 128, 64, 64)
    ring = Ring.create(ring_path(f"cuda-{os.getpid()}", 0), spec, "cuda")
    ring.populate()
    ring.cuda_register()
    ring.cuda_register()  # twice is once
    assert ring.pages.is_pinned()
    taps = torch.randn(6, 8192, 5120, device="cuda", dtype=torch.bfloat16)
    (write,) = ring.reserve(0, [(1, 8192, 0)], timeout=5)

    def rate(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        best = 0.0
        for _ in range(5):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            best = max(best, taps.nbytes / (time.perf_counter() - begun) / 1e9)
        return best

    # One contiguous run per stream and page; that is how the target's packed taps arrive.
    into = [(view[s], taps[s, b:e]) for b, e, view in ring.views(write) for s in range(6)]
    pinned = torch.empty_like(taps, device="cpu", pin_memory=True)
    measured = {"ring": rate(into), "pinned": rate([(pinned, taps)])}
    print(measured)
    assert measured["ring"] > 0.85 * measured["pinned"]
    ring.commit(write)
    lease = ring.lease(1, timeout=5)
    back = torch.cat([view.to("cuda", non_blocking=True) for _, _, view in ring.views(lease)], dim=1)
    assert torch.equal(back, taps)
    ring.release(lease)
    del into, write, lease
    ring.cuda_unregister()
    assert not ring.pages.is_pinned()
    ring.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_handed_off_taps_arrive_bit_for_bit_and_a_left_out_rule_shows() -> None:
    """Poisoned blocks, allocator storms, ragged sizes (benchmarks/bench_handoff.py): the safe one never fails."""
    consumers = Consumers(threads=False)
    found = {name: stress(name, default_setting("cuda", 300), consumers) for name in VARIANTS}
    consumers.close()
    assert found["safe"]["wrong"] == 0 and found["safe"]["entries"] == 300, found["safe"]["first"]
    # The early publication needs a consumer that is faster than the copy, and the early release an allocation in time:
    # neither is certain in 300 entries (on an H200 1 wrong entry of 400, none of 400).
    assert found["unsafe-packed-on-second-stream"]["wrong"] > 0, found
    assert all(result["pages_back"] for result in found.values())
