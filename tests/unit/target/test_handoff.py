"""The hand-off's rules that need no GPU: the cap on what is in flight, what is kept alive, and what an error does."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipe.config.schema import Noise
from recipe.drafter.batch import assemble
from recipe.ring import Misfit, Ring, RingSpec, Write
from recipe.ring.monitor import Section
from recipe.target.handoff import IN_FLIGHT, Handoff
from recipe.training.feed import Feed

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
    writes[0][1].pages[0] = SPEC.n_pages  # a page that the ring does not have
    handoff.submit(taps, writes)
    for number in range(1, IN_FLIGHT + 3):
        handoff.submit(*batch(ring, number))
    handoff.close()
    assert len(errors) == 1 and isinstance(errors[0], IndexError)
    assert ring.stats().published == 0


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("8 features", lambda taps: [taps[0][..., :1], taps[1]]),  # copy_ would repeat it
        ("8 features", lambda taps: [taps[0], taps[1].repeat(1, 1, 2)]),
        ("7 tokens", lambda taps: [taps[0][:, :3], taps[1]]),
        ("7 tokens", lambda taps: [taps[0][:, :1], taps[1]]),
        ("2 streams", lambda taps: taps[:1]),
        ("2 streams", lambda taps: [*taps, taps[0]]),  # the third would be dropped
        ("float16", lambda taps: [taps[0], taps[1].half()]),  # rounded already
        ("row 0 of a batch of 0", lambda taps: [tap[:0] for tap in taps]),
        ("row 0 of a batch", lambda taps: [tap[0] for tap in taps]),
    ],
)
def test_what_does_not_fit_a_page_is_refused_before_it_is_copied(ring: Ring, what: str, change: Any) -> None:
    errors: list[BaseException] = []
    handoff = Handoff(ring, torch.device("cpu"), range(SPEC.streams), errors.append)
    taps, writes = batch(ring, 0)
    with pytest.raises(Misfit, match=what):
        handoff.submit(change(taps), writes)
    handoff.submit(taps, writes)
    handoff.close()
    assert not errors and ring.stats().published == 1


def test_features_of_another_width_or_dtype_make_no_micro_batch() -> None:
    ids, taps = np.arange(5), [torch.zeros(5, 8), torch.zeros(5, 8)]
    anchors = [np.array([1])]
    assemble(ids, ids > 0, [5], anchors, taps, torch.zeros(5, 8))
    for last in (torch.zeros(5, 1), torch.zeros(5, 8).bfloat16(), torch.zeros(5)):
        with pytest.raises(ValueError, match="must be alike"):
            assemble(ids, ids > 0, [5], anchors, taps, last)


def test_a_drafter_of_other_streams_than_the_ring_has_does_not_start(ring: Ring) -> None:
    more: Any = {"max_anchors": 4, "slots": None, "noise": Noise(), "seed": 0, "device": torch.device("cpu")}
    with pytest.raises(Misfit, match="carries 2 streams"):
        Feed(None, None, ring, (0, 0), taps=2, last_hidden=True, timeout_s=1.0, **more)  # type: ignore[arg-type]
