"""Bringing a large file to the disk piece by piece, so that a slow disk can be told from one that does not answer.

`write` mostly fills memory; the transfer is waited for in `fsync`, which says nothing for minutes when 20 GB go to a
slow network disk, and a watchdog would take that for a hang.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

PIECE = 64 << 20
WAIT_WRITE_WAIT = 7  # SYNC_FILE_RANGE_WAIT_BEFORE | _WRITE | _WAIT_AFTER
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ESPIPE, errno.EOPNOTSUPP)
_sync_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _sync_range is not None:
    _sync_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def sync_file(path: Path, tick: Callable[[], None]) -> None:
    """Returns when the file is on the disk: after a power cut it is whole. ``tick`` is called after every 64 MiB.

    Raises OSError. What the pieces' calls report must not be swallowed: the kernel reports a failed write only once.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        for start in range(0, os.fstat(fd).st_size, PIECE):
            if _sync_range is None or _sync_range(fd, start, PIECE, WAIT_WRITE_WAIT) != 0:
                number = ctypes.get_errno()
                if _sync_range is None or number in UNSUPPORTED:
                    break  # the rest in one
                raise OSError(number, os.strerror(number), str(path))
            tick()
        os.fsync(fd)
    finally:
        os.close(fd)
