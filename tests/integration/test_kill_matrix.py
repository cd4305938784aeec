"""Kill anything at any time, resume, and get the run that you would have had: the kill matrix of docs/failures.md.

The launches are real down to the DeepSpeed launcher's own code (`fork_server.py`); fifteen kills go through the real
`deepspeed` command, imports and all. A resumed chain of kills must end with the never-killed run's weights, bit for
bit, and its list of trained entries.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recipe.run.train_cli import free_port
from tests.integration.kills import (
    GONE_S,
    HUNG_GONE_S,
    RING_TIMEOUT_S,
    TRIES,
    Kill,
    Order,
    Starved,
    assert_in_time,
    document,
    draw_orders,
    judge,
    last_line,
    left_in_shm,
)
from tests.integration.launches import REPOSITORY, ForkServer, Launch, real_launch
from tests.tiny import make_config, make_rows, make_target

SEED = 20261201
KILLS_OF_A_CHAIN = 6
DOCUMENT = REPOSITORY / "docs" / "failures.md"


@dataclass
class Workplace:
    """Target, rows and config, and the run that nobody disturbed."""

    folder: Path
    runs: Path
    server: ForkServer
    steps: int = 0
    launched: int = 0

    def run_dir(self, name: str) -> Path:
        return self.runs / name

    def words(self, name: str) -> list[str]:
        words = ["train", str(self.folder / "config.json"), "--set", f"dflash.run.name={name}"]
        if (self.run_dir(name) / "checkpoints" / "latest").exists():
            return [*words, "--resume"]
        return [*words, "--replace"] if self.run_dir(name).exists() else words

    def launch(self, name: str, order: Order | None = None, *more: str, **environment: str) -> Launch:
        self.launched += 1
        folder = self.folder / "launches" / f"{name}-{self.launched}"
        deliveries = folder / "deliveries"
        launch = self.server.launch(
            folder, [*self.words(name), *more], DEATH=order and order.death(), DELIVERIES=str(deliveries),
            FILL=str(self.runs), **environment,
        )  # fmt: skip
        deliveries.mkdir(exist_ok=True)
        return launch

    def finish(self, name: str, *more: str) -> Launch:
        launch = self.launch(name, None, *more)
        assert launch.wait(300) == 0, launch.output[-4000:]
        return launch

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.run_dir(name) / "checkpoints" / f"step_{self.steps:08d}" / "weights.safetensors")


def make_workplace(folder: Path, server: ForkServer, runs: Path | None = None, **changes: object) -> Workplace:
    make_target(folder / "target")
    make_rows(folder / "rows")
    runs = runs or folder / "runs"
    changes |= {"dflash__run__output_dir": str(runs), "dflash__run__log_every": 1}
    make_config(folder, dflash__ring__timeout_s=RING_TIMEOUT_S, **changes)
    place = Workplace(folder, runs, server)
    place.finish("whole")
    checkpoints = (place.run_dir("whole") / "checkpoints").glob("step_*")
    place.steps = max(int(path.name.removeprefix("step_")) for path in checkpoints)
    return place


# -- what must be equal -----------------------------------------------------------------------------------------------


def deliveries(launch: Launch, rank: int) -> list[str]:
    path = launch.folder / "deliveries" / f"rank{rank}"
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].split("\n")[:-1]  # a killed rank's last line may be half written


def assert_same_run(place: Workplace, name: str, launches: list[Launch]) -> None:
    """Weights bit for bit; and every entry was trained once, in the same order: what a launch trained after the
    checkpoint that the next one loaded is trained again, and nothing else is."""
    again, straight = place.weights(name), place.weights("whole")
    assert again.keys() == straight.keys()
    assert all(torch.equal(again[key], straight[key]) for key in straight), f"{name}: other weights"
    whole = next(iter((place.folder / "launches").glob("whole-*")))
    for rank in (2, 3):
        reference = deliveries(Launch(0, whole), rank)
        assert len(set(reference)) == len(reference) > 0
        trained_to = 0
        for launch in launches:
            part = deliveries(launch, rank)
            if not part:
                continue
            begin = reference.index(part[0])
            assert begin <= trained_to, f"{name}, rank {rank}: entries {trained_to}..{begin} were lost"
            assert part == reference[begin : begin + len(part)], f"{name}, rank {rank}: another order"
            trained_to = begin + len(part)
        assert trained_to == len(reference), f"{name}, rank {rank}: trained {trained_to} of {len(reference)} entries"


def run_chain(place: Workplace, name: str, orders: list[Order], kills: list[Kill]) -> list[Order]:
    """Kill, resume, kill, …, finish, compare. Returns the orders that could not come about any more."""
    launches: list[Launch] = []
    left, port, starved = list(orders), str(free_port()), 0
    while left:
        order = left[0]
        launch = place.launch(name, order, "--master-port", port)  # the same port at once: it must be free again
        launches.append(launch)
        while launch.struck_at() is None and launch.code() is None:
            time.sleep(0.01)
        if launch.struck_at() is None:
            assert launch.code() == 0, f"{order}\n{launch.output[-4000:]}"
            break  # the run was over before that moment came
        try:
            kills.append(judge(launch, order, place.run_dir(name)))
            left.pop(0)
        except Starved:
            starved += 1
            if starved > TRIES:
                raise
        if (place.run_dir(name) / "summary.json").exists():
            break  # all was done when it died
        (place.runs / "ballast").unlink(missing_ok=True)
    else:
        launches.append(place.finish(name, "--master-port", port))
    assert_same_run(place, name, launches)
    return left


# -- the tests --------------------------------------------------------------------------------------------------------


def test_a_sample_of_the_kill_matrix(tmp_path: Path, forks: ForkServer) -> None:
    """One target in a step, one drafter in a save; resumed, the run is the one that was never killed."""
    place = make_workplace(tmp_path, forks, dflash__run__epochs=1, dflash__run__save_every=2)
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")  # shown by a red CI
    rng = random.Random(seed)
    orders = [
        Order(rng.choice((0, 1)), "step", count=4, delay=rng.uniform(0.0, 0.3)),
        Order(2, "save", count=rng.randint(1, 10), save=1),
    ]
    kills: list[Kill] = []
    assert run_chain(place, "killed", orders, kills) == []
    assert len(kills) == 2


@pytest.mark.slow
def test_the_kill_matrix(tmp_path: Path, forks: ForkServer, pytestconfig: pytest.Config) -> None:
    disk = tmp_path / "runs"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(disk)], check=False).returncode:
        pytest.skip("needs root: a full disk is made on a small file system of its own")
    try:
        place = make_workplace(tmp_path, forks, disk, dflash__run__epochs=3, dflash__run__save_every=3)
        orders, kills, chain, refused = draw_orders(SEED), [], 0, 0
        while orders:
            name, batch = f"chain{chain}", orders[:KILLS_OF_A_CHAIN]
            left = run_chain(place, name, batch, kills)
            orders = left + orders[len(batch) :]
            refused = refused + 1 if len(left) == len(batch) else 0
            assert refused < 2, f"{left[0]} never comes about"
            shutil.rmtree(place.run_dir(name))
            chain += 1
            write_down(pytestconfig, "forked", kills)
            print(f"{len(kills)} kills, {chain} chains", flush=True)
        assert len(kills) >= 100
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False)


OUTSIDE = [
    ("launcher", "SIGKILL", "step=2/"), ("runner", "SIGTERM", "step=2/"), ("cli", "SIGINT", "step=2/"),
    ("rank0", "SIGKILL", "step=2/"), ("rank3", "SIGKILL", "step=3/"), ("rank2", "SIGSTOP", "step=2/"),
    ("launcher", "SIGTERM", "step=2/"), ("launcher", "SIGINT", "step=2/"), ("runner", "SIGKILL", "step=2/"),
    ("runner", "SIGINT", "step=2/"), ("cli", "SIGKILL", "step=2/"), ("cli", "SIGTERM", "step=2/"),
    ("rank1", "SIGKILL", ""), ("rank2", "SIGKILL", ""), ("rank0", "SIGSTOP", "step=2/"),
]  # fmt: skip

ABOVE = {"cli": "command line", "runner": "deepspeed runner", "launcher": "deepspeed launcher"}


@pytest.mark.slow
@pytest.mark.parametrize("real", [False, True])
def test_kills_from_outside(real: bool, tmp_path: Path, forks: ForkServer, pytestconfig: pytest.Config) -> None:
    """Signals to ranks, launcher, runner and the command line itself; ``real``: of the real command."""
    place = make_workplace(tmp_path, forks, dflash__run__epochs=3, dflash__run__save_every=2)
    kills: list[Kill] = []
    left, starved = list(OUTSIDE), 0
    while left:
        victim, manner, after = left[0]
        name = f"outside{len(kills) + starved}"
        launch = real_launch(tmp_path / "launches" / name, place.words(name)) if real else place.launch(name)
        if after:
            launch.wait_for(after, 600.0)
        else:
            launch.pid(victim)
            time.sleep(random.uniform(0.0, 3.0 if real else 0.3))  # while it still imports or connects
        try:
            kills.append(kill_from_outside(launch, victim, manner, place.run_dir(name)))
            left.pop(0)
        except Starved:
            starved += 1
            if starved > TRIES:
                raise
        write_down(pytestconfig, "real" if real else "outside", kills)
    place.finish("outside0")
    again, straight = place.weights("outside0"), place.weights("whole")
    assert all(torch.equal(again[key], straight[key]) for key in straight)


def kill_from_outside(launch: Launch, victim: str, manner: str, run_dir: Path) -> Kill:
    pid = launch.pid(victim)
    os.kill(pid, signal.Signals[manner])
    struck = time.monotonic()
    limit_s = HUNG_GONE_S if manner == "SIGSTOP" else GONE_S
    code = launch.wait(limit_s + 40)
    seconds = time.monotonic() - struck
    said = f"{victim} {manner}: {seconds:.1f} s, exit {code}\n{launch.output[-4000:]}"
    assert code not in (None, 0, 2), said
    if victim == "cli" and manner == "SIGKILL":
        line = next(line for line in launch.output.splitlines() if line.startswith("the run ends because of"))
    else:
        line = last_line(launch.output)
    if victim in ABOVE:  # no rank is to blame; one has seen it
        who = rf"the {ABOVE[victim]} \(pid {pid}\): .+, seen by rank \d \((target|drafter) .+; log: "
    else:
        who = rf"rank {victim[-1]} \(" if run_dir.exists() else "(a )?rank"
    assert re.match(f"the run ends because of {who}", line), said
    assert not left_in_shm(run_dir.name), said
    assert_in_time(seconds, limit_s, said)
    role = {"0": "target", "1": "target", "2": "drafter", "3": "drafter"}.get(victim[-1], victim)
    when = "within a step" if run_dir.exists() else "while it starts"
    return Kill(role, when, manner, launch.process is not None, round(seconds, 1), int(code or 0), line)


# -- docs/failures.md -------------------------------------------------------------------------------------------------


def write_down(config: pytest.Config, kind: str, kills: list[Kill]) -> None:
    """Keep this test's kills and write the document from those of both tests."""
    assert config.cache is not None
    folder = config.cache.mkdir("kills")
    (folder / f"{kind}.json").write_text(json.dumps([asdict(kill) for kill in kills]))
    known = [Kill(**kill) for file in sorted(folder.glob("*.json")) for kill in json.loads(file.read_text())]
    if len(known) >= 100:
        DOCUMENT.write_text(document(known), encoding="utf-8")
