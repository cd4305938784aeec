"""W&B with the real package: without a key, without a network, offline, after a resume, after a failure."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipe.errors import ConfigError
from recipe.tell.run_dir import RunDir
from recipe.tell.wandb_run import WandbRun, key_configured, reachable, resolve_mode

ROOT = Path(__file__).resolve().parents[3]
KEY = "0123456789abcdef0123456789abcdef01234567"
needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
LAUNCH = """
import json, sys
from recipe.tell.run_dir import RunDir
from recipe.tell.wandb_run import WandbRun
folder, mode, first, last, code = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
run_dir = RunDir.create(folder, "r", resume=first > 1)
(run_dir.checkpoints / "latest").touch()
wandb = WandbRun(run_dir, {"x": {"hf_token": "hushhush"}, "lr": 0.5}, "r", "p", mode)
print("active", wandb.active)
for step in range(first, last):
    wandb.log({"step": step, "loss": 1.0 / step, "ring": [3, 9]})
    wandb.log_gpu(0.5 * step, {"0/util_pct": 10 * step})
wandb.finish(code)
"""


def launch(
    folder: Path, mode: str, first: int = 1, last: int = 4, code: int = 0, **variables: str
) -> tuple[str, float]:
    """A process of its own with stdin closed; returns its output and how long it took."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    environment |= {"HOME": str(folder), "NETRC": str(folder / "none"), **variables}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, str(folder), mode, str(first), str(last), str(code)],
        cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr, time.monotonic() - started


def test_no_key_is_one_line_and_no_wait(tmp_path: Path) -> None:
    output, seconds = launch(tmp_path, "auto")
    assert output.splitlines()[0].startswith("wandb: off (no key is configured)") and "active False" in output
    assert len(output.splitlines()) == 2 and seconds < 30
    assert not (tmp_path / "r" / "wandb").exists()


@needs_wandb
def test_a_key_without_network_keeps_the_run_offline(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        output, seconds = launch(tmp_path, "auto", WANDB_API_KEY=KEY, WANDB_BASE_URL=url)
    assert "cannot be reached; kept offline" in output and "active True" in output and KEY not in output
    assert seconds < 90
    assert list((tmp_path / "r" / "wandb").glob("offline-run-*"))


def payloads(data: bytes) -> Iterator[bytes]:
    """Records of a .wandb file: blocks of 32 KiB, each record or part of one behind 4+2+1 bytes of sum, size, kind."""
    assert data[:4] == b":W&B"
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole = (b"" if kind in (1, 2) else whole) + data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield whole


def records(folder: Path) -> list[dict[str, Any]]:
    """What the offline runs of ``folder`` stored, in order of their start."""
    from wandb.proto import wandb_internal_pb2

    found = []
    paths = sorted(folder.glob("r/wandb/offline-run-*/run-*.wandb"), key=lambda path: path.parent.name)
    for data in (data for path in paths for data in payloads(path.read_bytes())):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        entry: dict[str, Any] = {"kind": kind}
        if kind == "history":
            items = record.history.item
            entry["values"] = {each.key or ".".join(each.nested_key): json.loads(each.value_json) for each in items}
        elif kind == "run":
            entry |= {"id": record.run.run_id, "config": str(record.run.config)}
        elif kind == "exit":
            entry["code"] = record.exit.exit_code
        elif kind == "metric":
            entry |= {"name": record.metric.name or record.metric.glob_name, "axis": record.metric.step_metric}
        found.append(entry)
    return found


@needs_wandb
def test_offline_resumed_and_failed(tmp_path: Path) -> None:
    """Faults R81 to R83: one id over a resume, no point lost, GPU samples on their own axis, failure marked."""
    first, _ = launch(tmp_path, "offline", 1, 6)
    second, _ = launch(tmp_path, "offline", 4, 8, code=1)
    assert "step" not in (first + second).lower().replace("active", ""), "no warning of dropped steps"
    stored = records(tmp_path)
    assert {entry["id"] for entry in stored if entry["kind"] == "run"} == {RunDir.open(tmp_path / "r").run_id}
    values = [entry["values"] for entry in stored if entry["kind"] == "history"]
    steps = [each["train/step"] for each in values if "train/step" in each]
    assert steps == [1, 2, 3, 4, 5, 4, 5, 6, 7]
    gpu = [each for each in values if "gpu/0/util_pct" in each]
    assert len(gpu) == 9 and all("train/step" not in each for each in gpu)
    axes = {entry["name"]: entry["axis"] for entry in stored if entry["kind"] == "metric"}
    assert axes["train/*"] == "train/step" and axes["gpu/*"] == "gpu/seconds"
    assert [entry["code"] for entry in stored if entry["kind"] == "exit"] == [0, 1]
    config = "".join(str(entry["config"]) for entry in stored if entry["kind"] == "run")
    assert "0.5" in config
    assert not any(b"hushhush" in path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file())


def test_modes(tmp_path: Path) -> None:
    bare = {"HOME": str(tmp_path)}
    assert resolve_mode("auto", bare) == "disabled"
    assert resolve_mode("auto", {**bare, "WANDB_API_KEY": KEY}) == "online"
    assert resolve_mode("auto", {**bare, "WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"}) == "disabled"
    assert resolve_mode("auto", {**bare, "WANDB_MODE": "offline"}) == "offline"
    assert resolve_mode("offline", bare) == "offline" and resolve_mode("disabled", {"WANDB_API_KEY": KEY}) == "disabled"
    with pytest.raises(ConfigError, match="no W&B key") as caught:
        resolve_mode("online", bare)
    assert caught.value.field == "dflash.telemetry.wandb.mode"


def test_a_key_in_netrc_counts_for_its_server_only(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert key_configured({"HOME": str(tmp_path)})
    assert not key_configured({"HOME": str(tmp_path), "WANDB_BASE_URL": "https://wandb.example.org"})
    (tmp_path / ".netrc").write_text("nonsense here")
    assert not key_configured({"HOME": str(tmp_path)})


def test_reachable_asks_the_right_port() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert not reachable({"WANDB_BASE_URL": url})
        server.listen()
        assert reachable({"WANDB_BASE_URL": url})
    assert not reachable({"WANDB_BASE_URL": "http://host.invalid"})


class Broken:
    """Stands for wandb's run after its service process died."""

    def log(self, values: dict[str, float]) -> None:
        raise ConnectionResetError("service died")

    def finish(self, exit_code: int) -> None:
        threading.Event().wait()


def test_failures_after_the_start_are_reported_once_and_end_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb = WandbRun(RunDir.create(tmp_path, "r"), {}, "r", "p", "disabled")
    wandb._run = Broken()
    for step in range(3):
        wandb.log({"step": step})
    assert capsys.readouterr().out.count("off from here on: service died") == 1 and not wandb.active
    wandb._run = Broken()
    started = time.monotonic()
    wandb.finish(1, timeout_s=0.2)
    wandb.finish(1)
    assert time.monotonic() - started < 5 and "wandb sync" in capsys.readouterr().out


def test_on_several_nodes_the_leaders_key_counts_and_is_asked_for_there(tmp_path: Path) -> None:
    alone = {"HOME": str(tmp_path)}
    with pytest.raises(ConfigError) as caught:
        resolve_mode("online", alone)
    assert "pdsh" not in str(caught.value) and "hostfile" not in str(caught.value)
    with pytest.raises(ConfigError, match="first host") as caught:
        resolve_mode("online", {**alone, "CROSS_SIZE": "2"})
    assert socket.gethostname() in str(caught.value)
