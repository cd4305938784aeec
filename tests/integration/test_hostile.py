"""Surroundings that are against the run: small or full shared memory, others' files, dead runs, taken ports, clocks."""

from __future__ import annotations

import ast
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipe.check.feasibility import refuse_secrets
from recipe.errors import ConfigError, RunError
from recipe.ring import Ring, RingSpec, available_shm, ring_path
from recipe.ring.segment import remove_dead_rings
from recipe.watch.network import await_listener, interface_of, listen, port_holder, settle_interface
from recipe.watch.role import Role
from recipe.watch.store import ControlStore
from tests.integration import sockets
from tests.tiny import make_config, make_rows, make_target

REPOSITORY = Path(__file__).resolve().parents[2]
SPEC = RingSpec(2, 8, "float32", 4, 4, 4)


# -- files in shared memory -----------------------------------------------------------------


def killed_creator(path: Path, run_id: str) -> None:
    """A process that makes a ring and is killed before it can take the name away."""
    pid = os.fork()
    if pid == 0:
        Ring.create(path, SPEC, run_id)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert path.exists()


def test_rings_of_dead_runs_go_and_everything_else_stays(tmp_path: Path) -> None:
    dead, living = ring_path("dead", 0, tmp_path), ring_path("living", 0, tmp_path)
    ours = Ring.create(living, SPEC, "living")
    damaged = ring_path("damaged", 0, tmp_path)
    damaged.write_bytes(b"no ring")
    damaged.chmod(0o600)
    link = ring_path("link", 0, tmp_path)
    link.symlink_to(damaged)
    kept = {living, damaged, link}
    if os.geteuid() == 0:
        foreign = ring_path("foreign", 0, tmp_path)
        killed_creator(foreign, "foreign")
        os.chown(foreign, 12345, 12345)
        kept.add(foreign)
    killed_creator(dead, "dead")
    assert remove_dead_rings(tmp_path) == [dead]
    assert set(tmp_path.iterdir()) == kept
    ours.close()


def test_a_ring_that_is_still_mapped_stays_even_if_its_creator_cannot_be_seen(tmp_path: Path) -> None:
    """Its creator may live in another container (another pid namespace): the kernel's lock tells, not the pid."""
    path = ring_path("elsewhere", 0, tmp_path)
    ready, go = os.pipe(), os.pipe()
    creator = os.fork()
    if creator == 0:
        Ring.create(path, SPEC, "elsewhere")
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.read(ready[0], 1)
    ring = Ring.attach(path, "elsewhere", 5.0)
    os.write(go[1], b"x")
    os.waitpid(creator, 0)
    assert remove_dead_rings(tmp_path) == [] and path.exists()
    with pytest.raises(ConfigError, match="belongs to a run that is alive"):
        Ring.create(path, SPEC, "elsewhere")
    ring.close()
    del ring
    assert remove_dead_rings(tmp_path) == [path]


