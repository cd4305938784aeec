"""The hand-off's rules that need no GPU: the cap on what is in flight, what is kept alive, and what an error does."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recipe.ring import Ring, RingSpec, Write
from recipe.ring.monitor import Section
from recipe.target.handoff import IN_FLIGHT, Handoff

SPEC = RingSpec(2, 8, "float32", 4, 64, 64)


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    ring = Ring.create(tmp_path / f"dflash-{os.getpid()}.ring", SPEC, "handoff")
    yield ring
    ring.close()


def batch(ring: Ring, number: int, tokens: int = 7) -> tuple[list[torch.Tensor], list[tuple[int, Write]]]:
    (write,) = ring.reserve(number, [(number, tokens, 0)], timeout=5)
    return [torch.full((1, tokens, SPEC.hidden), float(10 * number + s)) for s in range(SPEC.streams)], [(0, write)]


def test_no_more_than_the_cap_is_in_flight_and_nothing_is_kept_alive(ring: Ring) -> None:
    errors: list[BaseException] = []
    handoff = Handoff(ring, torch.device("cpu"), range(SPEC.streams), errors.append)
    batches = [batch(ring, number) for number in range(IN_FLIGHT + 2)]
    kept = [weakref.ref(taps[0]) for taps, _ in batches]
    passed = 0

    def submit() -> None:
        nonlocal passed
        while batches:
            handoff.submit(*batches.pop(0))
            passed += 1

    with Section(ring._monitor):  # nothing can be committed meanwhile
        thread = threading.Thread(target=submit)
        thread.start()
        time.sleep(0.5)
        assert passed == IN_FLIGHT
    thread.join(10)
    handoff.close()
    assert passed == IN_FLIGHT + 2 and not errors
    assert [ref() for ref in kept] == [None] * len(kept)
    for number in range(passed):
        lease = ring.lease(number, timeout=5)
        for begin, end, view in ring.views(lease):
            wanted = torch.tensor([10.0 * number, 10.0 * number + 1])[:, None, None].expand(2, end - begin, 8)
            assert torch.equal(view, wanted)
        ring.release(lease)


def test_an_error_of_the_copy_thread_is_reported_and_nobody_hangs(ring: Ring) -> None:
    errors: list[BaseException] = []
    handoff = Handoff(ring, torch.device("cpu"), range(SPEC.streams), errors.append)
    taps, writes = batch(ring, 0)
    handoff.submit([taps[0][:, :3], taps[1]], writes)  # a tap that is too short for its entry
    for number in range(1, IN_FLIGHT + 3):
        handoff.submit(*batch(ring, number))
    handoff.close()
    assert len(errors) == 1 and isinstance(errors[0], RuntimeError)
    assert ring.stats().published == 0
