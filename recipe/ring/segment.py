"""The file behind a ring: made whole before anybody can see it, private to the user, gone as soon as all have it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path

from recipe.errors import ConfigError, RunError
from recipe.ring import layout as L
from recipe.ring.layout import Layout, RingSpec, Views
from recipe.ring.sizing import available_shm, check_fits
from recipe.ring.sync import is_alive

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_CHUNK = 64 << 20
STALE_WAIT_S = 2.0  # two starters that find the same stale file take turns


def ring_path(run_id: str, node: int, root: str | os.PathLike[str] = "/dev/shm") -> Path:
    """Where the ring of a run lives on a node. Two nodes on one machine, or two runs, never share a name."""
    return Path(root) / f"dflash-{re.sub(r'[^A-Za-z0-9._-]', '_', run_id)}-n{node}.ring"


class Segment:
    """A mapped ring file. The mapping lives until its last view is gone: no thread is ever left on unmapped memory."""

    def __init__(self, fd: int, path: Path, spec: RingSpec) -> None:
        self.path, self.spec, self.layout = path, spec, Layout(spec)
        status = os.fstat(fd)
        self.inode = (status.st_dev, status.st_ino)
        # The mapping keeps a duplicate of ``fd``, and with it this lock, until it is gone: the kernel's word on whether
        # anybody uses the file, across pid namespaces (containers that share one /dev/shm) too.
        fcntl.flock(fd, fcntl.LOCK_SH)
        self.mapping = mmap.mmap(fd, self.layout.total)
        self.views = Views(self.mapping, self.layout)
        self._anchor = ctypes.c_char.from_buffer(self.mapping)  # keeps the address valid as long as this object lives
        self.address = ctypes.addressof(self._anchor)

    @staticmethod
    def create(path: Path, spec: RingSpec, fill: Callable[[Segment], None]) -> Segment:
        """A new file of ``spec.bytes``, all of it allocated. ``fill`` writes the tables before the name appears.

        Raises ConfigError when the memory does not suffice or the name belongs to somebody else or to a living run.
        """
        remove_dead_rings(path.parent)
        check_fits(spec.bytes, available_shm(path.parent))
        fd, temporary = _open_nameless(path)
        try:
            _allocate(fd, spec.bytes, path)
            segment = Segment(fd, path, spec)
            fill(segment)
            while not _try_link(fd, temporary, path):
                _remove_stale(path)
            return segment
        finally:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
            os.close(fd)

    @staticmethod
    def attach(path: Path, run_id: str, timeout: float) -> Segment:
        """Maps the file that another process made; waits for it to appear. Raises RunError on any mismatch."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                fd = -1
            except OSError as error:
                raise _foreign(path, f"cannot be opened ({error.strerror})") from error
            if fd >= 0:
                try:
                    spec, pid, alive = _judge(fd, path, run_id)
                    if alive:
                        return Segment(fd, path, spec)
                finally:
                    os.close(fd)
            if time.monotonic() >= deadline:
                found = f"is of a dead process (pid {pid})" if fd >= 0 else "did not appear"
                raise RunError(f"ring {path} {found} within {timeout:g} s: did the rank that creates it start?")
            time.sleep(0.01)

    def unlink(self) -> None:
        """Takes the name away, if it still is this file's. The mapping stays."""
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(self.path, follow_symlinks=False)
            if (status.st_dev, status.st_ino) == self.inode:
                self.path.unlink()

    def populate(self, part: int, parts: int, progress: Callable[[int, int], None] | None) -> None:
        """Touches share ``part`` of ``parts`` of the data pages, so that later writes find them in place."""
        pages = -(-self.layout.pages_bytes // L.PAGE_SIZE)
        begin = self.layout.pages_offset + pages * part // parts * L.PAGE_SIZE
        end = self.layout.pages_offset + pages * (part + 1) // parts * L.PAGE_SIZE
        for at in range(begin, end, _CHUNK):
            size = min(_CHUNK, end - at)
            try:
                self.mapping.madvise(_POPULATE_WRITE, at, size)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.views.raw[at : at + size : L.PAGE_SIZE].tobytes()  # older kernel: reading allocates as well
            if progress is not None:
                progress(at + size - begin, end - begin)


def _open_nameless(path: Path) -> tuple[int, Path | None]:
    """A file that vanishes with us until it gets its name; with a temporary name where the kernel has no O_TMPFILE."""
    try:
        return os.open(path.parent, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600), None
    except FileNotFoundError as error:
        raise ConfigError("ring path", str(path), "its folder must exist", "mount /dev/shm, or use a folder") from error
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise ConfigError(
                "ring path", str(path), f"its folder must be writable ({error.strerror})", "chmod"
            ) from error
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    return os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), temporary


