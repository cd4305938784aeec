"""Damage of the same size, another format, another target at the same path: nothing of it trains on in silence."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import shutil
import struct
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipe.model_files.fingerprint import fingerprint
from recipe.training import integrity, to_disk
from recipe.training.integrity import FORMAT, damage, folder_name, seal, sum_of_file

FILES = ("weights.safetensors", "optimizer_00001-of-00001.safetensors", "config.json")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / folder_name(7)
    folder.mkdir()
    for name in FILES[:2]:
        save_file({"a": torch.randn(50, 20), "b": torch.arange(9)}, folder / name)
    (folder / "config.json").write_text('{"block_size": 8}')
    files = {name: [(folder / name).stat().st_size, sum_of_file(folder / name)] for name in FILES}
    state = {"format": FORMAT, "step": 7, "worlds": [{"since": 0, "nodes": 1}], "files": files, "rate_step": 7}
    (folder / "state.json").write_text(json.dumps(seal(state)))
    assert damage(folder) is None
    return folder


def flip(path: Path, rng: random.Random) -> None:
    """One bit, somewhere."""
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


@pytest.mark.parametrize("name", [*FILES, "state.json"])
def test_every_flipped_bit_is_seen(checkpoint: Path, name: str) -> None:
    rng, whole = random.Random(3), (checkpoint / name).read_bytes()
    for _ in range(100):
        flip(checkpoint / name, rng)
        assert name in (damage(checkpoint) or ""), (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(whole)
    assert damage(checkpoint) is None


def test_only_what_is_asked_for_is_read(checkpoint: Path) -> None:
    """An export needs no optimizer state."""
    flip(checkpoint / FILES[1], random.Random(0))
    assert damage(checkpoint, FILES[:1]) is None and "other bytes" in (damage(checkpoint) or "")
    (checkpoint / FILES[1]).write_bytes(b"short")
    assert "has 5 of" in (damage(checkpoint, FILES[:1]) or "")


@pytest.mark.parametrize("version", [2, 3, 5, "x"])
def test_another_format_is_named(checkpoint: Path, version: object) -> None:
    state = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps({**state, "format": version}))
    assert f"has format {version!r}, and this program reads {FORMAT}" in (damage(checkpoint) or "")


def test_a_checkpoint_under_another_name_is_not_that_step(checkpoint: Path) -> None:
    other = checkpoint.rename(checkpoint.with_name(folder_name(8)))
    assert damage(other) == f"{other} holds step 7"


def test_a_file_of_many_pieces_is_summed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte counts, and so does the order of the pieces; the sum is of the bytes alone."""
    monkeypatch.setattr(integrity, "PIECE", 1000)
    monkeypatch.setattr(integrity, "READ", 300)
    path, rng = tmp_path / "file", random.Random(1)
    data = rng.randbytes(4321)
    path.write_bytes(data)
    pieces = [zlib.crc32(data[at : at + 1000]).to_bytes(4, "little") for at in range(0, 4321, 1000)]
    assert sum_of_file(path) == f"{zlib.crc32(b''.join(pieces)):08x}"
    for at in range(0, 4321, 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        assert sum_of_file(path) != f"{zlib.crc32(b''.join(pieces)):08x}"
    path.write_bytes(data[1000:2000] + data[:1000] + data[2000:])
    assert sum_of_file(path) != f"{zlib.crc32(b''.join(pieces)):08x}"


def test_the_seal_is_of_what_json_keeps(tmp_path: Path) -> None:
    """Keys that are numbers become text, and sort otherwise."""
    folder = tmp_path / folder_name(1)
    folder.mkdir()
    state = {"format": FORMAT, "step": 1, "files": {}, "engine": {9: 0.1, 10: float("inf"), 100: None}}
    (folder / "state.json").write_text(json.dumps(seal(state), indent=2))
    assert damage(folder) is None


def test_a_large_file_reaches_the_disk_in_pieces_that_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told as they come; where pieces are not supported the whole is synced, and an error is one."""
    path, ticks, synced = tmp_path / "file", [], []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(len(ticks)))
    path.write_bytes(bytes(300))
    monkeypatch.setattr(to_disk, "PIECE", 128)
    to_disk.sync_file(path, lambda: ticks.append(1))
    assert len(ticks) == 3 and synced == [3]
    for number, fails in ((errno.EINVAL, False), (errno.EIO, True)):
        monkeypatch.setattr(to_disk, "_sync_range", lambda *_, number=number: (ctypes.set_errno(number), -1)[1])
        if fails:
            with pytest.raises(OSError, match="file") as error:
                to_disk.sync_file(path, lambda: ticks.append(1))
            assert error.value.errno == number
        else:
            to_disk.sync_file(path, lambda: ticks.append(1))
    assert len(ticks) == 3 and synced == [3, 3]


# -- the target -------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 4}')
    generator = torch.Generator().manual_seed(0)
    for part in (1, 2):
        tensors = {f"layers.{i}.weight": torch.randn(64, 64, generator=generator) for i in range(part, part + 3)}
        save_file(tensors, folder / f"model-{part}.safetensors", metadata={"format": "pt"})
    return folder


def test_a_copy_is_the_same_target_and_a_fine_tune_is_not(model: Path, tmp_path: Path) -> None:
    known = fingerprint(model)
    copy = Path(shutil.copytree(model, tmp_path / "elsewhere"))
    assert fingerprint(copy) == known
    path = copy / "model-2.safetensors"
    tensors = load_file(path)
    tensors["layers.3.weight"] += 1e-3 * torch.randn(64, 64)  # a step of training in one layer: same names, same sizes
    save_file(tensors, path, metadata={"format": "pt"})
    assert path.stat().st_size == (model / "model-2.safetensors").stat().st_size
    assert fingerprint(copy) != known


def test_another_config_is_another_target(model: Path) -> None:
    known = fingerprint(model)
    (model / "config.json").write_text('{"hidden_size": 5}')
    assert fingerprint(model) != known


def test_what_is_no_safetensors_file_is_an_error(model: Path) -> None:
    (model / "model-1.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + bytes(100))
    with pytest.raises(ValueError, match="is no safetensors file"):
        fingerprint(model)
    for header in (b"[]", b'{"a": 1}', b'{"a": {}}', b"{"):
        (model / "model-1.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
        with pytest.raises(ValueError, match="is no safetensors file"):
            fingerprint(model)
