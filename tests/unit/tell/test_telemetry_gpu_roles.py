"""GPU samples by node and role: from two nodes' NVML through a real store into metrics.jsonl, status and report."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from recipe.config.schema import Layout
from recipe.tell import status_cli
from recipe.tell.gpu_roles import GpuNews, NodePost, by_role, flat, roles_of
from recipe.tell.metrics import Metrics, read_metrics
from recipe.tell.report import build
from recipe.tell.run_dir import RunDir
from recipe.tell.status import read_status
from recipe.tell.status_writer import StatusWriter
from recipe.watch.store import ControlStore

REPOSITORY = Path(__file__).resolve().parents[3]
NODE = """
import sys, time, torch.distributed as dist
from datetime import timedelta
from recipe.config.schema import Layout
from recipe.watch.store import ControlStore
from recipe.tell.gpu import GpuSampler, load_nvml
from recipe.tell.gpu_roles import NodePost, roles_of
store = ControlStore(dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, timedelta(seconds=20)))
roles = roles_of(Layout(target_gpus=[0, 1], drafter_gpus=[2], target_tp=2), 4)
sampler = GpuSampler(load_nvml(gpu_machine=True), 0.05, NodePost(store, roles, int(sys.argv[2])))
sampler.start()
sys.stdin.read()
sampler.stop()
"""
FAKE = """
from tests.unit.tell.test_telemetry_gpu import FakeNvml
_fake = FakeNvml()
globals().update({name: getattr(_fake, name) for name in dir(_fake) if not name.startswith("__")})
"""


@pytest.mark.parametrize(
    ("layout", "gpus", "expected"),
    [
        (Layout(target_gpus=[1, 2], drafter_gpus=[0], target_tp=2), 4, {1: "target", 2: "target", 0: "drafter"}),
        (Layout(target_gpus=[0], drafter_gpus=[1], target_tp=1, share_gpus=True), 1, {0: "target+drafter"}),
        (Layout(target_gpus=[0, 1], drafter_gpus=[2], target_tp=1, share_gpus=True), 2,
         {0: "target+drafter", 1: "target"}),
        (Layout(target_gpus=[0], drafter_gpus=[1], target_tp=1), 0, {}),
    ],
)  # fmt: skip
def test_roles(layout: Layout, gpus: int, expected: dict[int, str]) -> None:
    assert roles_of(layout, gpus) == expected


def test_what_one_gpu_lacks_does_not_hide_what_the_other_has() -> None:
    samples = [{"util_pct": 90, "mem_used": 5, "power_w": 300.0}, {"util_pct": 40, "mem_used": 7}, {"mem_used": 1}]
    target, drafter = by_role(samples, {0: "target", 1: "target", 2: "drafter"}, 3)
    assert target == {"node": 3, "role": "target", "gpus": 2, "util_pct": 65.0, "util_min_pct": 40, "mem_used": 7,
                      "power_w": 300.0}  # fmt: skip
    assert drafter == {"node": 3, "role": "drafter", "gpus": 1, "mem_used": 1}


def test_two_nodes_reach_metrics_status_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pynvml.py").write_text(FAKE)
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", NODE, str(server.port), str(node)], cwd=REPOSITORY, stdin=subprocess.PIPE,
            env={"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "OMP_NUM_THREADS": "1"},
        )
        for node in (0, 1)
    ]  # fmt: skip
    news = GpuNews(ControlStore(server), 2, interval_s=5.0)
    deadline = time.monotonic() + 60
    while len(rows := news.collect()) < 4:
        assert time.monotonic() < deadline and all(node.poll() is None for node in nodes)
        time.sleep(0.05)
    for node in nodes:
        node.communicate(b"")
        assert node.returncode == 0
    expected = {"gpus": 2, "util_pct": 5.0, "util_min_pct": 0, "mem_used": 1001, "mem_total": 9000, "power_w": 350.5,
                "temperature_c": 0}  # fmt: skip
    assert rows[0] == {"node": 0, "role": "target", **expected} and rows[2] == {"node": 1, "role": "target", **expected}
    assert [(row["node"], row["role"]) for row in rows] == [(n, r) for n in (0, 1) for r in ("target", "drafter")]
    assert flat(rows)["node1/drafter/util_pct"] == 20.0

    run_dir = RunDir.create(tmp_path, "run")
    metrics = Metrics(run_dir, 10)
    metrics.flush(1, gpu=news.window())
    metrics.flush(2, gpu=news.window())
    first, second = (record["gpu"] for record in read_metrics(run_dir.metrics_jsonl))
    assert first == rows and second == []  # nothing new has come
    writer = StatusWriter(run_dir, 10)
    writer.gpus(rows)
    writer.kernels("torch's functions")
    writer.close()
    assert read_status(run_dir).gpus == tuple(rows)
    screen = status_cli.screen(run_dir, read_status(run_dir))
    assert "gpus      node 1 target: 2 GPUs, 5 % busy (lowest 0 %)" in screen and "350 W each, 0 °C" in screen
    assert "kernels   torch's functions" in screen
    assert "node1/drafter" in build(run_dir) and "GPU utilisation (%)" in build(run_dir)
    run_dir.close()


def test_a_node_that_falls_silent_is_not_shown_for_ever() -> None:
    store = ControlStore(dist.HashStore())
    NodePost(store, {0: "target"}, 0)([{"util_pct": 50}])
    news = GpuNews(store, 1, interval_s=0.02)
    assert len(news.collect()) == 1
    time.sleep(0.2)
    assert news.collect() == [] and len(news.window()) == 1


def test_status_survives_odd_gpu_rows(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, "run")
    StatusWriter(run_dir, 10).close()
    fields = json.loads(run_dir.status_json.read_text())
    good = {"node": 0, "role": "target", "util_pct": 7}
    for odd in (7, [None], [{"node": "x", "role": "target"}], [{"node": 0, "role": "<b>"}]):
        run_dir.status_json.write_text(json.dumps({**fields, "gpus": odd}))
        assert read_status(run_dir).gpus == ()
    run_dir.status_json.write_text(json.dumps({**fields, "gpus": [{**good, "power_w": "much"}, good]}))
    assert read_status(run_dir).gpus == (good, good)
    run_dir.close()
