"""From the target's activations to the ring: device-to-host copies beside the compute, without a race.

Rules that the faults of others taught: nothing is packed on a second stream (the capture's tensors are complete on the
compute stream when their event fires); only the copies run beside it, on one copy stream and one thread; the tensors
stay referenced until the copies' event has completed; a semaphore caps what is in flight. The copy goes straight into
the pinned ring page. Each rank of a tensor-parallel group copies its own share of the taps.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from recipe.ring import Misfit, Ring, Write

IN_FLIGHT = 2


@dataclass
class _Job:
    taps: list[torch.Tensor]
    writes: Sequence[tuple[int, Write]]
    ready: torch.cuda.Event | None


class Handoff:
    """Copies captured taps into reserved ring pages and commits them.

    Args:
        share: indices of the taps (streams of a ring page) that this rank copies.
        on_error: called from the copy thread with the exception that ended it; it must end the run.
    """

    def __init__(
        self, ring: Ring, device: torch.device, share: Sequence[int], on_error: Callable[[BaseException], None]
    ) -> None:
        self._ring, self._share, self._on_error = ring, list(share), on_error
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slots = threading.Semaphore(IN_FLIGHT)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="handoff", daemon=True)
        self._thread.start()

    def submit(self, taps: list[torch.Tensor], writes: Sequence[tuple[int, Write]]) -> None:
        """Queue one batch. ``taps``: k tensors [n, S, H]; ``writes``: (index in the batch, reserved entry).

        Call it on the compute stream, right after the capture. Blocks while IN_FLIGHT batches are being copied. Raises
        Misfit for what the entries' pages cannot take as it is.
        """
        self._refuse_misfit(taps, writes)
        self._slots.acquire()
        if self._failed:
            self._slots.release()
            return  # the run is being ended by on_error
        ready = torch.cuda.Event() if self._stream is not None else None
        if ready is not None:
            ready.record()
        self._jobs.put(_Job(taps, writes, ready))

    def _refuse_misfit(self, taps: list[torch.Tensor], writes: Sequence[tuple[int, Write]]) -> None:
        spec = self._ring.spec
        spec.expect(taps, max((write.n_tokens for _, write in writes), default=0))
        rows = min(len(tap) for tap in taps)
        for index, write in writes:
            if not 0 <= index < rows or taps[0].ndim != 3:
                raise Misfit(f"entry {write.entry_id} is row {index} of a batch of {rows}")
            if len(write.pages) != spec.pages_for(write.n_tokens):
                raise Misfit(f"entry {write.entry_id} of {write.n_tokens} tokens has {len(write.pages)} pages")

    def close(self) -> None:
        """Wait until everything submitted is in the ring."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # per thread; a new one stands on GPU 0
            while (job := self._jobs.get()) is not None:
                self._copy(job)
                for _, write in job.writes:
                    self._ring.commit(write)
                del job
                self._slots.release()
        except BaseException as error:
            self._failed = True
            self._slots.release()
            self._on_error(error)

    def _copy(self, job: _Job) -> None:
        """Returns when every byte is in the ring, so that the taps may be freed and the entries published."""
        if self._stream is None:
            self._copy_pages(job)
            return
        with torch.cuda.stream(self._stream):
            assert job.ready is not None
            self._stream.wait_event(job.ready)
            self._copy_pages(job)
            done = torch.cuda.Event()
            done.record()
        done.synchronize()

    def _copy_pages(self, job: _Job) -> None:
        page_tokens = self._ring.spec.page_tokens
        for index, write in job.writes:
            for place, page in enumerate(write.pages):
                start = place * page_tokens
                stop = min(start + page_tokens, write.n_tokens)
                for stream in self._share:
                    source = job.taps[stream][index, start:stop]
                    self._ring.pages[page, stream, : stop - start].copy_(source, non_blocking=True)
