"""Two hosts with addresses, ssh and pdsh of their own, by the command that a user types. Minutes: marked slow."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recipe.tell.metrics import read_metrics
from recipe.tell.run_dir import RunDir
from recipe.tell.status import read_status
from tests.integration import hosts
from tests.tiny import make_config, make_rows, make_target

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(hosts.missing() is not None, reason=str(hosts.missing()))]


def newest_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(sorted((run_dir / "checkpoints").glob("step_*"))[-1] / "weights.safetensors")


def test_train_kill_and_resume_over_ssh(tmp_path: Path) -> None:
    make_target(tmp_path / "target", "llama")
    make_rows(tmp_path / "rows")
    layout = {"target_gpus": [0], "drafter_gpus": [1], "target_tp": 1, "device": "cpu"}
    config = make_config(tmp_path, dflash__layout=layout, dflash__run__save_every=4, dflash__run__log_every=1)
    (tmp_path / "hostfile").write_text("node-a slots=2\nnode-b slots=2\n")
    (tmp_path / "ssh").mkdir()
    runs = tmp_path / "runs"

    def start(name: str, *more: str) -> tuple[subprocess.Popen[bytes], Path]:
        output = tmp_path / f"{name}{len(more)}.out"
        command = [sys.executable, "-m", "recipe", "train", str(config), "--hostfile", str(tmp_path / "hostfile")]
        return both.run("node-a", [*command, "--set", f"dflash.run.name={name}", *more], output, REPOSITORY), output

    with hosts.Hosts(tmp_path / "ssh") as both:
        whole, said = start("whole")
        assert whole.wait(400) == 0, said.read_text()[-3000:]
        assert read_status(RunDir.open(runs / "whole")).state == "DONE"

        process, said = start("killed")
        while not re.search(r"step=5/", said.read_text()):
            assert process.poll() is None, said.read_text()[-3000:]
            time.sleep(0.05)
        os.kill(both.ranks("node-b")[1], signal.SIGKILL)
        begun = time.monotonic()
        while both.ranks("node-a") or both.ranks("node-b"):
            assert time.monotonic() - begun < 10.0, said.read_text()[-3000:]
            time.sleep(0.1)
        assert process.wait(60) not in (0, 2)
        status = read_status(RunDir.open(runs / "killed"))
        assert status.state == "DEAD" and "rank 3" in status.message and "node 1" in status.message
        assert both.shm("node-a") == both.shm("node-b") == ""

        resumed, said = start("killed", "--resume")
        assert resumed.wait(400) == 0, said.read_text()[-3000:]
    again, straight = newest_weights(runs / "killed"), newest_weights(runs / "whole")
    assert again.keys() == straight.keys() and all(torch.equal(again[name], straight[name]) for name in straight)
    steps = [[record["step"] for record in read_metrics(runs / name / "metrics.jsonl")] for name in ("killed", "whole")]
    assert steps[0] == steps[1]
