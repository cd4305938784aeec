"""Who can reach the control store's port can write; what was not written with the launch's secret is not obeyed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from recipe.config import load_config
from recipe.errors import RunError
from recipe.process import secret_of
from recipe.run.launch import launch_name
from recipe.watch.role import Role
from recipe.watch.store import ControlStore

SECRET = b"of the launcher"


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def stranger(server: dist.TCPStore, secret: bytes = b"") -> ControlStore:
    """Knows the port and, as `TCPStore.list_keys` tells them, even the names of the keys."""
    return ControlStore(dist.TCPStore("127.0.0.1", server.port, None, False), secret)


def test_a_strangers_abort_is_ignored_and_said_once(server: dist.TCPStore, capsys: pytest.CaptureFixture[str]) -> None:
    ours = ControlStore(server, SECRET)
    for secret in (b"", b"guessed"):
        stranger(server, secret).raw.set("abort", stranger(server, secret)._signed("abort", {"rank": 0, "code": 1}))
        assert ours.peek("abort") is None
    server.set("abort", "{}")
    assert ours.peek("abort") is None and capsys.readouterr().err.count("not of this run: ignored") == 1
    report = {"rank": 3, "cause": "a real one", "code": 1}
    assert ours.abort(report) == report and ours.peek("abort") == report
    assert ControlStore(server, SECRET).abort({"rank": 1}) == report  # the first report stands


def test_a_message_does_not_pass_for_another(server: dist.TCPStore) -> None:
    ours = ControlStore(server, SECRET)
    ours.put("beat/0", {"rank": 0, "cause": "moved", "code": 1})
    server.set("abort", server.get("beat/0").decode())
    assert ours.peek("abort") is None and ours.peek("beat/0") == {"rank": 0, "cause": "moved", "code": 1}


def test_who_waits_waits_on_for_the_right_one(server: dist.TCPStore) -> None:
    ours = ControlStore(server, SECRET)
    stranger(server).put("agreed", {"config": "theirs"})
    with pytest.raises(RunError, match="no 'agreed' of this run"):
        ours.get("agreed", 0.3)
    timer = threading.Timer(0.3, stranger(server, SECRET).put, ("agreed", {"config": "ours"}))
    timer.start()
    begun = time.monotonic()
    assert ours.get("agreed", 20.0) == {"config": "ours"} and time.monotonic() - begun < 10
    timer.join()


def test_the_secret_is_the_launchers_and_no_other_users(repository: Path) -> None:
    code = "import sys; from recipe.process import secret_of; print(secret_of(int(sys.argv[1])).hex())"
    asked = [
        subprocess.run([sys.executable, "-c", code, str(os.getpid())], capture_output=True, text=True).stdout.strip()
        for _ in range(2)
    ]
    assert asked == [secret_of(os.getpid()).hex()] * 2 and len(asked[0]) == 64
    other = subprocess.Popen(["sleep", "60"])
    try:
        assert secret_of(other.pid) not in (b"", secret_of(os.getpid()))
        if os.geteuid() == 0:
            stolen = subprocess.run(["cat", f"/proc/{os.getpid()}/auxv"], user=65534, capture_output=True)
            assert stolen.returncode != 0 and stolen.stdout == b""
    finally:
        other.kill()
        other.wait()
    assert secret_of(2**22 + 1) == b""


def test_the_names_of_a_launchs_keys_depend_on_it(repository: Path) -> None:
    config = load_config(repository / "ds_configs/demo.json")
    places = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_SIZE": 4, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    env = {**{key: str(value) for key, value in places.items()}, "MASTER_ADDR": "-", "MASTER_PORT": "-"}
    role = Role.from_environment(config.dflash.layout, env)
    assert launch_name(role, config, SECRET) == launch_name(role, config, SECRET) != launch_name(role, config, b"")
