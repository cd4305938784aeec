"""Death on order, inside a rank that the fork server started: `DEATH` says which rank, at which moment, in what manner.

The product has no hooks for this: its own functions are wrapped before `main` runs, so that a rank can die while it
holds the ring's mutex, between two file operations of a save, or half a second into a step.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_spent: list[bytearray] = []  # memory that is used up stays used up


def prepare() -> None:
    """Called in every rank before its `main`."""
    if path := os.environ.get("DELIVERIES"):
        record_deliveries(Path(path))
    if spoilt := os.environ.get("POISON"):
        from tests.integration import poison

        poison.prepare(json.loads(spoilt))
    order = json.loads(os.environ.get("DEATH", "null"))
    if order is not None and order["rank"] == int(os.environ["LOCAL_RANK"]):
        strike = Strike(order)
        MOMENTS[order["moment"]](strike, order)


class Strike:
    """Dies once, at the ``count``-th call, ``delay`` seconds later (0: inside the call itself)."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.manner, self.left, self.delay = MANNERS[order["manner"]], int(order.get("count", 1)), order.get("delay", 0)
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self.left -= 1
            if self.left != 0:
                return
        (Path(os.environ["FORK_SERVER_PIDS"]) / "struck").write_text(repr(time.time()))
        if self.delay:
            timer = threading.Timer(self.delay, self.manner)
            timer.daemon = True
            timer.start()
        else:
            self.manner()


# -- manners ---------------------------------------------------------------------------------------------------------


def send(signum: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signum)


def leave_early() -> None:
    os._exit(0)


def raise_an_error() -> None:
    raise ZeroDivisionError("an error that the test planted")


def find_a_mistake() -> None:
    """What is the user's to mend and shows late: a file of the rows that somebody has removed, say."""
    from recipe.errors import ConfigError

    raise ConfigError("dflash.data.path", "rows", "a mistake that the test planted", "mend it")


def work_slowly() -> None:
    """`SLOW_S` seconds of work that says nothing, as writing to a slow disk; then all goes on."""
    end = time.monotonic() + float(os.environ["SLOW_S"])
    while time.monotonic() < end:
        sum(range(10_000))


def hang() -> None:
    time.sleep(3600)


def run_out_of_memory() -> None:
    """Really: the address space is capped, eaten up, and stays so while the error is handled."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limit = used + (48 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    size = 16 << 20
    while True:
        try:
            _spent.append(bytearray(size))
        except MemoryError:
            if size < 64 << 10:
                raise
            size //= 2


def fill_the_disk() -> None:
    """Really: the file system of the run is full from now on (the test gives it a small one of its own)."""
    with open(Path(os.environ["FILL"]) / "ballast", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
        try:
            while True:
                file.write(b"x")
        except OSError:
            return


def use_up_the_inodes() -> None:
    """Really: that file system takes no further file from now on, though files may grow."""
    folder = Path(os.environ["FILL"]) / "ballast"
    with contextlib.suppress(OSError):
        folder.mkdir()
        for number in itertools.count():
            (folder / str(number)).touch()


def lose_the_store() -> None:
    """Cut this process's connections to the control store, as a broken network does."""
    port = int(os.environ["MASTER_PORT"])
    for fd in list(os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(int(fd))) as one:
                if one.getpeername()[1] == port:
                    one.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


MANNERS: dict[str, Callable[[], None]] = {
    "SIGKILL": send(signal.SIGKILL),
    "SIGSTOP": send(signal.SIGSTOP),
    "SIGTERM": send(signal.SIGTERM),
    "SIGSEGV": send(signal.SIGSEGV),
    "exit 0": leave_early,
    "exception": raise_an_error,
    "mistake": find_a_mistake,
    "slow": work_slowly,
    "hang": hang,
    "out of memory": run_out_of_memory,
    "full disk": fill_the_disk,
    "no inodes": use_up_the_inodes,
    "lost store": lose_the_store,
}


# -- moments ---------------------------------------------------------------------------------------------------------


def before(
    owner: type, name: str, strike: Callable[[], None], when: Callable[..., bool] = lambda *a, **k: True
) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            strike()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def after(owner: type, name: str, strike: Callable[[], None]) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        strike()
        return result

    setattr(owner, name, wrapped)


def at_entry(strike: Strike, order: dict[str, Any]) -> None:
    """Before the program does anything: no sibling knows this rank yet."""
    strike()


def at_phase(strike: Strike, order: dict[str, Any]) -> None:
    """When the rank says that it is in ``phase``."""
    from recipe.watch.watchdog import Watchdog

    before(Watchdog, "progress", strike, lambda self, phase, *rest, **named: phase == order["phase"])


def in_a_step(strike: Strike, order: dict[str, Any]) -> None:
    """``delay`` seconds after the ``count``-th step or batch."""
    from recipe.watch.watchdog import Watchdog

    before(Watchdog, "progress", strike, lambda self, phase, *rest, **named: phase in ("training", "producing"))


def with_the_mutex(strike: Strike, order: dict[str, Any]) -> None:
    """While holding the ring's mutex: in the middle of an update, or just before one."""
    from recipe.ring.monitor import Section

    after(Section, order.get("call", "begin"), strike)


def with_an_entry(strike: Strike, order: dict[str, Any]) -> None:
    """A drafter with a lease in its hand, a target with reserved pages."""
    from recipe.ring import Ring

    for name in ("lease", "reserve", "join"):
        after(Ring, name, strike)


def in_a_save(strike: Strike, order: dict[str, Any]) -> None:
    """At the ``count``-th file operation below checkpoints/ of one save, the ``save``-th of this rank."""
    events = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if event in events and "/checkpoints/" in str(arguments[0]) and started:
            if event == "open" and not str(arguments[1]).startswith(("w", "x", "a", "None")):
                return
            strike()

    started: list[int] = []
    saves = [int(order.get("save", 1))]

    def save_begins() -> None:
        saves[0] -= 1
        if saves[0] == 0:
            started.append(1)

    from recipe.watch.watchdog import Watchdog

    before(Watchdog, "progress", save_begins, lambda self, phase, *rest, **named: phase == "saving")
    sys.addaudithook(listen)


MOMENTS: dict[str, Callable[[Strike, dict[str, Any]], None]] = {
    "entry": at_entry,
    "phase": at_phase,
    "step": in_a_step,
    "mutex": with_the_mutex,
    "entry in hand": with_an_entry,
    "save": in_a_save,
}


# -- what was trained ------------------------------------------------------------------------------------------------


def record_deliveries(folder: Path) -> None:
    """Write down every entry that this rank gives back to the ring, in order: that is what it trains."""
    from recipe.ring import Ring

    path = folder / f"rank{os.environ['LOCAL_RANK']}"
    original = Ring.release

    def release(self: Ring, lease: Any) -> None:
        original(self, lease)
        with open(path, "a", encoding="ascii") as file:
            file.write(f"{lease.entry_id} {lease.reuse_index}\n")

    Ring.release = release  # type: ignore[method-assign]
