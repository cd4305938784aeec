"""Reading checkpoints: prefixes, slices, tied heads; and broken files are named before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from recipe.errors import ConfigError
from recipe.model_files.weights import Checkpoint

V, H = 11, 4


def tensors(prefix: str, head: bool = True) -> dict[str, torch.Tensor]:
    result = {f"{prefix}embed_tokens.weight": torch.arange(V * H).reshape(V, H).float()}
    result[f"{prefix}layers.0.mlp.up_proj.weight"] = torch.randn(6, H)
    result["model.visual.blocks.0.weight"] = torch.ones(2)
    result["mtp.layers.0.weight"] = torch.ones(2)
    if head:
        result["lm_head.weight"] = -torch.ones(V, H)
    return result


def write(
    folder: Path, content: dict[str, torch.Tensor], files: int = 1, config: dict[str, object] | None = None
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    if files == 1:
        save_file(content, folder / "model.safetensors")
        return folder
    names = [f"model-{i + 1}-of-{files}.safetensors" for i in range(files)]
    weight_map = {key: names[i % files] for i, key in enumerate(content)}
    for name in names:
        save_file({key: content[key] for key, file in weight_map.items() if file == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model.", ""])
def test_prefix_is_found_and_slices_equal_the_tensor(tmp_path: Path, prefix: str, files: int) -> None:
    content = tensors(prefix)
    checkpoint = Checkpoint(write(tmp_path / "m", content, files))
    assert checkpoint.prefix == prefix
    names = {"embed_tokens.weight", "layers.0.mlp.up_proj.weight", "lm_head.weight"}
    extra = {"visual.blocks.0.weight"} if prefix == "model." else set()
    assert set(checkpoint.names) - extra - {"model.visual.blocks.0.weight"} == names
    up = content[f"{prefix}layers.0.mlp.up_proj.weight"]
    assert torch.equal(checkpoint.tensor("layers.0.mlp.up_proj.weight"), up)
    assert torch.equal(checkpoint.rows("layers.0.mlp.up_proj.weight", 2, 5), up[2:5])
    assert torch.equal(checkpoint.cut("layers.0.mlp.up_proj.weight", 1, 1, 3), up[:, 1:3])
    assert torch.equal(checkpoint.embedding(), content[f"{prefix}embed_tokens.weight"])
    assert torch.equal(checkpoint.head(), content["lm_head.weight"])


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    without = Checkpoint(write(tmp_path / "a", tensors("model.", head=False)))
    flagged = Checkpoint(
        write(tmp_path / "b", tensors("model."), config={"model_type": "llama", "tie_word_embeddings": True})
    )
    for checkpoint in (without, flagged):
        assert torch.equal(checkpoint.head(), checkpoint.embedding())


def test_truncated_file_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", tensors("model."), files=3)
    broken = folder / "model-2-of-3.safetensors"
    broken.write_bytes(broken.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"model-2-of-3\.safetensors.*\n?.*truncated"):
        Checkpoint(folder)


def test_missing_file_and_missing_tensor_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", tensors("model."), files=3)
    (folder / "model-3-of-3.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-3-of-3\.safetensors.*missing"):
        Checkpoint(folder)
    save_file({"other": torch.ones(1)}, folder / "model-3-of-3.safetensors")
    with pytest.raises(ConfigError, match=r"model-3-of-3\.safetensors.*the index says"):
        Checkpoint(folder)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"neither model\.safetensors"):
        Checkpoint(tmp_path / "empty")


def test_misshapen_and_absent_tensors_name_the_file(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write(tmp_path / "m", tensors("model.")))
    checkpoint.expect("embed_tokens.weight", (V, H))
    with pytest.raises(ConfigError, match=r"model\.safetensors.*embed_tokens.*\[11, 4\].*\[12, 4\]"):
        checkpoint.expect("embed_tokens.weight", (V + 1, H))
    with pytest.raises(ConfigError, match=r"no tensor 'norm\.weight'"):
        checkpoint.tensor("norm.weight")
    with pytest.raises(ConfigError, match="has size 11"):
        checkpoint.rows("embed_tokens.weight", 5, 12)
