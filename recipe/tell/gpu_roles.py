"""GPU samples by node and role: one sampler a node, the control store as the way, the leader as the only writer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from recipe.config.schema import Layout
from recipe.tell.gpu import Sample

#: field -> how several values of it become one
REDUCE: dict[str, Callable[[Sequence[float]], float]] = {
    "util_pct": lambda values: round(sum(values) / len(values), 1),
    "util_min_pct": min,
    "mem_used": max,
    "mem_total": max,
    "power_w": lambda values: round(sum(values) / len(values), 1),
    "temperature_c": max,
    "sm_mhz": lambda values: round(sum(values) / len(values)),
}
STALE = 5  # intervals after which a node that is not heard of is not shown any more

Row = dict[str, Any]  # node, role, gpus, then fields of REDUCE (those that the GPUs support); power is one GPU's


class Board(Protocol):
    """What is used of the control store."""

    def put(self, key: str, value: object) -> None: ...

    def peek(self, key: str) -> object | None: ...


def roles_of(layout: Layout, gpus: int) -> dict[int, str]:
    """CUDA device number -> ``target``, ``drafter`` or, on a GPU that both use, ``target+drafter``."""
    found: dict[int, str] = {}
    for role, ranks in (("target", layout.target_gpus), ("drafter", layout.drafter_gpus)):
        for rank in ranks:
            device = rank % gpus if layout.share_gpus else rank
            before = found.get(device, role)
            found[device] = before if before == role or "+" in before else f"{before}+{role}"
    return {device: role for device, role in found.items() if device < gpus}


def by_role(samples: Sequence[Sample], roles: Mapping[int, str], node: int) -> list[Row]:
    """One row for each role of a node. ``samples``: of its GPUs, in CUDA's order."""
    rows = []
    for role in dict.fromkeys(roles.values()):
        mine = [samples[device] for device, other in roles.items() if other == role and device < len(samples)]
        lowest = [{**sample, "util_min_pct": sample["util_pct"]} if "util_pct" in sample else sample for sample in mine]
        rows.append({"node": node, "role": role, "gpus": len(mine), **_reduced(lowest)})
    return rows


def _reduced(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    columns = {name: [sample[name] for sample in samples if name in sample] for name in REDUCE}
    return {name: REDUCE[name](values) for name, values in columns.items() if values}


class NodePost:
    """The sink of a node's `GpuSampler`: its newest sample lies in the control store."""

    def __init__(self, board: Board, roles: Mapping[int, str], node: int) -> None:
        self._board, self._roles, self._node, self._count = board, roles, node, 0

    def __call__(self, samples: Sequence[Sample]) -> None:
        self._count += 1
        rows = by_role(samples, self._roles, self._node)
        self._board.put(f"gpu/{self._node}", {"count": self._count, "rows": rows})


class GpuNews:
    """The leader's: collects what the nodes have posted. `collect` may be called from the sampler's thread."""

    def __init__(self, board: Board, nodes: int, interval_s: float) -> None:
        self._board, self._nodes, self._interval_s = board, nodes, interval_s
        self._counts: dict[int, int] = {}
        self._newest: dict[int, tuple[float, list[Row]]] = {}
        self._window: deque[Row] = deque()  # filled by the sampler's thread, emptied by the main one

    def collect(self) -> list[Row]:
        """The newest rows of all nodes, oldest node number first; one that has fallen silent is left out."""
        now = time.monotonic()
        for node in range(self._nodes):
            post = self._board.peek(f"gpu/{node}")
            if isinstance(post, dict) and post["count"] != self._counts.get(node):
                self._counts[node] = post["count"]
                self._newest[node] = (now, post["rows"])
                self._window.extend(post["rows"])
        fresh = [rows for at, rows in self._newest.values() if now - at < STALE * self._interval_s]
        return sorted((row for rows in fresh for row in rows), key=lambda row: row["node"])

    def window(self) -> list[Row]:
        """What has come since the last call, one row for each node and role; the log window's GPU numbers."""
        groups: dict[tuple[int, str, int], list[Row]] = {}
        while self._window:
            row = self._window.popleft()
            groups.setdefault((row["node"], row["role"], row["gpus"]), []).append(row)
        return [
            {"node": node, "role": role, "gpus": gpus, **_reduced(group)}
            for (node, role, gpus), group in sorted(groups.items(), key=lambda item: item[0][0])
        ]


def flat(rows: Sequence[Row]) -> dict[str, float]:
    """``{"node0/target/util_pct": 93.0, …}``: for W&B and for curves."""
    return {f"node{row['node']}/{row['role']}/{name}": row[name] for row in rows for name in REDUCE if name in row}
