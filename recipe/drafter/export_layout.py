"""Writing a drafter in the z-lab layout that the reference client, vLLM and SGLang load, and reading one strictly."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from recipe.drafter.config import ARCHITECTURE, DrafterConfig
from recipe.errors import ConfigError, RunError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
#: The releases whose reading of our exports is tested (docs/servers.md), and that the printed commands are for.
VERSIONS = {"vllm": "0.34.0", "sglang": "0.5.23", "speculators": "0.9.0"}
WEIGHTS, CONFIG = "model.safetensors", "config.json"
Tensors = dict[str, torch.Tensor]


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the drafter by z-lab name: 3 + 11 for each layer (58 for five), biases only if configured."""
    h, d, f = config.hidden_size, config.head_dim, config.intermediate_size
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(config.target_layer_ids) * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for layer in range(config.num_hidden_layers):
        at, mlp = f"layers.{layer}.self_attn.", f"layers.{layer}.mlp."
        for name, rows, columns in (("q", q, h), ("k", kv, h), ("v", kv, h), ("o", h, q)):
            shapes[f"{at}{name}_proj.weight"] = (rows, columns)
            if config.attention_bias:
                shapes[f"{at}{name}_proj.bias"] = (rows,)
        shapes |= {f"{at}q_norm.weight": (d,), f"{at}k_norm.weight": (d,)}
        shapes |= {f"{mlp}gate_proj.weight": (f, h), f"{mlp}up_proj.weight": (f, h), f"{mlp}down_proj.weight": (h, f)}
        shapes[f"layers.{layer}.input_layernorm.weight"] = (h,)
        shapes[f"layers.{layer}.post_attention_layernorm.weight"] = (h,)
    return shapes


def check_tensors(config: DrafterConfig, tensors: Mapping[str, torch.Tensor], source: str) -> None:
    """ConfigError unless ``tensors`` are exactly the drafter's, by name and shape."""
    wanted = tensor_shapes(config)
    missing, surplus = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    wrong = [f"{n} {tuple(tensors[n].shape)} instead of {s}" for n, s in wanted.items()
             if n in tensors and tuple(tensors[n].shape) != s]  # fmt: skip
    for kind, names in (("lacks", missing), ("has unknown", surplus), ("has misshapen", wrong)):
        if names:
            rule = f"the drafter {kind} {len(names)} tensors, the first: {names[0]}"
            raise ConfigError(source, names[0], rule, "config.json and model.safetensors must be of the same export")


def refuse_occupied(out_dir: Path) -> None:
    """ConfigError unless ``out_dir`` is free, empty, or an earlier export: what is there is going to be replaced."""
    fix = "choose another folder"
    if out_dir.is_file():
        raise ConfigError("--output", str(out_dir), "is a file", fix)
    if not out_dir.exists():
        return
    names = {path.name for path in out_dir.iterdir()}
    ours = names <= {CONFIG, WEIGHTS} and (CONFIG not in names or _is_drafter(out_dir / CONFIG))
    if not ours:
        raise ConfigError("--output", str(out_dir), "the folder exists and is no export", fix)


def _is_drafter(path: Path) -> bool:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    if not isinstance(data, dict):
        return False
    return data.get("architectures") == [ARCHITECTURE] or data.get("speculators_model_type") == "dflash"


