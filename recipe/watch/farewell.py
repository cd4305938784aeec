"""What a rank tells the others of its node before it leaves, so that a consequence is never taken for the cause.

A rank that ends because rank 0 was killed is soon dead itself, and a sibling that looks a moment later sees two dead.
So whoever leaves before the end of the run says first whom it blames: in a datagram to a socket of each sibling, which
the kernel keeps there after the sender has gone. Who is dead *and* has said nothing was ended from outside.

The sockets have abstract names made from the launcher, so nothing lies in a file system and nothing is left behind;
they need neither torch nor the control store. The kernel tells who sent a message: other users' are not heard.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterable
from typing import Any

from recipe import process

KIND = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
MOST_BYTES = 16384  # of one message; a cause of one line is far shorter
MOST_CAUSE = 4000  # characters
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of the sender: unix(7), SCM_CREDENTIALS


class Farewells:
    """This rank's ear and voice. ``launcher``: pid of the parent that all ranks of the node share."""

    def __init__(self, launcher: int, rank: int) -> None:
        self.rank = rank
        self._group = f"\0dflash-{process.pid_namespace()}-{launcher}-{process.start_ticks(launcher)}-"
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, KIND)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(self._group + str(rank))
        except OSError:  # the name is taken: what is lost is only certainty about who died first
            self._socket.close()
            self._socket = None

    def send(self, report: dict[str, Any], ranks: Iterable[int]) -> None:
        """Tell ``ranks`` why this one leaves. Never blocks and never fails: it is called at the end."""
        told = {key: report[key] for key in ("rank", "role", "cause", "code", "who") if key in report}
        told["cause"] = str(told.get("cause", ""))[:MOST_CAUSE]
        text = json.dumps([self.rank, told]).encode()
        for rank in ranks:
            # Refused: it has left, or has not come yet.
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, KIND) as voice:
                voice.sendto(text, self._group + str(rank))

    def receive(self) -> list[tuple[int, dict[str, Any]]]:
        """(rank, report) of everybody who has said farewell since the last call, in the order of arrival."""
        heard = []
        while self._socket is not None:
            try:
                text, extra, _, _ = self._socket.recvmsg(MOST_BYTES, socket.CMSG_SPACE(CREDENTIALS.size))
            except OSError:
                break
            if text and _sender(extra) == os.getuid() and (one := _parse(text)) is not None:
                heard.append(one)
        return heard

    def close(self) -> None:
        """Give the name back."""
        if self._socket is not None:
            self._socket.close()


def _sender(extra: list[tuple[int, int, bytes]]) -> int | None:
    """The user who sent a message, from the kernel."""
    for level, kind, data in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) >= CREDENTIALS.size:
            return int(CREDENTIALS.unpack_from(data)[1])
    return None


def _parse(text: bytes) -> tuple[int, dict[str, Any]] | None:
    try:
        rank, report = json.loads(text)
        known = {"rank": int(report["rank"]), "code": int(report["code"])}
        words = {key: str(report[key]) for key in ("role", "cause", "who") if key in report}
        return int(rank), {"role": "", **words, **known}
    except (ValueError, TypeError, KeyError):
        return None
