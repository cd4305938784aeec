"""A checkpoint of any known shape with random weights: real sharded safetensors files, made on a GPU if there is one.

Used by the target benchmark: 51 GB of Qwen3.6-27B's text model are written in seconds to a tmpfs.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from recipe.model_files.shapes import TargetShape
from recipe.target.model import build_meta_model, parameter_shapes

PREFIX = "model.language_model."  # where a vision-language checkpoint keeps its text model


def random_parameter(name: str, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """One parameter as a trained model might hold it: matrices of std 1/sqrt(inputs), gains near one, decays spread."""
    device = generator.device
    if name.endswith("A_log"):
        return torch.empty(shape, device=device).uniform_(0.5, 16, generator=generator).log().to(dtype)
    noise = torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)
    if len(shape) > 1:
        inputs = shape[-1]  # of a convolution and of one expert too
        return noise.mul_(0.02 if "embed" in name else 0.5 * inputs**-0.5)
    # Qwen3.5 stores its norms' gains as offsets from one; only the gated norm, dt_bias and other models hold the gain
    return noise.mul_(0.1).add_(1.0 if name.endswith(("linear_attn.norm.weight", "dt_bias")) else 0.0)


def write_checkpoint(
    folder: Path, shape: TargetShape, dtype: torch.dtype, device: str, layers_per_file: int = 4, threads: int = 8
) -> int:
    """config.json, index and shards of ``shape`` below ``folder``; returns the bytes of weights. No head is written."""
    folder.mkdir(parents=True, exist_ok=True)
    model = build_meta_model(shape, shape.num_layers, True, dtype)
    groups: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, size in parameter_shapes(model).items():
        layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
        groups.setdefault(layer // layers_per_file, {})[name] = size
    files = {group: f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i, group in enumerate(groups)}

    def write(group: int) -> int:
        generator = torch.Generator(device).manual_seed(1000 + group)
        tensors = {PREFIX + n: random_parameter(n, s, generator, dtype).cpu() for n, s in groups[group].items()}
        save_file(tensors, str(folder / files[group]), metadata={"format": "pt"})
        return sum(tensor.nbytes for tensor in tensors.values())

    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(write, groups))
    weight_map = {PREFIX + name: files[group] for group, names in groups.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(shape.text_config))
    return total
