"""What is found wrong with a target before anything is launched, and targets in the hub's local cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.file_download import repo_folder_name
from safetensors.torch import load_file, save_file

from recipe.check import resolve
from recipe.config import load_config
from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape
from recipe.model_files.weights import Checkpoint
from recipe.target.verify import verify_target
from tests.tiny import make_config, make_target

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="verify_target hides fla from the rest of a process")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("verify") / "target")


def verify(folder: Path) -> None:
    config = load_config(str(make_config(folder)))
    shape = TargetShape.resolve(config.dflash.target.path)
    verify_target(resolve(config, shape=shape), shape)


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "target" / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "target" / "model.safetensors")


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "target" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


UP = "model.layers.2.mlp.up_proj.weight"
MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing tensor": (lambda f: change_weights(f, lambda t: t.pop(UP)), r"layers\.2\.mlp\.up_proj"),
    "misshapen tensor": (
        lambda f: change_weights(f, lambda t: t.update({UP: torch.zeros(95, 48)})),
        r"model\.safetensors.*\[95, 48\].*\[96, 48\]",
    ),
    "quantised tensor": (
        lambda f: change_weights(f, lambda t: t.update({UP: torch.zeros(96, 48, dtype=torch.int8)})),
        r"model\.safetensors.*I8.*quantised",
    ),
    "config contradicts": (lambda f: change_config(f, intermediate_size=128), r"\[96, 48\].*\[128, 48\]"),
    "vocabulary contradicts": (lambda f: change_config(f, vocab_size=200), r"embed_tokens.*\[199, 48\].*\[200, 48\]"),
    "unknown type": (lambda f: change_config(f, model_type="no_such_model"), r"no_such_model"),
    "negative size": (lambda f: change_config(f, head_dim=-16), r"head_dim is -16"),
    "endless layers": (lambda f: change_config(f, num_hidden_layers=10**30), "num_hidden_layers"),
    "list": (lambda f: (f / "target" / "config.json").write_text("[]"), "must be a JSON object"),
    "bad text_config": (lambda f: change_config(f, text_config=[1]), "text_config"),
    "truncated": (
        lambda f: (f / "target" / "model.safetensors").write_bytes(
            (f / "target" / "model.safetensors").read_bytes()[:-100]
        ),
        r"model\.safetensors.*truncated",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(target: Path, tmp_path: Path, mistake: str) -> None:
    shutil.copytree(target, tmp_path / "target")
    verify(tmp_path)  # sound before
    spoil, match = MISTAKES[mistake]
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=match):
        verify(tmp_path)


def test_other_float_types_are_converted(target: Path, tmp_path: Path) -> None:
    shutil.copytree(target, tmp_path / "target")
    change_weights(tmp_path, lambda t: t.update({UP: t[UP].half()}))
    verify(tmp_path)


def test_hub_cache_and_revision(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache as the hub's client lays it out: blobs, snapshots by commit, refs by branch."""
    repo = tmp_path / repo_folder_name(repo_id="some/model", repo_type="model")
    commits = {"main": "a" * 40, "older": "b" * 40}
    for ref, commit in commits.items():
        snapshot = repo / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for path in target.iterdir():
            blob = repo / "blobs" / f"{ref}-{path.name}"
            blob.parent.mkdir(exist_ok=True)
            shutil.copy(path, blob)
            (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / ref).write_text(commit)
    blob = repo / "blobs" / "older-config.json"
    blob.write_text(json.dumps(json.loads(blob.read_text()) | {"rms_norm_eps": 0.5}))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert [found.repo_id for found in scan_cache_dir(tmp_path).repos] == ["some/model"]
    for revision, eps in ((None, 1e-6), ("main", 1e-6), ("older", 0.5), ("b" * 40, 0.5)):
        assert TargetShape.resolve("some/model", revision).rms_norm_eps == eps
        assert Checkpoint("some/model", revision).folder.name == ("b" if eps == 0.5 else "a") * 40
    with pytest.raises(ConfigError, match="local Hugging Face cache"):
        TargetShape.resolve("some/model", "never")
    (repo / "snapshots" / commits["main"] / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        Checkpoint("some/model")
