"""Reading tensors, or slices of them, of a safetensors folder, straight to a device."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape, model_folder

PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "model.",
    "transformer.",
    "gpt_neox.",
    "model.decoder.",
    "",
)
HEADS = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.language_model.lm_head.weight",
    "embed_out.weight",
)
FLOATS = ("BF16", "F16", "F32", "F64")
EMBEDDING = "embed_tokens.weight"
EMBEDDINGS = (EMBEDDING, "embed_in.weight", "wte.weight", "word_embeddings.weight")
FIX = "fetch the model again, or point dflash.target.path at a complete folder"


class Checkpoint:
    """The text model inside a safetensors folder (single file or sharded).

    Names are those of the bare text model ("embed_tokens.weight", "layers.0.…", "norm.weight") plus "lm_head.weight";
    the checkpoint's own prefix is found once. Vision and multi-token-prediction tensors are not listed and never read.
    Opening checks that every file is there, whole, and holds the tensors that the index promises. One file is open at
    a time, so that no more than one file's pages are mapped. Not thread-safe.

    Errors: ConfigError that names the file.
    """

    def __init__(self, path: str | Path, revision: str | None = None) -> None:
        self.folder = model_folder(str(path), revision)
        self._open: tuple[Path, str, Any] | None = None
        files = self._files()
        self.prefix = self._find_prefix(files)
        self._keys = {name.removeprefix(self.prefix): name for name in files if name.startswith(self.prefix)}
        if self.prefix == "":
            self._keys = {name: key for name, key in self._keys.items() if not name.startswith(("visual.", "mtp."))}
        head = next((key for key in HEADS if key in files), None)
        if head is not None:
            self._keys["lm_head.weight"] = head
        self._file_of = {name: files[key] for name, key in self._keys.items()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._keys)

    def file_of(self, name: str) -> Path:
        """The file that holds ``name``; ConfigError when no file does."""
        if name not in self._file_of:
            rule = f"the checkpoint has no tensor {name!r} (under the prefix {self.prefix!r})"
            raise ConfigError(str(self.folder), name, rule, FIX)
        return self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name, "cpu").get_shape())

    def dtypes(self) -> dict[str, int]:
        """How many tensors are stored in each dtype, under safetensors' names (BF16, F16, F32, …); headers alone."""
        return dict(Counter(self._slice(name, "cpu").get_dtype() for name in sorted(self._keys, key=self.file_of)))

    def expect(self, name: str, shape: Sequence[int]) -> None:
        """ConfigError that names the file when ``name`` is missing, has another shape, or holds no plain floats.

        Other float types than the run's are fine, they are converted; integers and fp8 would need their scales.
        """
        file, found = self.file_of(name), self.shape(name)
        dtype = str(self._slice(name, "cpu").get_dtype())
        if dtype not in FLOATS:
            rule = f"tensor {name!r} has dtype {dtype}, not one of {', '.join(FLOATS)}; quantised weights are not read"
            raise ConfigError(str(file), dtype, rule, "use the unquantised checkpoint of this model")
        if found != tuple(shape):
            rule = f"tensor {name!r} has shape {list(found)} where config.json implies {list(shape)}"
            raise ConfigError(str(file), list(found), rule, FIX)

    def tensor(self, name: str, device: str | torch.device = "cpu") -> torch.Tensor:
        """The whole tensor, in the checkpoint's dtype."""
        handle = self._handle(self.file_of(name), str(device))
        return self._read(name, lambda: handle.get_tensor(self._keys[name]))

    def cut(self, name: str, dim: int, start: int, stop: int, device: str | torch.device = "cpu") -> torch.Tensor:
        """``tensor[start:stop]`` along ``dim``, reading no other byte than needed, straight to ``device``."""
        piece = self._slice(name, str(device))
        size = piece.get_shape()[dim]
        if not 0 <= start <= stop <= size:
            raise ConfigError(str(self.file_of(name)), [start, stop], f"{name!r} has size {size} in dim {dim}", FIX)
        return self._read(name, lambda: piece[(slice(None),) * dim + (slice(start, stop),)])

    def rows(self, name: str, start: int, stop: int, device: str | torch.device = "cpu") -> torch.Tensor:
        """Rows ``[start, stop)`` of a tensor."""
        return self.cut(name, 0, start, stop, device)

    @property
    def embedding_name(self) -> str:
        return next(name for name in EMBEDDINGS if name in self._keys)

    def embedding(self, device: str | torch.device = "cpu") -> torch.Tensor:
        """Token embedding [V, H]."""
        return self.tensor(self.embedding_name, device)

    @property
    def tied(self) -> bool:
        """True when the head is the embedding: config.json says so, or the checkpoint has no head of its own."""
        return "lm_head.weight" not in self._keys or TargetShape.resolve(str(self.folder)).tie_word_embeddings

    def head(self, device: str | torch.device = "cpu") -> torch.Tensor:
        """Output head [V, H]; the embedding where the two are tied."""
        return self.embedding(device) if self.tied else self.tensor("lm_head.weight", device)

    def close(self) -> None:
        """Unmaps the file that is open."""
        self._open = None

    def _files(self) -> dict[str, Path]:
        """Checkpoint key -> file, every file checked."""
        index_file, single = self.folder / "model.safetensors.index.json", self.folder / "model.safetensors"
        if not index_file.is_file():
            if not single.is_file():
                rule = "there is neither model.safetensors nor model.safetensors.index.json"
                raise ConfigError(str(self.folder), str(self.folder), rule, FIX)
            return dict.fromkeys(self._handle(single, "cpu").keys(), single)
        try:
            weight_map: dict[str, str] = json.loads(index_file.read_text(encoding="utf-8"))["weight_map"]
            if not (isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())):
                raise TypeError("weight_map is no table of file names")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(str(index_file), "weight_map", f"not a safetensors index: {error!r}", FIX) from error
        for name in sorted(set(weight_map.values())):
            held = set(self._handle(self.folder / name, "cpu").keys())
            missing = next((key for key, file in weight_map.items() if file == name and key not in held), None)
            if missing is not None:
                rule = "the index says that this file holds it, and it does not"
                raise ConfigError(str(self.folder / name), missing, rule, FIX)
        return {key: self.folder / file for key, file in weight_map.items()}

    def _find_prefix(self, files: dict[str, Path]) -> str:
        for prefix in PREFIXES:
            if any(prefix + name in files for name in EMBEDDINGS):
                return prefix
        rule = f"no tensor {EMBEDDING!r} under any of the prefixes {list(PREFIXES)}"
        raise ConfigError(str(self.folder), sorted(files)[:3], rule, "use a decoder-only language model")

    def _handle(self, file: Path, device: str) -> Any:
        if self._open is None or self._open[:2] != (file, device):
            self._open = None  # unmap the old one first
            if not file.is_file():
                raise ConfigError(str(file), file.name, "this file of the checkpoint is missing", FIX)
            try:
                self._open = (file, device, safe_open(str(file), framework="pt", device=device))
            except (SafetensorError, OSError) as error:
                rule = f"truncated or not a safetensors file ({error})"
                raise ConfigError(str(file), file.stat().st_size, rule, FIX) from error
        return self._open[2]

    def _slice(self, name: str, device: str) -> Any:
        return self._handle(self.file_of(name), device).get_slice(self._keys[name])

    def _read(self, name: str, read: Any) -> torch.Tensor:
        try:
            tensor: torch.Tensor = read()
        except (SafetensorError, OSError) as error:
            raise ConfigError(str(self.file_of(name)), name, f"cannot be read ({error})", FIX) from error
        return tensor
