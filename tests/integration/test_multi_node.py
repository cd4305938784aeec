"""Two nodes, by their DeepSpeed launchers, on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recipe.agreement.nodes import compare, probe_run_dir
from recipe.errors import ConfigError
from recipe.tell.metrics import read_metrics
from recipe.tell.run_dir import RunDir
from recipe.tell.status import read_status
from tests.integration import sockets
from tests.integration.nodes import Nodes
from tests.tiny import make_config, make_rows, make_target

LAYOUT = {"target_gpus": [0], "drafter_gpus": [1], "target_tp": 1, "device": "cpu"}
SECRETS = {
    "WANDB_API_KEY": "planted0wandb1key",
    "HF_TOKEN": "hf_plantedplantedplanted",
    "HTTPS_PROXY": "http://me:planted-in-a-url@127.0.0.1:9",
    "AWS_SECRET_ACCESS_KEY": "planted/access/key",
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nodes")
    make_target(folder / "target", "llama")
    make_rows(folder / "rows", count=40)
    make_config(folder, dflash__layout=LAYOUT, dflash__run__save_every=2, dflash__run__log_every=1)
    return folder


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path_factory.mktemp("server") / "log", **SECRETS)
    yield nodes
    nodes.close()


def arguments(workplace: Path, name: str, *more: str) -> list[str]:
    return ["--deepspeed_config", str(workplace / "config.json"), "--set", f"dflash.run.name={name}", *more]


def losses(run_dir: Path) -> dict[int, float]:
    return {int(record["step"]): float(record["loss"]) for record in read_metrics(run_dir / "metrics.jsonl")}


def newest_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(sorted((run_dir / "checkpoints").glob("step_*"))[-1] / "weights.safetensors")


def test_two_nodes_lose_a_rank_are_gone_together_and_resume_to_the_same_weights(
    workplace: Path, nodes: Nodes, tmp_path: Path, clean_shm: None
) -> None:
    """Two runs of two nodes at once, all on one /dev/shm: nothing collides, and the death of one is not the other's.

    Everything listens on loopback only, and nothing that is written tells a secret.
    """
    whole = nodes.launch(tmp_path / "whole", *arguments(workplace, "whole"))
    killed = nodes.launch(tmp_path / "killed", *arguments(workplace, "killed"))
    whole.wait_for(r"^step=1/")
    addresses = sockets.listening([whole.rank(node, local) for node in range(2) for local in range(2)])
    assert addresses and addresses <= {"127.0.0.1"}, addresses
    killed.wait_for(r"^step=3/")
    os.kill(killed.rank(1, 1), signal.SIGKILL)
    begun = time.monotonic()
    codes = killed.wait(10.0)
    assert all(code != 0 for code in codes), codes
    assert time.monotonic() - begun < 10.0
    assert whole.wait(120) == [0, 0], whole.output(0)[-3000:] + whole.output(1)[-3000:]
    runs = workplace / "runs"
    assert read_status(RunDir.open(runs / "whole")).state == "DONE"
    status = read_status(RunDir.open(runs / "killed"))
    assert status.state == "DEAD" and "rank 3" in status.message and "node 1" in status.message, status

    resumed = nodes.launch(tmp_path / "resumed", *arguments(workplace, "killed", "--resume"))
    assert resumed.wait(120) == [0, 0], resumed.output(0)[-3000:] + resumed.output(1)[-3000:]
    again, straight = newest_weights(runs / "killed"), newest_weights(runs / "whole")
    assert again.keys() == straight.keys() and all(torch.equal(again[name], straight[name]) for name in straight)
    assert losses(runs / "killed") == losses(runs / "whole")
    assert holding_secrets([runs, tmp_path]) == []


def holding_secrets(folders: list[Path]) -> list[str]:
    """Files of a run (logs, config, provenance, checkpoints, export) and of the terminal that tell a secret."""
    words = [b"planted-in-a-url" if name == "HTTPS_PROXY" else value.encode() for name, value in SECRETS.items()]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 20
    return [f"{path}: {word!r}" for path in files for word in words if word in path.read_bytes()]


@pytest.mark.slow  # the probe waits 15 s for a slow network file system
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_node_that_does_not_see_the_run_folder_says_so_in_one_line(
    workplace: Path, nodes: Nodes, tmp_path: Path, clean_shm: None
) -> None:
    (workplace / "runs").mkdir(exist_ok=True)
    launch = nodes.launch(tmp_path / "apart", *arguments(workplace, "apart"), hide=workplace / "runs")
    codes = launch.wait(60.0)
    said = launch.output(0) + launch.output(1)
    assert codes[1] == 2 and 0 not in codes, codes
    assert "Traceback" not in said and re.search(r"node 1 \(.*\) does not see it", said), said[-3000:]
    assert "dflash.run.output_dir" in said and "file system that all nodes share" in said
    assert not (workplace / "runs" / "apart").exists()


def test_the_probe_finds_the_run_folder_and_nothing_else(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "here") as run_dir:
        run_id = run_dir.run_id
        probe_run_dir(1, run_dir.path, run_id, wait_s=0.0)
        with pytest.raises(ConfigError, match="sees another folder there"):
            probe_run_dir(1, run_dir.path, "another", wait_s=0.0)
        with pytest.raises(ConfigError, match="does not see it"):
            probe_run_dir(1, tmp_path / "nowhere", run_id, wait_s=0.0)
        (run_dir.path / ".run.json").write_text("[1")
        with pytest.raises(ConfigError, match="does not see it"):
            probe_run_dir(1, run_dir.path, run_id, wait_s=0.0)


def test_nodes_with_another_version_or_other_data_are_refused_with_both_values() -> None:
    leaders = {"torch": "2.13.0", "data": "aaaa"}
    compare(1, dict(leaders), leaders)
    with pytest.raises(ConfigError, match="another data than node 0, which has aaaa") as refused:
        compare(1, {"torch": "2.13.0", "data": "bbbb"}, leaders)
    assert "bbbb" in str(refused.value) and "node 1" in str(refused.value)
    with pytest.raises(ConfigError, match=r"another torch than node 0, which has 2\.13\.0"):
        compare(1, {"data": "aaaa"}, leaders)
    assert json.dumps(leaders)  # travels through the control store
