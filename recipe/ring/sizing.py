"""How large a ring is and whether this machine can hold it: plain arithmetic, and three numbers of the kernel's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recipe.errors import ConfigError
from recipe.ring.layout import RingSpec

_RUN_BYTES = 1 << 20  # one stream of a page: a copy of this size reaches 92 % of the pinned rate (ring_h200.md)
_DTYPES = {2: "bfloat16", 4: "float32"}


@dataclass(frozen=True)
class RingSize:
    """The size of a ring. ``capacity_tokens`` is reached only by sequences that fill their pages."""

    streams: int
    hidden: int
    dtype_bytes: int
    page_tokens: int
    n_pages: int
    max_entries: int
    page_bytes: int
    bytes: int
    capacity_tokens: int
    min_ready_tokens: int

    def spec(self, dtype: str, reuse: int = 1) -> RingSpec:
        """The RingSpec of this size; give the ``reuse`` that the size was planned with."""
        return RingSpec(self.streams, self.hidden, dtype, self.page_tokens, self.n_pages, self.max_entries, reuse)


def derive_page_tokens(row_bytes: int, max_seq_len: int, lengths: Sequence[int] | np.ndarray | None = None) -> int:
    """Tokens of a page: a power of two with long copies (1 MiB a stream), yet little waste in the last page.

    At most an eighth of ``max_seq_len`` or, if known, a quarter of the mean length; at least 16; never above
    ``max_seq_len`` rounded up to a power of two.
    """
    cap = max_seq_len // 8
    if lengths is not None and len(lengths):
        cap = min(cap, int(np.mean(lengths)) // 4)
    limit = min(max(cap, 16), 1 << max(max_seq_len - 1, 0).bit_length())
    tokens = 1
    while tokens * 2 <= limit and tokens * row_bytes < _RUN_BYTES:
        tokens *= 2
    return tokens


def plan_ring(
    hidden: int,
    streams: int,
    dtype_bytes: int,
    token_budget: int,
    min_ready: int,
    max_depth: int,
    max_bytes: int | None,
    max_seq_len: int,
    page_tokens: int | None,
    lengths: Sequence[int] | np.ndarray | None = None,
    reuse: int = 1,
    max_batch_size: int = 1,
) -> RingSize:
    """A ring of ``max_depth`` batches of ``token_budget`` tokens, or as many as fit into ``max_bytes``.

    ``lengths`` (of the rows) make the room for half-empty last pages exact; without them a batch is counted in whole
    pages plus nothing. ``max_batch_size`` sequences of a batch may each leave their last page almost empty: one such
    batch always fits. ``max_entries`` is ``n_pages``: an entry has at least one page. Raises ConfigError when
    ``min_ready`` batches, or that batch, or the longest sequence, do not fit.
    """
    if min_ready > max_depth:
        fix = f"lower ring.min_ready to {max_depth} or raise ring.max_depth"
        raise ConfigError("dflash.ring.min_ready", min_ready, f"must not exceed ring.max_depth = {max_depth}", fix)
    if dtype_bytes not in _DTYPES:
        raise ConfigError("ring.dtype_bytes", dtype_bytes, "must be 2 or 4", "use bfloat16 or float32")
    page_tokens = page_tokens or derive_page_tokens(hidden * dtype_bytes, max_seq_len, lengths)
    rounding = 1.0
    if lengths is not None and len(lengths):
        exact = np.asarray(lengths, dtype=np.int64)
        rounding = float((-(-exact // page_tokens) * page_tokens).sum() / exact.sum())
    batch_pages = -(-int(token_budget * rounding) // page_tokens)
    longest = -(-max(max_seq_len, token_budget) // page_tokens) + max_batch_size - 1
    n_pages = max(max_depth * batch_pages, longest)

    def spec(pages: int) -> RingSpec:
        return RingSpec(streams, hidden, _DTYPES[dtype_bytes], page_tokens, pages, pages, reuse)

    if max_bytes is not None and spec(n_pages).bytes > max_bytes:
        n_pages = _most_pages(spec, max_bytes, n_pages)
    needed = max(min_ready * batch_pages, longest)
    if n_pages < needed:
        rule = f"min_ready = {min_ready} batches (or one batch of the worst shape) need {spec(needed).bytes} bytes"
        raise ConfigError("dflash.ring.max_bytes", max_bytes, rule, "raise ring.max_bytes or lower ring.min_ready")
    final = spec(n_pages)
    return RingSize(
        streams=streams,
        hidden=hidden,
        dtype_bytes=dtype_bytes,
        page_tokens=page_tokens,
        n_pages=n_pages,
        max_entries=n_pages,
        page_bytes=final.page_bytes,
        bytes=final.bytes,
        capacity_tokens=n_pages * page_tokens,
        min_ready_tokens=min_ready * token_budget,
    )


def _most_pages(spec, max_bytes: int, upper: int) -> int:  # type: ignore[no-untyped-def]
    """The largest number of pages below ``upper`` whose ring fits into ``max_bytes`` (0 if not even one does)."""
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if spec(middle).bytes <= max_bytes else (low, middle - 1)
    return low


def available_shm(
    path: str | os.PathLike[str] = "/dev/shm",
    proc: str | os.PathLike[str] = "/proc",
    cgroup: str | os.PathLike[str] = "/sys/fs/cgroup",
) -> dict[str, int | None]:
    """Bytes that a new file at ``path`` could take: ``shm_free`` (statvfs), ``mem_available``, ``cgroup_free``.

    ``cgroup_free`` is the tightest limit (version 1 or 2) of this process's group and its parents, less what is used,
    plus file cache that the kernel would give up. None where there is no such number. Raises ConfigError without
    ``path``.
    """
    try:
        status = os.statvfs(path)
    except (FileNotFoundError, NotADirectoryError):
        rule = "the ring lives in shared memory, and this machine has none there"
        fix = "train on Linux, with /dev/shm mounted (docker: --shm-size, or --ipc=host)"
        raise ConfigError("dflash.ring", str(path), rule, fix) from None
    return {
        "shm_free": status.f_bavail * status.f_frsize,
        "mem_available": _mem_available(Path(proc)),
        "cgroup_free": _cgroup_free(Path(proc), Path(cgroup)),
    }


def check_fits(size: RingSize | int, available: Mapping[str, int | None]) -> None:
    """Raises ConfigError, naming both numbers, if a ring of ``size`` (bytes) cannot be held by ``available``."""
    needed = size if isinstance(size, int) else size.bytes
    fixes = {
        "shm_free": (
            "free in /dev/shm",
            "lower ring.max_depth, set ring.max_bytes, or enlarge it (docker: --shm-size)",
        ),
        "mem_available": ("of memory available", "lower ring.max_depth or set ring.max_bytes"),
        "cgroup_free": ("left below the cgroup memory limit", "lower ring.max_depth or raise the container's limit"),
    }
    for name, (what, fix) in fixes.items():
        free = available.get(name)
        if free is not None and needed > free:
            gib = f"{needed / 2**30:.2f} of {free / 2**30:.2f} GiB"
            rule = f"the ring needs {needed} bytes but {free} bytes are {what} ({gib})"
            raise ConfigError("dflash.ring", f"{needed} bytes", rule, fix)


def _mem_available(proc: Path) -> int | None:
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_free(proc: Path, root: Path) -> int | None:
    free: list[int] = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, limit, usage, cache = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        # A container often sees its own group as the root: the path in /proc may lead nowhere, its parents count too.
        parts = [part for part in group.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            folder = base.joinpath(*parts[:depth])
            top, used = _read(folder / limit).strip(), _read(folder / usage).strip()
            if top.isdigit() and used.isdigit() and int(top) < 1 << 60:
                free.append(max(int(top) - int(used) + _stat(folder / "memory.stat", cache), 0))
    return min(free) if free else None


def _stat(path: Path, key: str) -> int:
    for line in _read(path).splitlines():
        if line.startswith(key + " "):
            return int(line.split()[1])
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
