"""Reading a run's state from outside: from status.json, the processes it names, and the age of its last progress."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from recipe.process import ProcessId, boot_id
from recipe.tell.run_dir import RunDir
from recipe.tell.status_fields import process_of, read_fields, whole, wrong_field
from recipe.tell.status_writer import TERMINAL, StatusWriter, mark_dead

__all__ = ["EXIT_CODES", "State", "Status", "StatusWriter", "mark_dead", "read_status"]

State = Literal["STARTING", "FILLING", "TRAINING", "STALLED", "DIVERGED", "DEAD", "DONE"]
EXIT_CODES: dict[State, int] = {
    "STARTING": 0,
    "FILLING": 0,
    "TRAINING": 0,
    "DONE": 0,
    "STALLED": 3,
    "DIVERGED": 4,
    "DEAD": 5,
}
_ENDED: dict[str, State] = {"done": "DONE", "dead": "DEAD", "diverged": "DIVERGED"}
_LIVE: dict[str, State] = {"starting": "STARTING", "filling": "FILLING", "training": "TRAINING"}
_SILENT_S = 60.0  # without a heartbeat for this long, a process that cannot be looked at counts as dead


@dataclass(frozen=True)
class Status:
    """One look at a run. Times are seconds; None means not known (yet)."""

    state: State
    message: str
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    waiting_side: str | None = None
    last_progress_s: float | None = None
    heartbeat_s: float | None = None
    process: str | None = None
    gpus: tuple[Mapping[str, Any], ...] = ()
    kernels: str | None = None

    @property
    def exit_code(self) -> int:
        """0 healthy or done, 3 stalled, 4 diverged, 5 dead."""
        return EXIT_CODES[self.state]

    def to_json(self) -> dict[str, Any]:
        """What ``status --json`` prints; strict JSON, so a loss that is not finite is null (the message names it)."""
        keys = (
            "state", "step", "steps", "loss", "tokens_per_s", "eta_s", "waiting_side", "last_progress_s", "message",
            "gpus", "kernels",
        )  # fmt: skip
        values = {key: getattr(self, key) for key in keys}
        return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}


def read_status(run_dir: RunDir) -> Status:
    """Decide the state of a run, alive or long gone, on this machine or another. Raises ConfigError: not a run."""
    fields = read_fields(run_dir.status_json)
    status = _judge(run_dir, fields)
    if status.state == "DEAD" and fields.get("phase") not in TERMINAL:
        # It may have finished between our reading the file and our looking for its processes.
        time.sleep(0.2)
        again = read_fields(run_dir.status_json)
        if again != fields:
            status = _judge(run_dir, again)
    return status


def _judge(run_dir: RunDir, raw: Mapping[str, Any]) -> Status:
    fields = whole(raw)
    if fields is None:
        return _without_status(run_dir)
    process: ProcessId = fields["process"]
    status = _facts(fields, process)
    phase = str(fields.get("phase"))
    if phase in _ENDED:
        return replace(status, state=_ENDED[phase], eta_s=None, message=str(fields.get("message") or phase))
    for check in (_gone, _stopped, _silent):
        if trouble := check(fields, process, status):
            return replace(status, state=trouble[0], eta_s=None, message=f"{trouble[1]}; see {run_dir.train_log}")
    if status.loss is not None and not math.isfinite(status.loss):
        return replace(status, state="DIVERGED", eta_s=None, message=f"the loss is {status.loss} at step {status.step}")
    expect_s = float(fields.get("expect_s", math.inf))
    if status.last_progress_s is not None and status.last_progress_s > expect_s:
        what = f"alive, but no progress for {duration(status.last_progress_s)} (expected within {duration(expect_s)})"
        return replace(status, state="STALLED", eta_s=None, message=f"{what} while {_activity(fields)}")
    return replace(status, message=_activity(fields))


def _without_status(run_dir: RunDir) -> Status:
    """No (readable) status.json: the run was made a moment ago, or died before it reported anything."""
    marker = run_dir.marker()
    process = process_of(marker.get("process"))
    who = str(process) if process else None
    damaged = run_dir.status_json.exists()
    alive = process is not None and process.liveness() == "alive"
    if process is not None and process.liveness() == "unknown":
        created = marker.get("created")
        alive = isinstance(created, (int, float)) and time.time() - created < _SILENT_S
    if alive and not damaged:
        return Status("STARTING", "the run folder was made, nothing is reported yet", process=who)
    if alive:
        what = f"{_damage(run_dir)}, although the run's process lives ({who}); see {run_dir.train_log}"
        return Status("STALLED", what, process=who)
    what = _damage(run_dir) if damaged else "the run ended before it reported anything"
    return Status("DEAD", f"{what}; see {run_dir.train_log}", process=who)


def _damage(run_dir: RunDir) -> str:
    fields = read_fields(run_dir.status_json)
    return "status.json is damaged" + (f" (its {wrong_field(fields)!r} is not what it must be)" if fields else "")


def _facts(fields: Mapping[str, Any], process: ProcessId) -> Status:
    heartbeat, progress = fields["heartbeat"], fields["progress"]
    # Within one boot the monotonic clock is shared by all processes, so a jump of the wall clock changes nothing. From
    # elsewhere only the heartbeat, rewritten every few seconds, is compared with our wall clock.
    if process.boot_id == boot_id():
        silent_s = time.monotonic() - heartbeat["monotonic"]
    else:
        silent_s = time.time() - heartbeat["wall"]
    silent_s = max(0.0, silent_s)
    still_s = silent_s + max(0.0, heartbeat["monotonic"] - progress["monotonic"])
    step = fields.get("step")
    eta_s = fields.get("eta_s") if fields.get("label") is None else fields.get("phase_eta_s")
    return Status(
        state=_LIVE.get(str(fields.get("phase")), "STARTING"),
        message="",
        step=step,
        steps=fields.get("steps"),
        loss=fields.get("loss"),
        tokens_per_s=fields.get("tokens_per_s"),
        eta_s=eta_s,
        waiting_side=fields.get("waiting_side"),
        last_progress_s=round(still_s, 1),
        heartbeat_s=round(silent_s, 1),
        process=str(process),
        gpus=tuple(fields["gpus"]),
        kernels=fields.get("kernels"),
    )


_Trouble = tuple[State, str] | None


def _all_processes(fields: Mapping[str, Any], process: ProcessId) -> list[ProcessId]:
    """Each once: asked twice, a process could be stopped in between and be named without its rank."""
    listed: list[ProcessId] = fields["processes"]
    return listed if any(each.pid == process.pid for each in listed) else [*listed, process]


def _gone(fields: Mapping[str, Any], process: ProcessId, status: Status) -> _Trouble:
    for each in _all_processes(fields, process):
        liveness = each.liveness()
        if liveness == "gone":
            return "DEAD", f"{each} is gone without a farewell (killed?) while {_activity(fields)}"
        if liveness == "rebooted" and (status.heartbeat_s or 0) > _SILENT_S:
            return "DEAD", f"{each.host} was restarted while {_activity(fields)}"
    return None


def _stopped(fields: Mapping[str, Any], process: ProcessId, status: Status) -> _Trouble:
    for each in _all_processes(fields, process):
        if each.liveness() == "stopped":
            return "STALLED", f"{each} is stopped (SIGSTOP) while {_activity(fields)}; kill -CONT {each.pid} wakes it"
    return None


def _silent(fields: Mapping[str, Any], process: ProcessId, status: Status) -> _Trouble:
    limit = max(_SILENT_S, 10 * float(fields.get("heartbeat_interval_s", 0)))
    if process.liveness() in ("unknown", "rebooted") and (status.heartbeat_s or 0) > limit:
        silence = duration(status.heartbeat_s or 0)
        return "DEAD", f"no heartbeat for {silence} from {process}, which cannot be looked at from here"
    return None


def _activity(fields: Mapping[str, Any]) -> str:
    label = str(fields.get("label") or fields.get("phase"))
    done, total = fields.get("done"), fields.get("total")
    if done is not None:
        label += f" {done:g}" + (f"/{total:g}" if total is not None else "")
    return label


def duration(seconds: float) -> str:
    """``75`` → ``1 min 15 s``."""
    if not math.isfinite(seconds):
        return "ever"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
