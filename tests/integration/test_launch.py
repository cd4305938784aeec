"""The real `deepspeed` launch on a tiny random hybrid target: a whole run, a death, a resume, a refusal.

2 target ranks (tp 2, uneven heads) and 2 drafter ranks over gloo on the CPU. About 25 s a launch on two idle cores.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recipe.drafter.export_layout import load_export
from recipe.tell.metrics import read_metrics
from recipe.tell.run_dir import RunDir
from recipe.tell.status import read_status
from tests.tiny import make_config, make_rows, make_target

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 15


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    make_target(folder / "target")
    make_rows(folder / "rows")
    make_config(folder, dflash__run__epochs=3, dflash__run__save_every=4, dflash__run__log_every=1)
    return folder


def command(workplace: Path, name: str, *more: str) -> list[str]:
    config = str(workplace / "config.json")
    return [sys.executable, "-m", "recipe", "train", config, "--set", f"dflash.run.name={name}", *more]


def ranks_of(workplace: Path) -> dict[int, int]:
    """Local rank -> pid of the live ranks of this test's runs."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        local = re.search(r"--local_rank=(\d+)", line)
        if local and str(workplace) in line and "recipe/train.py" in line:
            found[int(local.group(1))] = int(path.parent.name)
    return found


def run(workplace: Path, name: str, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(workplace, name, *more), cwd=REPOSITORY, capture_output=True, text=True, timeout=300)


def losses(run_dir: Path) -> dict[int, float]:
    return {int(record["step"]): float(record["loss"]) for record in read_metrics(run_dir / "metrics.jsonl")}


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "checkpoints" / f"step_{STEPS:08d}" / "weights.safetensors")


@pytest.fixture(scope="module")
def whole(workplace: Path) -> Path:
    """A run that nobody disturbs."""
    done = run(workplace, "whole")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return workplace / "runs" / "whole"


def test_a_whole_run_trains_saves_exports_and_says_so(whole: Path) -> None:
    assert read_status(RunDir.open(whole)).state == "DONE"
    seen = losses(whole)
    assert sorted(seen) == list(range(1, STEPS + 1))
    assert sum(seen[step] for step in range(13, 16)) < 0.9 * sum(seen[step] for step in range(1, 4))
    assert sorted(path.name for path in (whole / "checkpoints").glob("step_*")) == [
        f"step_{step:08d}" for step in (8, 12, 15)
    ]
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["final_loss"] == pytest.approx(seen[STEPS])
    config, exported = load_export(Path(summary["export"]))
    assert config.block_size == 8 and config.target_layer_ids == (1, 2, 3, 4, 5)
    trained = weights(whole)
    assert exported.keys() == trained.keys() and all(torch.equal(exported[k], trained[k]) for k in trained)
    log = (whole / "train.log").read_text()
    assert re.search(
        r"^step=15/15 loss=\S+ tau_est=\S+ acc@1=\S+ lr=\S+ gnorm=\S+ ms=\d+ wait_ms=\d+ tok/s=", log, re.M
    )


def test_the_stored_config_runs_again_by_itself(whole: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "recipe", "train", str(whole / "config.json"), "--check", "--no-model"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_killed_anywhere_it_is_gone_at_once_and_resumes_to_the_same_weights(
    workplace: Path, whole: Path, clean_shm: None
) -> None:
    """Bit-equal on the same layout, and the same loss at every step: nothing was lost, nothing trained twice."""
    victim = random.randrange(4)
    process = subprocess.Popen(
        command(workplace, "killed"), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step=6/"):
            break
    pids = ranks_of(workplace)
    assert len(pids) == 4, "the run ended before it could be killed"
    os.kill(pids[victim], signal.SIGKILL)
    killed_at = time.monotonic()
    rest = process.stdout.read()
    assert process.wait(timeout=60) not in (0, 2)
    assert time.monotonic() - killed_at < 10.0 and not ranks_of(workplace)
    assert re.search(rf"the run ends because of rank {victim} \(.*\): its process .* is gone", rest), rest[-2000:]
    status = read_status(RunDir.open(workplace / "runs" / "killed"))
    assert status.state == "DEAD" and f"rank {victim}" in status.message

    refused = run(workplace, "killed")
    assert refused.returncode == 2 and "--resume" in refused.stderr
    other = run(workplace, "killed", "--resume", "--set", "dflash.drafter.block_size=4")
    assert other.returncode == 2 and "Traceback" not in other.stderr + other.stdout
    assert "block_size" in other.stderr + other.stdout and "8" in other.stderr + other.stdout
    resumed = run(workplace, "killed", "--resume")
    assert resumed.returncode == 0, resumed.stdout[-3000:] + resumed.stderr[-3000:]
    again, straight = weights(workplace / "runs" / "killed"), weights(whole)
    assert all(torch.equal(again[name], straight[name]) for name in straight)
    assert losses(workplace / "runs" / "killed") == losses(whole)


def test_the_bare_launcher_refuses_with_one_message_and_leaves_nothing(workplace: Path, clean_shm: None) -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "4", "--master_port", "29731",
         "recipe/train.py", "--deepspeed_config", str(workplace / "config.json"),
         "--set", "dflash.run.name=refused", "--set", "dflash.target.target_layer_ids=[1, 7]"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 2 and "Traceback" not in said
    assert said.count("error:") == 1 and "target_layer_ids" in said and "Fix:" in said
    assert not (workplace / "runs" / "refused").exists()


@pytest.mark.slow
def test_check_tries_one_step_and_writes_nothing(workplace: Path, clean_shm: None) -> None:
    before = sorted(Path(tempfile.gettempdir()).glob("dflash-check-*"))
    done = run(workplace, "tried", "--check")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "steps: 15" in done.stdout and "ring:" in done.stdout and "this config runs here" in done.stdout
    assert not (workplace / "runs" / "tried").exists()
    assert sorted(Path(tempfile.gettempdir()).glob("dflash-check-*")) == before


@pytest.mark.slow
def test_an_occupied_port_is_the_users_mistake_and_not_a_traceback(workplace: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run(workplace, "port", "--master-port", str(taken.getsockname()[1]))
    said = done.stdout + done.stderr
    assert done.returncode == 2 and "Traceback" not in said and "master_port" in said
    assert not (workplace / "runs" / "port").exists()
