"""Micro-batches of one drafter rank: planned from the rows, filled from the ring, one ahead of the training step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from recipe.config.schema import Noise
from recipe.data.rows import Rows
from recipe.data.schedule import Schedule, entry_id, token_checksum
from recipe.drafter.anchors import EntryKey, candidates, plan_anchors
from recipe.drafter.batch import HostLayout, MicroBatch, Tokens, assemble, blank
from recipe.drafter.noise import add_noise
from recipe.errors import RunError
from recipe.ring import Misfit, Ring

NOTHING = HostLayout.build([1], [np.zeros(0, np.int64)], np.zeros(1, bool), None)


@dataclass(frozen=True)
class Planned:
    """A micro-batch before its taps are there: enough for its weight. Empty for a rank that has no data left."""

    sequences: list[Tokens]
    anchors: list[np.ndarray]
    host: HostLayout

    @property
    def tokens(self) -> int:
        return sum(len(sequence.input_ids) for sequence in self.sequences)

    @property
    def barren(self) -> int:
        """Entries without two supervised tokens in a row: they have no anchor and train nothing."""
        return sum(not len(candidates(sequence.loss_mask)) for sequence in self.sequences)

    @property
    def keys(self) -> list[EntryKey]:
        return [sequence.key for sequence in self.sequences]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Rows (start, stop) of each entry in the packed row."""
        return self.host.spans if self.sequences else ()


class Filled(NamedTuple):
    """A micro-batch with its taps. ``row_sums`` fp32 [streams, C]: sum over the features of each row as it lay in the
    ring, before noise (not finite where a value of the row is not); None without entries."""

    planned: Planned
    batch: MicroBatch
    row_sums: Tensor | None


