"""Reading status.json as it may be found: half written, of another version, or edited by hand. Never a traceback."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe.process import ProcessId
from recipe.tell.gpu_roles import REDUCE

NUMBERS = ("step", "steps", "loss", "tokens_per_s", "eta_s", "phase_eta_s", "done", "total", "expect_s", "rank",
           "heartbeat_interval_s")  # fmt: skip
COUNTS = ("step", "steps")
WORDS = ("state", "launch", "phase", "label", "message", "role", "waiting_side", "kernels")
PHASES = ("starting", "filling", "training", "done", "dead", "diverged")
GPU_ROLES = ("target", "drafter", "target+drafter")
TIMES = ("heartbeat", "progress")
MOST = 1e15  # no number of a run is larger; a date in seconds is 2e9


def read_fields(path: Path) -> dict[str, Any]:
    """The content of status.json, as it is; empty if there is none or it is no JSON object."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def whole(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The known fields with their right types, or None when one of them cannot be right: the file is damaged then."""
    known: dict[str, Any] = {}
    if wrong_field(fields) is not None:
        return None
    for name in NUMBERS:
        value = fields.get(name)
        known[name] = int(value) if name in COUNTS and value is not None else value
    for name in WORDS:
        value = fields.get(name)
        known[name] = None if value is None else re.sub(r"[\x00-\x1f\x7f]+", " ", value)
    for name in TIMES:
        known[name] = fields[name]
    known["process"] = process_of(fields.get("process"))
    known["processes"] = [process_of(each) for each in fields.get("processes") or []]
    known["gpus"] = gpu_rows(fields.get("gpus"))
    return {name: value for name, value in known.items() if value is not None}


def gpu_rows(values: object) -> list[dict[str, Any]]:
    """The GPU numbers that can be right: what is shown beside the state must not decide about it."""
    rows = []
    for row in values if isinstance(values, list) else []:
        if isinstance(row, Mapping) and type(row.get("node")) is int and row.get("role") in GPU_ROLES:
            numbers = {name: row[name] for name in ("gpus", *REDUCE) if _is_number(row.get(name))}
            rows.append({"node": row["node"], "role": row["role"], **numbers})
    return rows


def wrong_field(fields: Mapping[str, Any]) -> str | None:
    """The first field that is missing or cannot be right, or None."""
    for name in NUMBERS:
        if fields.get(name) is not None and not _is_number(fields[name], name == "loss"):
            return name
    for name in WORDS:
        if fields.get(name) is not None and not isinstance(fields[name], str):
            return name
    for name in TIMES:
        value = fields.get(name)
        if not isinstance(value, Mapping) or not all(_is_number(value.get(key)) for key in ("wall", "monotonic")):
            return name
    if fields.get("phase") not in PHASES:
        return "phase"
    listed = fields.get("processes") or []
    if not isinstance(listed, list) or any(process_of(each) is None for each in listed):
        return "processes"
    return "process" if process_of(fields.get("process")) is None else None


def process_of(values: object) -> ProcessId | None:
    """The process that ``values`` describe, or None if they do not describe one."""
    if not isinstance(values, Mapping):
        return None
    try:
        found = ProcessId.from_dict(values)
    except (KeyError, TypeError):
        return None
    numbers = all(type(value) is int for value in (found.pid, found.start, 0 if found.rank is None else found.rank))
    words = (found.boot_id, found.pid_namespace, found.host, "" if found.role is None else found.role)
    return found if numbers and all(isinstance(word, str) and word.isprintable() for word in words) else None


def _is_number(value: object, infinite: bool = False) -> bool:
    """A loss may be infinite or NaN, which is news; nothing else may."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return infinite
    return abs(value) < MOST
