"""The lines that README.md gives to people who live in the launcher: on one machine without ssh, as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.config import load_config
from recipe.run.train_cli import _hosts
from recipe.tell.run_dir import RunDir
from recipe.tell.status import read_status
from tests.integration.launches import ENVIRONMENT
from tests.tiny import make_config, make_rows, make_target

REPOSITORY = Path(__file__).resolve().parents[2]
LINES = re.findall(r"^deepspeed .*$", (REPOSITORY / "README.md").read_text(), re.M)
ONE_AND_ONE = {"target_gpus": [0], "drafter_gpus": [1], "target_tp": 1, "device": "cpu"}


@pytest.mark.parametrize("line", [LINES[0], pytest.param(LINES[1], marks=pytest.mark.slow)])
def test_the_line_of_the_readme_runs_on_one_machine(tmp_path: Path, line: str) -> None:
    """Without ssh on the PATH. LOCAL_SIZE is how DeepSpeed's CPU accelerator is told a number of devices."""
    make_target(tmp_path / "target", "llama")
    make_rows(tmp_path / "rows")
    config = make_config(tmp_path, dflash__layout=ONE_AND_ONE, dflash__run__max_steps=2)
    (tmp_path / "ssh").write_text("#!/bin/sh\nexit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    command = line.replace("ds_configs/qwen3.6_27b_5t3d.json", str(config)).split()
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **ENVIRONMENT, "PATH": path, "LOCAL_SIZE": "2"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert read_status(RunDir.open(tmp_path / "runs" / "tiny")).state == "DONE"


def test_a_hostfile_of_this_machine_alone_needs_no_ssh(tmp_path: Path) -> None:
    config = load_config(make_config(tmp_path, dflash__layout=ONE_AND_ONE))
    hostfile = tmp_path / "hostfile"
    for host, expected in (("localhost", []), (os.uname().nodename, []), ("node7", ["node7"])):
        hostfile.write_text(f"{host} slots=2\n")
        assert _hosts(str(hostfile), config) == expected
    hostfile.write_text("localhost slots=2\nnode7 slots=2\n")
    assert _hosts(str(hostfile), config) == ["localhost", "node7"]
