"""Sizes against brute force, and the limits of a machine against made-up and real file systems."""

from __future__ import annotations

import ctypes
import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from recipe.errors import ConfigError
from recipe.ring import Ring, RingSpec, available_shm, check_fits, plan_ring
from recipe.ring.layout import _ITEM, MAX_PEERS, Layout
from recipe.ring.sizing import derive_page_tokens

PLAN = {"hidden": 5120, "streams": 6, "dtype_bytes": 2, "token_budget": 49152, "min_ready": 30, "max_depth": 90}


def test_the_reference_ring() -> None:
    size = plan_ring(**PLAN, max_bytes=None, max_seq_len=8192, page_tokens=None, max_batch_size=64)  # type: ignore[arg-type]
    assert size.page_tokens == 128 and size.page_bytes == 128 * 6 * 5120 * 2
    assert size.capacity_tokens == 90 * 49152 == size.n_pages * 128
    assert size.bytes == size.spec("bfloat16").bytes
    assert 0 < size.bytes - size.n_pages * size.page_bytes < 0.001 * size.bytes, (
        "the tables cost less than a thousandth"
    )


def test_lengths_make_room_for_half_empty_pages() -> None:
    lengths = np.random.default_rng(0).integers(1, 300, 5000)
    size = plan_ring(64, 2, 4, 4096, 2, 8, None, 300, 64, lengths)
    pages = sum(-(-int(n) // 64) for n in lengths)
    assert size.n_pages == pytest.approx(8 * 4096 * pages / lengths.sum(), rel=0.015)


def test_max_bytes_is_kept_and_used_up() -> None:
    for limit in (10_000_000, 12_345_678, 50_000_000):
        size = plan_ring(256, 6, 4, 512, 1, 90, limit, 512, 32)
        more = RingSpec(6, 256, "float32", 32, size.n_pages + 1, size.n_pages + 1)
        assert size.bytes <= limit < more.bytes


def test_too_little_for_min_ready_names_the_bytes() -> None:
    with pytest.raises(ConfigError, match=r"max_bytes = 1000000: min_ready = 4 batches .* need \d+ bytes"):
        plan_ring(256, 6, 4, 2048, 4, 90, 1_000_000, 512, None)
    with pytest.raises(ConfigError, match=r"must not exceed ring.max_depth = 3"):
        plan_ring(256, 6, 4, 2048, 4, 3, None, 512, None)


def test_one_worst_batch_always_fits() -> None:
    size = plan_ring(8, 1, 4, 64, 1, 1, None, 64, 16, max_batch_size=10)
    worst = [16 * 5 - 9 - 9 + 1] + [1] * 9  # 64 padded tokens at most
    assert sum(-(-n // 16) for n in worst) <= size.n_pages


@pytest.mark.parametrize(
    ("row", "longest", "mean"), [(10240, 8192, None), (1024, 512, None), (512, 512, 60), (4, 3, 2)]
)
def test_page_tokens_is_a_power_of_two_in_bounds(row: int, longest: int, mean: int | None) -> None:
    tokens = derive_page_tokens(row, longest, None if mean is None else [mean] * 3)
    assert tokens & (tokens - 1) == 0 and 1 <= tokens < 2 * longest
    if mean is not None:
        assert tokens <= max(16, mean // 4)


def test_tables_do_not_overlap() -> None:
    layout = Layout(RingSpec(2, 3, "bfloat16", 5, 7, 11, 13))
    spans = sorted((at, at + count * _ITEM[fmt]) for at, fmt, count in layout.tables.values())
    spans.append((layout.pages_offset, layout.pages_offset + layout.pages_bytes))
    assert spans[0][0] == 4096 and spans[-1][1] <= layout.total
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert layout.tables["cells"][2] == 11 * 13 and layout.tables["peer_pid"][2] == MAX_PEERS


@pytest.mark.parametrize("tight", ["shm_free", "mem_available", "cgroup_free"])
def test_check_fits_names_both_numbers(tight: str) -> None:
    free = {"shm_free": 10**9, "mem_available": 10**9, "cgroup_free": None} | {tight: 67108864}
    check_fits(67108864, free)
    with pytest.raises(ConfigError, match="needs 67108865 bytes but 67108864 bytes are"):
        check_fits(67108865, free)


def test_this_machine() -> None:
    free = available_shm()
    status = os.statvfs("/dev/shm")
    assert abs((free["shm_free"] or 0) - status.f_bavail * status.f_frsize) < 1 << 30
    assert 0 < (free["mem_available"] or 0) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("version", [1, 2])
def test_cgroup_limits(tmp_path: Path, version: int) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    key = "inactive_file" if version == 2 else "total_inactive_file"
    line = "0::/a/b\n" if version == 2 else "5:cpu,memory:/a/b\n1:name=systemd:/x\n"
    (proc / "self" / "cgroup").write_text(line)
    base = root if version == 2 else root / "memory"
    for folder, limit, used, cache in (
        ("a/b", "max" if version == 2 else str(2**63 - 4096), 5, 0),
        ("a", 1000, 600, 50),
    ):
        (base / folder).mkdir(parents=True, exist_ok=True)
        (base / folder / names[0]).write_text(f"{limit}\n")
        (base / folder / names[1]).write_text(f"{used}\n")
        (base / folder / "memory.stat").write_text(f"anon 1\n{key} {cache}\n")
    free = available_shm("/dev/shm", proc, root)
    assert free["cgroup_free"] == 450 and free["mem_available"] is None
    (proc / "self" / "cgroup").write_text("0::/gone\n")
    assert available_shm("/dev/shm", proc, tmp_path / "none")["cgroup_free"] is None


def _on_small_tmpfs(folder: Path, check_first: bool) -> str:
    """In a mount namespace of its own: mounts 64 MB at ``folder`` and makes a ring of 100 MB there; the message."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000) or libc.mount(b"none", b"/", None, 0x40000 | 0x4000, None):
        return "no namespace"
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"size=64m"):
        return "no mount"
    if not check_first:  # as if somebody else took the space after the check
        from recipe.ring import segment

        segment.check_fits = lambda size, available: None
    try:
        Ring.create(folder / "r.ring", RingSpec(6, 1024, "float32", 32, 128, 128), "run")
    except ConfigError as error:
        return f"{error} | left: {os.listdir(folder)}"
    return "created"


@pytest.mark.parametrize("check_first", [True, False])
def test_a_64_mb_shm_is_refused_at_start(tmp_path: Path, check_first: bool) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, _on_small_tmpfs(tmp_path, check_first).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        message = pipe.read()
    os.waitpid(pid, 0)
    if message.startswith("no "):
        pytest.skip("cannot mount here")
    needed = RingSpec(6, 1024, "float32", 32, 128, 128).bytes
    assert f"needs {needed} bytes" in message and "67108864 bytes" in message and "left: []" in message
