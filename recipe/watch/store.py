"""The control store: the one thing that all ranks of all roles share. Facts, heartbeats, abort flag, end barrier."""

from __future__ import annotations

import hmac
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from recipe.errors import RunError
from recipe.watch.network import await_listener, listen
from recipe.watch.role import Role

CONNECT_TIMEOUT_S = 120.0  # the imports of nodes that start together differ by less, on slow shared disks too
POLL_S = 0.1
MAC_BYTES = 32  # of the code in front of every value, in hexadecimal


class ControlStore:
    """A small typed face of the launch's `TCPStore`, which rank 0 serves at MASTER_ADDR:MASTER_PORT.

    The launcher itself never binds that port, so no second port is needed and none can collide. Whoever can reach the
    port can write: values carry a code made with ``secret``, and those of others are ignored, and said once. An empty
    secret (several nodes, which have none in common) keeps nobody out.
    """

    def __init__(self, store: dist.Store, secret: bytes = b"") -> None:
        self.raw, self._secret, self._warned = store, secret, False

    @classmethod
    def connect(
        cls, role: Role, run: str, serve: bool, timeout_s: float = CONNECT_TIMEOUT_S, secret: bytes = b""
    ) -> ControlStore:
        """Join the store; ``serve`` is true exactly once, on rank 0's first connection.

        ``run`` names the launch. All keys live below it: the ranks of a second launch on an occupied port reach the
        first one's store, and must not be able to touch its flags.

        Raises:
            ConfigError: the port is in use, or rank 0 cannot listen at MASTER_ADDR.
            RunError: rank 0 cannot be reached.
        """
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # torch itself would listen on every interface; our socket is on the one address that the launch names.
        listener = listen(host, port, role.nodes).detach() if serve else None
        if not serve:
            await_listener(host, port, role.name, timeout_s)
        try:
            store = dist.TCPStore(
                host,
                port,
                None,
                is_master=serve,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
                master_listen_fd=listener,
            )
        except (RuntimeError, dist.DistError) as error:
            raise RunError(f"{role.name}: the control store of rank 0 at {host}:{port} did not answer") from error
        return cls(dist.PrefixStore(run, store), secret)

    def claim(self, role: Role) -> None:
        """Take this rank's place in the launch; before anything else is written.

        Two launches of one run over several nodes have the same name, and the ranks of the second may reach the store
        of the first.

        Raises:
            RunError: the place is taken, so this store is another launch's.
        """
        if self.raw.add(f"claim/{role.rank}", 1) != 1:
            raise RunError(f"{role.name}: another launch of this run is served at this port and has this rank already")

    def put(self, key: str, value: object) -> None:
        self.raw.set(key, self._signed(key, value))

    def get(self, key: str, timeout_s: float) -> object:
        """Wait for ``key``. Raises RunError after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.raw.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
            except (RuntimeError, dist.DistError) as error:
                raise RunError(f"no {key!r} in the control store after {timeout_s:.0f} s") from error
            text = self.raw.get(key)
            if self._is_ours(key, text):
                return json.loads(text[MAC_BYTES:])
            if time.monotonic() > deadline:
                raise RunError(f"no {key!r} of this run in the control store after {timeout_s:.0f} s")
            time.sleep(POLL_S)  # somebody else's: the right one comes over it

    def peek(self, key: str) -> object | None:
        """The value of ``key`` now, or None."""
        text = self.raw.get(key) if self.raw.check([key]) else b""
        return json.loads(text[MAC_BYTES:]) if text and self._is_ours(key, text) else None

    def abort(self, report: dict[str, object]) -> dict[str, object]:
        """Raise the abort flag; the first report stands, and is returned."""
        text = self._signed("abort", report)
        stored = self.raw.compare_set("abort", "", text) or text.encode()
        if self._is_ours("abort", stored):
            return json.loads(stored[MAC_BYTES:])
        self.raw.set("abort", text)
        return report

    def _signed(self, key: str, value: object) -> str:
        text = json.dumps(value)
        return self._code(key, text.encode()) + text

    def _code(self, key: str, text: bytes) -> str:
        return hmac.new(self._secret, key.encode() + b"\0" + text, "sha256").hexdigest()[:MAC_BYTES]

    def _is_ours(self, key: str, text: bytes) -> bool:
        right = hmac.compare_digest(text[:MAC_BYTES], self._code(key, text[MAC_BYTES:]).encode())
        if not right and not self._warned:
            self._warned = True
            print(f"warning: {key!r} in the control store is not of this run: ignored", file=sys.stderr, flush=True)
        return right

    def check_in(self, barrier: str) -> int:
        """Count this rank in at ``barrier`` without waiting; returns how many are there."""
        return int(self.raw.add(f"barrier/{barrier}", 1))

    def arrive(self, barrier: str, role: Role, members: int, timeout_s: float, tick: Callable[[], None]) -> None:
        """Count in and wait until ``members`` ranks have; see `wait_for`."""
        self.check_in(barrier)
        self.wait_for(barrier, role, members, timeout_s, tick)

    def wait_for(self, barrier: str, role: Role, members: int, timeout_s: float, tick: Callable[[], None]) -> None:
        """Wait until ``members`` ranks have checked in. Polling keeps the connection usable by other threads.

        ``tick`` is called at every look: waiting for others is not hanging, and they are watched themselves.

        Raises:
            RunError: not all are there after ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while (arrived := self.raw.add(f"barrier/{barrier}", 0)) < members:
            if time.monotonic() > deadline:
                raise RunError(
                    f"{role.name}: only {arrived} of {members} ranks reached {barrier!r} in {timeout_s:.0f} s"
                )
            tick()
            time.sleep(POLL_S)