def test_segments_are_private(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        ring = Ring.create(ring_path("private", 0, tmp_path), SPEC, "private")
        assert ring_path("private", 0, tmp_path).stat().st_mode & 0o777 == 0o600
        ring.close()
    finally:
        os.umask(previous)


def test_a_machine_without_shared_memory_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this machine has none there") as refused:
        available_shm(tmp_path / "shm")
    assert "--shm-size" in str(refused.value)


INSIDE = """
import os, sys
from recipe.run.cli import main
config, folder = sys.argv[1:]
def told(name, *more):
    print(f"== {name}", file=sys.stderr, flush=True)
    print(f"== {name} {main(['train', config, *more])}", file=sys.stderr, flush=True)
told("large", "--set", "dflash.ring.max_depth=8000", "--set", "dflash.run.name=large")
told("readonly", "--set", f"dflash.run.output_dir={folder}/readonly")
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root may mount")
def test_a_container_with_64_mb_of_shm_and_a_read_only_folder_is_told_what_to_do(tmp_path: Path) -> None:
    """Before anything is loaded, by the command that a user types; the mounts are private to the command."""
    make_target(tmp_path / "target", "llama")
    make_rows(tmp_path / "rows")
    config = make_config(tmp_path)
    (tmp_path / "readonly").mkdir()
    (tmp_path / "inside.py").write_text(INSIDE)
    mounts = (
        "mount -t tmpfs -o size=64m tmpfs /dev/shm && mount -t tmpfs -o size=1m,ro tmpfs $3/readonly && "
        'exec "$0" "$1" "$2" "$3"'
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mounts, sys.executable, str(tmp_path / "inside.py"), str(config), str(tmp_path)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=200, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
    _, large, readonly = done.stderr.split("== large\n")[0], *done.stderr.split("== large\n")[1].split("== readonly\n")
    assert "== large 2" in large and "free in /dev/shm" in large and "--shm-size" in large, large
    assert large.count("error:") == 1
    assert "== readonly 2" in readonly and "dflash.run.output_dir" in readonly, readonly
    assert "is not a folder that can be written" in readonly and readonly.count("error:") == 1
    assert not (tmp_path / "runs").exists()


# -- ports and addresses -----------------------------------------------------------------


def test_an_occupied_port_names_who_has_it_and_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as refused:
            listen("127.0.0.1", port, 1)
        assert f"pid {os.getpid()} (" in str(refused.value) and "--master-port" in str(refused.value)
    listen("127.0.0.1", port, 1).close()
    assert port_holder(port) == "another process"


def test_the_store_listens_on_its_own_address_and_nothing_else() -> None:
    before = sockets.listening([os.getpid()])
    server = listen("127.0.0.2", 0, 2)
    assert sockets.listening([os.getpid()]) - before == {"127.0.0.2"}
    server.close()
    with pytest.raises(ConfigError, match="is no address of node 0"):
        listen("192.0.2.1", 0, 2)
    with pytest.raises(ConfigError, match="other nodes cannot reach"):
        listen("localhost", 0, 2)
    with pytest.raises(ConfigError, match="cannot be resolved"):
        listen("no-such-host.invalid", 0, 2)


def test_collectives_use_the_interface_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback and interface_of("127.0.0.77") == loopback and interface_of("192.0.2.1") is None
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    assert settle_interface("127.0.0.1", 1) == loopback
    assert os.environ["GLOO_SOCKET_IFNAME"] == loopback and os.environ["NCCL_SOCKET_IFNAME"] == "mine"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")


def test_a_second_launch_cannot_take_a_rank_in_the_first_ones_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    role = Role("target", 0, 4, 0, 2, 0, 0, 1, 1, 1)
    before = sockets.listening([os.getpid()])
    store = ControlStore.connect(role, "run", serve=True)
    store.claim(role)
    other = ControlStore.connect(role, "run", serve=False)
    with pytest.raises(RunError, match="another launch of this run"):
        other.claim(role)
    assert sockets.listening([os.getpid()]) - before <= {"127.0.0.1"}
    with pytest.raises(ConfigError, match="in use by pid"):
        ControlStore.connect(role, "run", serve=True)


def test_a_rank_that_waits_for_rank_0_obeys_sigterm_at_once() -> None:
    """SIGTERM is blocked in every rank, and here nobody watches; a launcher would otherwise need 30 s to end it."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: refused
        port, blocked = closed.getsockname()[1], os.pipe()
        waiting = os.fork()
        if waiting == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
            os.write(blocked[1], b"x")
            try:
                await_listener("127.0.0.1", port, "rank 1", 60.0)
            except RunError as error:
                os._exit(7 if "told to end" in str(error) else 8)
            os._exit(9)
        os.read(blocked[0], 1)
        os.kill(waiting, signal.SIGTERM)
        begun = time.monotonic()
        assert os.waitstatus_to_exitcode(os.waitpid(waiting, 0)[1]) == 7
        assert time.monotonic() - begun < 5.0
        with pytest.raises(RunError, match="cannot be reached after"):
            await_listener("127.0.0.1", port, "rank 1", 0.3)


# -- secrets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["https://me:hunter2@host/runs", "hf_0123456789abcdefghij", "api_key=abcdef123", "Bearer abcdefgh12345"]
)
def test_a_config_with_a_secret_is_refused_without_showing_it(value: str) -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)dflash\.telemetry\.wandb\.project.*keys belong in the environment"
    ) as refused:
        refuse_secrets({"dflash": {"telemetry": {"wandb": {"project": value}}, "layout": {"target_gpus": [0, 1]}}})
    assert value not in str(refused.value)


def test_every_shipped_config_is_free_of_what_looks_like_a_secret() -> None:
    for path in sorted((REPOSITORY / "ds_configs").glob("*.json")):
        refuse_secrets(json.loads(path.read_text()))


# -- what no module may do -----------------------------------------------------------------

#: Wall-clock times that are only shown or stored, or compared with another host's heartbeat: never a time-out.
SHOWS_WALL_CLOCK = {"tell/metrics.py", "tell/run_dir.py", "tell/status.py", "tell/status_writer.py"}


@functools.cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """(module, dotted name of the function, call) of every call in recipe/."""
    found = []
    for path in sorted((REPOSITORY / "recipe").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                found.append((path.relative_to(REPOSITORY / "recipe").as_posix(), dotted(node.func), node))
    return found


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def test_no_time_out_depends_on_the_wall_clock() -> None:
    users = {module for module, name, _ in calls() if name in ("time.time", "datetime.now", "datetime.datetime.now")}
    assert users <= SHOWS_WALL_CLOCK, users - SHOWS_WALL_CLOCK


def test_nothing_is_unpickled_and_no_code_of_a_model_runs_unasked() -> None:
    for module, name, call in calls():
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name == "torch.load":
            assert keywords.get("weights_only") == "True", f"{module} line {call.lineno}"
        assert not name.startswith(("pickle.", "cloudpickle.", "dill.", "marshal.")), f"{module} line {call.lineno}"
        assert keywords.get("allow_pickle", "False") == "False", f"{module} line {call.lineno}"
        assert keywords.get("trust_remote_code", "False") == "False", f"{module} line {call.lineno}"