def write_folder(out_dir: Path, config: Mapping[str, Any], tensors: Tensors, verify: Callable[[Path], None]) -> Path:
    """Write into a hidden neighbour of ``out_dir``, ``verify`` it there, and only then give it its name."""
    out_dir = Path(out_dir)
    refuse_occupied(out_dir)
    staging = out_dir.parent / f".{out_dir.name}.{os.getpid()}.tmp"
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
    except OSError as error:
        rule = f"cannot be made ({error.strerror})"
        raise ConfigError("--output", str(out_dir), rule, "choose a folder that can be written") from None
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, staging / WEIGHTS, {"format": "pt"})
        (staging / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        # safetensors writes 0600; a server under another account must be able to read what its folder lets it read.
        (staging / WEIGHTS).chmod((staging / CONFIG).stat().st_mode & 0o777)
        verify(staging)
        if out_dir.exists():
            refuse_occupied(out_dir)
            shutil.rmtree(out_dir)
        staging.rename(out_dir)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out_dir


def export_hf(state_dict: Mapping[str, torch.Tensor], config: DrafterConfig, out_dir: Path, dtype: str) -> Path:
    """Write the z-lab layout; read back before it gets its name: every tensor must be there and equal, bit for bit.

    ``dtype``: bfloat16 or float32, of every tensor and in the config. Raises ConfigError for tensors that do not fit.
    """
    check_tensors(config, state_dict, "export")
    tensors = {name: tensor.detach().to("cpu", DTYPES[dtype]) for name, tensor in state_dict.items()}
    stored = config.with_dtype(dtype)
    written = stored.to_dict()
    # The layout is said, not implied: the anchor slot predicts nothing (speculators' name for the same question).
    written["dflash_config"]["sample_from_anchor"] = False

    def verify(folder: Path) -> None:
        read_config, read = load_export(folder)
        if read_config != stored:
            raise RunError(f"the exported config does not read back: {read_config} instead of {stored}")
        for name, tensor in tensors.items():
            if read[name].dtype != tensor.dtype or not torch.equal(read[name], tensor):
                raise RunError(f"the exported tensor {name} does not read back equal")

    return write_folder(Path(out_dir), written, tensors, verify)


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of an export folder. ConfigError when it is missing or no JSON object."""
    path = Path(folder) / CONFIG
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("export", str(folder), f"config.json cannot be read ({error})", "name an export") from None
    if not isinstance(data, dict):
        raise ConfigError("export", str(path), "is not a JSON object", "name an export folder")
    return data


def read_tensors(folder: Path) -> Tensors:
    """The tensors of the folder's safetensors files. ConfigError when there are none, or one is damaged."""
    tensors: Tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")) or [Path(folder) / WEIGHTS]:
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            rule = f"{path.name} cannot be read ({error})"
            raise ConfigError("export", str(folder), rule, "export the checkpoint again") from None
    return tensors


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """ConfigError about ``path`` when reading the values of a config.json trips over one of them."""
    try:
        yield
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError, ZeroDivisionError) as error:
        rule = f"a value in it is none that a drafter can have ({type(error).__name__}: {str(error)[:150]})"
        raise ConfigError("config.json", str(path), rule, "mend it, or export the checkpoint again") from None


def load_export(folder: Path) -> tuple[DrafterConfig, Tensors]:
    """A drafter in the z-lab layout or in speculators': nothing is guessed. ConfigError names what is odd."""
    data = read_config(folder)
    architectures = data.get("architectures")
    with understood(Path(folder) / CONFIG):
        # Our export names vLLM's class; what speculators saves itself names its own, which is called as z-lab's is.
        if data.get("speculators_model_type") == "dflash":
            from recipe.drafter.export_speculators import from_speculators

            config, tensors = from_speculators(data, read_tensors(folder))
        elif architectures == [ARCHITECTURE]:
            inner = data.get("dflash_config") or {}
            refuse_shifted(inner.get("sample_from_anchor", data.get("sample_from_anchor")))
            if "target_layer_ids" not in inner and "target_layer_ids" not in data:
                rule = "the export does not say which layers it taps, and a guess would fit by shape and be wrong"
                raise ConfigError("dflash_config.target_layer_ids", None, rule, "add the trainer's ids to config.json")
            config, tensors = DrafterConfig.from_dict(data), read_tensors(folder)
        else:
            rule = f"only {ARCHITECTURE} and DFlashSpeculator are known"
            raise ConfigError("architectures", architectures, rule, "export with a known layout")
        if not 2 <= config.block_size <= config.max_position_embeddings:
            rule = f"a block is the anchor and at least one draft, within {config.max_position_embeddings} positions"
            raise ConfigError("block_size", config.block_size, rule, "write the block size of the training")
        check_tensors(config, tensors, str(folder))
    return config, tensors


def refuse_shifted(sample_from_anchor: object) -> None:
    """ConfigError unless the anchor slot is said, or silently taken, to predict nothing."""
    if sample_from_anchor not in (None, False):
        rule = "a block layout in which the anchor slot predicts too is not decoded here: every draft would be shifted"
        raise ConfigError("sample_from_anchor", sample_from_anchor, rule, "use a drafter with unshifted labels")
