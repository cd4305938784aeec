"""Which addresses some processes listen on, from /proc."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

LISTENS = "0A"


def listening(pids: Iterable[int]) -> set[str]:
    """Addresses of all TCP sockets in state LISTEN and all UDP sockets of these processes."""
    mine, found = inodes(pids), set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in mine and (table.startswith("udp") or fields[3] == LISTENS):
                found.add(address(fields[1].split(":")[0]))
    return found


def inodes(pids: Iterable[int]) -> set[str]:
    found = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                name = os.readlink(link)
            except OSError:
                continue
            if name.startswith("socket:["):
                found.add(name[8:-1])
    return found


def address(text: str) -> str:
    """The kernel writes addresses as words in host order: 0100007F is 127.0.0.1."""
    words = b"".join(struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)
