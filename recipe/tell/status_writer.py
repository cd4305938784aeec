"""What a run writes into status.json while it lives: what it does, when it last moved, and how it ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from recipe.process import ProcessId
from recipe.tell.disk import DiskTrouble
from recipe.tell.provenance import redact_text
from recipe.tell.run_dir import RunDir, write_json
from recipe.tell.status_fields import read_fields

TERMINAL = ("done", "dead", "diverged")
WaitingSide = Literal["target", "drafter", "neither"]
_STATUS_LOCK = ".status.lock"
_PATIENCE_S = 3.0
_RECENT = 20  # intervals between steps that the expectation is built from


class StatusWriter:
    """Owned by one process of the run (drafter rank 0). Calls only note values; a thread writes the file.

    The thread's heartbeat says that the process lives; the progress time moves only when a step, a phase, its counter
    or the ring's filling moves. ``stall_after_s`` is how long start-up, filling and other phases may stand still
    (ring.timeout_s fits); between steps the limit is ten times the slowest recent step, at least ``min_stall_s``.
    The first terminal state (done, dead, diverged) of a launch stays, whoever wrote it.
    """

    def __init__(
        self,
        run_dir: RunDir,
        steps: int | None = None,
        processes: Sequence[ProcessId] = (),
        stall_after_s: float = 600.0,
        min_stall_s: float = 60.0,
        heartbeat_s: float = 2.0,
    ) -> None:
        self._path = run_dir.status_json
        self._stall_after_s, self._min_stall_s, self._heartbeat_s = stall_after_s, min_stall_s, heartbeat_s
        self.launch = uuid.uuid4().hex[:12]
        # Two locks, so that a disk that hangs holds up the writing thread only, never a training step.
        self._mutex, self._writing = threading.Lock(), threading.Lock()
        self._intervals: deque[float] = deque(maxlen=_RECENT)
        self._last_step: tuple[int, float] | None = None
        self._counting: tuple[str, float, float] | None = None  # label, first count, when
        self._terminal = self._superseded = False
        self._trouble = DiskTrouble()
        self._fields: dict[str, Any] = {
            "launch": self.launch,
            "process": ProcessId.own().to_dict(),
            "processes": [process.to_dict() for process in processes],
            "heartbeat_interval_s": heartbeat_s,
            "phase": "starting",
            "steps": steps,
        }
        self._progress(stall_after_s)
        self._write(first=True)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="status", daemon=True)
        self._thread.start()

    def processes(self, processes: Sequence[ProcessId]) -> None:
        """All ranks of the run; `status` then notices by itself when one of them is gone or stopped."""
        with self._mutex:
            self._fields["processes"] = [process.to_dict() for process in processes]

    def gpus(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """The newest GPU numbers by node and role (`gpu_roles.Row`)."""
        with self._mutex:
            self._fields["gpus"] = list(rows)

    def kernels(self, text: str) -> None:
        """By what slower functions than it should the target computes."""
        with self._mutex:
            self._fields["kernels"] = text

    def phase(
        self, label: str, done: float | None = None, total: float | None = None, eta_s: float | None = None
    ) -> None:
        """Anything that is not a step: ``phase("loading", 34, 64, 12.0)``, later ``phase("evaluating", 3, 64)``.

        Without ``eta_s`` the time left follows from how fast ``done`` has grown in this phase.
        """
        with self._mutex:
            started = self._last_step is not None
            eta_s = self._estimate(label, done, total) if eta_s is None else eta_s
            self._set("training" if started else "starting", label, done=done, total=total, phase_eta_s=eta_s)

    def filling(self, ready: int, min_ready: int) -> None:
        """Drafters wait for the reservoir: ``ready`` of ``min_ready`` batches are in the ring."""
        with self._mutex:
            left = self._estimate("filling", ready, min_ready)
            self._set("filling", "filling", done=ready, total=min_ready, phase_eta_s=left)

    def first_step(self, compiles: bool) -> None:
        """The reservoir is full and the first step is under way; on a GPU it compiles for a while."""
        with self._mutex:
            self._set("training", "first step" + (", compiling" if compiles else ""), done=None, total=None,
                      phase_eta_s=None)  # fmt: skip

    def training(
        self,
        step: int,
        steps: int,
        loss: float | None,
        tokens_per_s: float | None = None,
        eta_s: float | None = None,
        waiting_side: WaitingSide | None = None,
    ) -> None:
        """After every optimizer step, or as often as the numbers are known. Only a new ``step`` is progress."""
        now = time.monotonic()
        with self._mutex:
            new = self._last_step is None or step != self._last_step[0]
            between_steps = self._fields.get("label") is None
            if new and between_steps and self._last_step is not None:
                self._intervals.append((now - self._last_step[1]) / max(1, step - self._last_step[0]))
            self._fields.update(
                phase="training", label=None, done=None, total=None, phase_eta_s=None, step=step, steps=steps,
                loss=loss, tokens_per_s=tokens_per_s, eta_s=eta_s, waiting_side=waiting_side,
            )  # fmt: skip
            if new or not between_steps:
                self._last_step = (step, now)
                self._progress(self._expected_s())

    def done(self, message: str = "finished") -> None:
        """The run has ended well. Call it before the ranks exit."""
        self._end("done", message)

    def dead(self, rank: int | None, role: str | None, cause: str) -> None:
        """A rank died, or this one is about to."""
        self._end("dead", _death(rank, role, cause), rank=rank, role=role)

    def diverged(self, step: int, message: str) -> None:
        """The numbers are beyond repair (too many skipped steps, a loss that is NaN)."""
        self._end("diverged", message, step=step)

    def close(self) -> None:
        """Write what is noted and stop the heartbeat. Without a terminal state the run will count as dead."""
        if self._terminal:
            return  # written and stopped already
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=_PATIENCE_S)
        self._write_bounded()

    def _estimate(self, label: str, done: float | None, total: float | None) -> float | None:
        """Seconds left of a phase that counts; None as long as it has not counted on."""
        now = time.monotonic()
        if self._counting is None or self._counting[0] != label or (done or 0) < self._counting[1]:
            self._counting = (label, done or 0, now)
        _, first, since = self._counting
        if not done or not total or done <= first:
            return None
        return (total - done) * (now - since) / (done - first)

    def _set(self, phase: str, label: str, **fields: Any) -> None:
        before = [self._fields.get(key) for key in ("phase", "label", "done")]
        self._fields.update(phase=phase, label=label, **fields)
        if before != [phase, label, fields["done"]]:
            self._progress(self._stall_after_s)

    def _progress(self, expect_s: float) -> None:
        self._fields["progress"] = _now()
        self._fields["expect_s"] = expect_s

    def _expected_s(self) -> float:
        if len(self._intervals) < 3:  # the first steps compile
            return self._stall_after_s
        slowest = max(self._intervals)
        return min(max(10 * slowest, self._min_stall_s), max(self._stall_after_s, 3 * slowest))

    def _end(self, phase: str, message: str, **fields: Any) -> None:
        with self._mutex:
            if self._terminal:
                return
            self._terminal = True
            self._fields.update(phase=phase, label=None, message=redact_text(message), **fields)
            self._progress(self._stall_after_s)
        self._stop.set()
        self._write_bounded()

    def _write_bounded(self) -> None:
        """Write, but give up waiting soon: the watchdog calls this and must end the process whatever the disk does."""
        thread = threading.Thread(target=self._write, name="status-last", daemon=True)
        thread.start()
        thread.join(timeout=_PATIENCE_S)

    def _beat(self) -> None:
        # Short ticks while there is news, so that `status` is at most a second behind.
        written, last = self._fields.get("progress"), time.monotonic()
        while not self._stop.wait(min(1.0, self._heartbeat_s)):
            progress = self._fields.get("progress")
            if progress is not written or time.monotonic() - last >= self._heartbeat_s:
                written, last = progress, time.monotonic()
                self._write()

    def _write(self, first: bool = False) -> None:
        with self._writing:
            with self._mutex:
                fields = {**self._fields, "heartbeat": _now()}
            if self._superseded:
                return
            with self._trouble.survived("status.json"), _file_lock(self._path):
                current = {} if first else read_fields(self._path)
                if current and current.get("launch") != self.launch:
                    self._superseded = True  # a newer launch reports now
                elif current.get("phase") not in TERMINAL:
                    # Not synced to disk: it is rewritten every few seconds, and a slow disk must not hold it up.
                    write_json(self._path, fields, durable=fields["phase"] in TERMINAL)


def mark_dead(run_dir: RunDir, rank: int | None, role: str | None, cause: str, launch: str | None = None) -> bool:
    """For the watchdog of any other rank: note the death unless an end is noted already. True if it was written.

    ``launch`` (`StatusWriter.launch`) keeps a late watchdog of an earlier launch from marking a later one.
    """
    with _file_lock(run_dir.status_json):
        fields = read_fields(run_dir.status_json)
        if fields.get("phase") in TERMINAL or (launch is not None and fields.get("launch", launch) != launch):
            return False
        fields.update(phase="dead", label=None, rank=rank, role=role, message=redact_text(_death(rank, role, cause)))
        now = _now()
        fields = {
            "process": ProcessId.own().to_dict(),
            "progress": now,
            "heartbeat": now,
            **fields,
        }
        write_json(run_dir.status_json, fields)
        return True


def _death(rank: int | None, role: str | None, cause: str) -> str:
    if rank is None and role:  # the command line, the launcher: what happened to it is the cause
        return f"{role}: {cause}"
    who = "the run" if rank is None else f"rank {rank}" + (f" ({role})" if role else "")
    return f"{who} died: {cause}"


def _now() -> dict[str, float]:
    return {"wall": time.time(), "monotonic": time.monotonic()}


@contextlib.contextmanager
def _file_lock(status_json: Path) -> Iterator[None]:
    fd = os.open(status_json.with_name(_STATUS_LOCK), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        for _ in range(50):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.01)  # the holder may be a stopped process: after half a second go on without the lock
        yield
    finally:
        os.close(fd)
