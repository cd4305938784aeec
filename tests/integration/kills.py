"""Which deaths the kill matrix orders, and what must hold after each of them."""

from __future__ import annotations

import datetime
import os
import platform
import random
import re
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recipe.tell.run_dir import RunDir
from recipe.tell.status import read_status
from tests.integration.launches import REPOSITORY, Launch

TARGETS, DRAFTERS = (0, 1), (2, 3)
RING_TIMEOUT_S = 20
GONE_S, HUNG_GONE_S = 10.0, float(RING_TIMEOUT_S)
FULL_GONE_S = 60.0  # what cannot be saved now may be at the next save: the last one ends the run
BUSY, TRIES = 3.0, 5  # load per core of a machine with other work on it; how often a kill may be starved there
START_UP = ("checking", "touching the ring's memory", "importing the model code", "ready")
OF_TARGETS = (*START_UP, "loading the target")
OF_DRAFTERS = (*START_UP, "loading embedding and head", "building the drafter")
HANGS = ("SIGSTOP", "hang")
INNOCENT = ("SIGKILL", "SIGSTOP", "SIGSEGV", "exit 0", "hang", "lost store")  # no traceback is anybody's news


@dataclass
class Order:
    """One planned death; `tests/integration/death.py` carries it out."""

    rank: int
    moment: str
    manner: str = "SIGKILL"
    phase: str = ""
    count: int = 1
    delay: float = 0.0
    save: int = 1
    call: str = "begin"

    @property
    def role(self) -> str:
        return "target" if self.rank in TARGETS else "drafter"

    @property
    def when(self) -> str:
        """The moment in words, for the table."""
        names = {"entry": "at its first instruction", "step": "within a step", "mutex": "holding the ring's mutex",
                 "entry in hand": "holding a lease" if self.role == "drafter" else "holding reserved pages",
                 "save": "within a save"}  # fmt: skip
        return names.get(self.moment, self.phase)

    @property
    def limit_s(self) -> float:
        if self.manner == "full disk":
            return FULL_GONE_S
        return HUNG_GONE_S if self.manner in HANGS else GONE_S

    def death(self) -> dict[str, Any]:
        return asdict(self)


ABOVE_RANKS = ("cli", "runner", "launcher")


@dataclass
class Kill:
    """What came of an order: the row of docs/failures.md is built from these."""

    role: str
    when: str
    manner: str
    real: bool
    seconds: float
    code: int
    line: str


def draw_orders(seed: int) -> list[Order]:
    """At least a hundred deaths: every rank at every moment, and every manner for each role; numbers drawn."""
    rng = random.Random(seed)
    orders = []
    for rank in (*TARGETS, *DRAFTERS):
        drafter = rank in DRAFTERS
        orders.append(Order(rank, "entry"))
        orders += [Order(rank, "phase", phase=phase) for phase in (OF_DRAFTERS if drafter else OF_TARGETS)]
        orders += [Order(rank, "step", count=rng.randint(1, 6), delay=rng.uniform(0.01, 0.4)) for _ in range(3)]
        orders += [Order(rank, "mutex", count=rng.randint(3, 60), call=call) for call in ("begin", "__enter__") * 2]
        orders += [Order(rank, "entry in hand", count=rng.randint(1, 40 if drafter else 8)) for _ in range(2)]
        orders.append(Order(rank, "phase", phase="waiting for the others to end", delay=rng.uniform(0.0, 0.2)))
        if drafter:
            most = 14 if rank == DRAFTERS[0] else 3
            orders += [Order(rank, "save", count=rng.randint(1, most), save=rng.randint(1, 2)) for _ in range(6)]
            orders.append(Order(rank, "phase", phase="exporting", delay=rng.uniform(0.0, 0.05)))
        step = {"moment": "step", "count": rng.randint(2, 5)}
        for manner in ("exception", "exit 0", "lost store", "SIGSTOP", "SIGSEGV", "SIGTERM", "hang"):
            orders.append(Order(rank, manner=manner, **step))  # type: ignore[arg-type]
        orders.append(Order(rank, "entry in hand", "out of memory", count=rng.randint(2, 12)))
        orders.append(Order(rank, "phase", "exception", phase="ready"))
        orders.append(Order(rank, "phase", "exit 0", phase="importing the model code"))
    orders += [Order(rank, "phase", "full disk", phase="saving") for rank in DRAFTERS]
    orders += [Order(2, "phase", "hang", phase="saving"), Order(3, "phase", "hang", phase="building the drafter")]
    rng.shuffle(orders)
    return orders


def last_line(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.strip()), "")


def judge(launch: Launch, order: Order, run_dir: Path) -> Kill:
    """Wait for the end of a launch that dies by ``order``; assert all that issue and README promise about it."""
    while (struck := launch.struck_at()) is None:
        assert launch.code() is None, f"{order} never came about: {launch.output[-3000:]}"
        time.sleep(0.01)
    code = launch.wait(order.limit_s + 40)
    seconds = time.time() - struck - order.delay
    said = f"{order}: {seconds:.1f} s, exit {code}\n{launch.output[-4000:]}"
    assert code is not None, f"not gone after {order.limit_s + 40:.0f} s: {said}"
    assert code not in (0, 2), said
    line = last_line(launch.output)
    late = order.phase in ("exporting", "waiting for the others to end") or order.manner == "lost store"
    if late and line.startswith("error: the run is done ("):  # a lost store is only noticed when it is used
        assert_in_time(seconds, order.limit_s, said)
        return Kill(order.role, order.when, order.manner, False, round(seconds, 1), code, line)
    assert launch.output.count("the run ends because of") == 1, said
    assert_named(line, order, run_dir, said)
    if order.manner in INNOCENT:
        assert "Traceback" not in launch.output, said
    elif order.manner == "exception":
        assert launch.output.count("Traceback") == 1 and "that the test planted" in launch.output, said
    assert not left_in_shm(run_dir.name), said
    if "no log" not in line and "of a rank:" not in line and order.manner != "full disk":
        assert_status(run_dir, order, said)
    if order.manner in HANGS and run_dir.is_dir():
        stacks = sorted(path.name for path in (run_dir / "stacks").glob("rank_*.txt"))
        assert stacks == [f"rank_{rank}.txt" for rank in range(4)], f"{stacks} {said}"
    assert_in_time(seconds, order.limit_s, said)
    return Kill(order.role, order.when, order.manner, False, round(seconds, 1), code, line)


