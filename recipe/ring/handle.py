"""One process's handle of a ring: making or finding the file, its memory, leaving, aborting, statistics."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from recipe.errors import ConfigError, RunError
from recipe.process import start_ticks
from recipe.ring import layout as L
from recipe.ring.layout import RingSpec
from recipe.ring.monitor import Monitor, OnWait, Section
from recipe.ring.segment import Segment
from recipe.ring.sync import RobustMutex
from recipe.ring.table import Table
from recipe.ring.tickets import Lease, RingStats, Write

Self = TypeVar("Self", bound="RingHandle")


class RingHandle:
    """One process's handle of a ring. Thread-safe; a forked child may go on using it. Every user must `close` it."""

    def __init__(self, segment: Segment, on_wait: OnWait | None = None, lock_timeout_s: float = 60.0) -> None:
        """Used by `create` and `attach`. ``on_wait(what, seconds)`` runs once a second in every wait and may raise.

        ``lock_timeout_s``: how long a holder of the lock may stand still before RingTimeout names it.
        """
        self.spec, self.path = segment.spec, segment.path
        self._segment: Segment | None = segment
        table = Table(segment.views, self.spec, segment.layout.n_buckets)
        self._open_monitor: Monitor | None = Monitor(segment, table, on_wait, lock_timeout_s)
        self._pages: torch.Tensor | None = None
        self._registered, self._created_by = False, 0
        self.verify = bool(segment.views.words[L.W_VERIFY])
        _ = self._monitor.peer

    @classmethod
    def create(
        cls: type[Self],
        path: str | os.PathLike[str],
        spec: RingSpec,
        run_id: str,
        producers: int = 1,
        first_batch: int = 0,
        verify: bool = False,
        on_wait: OnWait | None = None,
        lock_timeout_s: float = 60.0,
    ) -> Self:
        """Makes the file (mode 0600, fully allocated) and attaches. A dead run's file of that name is replaced.

        ``producers``: how many `finish` calls end the data. ``first_batch``: the first batch_seq (a resumed run's).
        ``verify``: keep a CRC of every published page and check it at each lease. Raises ConfigError.
        """
        if not 1 <= producers <= L.MAX_PRODUCERS:
            raise ConfigError("producers", producers, f"must be in 1..{L.MAX_PRODUCERS}", "use fewer target replicas")
        if not 0 < len(run_id.encode()) < L.RUN_ID_BYTES:
            raise ConfigError("run id", run_id, f"must have 1..{L.RUN_ID_BYTES - 1} bytes", "use a shorter name")

        def fill(segment: Segment) -> None:
            words = segment.views.words
            for at, value in enumerate(spec.words(), L.W_STREAMS):
                words[at] = value
            words[L.W_MAGIC], words[L.W_VERSION], words[L.W_BYTES] = L.MAGIC, L.VERSION, spec.bytes
            words[L.W_PRODUCERS], words[L.W_VERIFY] = producers, int(verify)
            words[L.W_CREATOR_PID], words[L.W_CREATOR_START] = os.getpid(), start_ticks(os.getpid()) or 0
            segment.views.set_text(L.OFFSET_RUN_ID, L.RUN_ID_BYTES, run_id)
            RobustMutex(segment.address + L.OFFSET_MUTEX).initialise()
            Table(segment.views, spec, segment.layout.n_buckets).initialise(first_batch)

        ring = cls(Segment.create(Path(path), spec, fill), on_wait, lock_timeout_s)
        ring._created_by = os.getpid()
        return ring

    @classmethod
    def attach(
        cls: type[Self],
        path: str | os.PathLike[str],
        run_id: str,
        timeout: float = 60.0,
        spec: RingSpec | None = None,
        on_wait: OnWait | None = None,
        lock_timeout_s: float = 60.0,
    ) -> Self:
        """Maps the ring that another process of this run made, waiting up to ``timeout`` s for it.

        Raises RunError if the file is of another run, version or size, or differs from ``spec`` when that is given.
        """
        segment = Segment.attach(Path(path), run_id, timeout)
        if spec is not None and spec != segment.spec:
            raise RunError(f"ring {path} holds {segment.spec}, this rank expects {spec}")
        return cls(segment, on_wait, lock_timeout_s)

    @property
    def pages(self) -> torch.Tensor:
        """All data pages, ``[n_pages, streams, page_tokens, hidden]``: the shared bytes themselves, no copy."""
        if self._pages is None:
            segment, spec = self._mapped, self.spec
            shape = (spec.n_pages, spec.streams, spec.page_tokens, spec.hidden)
            count = shape[0] * shape[1] * shape[2] * shape[3]
            flat = torch.frombuffer(
                segment.mapping, dtype=spec.torch_dtype, count=count, offset=segment.layout.pages_offset
            )
            self._pages = flat.view(shape)
        return self._pages

    @property
    def buffer(self) -> tuple[int, int]:
        """(address, bytes) of the data pages; the address is aligned to a memory page."""
        layout = self._mapped.layout
        return self._mapped.address + layout.pages_offset, L.align(layout.pages_bytes, L.PAGE_SIZE)

    def views(self, ticket: Write | Lease) -> list[tuple[int, int, torch.Tensor]]:
        """The pages of an entry in token order: ``(first token, end token, tensor [streams, end - first, hidden])``."""
        step, pages = self.spec.page_tokens, self.pages
        spans = [(i * step, min((i + 1) * step, ticket.n_tokens), page) for i, page in enumerate(ticket.pages)]
        return [(begin, end, pages[page, :, : end - begin]) for begin, end, page in spans]

    def populate(self, part: int = 0, parts: int = 1, progress: Callable[[int, int], None] | None = None) -> None:
        """First touch of share ``part`` of ``parts`` of the pages (5 GB/s a process; do it before data flows).

        ``progress(done bytes, share's bytes)``.
        """
        self._mapped.populate(part, parts, progress)

    def cuda_register(self) -> None:
        """Pins the data pages for this process's GPUs (cudaHostRegister, portable). Raises RunError if CUDA refuses."""
        if not self._registered:
            address, size = self.buffer
            code = int(torch.cuda.cudart().cudaHostRegister(address, size, 1))
            if code != 0:
                raise RunError(f"cudaHostRegister of {size} bytes failed with code {code} (locked-memory limit?)")
            self._registered = True

    def cuda_unregister(self) -> None:
        """Undoes `cuda_register`; `close` does it too."""
        if self._registered:
            self._registered = False
            code = int(torch.cuda.cudart().cudaHostUnregister(self.buffer[0]))
            if code != 0:
                raise RunError(f"cudaHostUnregister failed with code {code}")

    def unlink(self) -> None:
        """Takes the file's name away, once all have attached: from now on the memory goes with its last process."""
        self._mapped.unlink()

    def close(self) -> None:
        """Leaves the ring. With a write or lease still open that aborts it. Safe to call twice.

        The memory is unmapped when the last tensor made from `pages` is gone.
        """
        if self._open_monitor is None:
            return
        try:
            self.cuda_unregister()
            self._open_monitor.leave()
        except RunError:
            pass  # aborted, or the lock is stuck: the others notice that this process goes without leaving
        finally:
            if self._created_by == os.getpid():
                self._mapped.unlink()
            self._open_monitor = self._segment = self._pages = None

    def abort(self, reason: str) -> None:
        """Ends the ring for everybody: all waiters wake at once with RingAborted(reason). The first reason stays."""
        self._monitor.abort(reason)

    def stats(self) -> RingStats:
        """A snapshot, without the lock: each number is right, two of them may be an update apart. Never blocks."""
        w = self._monitor.words
        return RingStats(
            free_pages=w[L.W_FREE_PAGES],
            n_pages=self.spec.n_pages,
            ready_tokens=w[L.W_READY_TOKENS],
            depth_tokens=w[L.W_DEPTH_TOKENS],
            reserved=w[L.W_RESERVED],
            published=w[L.W_PUBLISHED],
            delivered=w[L.W_DELIVERED],
            retired=w[L.W_RETIRED],
            next_batch=w[L.W_NEXT_BATCH],
            entries={name: w[L.W_STATE0 + state] for state, name in enumerate(L.STATES)},
            peers=sum(self._monitor.views.peer_state),
            producers=w[L.W_PRODUCERS],
            producers_finished=w[L.W_FINISHED].bit_count(),
            producer_wait_s=w[L.W_SPACE_WAIT_NS] / 1e9,
            turn_wait_s=w[L.W_TURN_WAIT_NS] / 1e9,
            consumer_wait_s=w[L.W_CONSUMER_WAIT_NS] / 1e9,
            aborted=self._monitor.reason(),
        )

    def check_invariants(self) -> None:
        """Compares all tables with each other (linear cost); raises AssertionError where they disagree."""
        with Section(self._monitor):
            self._table.check()

    @property
    def _mapped(self) -> Segment:
        if self._segment is None:
            raise RunError("the ring is closed")
        return self._segment

    @property
    def _monitor(self) -> Monitor:
        if self._open_monitor is None:
            raise RunError("the ring is closed")
        return self._open_monitor

    @property
    def _table(self) -> Table:
        return self._monitor.table

    @property
    def _all_finished(self) -> bool:
        words = self._monitor.words
        return words[L.W_FINISHED] == (1 << words[L.W_PRODUCERS]) - 1