class Feed:
    """Args:
    place: (node, index of this drafter on its node).
    taps: number of taps; ``last_hidden``: whether the ring carries one more stream for soft labels.
    slots: pad every micro-batch to this many blocks (static shapes on a GPU), or None.
    """

    def __init__(
        self,
        schedule: Schedule,
        rows: Rows,
        ring: Ring,
        place: tuple[int, int],
        *,
        taps: int,
        last_hidden: bool,
        max_anchors: int,
        slots: int | None,
        noise: Noise,
        seed: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        if taps + last_hidden != ring.spec.streams:
            rule = f"{taps} taps and {int(last_hidden)} last hidden state"
            raise Misfit(f"the ring carries {ring.spec.streams} streams, and this drafter reads {rule}")
        self.schedule, self.rows, self.ring, self.place = schedule, rows, ring, place
        self.taps, self.last_hidden = taps, last_hidden
        self.max_anchors, self.slots, self.noise, self.seed = max_anchors, slots, noise, seed
        self.device, self.timeout_s = device, timeout_s
        self.waited_s = 0.0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead = ThreadPoolExecutor(1, "feed", initializer=self._enter_thread)
        self._next: tuple[int, int, Future[Filled]] | None = None
        self._plans: dict[int, list[Planned]] = {}

    def _enter_thread(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # per thread; a new one stands on GPU 0

    def plan(self, step: int) -> list[Planned]:
        """The accumulation's micro-batches of this rank, from the rows alone: no tap is needed to weigh them."""
        planned = self._plans.get(step)  # the training thread and the reading thread both come here
        if planned is None:
            planned = [self._plan(step, index) for index in range(self.schedule.accumulation)]
            self._plans[step] = planned
            self._plans.pop(step - 3, None)
        return planned

    def _plan(self, step: int, index: int) -> Planned:
        planned = self.schedule.micro_batch(step, *self.place, index)
        sequences = [
            Tokens(EntryKey(planned.epoch, int(row), int(reuse)), *self.rows[int(row)])
            for row, reuse in zip(planned.rows, planned.reuses, strict=True)
        ]
        masks = [sequence.loss_mask for sequence in sequences]
        anchors = plan_anchors(masks, [sequence.key for sequence in sequences], self.max_anchors, self.seed)
        if not sequences:
            return Planned([], [], NOTHING)
        return Planned(
            sequences, anchors, HostLayout.build([len(m) for m in masks], anchors, np.concatenate(masks), self.slots)
        )

    def micro_batches(self, step: int) -> Iterator[Filled]:
        """The micro-batches of ``step`` in order, on the device; the one after is read meanwhile."""
        for index in range(self.schedule.accumulation):
            started = time.monotonic()
            filled = self._start(step, index).result()
            self.waited_s += time.monotonic() - started
            if self._stream is not None:
                self._adopt(filled)
            following = (step, index + 1) if index + 1 < self.schedule.accumulation else (step + 1, 0)
            if following[0] < self.schedule.total_steps:
                self._start(*following)
            yield filled

    def _start(self, step: int, index: int) -> Future[Filled]:
        if self._next is None or self._next[:2] != (step, index):
            self._next = (step, index, self._ahead.submit(self._fill, step, index))
        return self._next[2]

    def _adopt(self, filled: Filled) -> None:
        """The tensors were written on the copy stream: order them before the compute, and tell the allocator."""
        assert self._stream is not None
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        for value in [*vars(filled.batch).values(), filled.row_sums]:
            for tensor in value if isinstance(value, list) else [value]:
                if isinstance(tensor, Tensor):
                    tensor.record_stream(current)

    def _fill(self, step: int, index: int) -> Filled:
        with torch.cuda.stream(self._stream):  # no effect for None
            planned = self.plan(step)[index]
            spec = self.ring.spec
            if not planned.sequences:
                empty = blank(
                    self.taps, spec.hidden, last_hidden=self.last_hidden, dtype=spec.torch_dtype, device=self.device
                )
                return Filled(planned, empty, None)
            streams = [
                torch.empty(planned.tokens, spec.hidden, dtype=spec.torch_dtype, device=self.device)
                for _ in range(spec.streams)
            ]
            self._read(planned, streams)
            row_sums = torch.stack([stream.sum(-1, dtype=torch.float32) for stream in streams])
            taps, last = streams[: self.taps], streams[self.taps] if self.last_hidden else None
            progress = self.schedule.rate_step(step) / max(self.schedule.rate_steps - 1, 1)
            add_noise(taps, planned.host.spans, planned.keys, self.noise, progress, self.seed)
            batch = assemble(
                np.concatenate([sequence.input_ids for sequence in planned.sequences]),
                planned.host.loss_mask,
                [len(sequence.input_ids) for sequence in planned.sequences],
                planned.anchors,
                taps,
                last,
                self.slots,
            )
            return Filled(planned, batch, row_sums)

    def _read(self, planned: Planned, streams: list[Tensor]) -> None:
        """Copy every entry's pages into the packed row; leases go back only when the copies have completed."""
        leases = []
        for sequence, (start, stop) in zip(planned.sequences, planned.host.spans, strict=True):
            key = sequence.key
            lease = self.ring.lease(entry_id(key.epoch, key.row), key.reuse, self.timeout_s)
            if lease.n_tokens != stop - start or lease.checksum != token_checksum(sequence.input_ids):
                raise RunError(
                    f"ring entry of row {key.row}, epoch {key.epoch} holds {lease.n_tokens} tokens "
                    f"(checksum {lease.checksum:08x}); the row has {stop - start} and other tokens"
                )
            if len(lease.pages) != self.ring.spec.pages_for(lease.n_tokens):
                raise Misfit(f"ring entry of row {key.row}: {lease.n_tokens} tokens on {len(lease.pages)} pages")
            leases.append(lease)
            self._copy(lease.pages, start, stop, streams)
        if self._stream is not None:
            self._stream.synchronize()
        for lease in leases:
            self.ring.release(lease)

    def _copy(self, pages: tuple[int, ...] | list[int], start: int, stop: int, streams: list[Tensor]) -> None:
        size = self.ring.spec.page_tokens
        for place, page in enumerate(pages):
            begin = start + place * size
            end = min(begin + size, stop)
            for index, stream in enumerate(streams):
                stream[begin:end].copy_(self.ring.pages[page, index, : end - begin], non_blocking=True)

    def close(self) -> None:
        self._ahead.shutdown(wait=True, cancel_futures=True)