class Starved(AssertionError):
    """It took too long while others used the machine. All else that is promised held; the kill is tried again."""


def assert_in_time(seconds: float, limit_s: float, said: str) -> None:
    """``limit_s`` is a promise for a machine that is not overloaded by others."""
    if seconds >= limit_s:
        raise (Starved if os.getloadavg()[0] > BUSY * (os.cpu_count() or 1) else AssertionError)(said)


def assert_named(line: str, order: Order, run_dir: Path, said: str) -> None:
    """The last line names rank, role, cause and log. Who left before anybody looked is only missed: a forked rank's
    environment does not say which it is (an exec'ed one's does)."""
    if order.moment == "entry" and re.match(r"the run ends because of a rank: only 3 of the 4 processes .+ log", line):
        return
    if line.endswith("no log"):  # so early, roles may not be known yet
        assert re.match(rf"the run ends because of rank {order.rank}[ :]", line), said
        return
    rank = r"\d" if order.manner == "full disk" else order.rank  # every rank that writes meets a full disk
    place = rf"rank {rank} \({order.role} [^)]*node 0\)"
    assert re.match(rf"the run ends because of {place}: .+; log: {run_dir}/train.log", line), said


def assert_status(run_dir: Path, order: Order, said: str) -> None:
    status = read_status(RunDir.open(run_dir))
    assert status.state == "DEAD" and status.exit_code == 5, f"{status} {said}"
    assert re.findall(r"rank \d+ \(", status.message) == [f"rank {order.rank} ("], f"{status.message} {said}"


def left_in_shm(name: str) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob("dflash-*") if name in path.name]


HEAD = """\
# What happens when something dies

Written by `tests/integration/test_kill_matrix.py` (`pytest -m slow`); do not edit it. Every row was done to real
processes: 2 target ranks (tensor parallel) and 2 drafter ranks over gloo on a CPU machine, started through the real
launcher's code. Asserted of every kill:

* every process of the run is gone in time, with an exit code that is neither 0 nor 2, and nothing is left in /dev/shm;
* the last line on the screen names rank, role, cause and log. Before the run has made its folder there is no log, and
  the role may not be known yet. What happens to the command line, the runner or the launcher is no rank's fault: the
  line names that process, and the rank that saw it. A full disk is met by every rank that writes: any of them is named,
  and only when the run's last save has failed too.

Asserted of kills of ranks from inside (all but the rows of `cli`, `runner`, `launcher` and real `deepspeed`):

* of a rank that was killed, stopped or left there is no traceback on the screen, of an exception it is there once;
* `status` says DEAD and names the rank once (not after a full disk, which `status.json` met too);
* a hang leaves the stacks of all four ranks in the run folder's `stacks/`;
* kills are chained (kill, resume, kill, …) on one port: every chain ends with the weights of the run that nobody
  disturbed, bit for bit, and every entry was trained exactly once, in the same order.

A kill that took too long while other work had the machine (more than three runnable processes a core) is repeated: only
its time is excused.
"""


def document(kills: list[Kill]) -> str:
    """The text of docs/failures.md."""
    quick = [kill.seconds for kill in kills if kill.manner not in HANGS]
    real = sum(kill.real for kill in kills)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=REPOSITORY)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[1]:.1f}"
    machine += f", {datetime.date.today()}, commit {commit.stdout.strip() or 'unknown'}"
    return (
        f"{HEAD}\n{len(kills)} kills, {real} of them through the real `deepspeed` command ({machine}). All processes "
        f"were\ngone after {statistics.median(quick):.1f} s (median), {max(quick):.1f} s (most), hangs apart: they are "
        f"ended within `ring.timeout_s` ({RING_TIMEOUT_S} s here) and leave all stacks in the run folder's "
        f"`stacks/`.\n\n{table(kills)}\n"
    )


def table(kills: list[Kill]) -> str:
    """One row for each manner of death of a rank, and of each process above the ranks."""
    groups: dict[tuple[str, str], list[Kill]] = {}
    for kill in kills:
        groups.setdefault((kill.role if kill.role in ABOVE_RANKS else "a rank", kill.manner), []).append(kill)
    lines = [
        "| who | what was done to it | kills | moments | gone after, at most | exit codes | what the user reads last |",
        "|---|---|---|---|---|---|---|",
    ]
    for (who, manner), group in sorted(groups.items()):
        codes = ", ".join(sorted({str(kill.code) for kill in group}))
        moments, most = len({(kill.role, kill.when) for kill in group}), max(kill.seconds for kill in group)
        said = re.sub(r"/\S+/(runs/)", r"…/\1", group[0].line).replace("|", "\\|")
        lines.append(f"| {who} | {manner} | {len(group)} | {moments} | {most} s | {codes} | {said} |")
    return "\n".join(lines)
