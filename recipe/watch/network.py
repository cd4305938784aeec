"""Which address a run listens on: the one that MASTER_ADDR (so the hostfile) implies, and no other.

On one machine that is the loopback interface: nothing of the run can be reached from outside. Over several nodes it is
the interface that leads to rank 0. A user's own GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME stands.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

from recipe.errors import ConfigError, RunError
from recipe.tell.provenance import redact_argv

INTERFACE_KEYS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SAY_S = 10.0  # between two lines that say what is waited for
TOLD_S = 2.0  # several looks of the node's watch, which can name who is to blame
_LISTENS = "0A"


def listen(host: str, port: int, nodes: int) -> socket.socket:
    """A listening socket on ``host``'s own address and nothing else, for the control store of rank 0.

    Raises:
        ConfigError: the port is taken (named by whom, where that can be seen), ``host`` is no address of this machine,
            or it is a name that means loopback here, which other nodes cannot reach.
    """
    family, address = _resolve(host)
    if nodes > 1 and address != host and ipaddress.ip_address(address).is_loopback:
        rule = f"means {address} on node 0, an address that other nodes cannot reach"
        raise ConfigError("master_addr", host, rule, "give an address instead: deepspeed --master_addr ADDRESS")
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port of a run that just ended is free
    try:
        server.bind((address, port))
        server.listen(1024)
    except OSError as error:
        server.close()
        raise _cannot_listen(error, host, port) from error
    return server


def _cannot_listen(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        rule = f"the port is in use by {port_holder(port)}"
        fix = "end it, or take another port: --master-port PORT (deepspeed itself: --master_port PORT)"
        return ConfigError("master_port", port, rule, fix)
    if error.errno == errno.EADDRNOTAVAIL:
        rule = "is no address of node 0, where rank 0 has to listen"
        return ConfigError("master_addr", host, rule, "name an address of the hostfile's first host: --master_addr")
    rule = f"rank 0 cannot listen there ({error.strerror})"
    return ConfigError("master_port", port, rule, "take another port: --master-port PORT")


def await_listener(host: str, port: int, who: str, limit_s: float) -> None:
    """Wait until somebody listens at ``host``:``port``: rank 0 may still be importing, or may have died before that.

    A pending SIGTERM or SIGINT, a launcher that has gone and an ssh session that was cut end the wait; the node's watch
    gets TOLD_S to find out and say why. Raises RunError.
    """
    started, said, parent = time.monotonic(), 0.0, os.getppid()
    told_at: float | None = None
    while True:
        try:
            socket.create_connection((host, port), timeout=2.0).close()
            return
        except OSError as error:
            cause = error.strerror or str(error)
        waited = time.monotonic() - started
        if signal.sigpending() & {signal.SIGTERM, signal.SIGINT} or os.getppid() != parent or _output_is_gone():
            told_at = waited if told_at is None else told_at
        if told_at is not None and waited - told_at > TOLD_S:
            raise RunError(f"{who}: told to end while it waited for rank 0 at {host}:{port}")
        if waited > limit_s:
            raise RunError(f"{who}: rank 0 at {host}:{port} cannot be reached after {waited:.0f} s ({cause})")
        if waited - said > SAY_S:
            said = waited
            since = f"{waited:.0f} s of at most {limit_s:.0f} s"
            print(f"{who} waits for rank 0 at {host}:{port}: {since} ({cause})", file=sys.stderr, flush=True)
        time.sleep(0.2)


def _output_is_gone() -> bool:
    """Whether nobody reads our stderr any more: what a rank sees of an ssh session that was cut."""
    poll = select.poll()
    poll.register(2, select.POLLERR)
    return bool(poll.poll(0))


def settle_interface(host: str, nodes: int) -> str | None:
    """Tell gloo and NCCL the interface that leads to ``host``. Returns it, or None where it cannot be told.

    Must run before the first process group is made.
    """
    interface = interface_of(_own_address(host)) if nodes > 1 else interface_of("127.0.0.1")
    if interface is not None:
        for key in INTERFACE_KEYS:
            os.environ.setdefault(key, interface)
    return interface


def interface_of(address: str | None) -> str | None:
    """Name of the network interface that has ``address``; every 127.x.y.z belongs to the loopback interface."""
    if address is None:
        return None
    import psutil

    wanted = "127.0.0.1" if address.startswith("127.") else address
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == wanted for entry in entries):
            return str(name)
    return None


def _own_address(host: str) -> str | None:
    """The address of this machine from which ``host`` is reached; nothing is sent."""
    family, address = _resolve(host)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        fix = "name a host that this node can resolve, or its address: --master_addr ADDRESS"
        raise ConfigError("master_addr", host, f"cannot be resolved ({error})", fix) from None
    best = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return best[0], str(best[4][0])


def port_holder(port: int) -> str:
    """Who listens on a TCP port of this machine, in words; another user's process is named by its user id."""
    for inode, uid in _listeners(port):
        pid = _pid_with_socket(inode)
        if pid is not None:
            return f"pid {pid} ({_command(pid)})"
        if uid != os.geteuid():
            return f"a process of user id {uid}"
    return "another process"


def _listeners(port: int) -> list[tuple[str, int]]:
    """(inode, user id) of the sockets that listen on ``port``."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                found.append((fields[9], int(fields[7])))
    return found


def _command(pid: int) -> str:
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "ended just now"
    text = " ".join(redact_argv(argv)).strip()
    return text if len(text) <= 100 else text[:99] + "…"


def _pid_with_socket(inode: str) -> int | None:
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            for link in folder.iterdir():
                if os.readlink(link) == f"socket:[{inode}]":
                    return int(folder.parent.name)
        except OSError:
            continue  # another user's process, or one that ended meanwhile
    return None