def _allocate(fd: int, size: int, path: Path) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
            raise
        free = available_shm(path.parent)["shm_free"]
        raise ConfigError(
            "dflash.ring",
            f"{size} bytes",
            f"the ring needs {size} bytes but {path.parent} has {free} bytes free",
            "lower ring.max_depth, set ring.max_bytes, or enlarge the file system (docker: --shm-size)",
        ) from error


def _try_link(fd: int, temporary: Path | None, path: Path) -> bool:
    """Gives the finished file its name in one step; False if the name is taken."""
    try:
        if temporary is None:
            # linkat through /proc needs the folder descriptors that make Python follow the symbolic link.
            folder = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.link(str(fd), path, src_dir_fd=folder, follow_symlinks=True)
            finally:
                os.close(folder)
        else:
            os.link(temporary, path)
    except FileExistsError:
        return False
    return True


def _remove_stale(path: Path) -> None:
    """Removes the file of a dead run; raises ConfigError if it is a living one's, another user's, or no ring."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _foreign(path, f"cannot be opened ({error.strerror})") from error
    try:
        _, pid, alive = _judge(fd, path, None)
        if alive or not _lock_unused(fd, STALE_WAIT_S):
            raise _foreign(path, f"belongs to a run that is alive (pid {pid})", "use another run name, or end that run")
        _unlink_same(path, fd)
    finally:
        os.close(fd)


def _unlink_same(path: Path, fd: int) -> bool:
    """Removes the name ``path`` if it is still that of the open, judged file: a new run may have taken it since."""
    try:
        now, judged = os.stat(path, follow_symlinks=False), os.fstat(fd)
        if (now.st_dev, now.st_ino) != (judged.st_dev, judged.st_ino):
            return False
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def remove_dead_rings(folder: Path) -> list[Path]:
    """Removes the rings that killed runs of this user left in ``folder`` (killed before the name was taken away).

    Files of others, of living processes, of runs in other containers, and whatever is no ring stay. Returns what went.
    """
    removed = []
    for path in sorted(folder.glob("dflash-*.ring")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            if not _judge(fd, path, None)[2] and _lock_unused(fd, 0.0) and _unlink_same(path, fd):
                removed.append(path)
        except (ConfigError, RunError, OSError):
            continue
        finally:
            os.close(fd)
    return removed


def _lock_unused(fd: int, wait_s: float) -> bool:
    """Takes the file's exclusive lock; False if somebody still maps it. A starter that judges it lets go at once."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)


def _judge(fd: int, path: Path, run_id: str | None) -> tuple[RingSpec, int, bool]:
    """Spec, creator's pid and whether the creator lives, from the header. Raises if it is not a ring of ours."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise _foreign(path, f"belongs to user id {status.st_uid}")
    if status.st_mode & 0o077:
        raise _foreign(path, f"has mode {stat.S_IMODE(status.st_mode):o}, so others can change it")
    header = os.pread(fd, L.PAGE_SIZE, 0)
    words = memoryview(header[: L.N_WORDS * 8]).cast("q") if len(header) == L.PAGE_SIZE else [0] * L.N_WORDS
    if words[L.W_MAGIC] != L.MAGIC:
        raise _foreign(path, "is not a ring")
    pid, start = words[L.W_CREATOR_PID], words[L.W_CREATOR_START]
    alive = is_alive(pid, start)
    if words[L.W_VERSION] != L.VERSION:
        if alive or run_id is not None:
            raise RunError(f"ring {path} has version {words[L.W_VERSION]}, this program has {L.VERSION}")
        return RingSpec(1, 1, "float32", 1, 1, 1), pid, False
    spec = RingSpec.from_words(list(words[L.W_STREAMS : L.W_STREAMS + 7]))
    if run_id is not None and alive:
        owner = header[L.OFFSET_RUN_ID : L.OFFSET_RUN_ID + L.RUN_ID_BYTES].split(b"\0")[0].decode("utf-8", "replace")
        if owner != run_id:
            raise RunError(f"ring {path} is of run {owner!r}, not of {run_id!r}")
        if not status.st_size == words[L.W_BYTES] == spec.bytes:
            raise RunError(f"ring {path} has {status.st_size} bytes, its header says {words[L.W_BYTES]}")
    return spec, pid, alive


def _foreign(path: Path, what: str, fix: str = "remove that file, or use another run name") -> ConfigError:
    return ConfigError("ring path", str(path), f"the file {what}", fix)
