"""How much host memory loading takes, in real processes, from a sharded checkpoint of some hundred MB."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoConfig

from recipe.engine.worlds import disable_shm_all_reduce
from recipe.model_files.shapes import TargetShape
from recipe.target.cpu_kernels import use_torch_kernels_on_cpu
from recipe.target.loader import load_target
from recipe.target.model import build_meta_model, parameter_shapes
from recipe.target.plan_cost import rank_parameters
from recipe.target.shard_plan import ShardPlan

TP, LAYERS, FILES = 4, 8, 8
SETTINGS = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": LAYERS, "num_attention_heads": 16}
SETTINGS |= {"num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 128}
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="measures a load to host memory")


def write_checkpoint(folder: Path) -> TargetShape:
    """One layer to a file, in bf16."""
    AutoConfig.for_model("llama", **SETTINGS).save_pretrained(folder)
    shape = TargetShape.resolve(str(folder))
    full = parameter_shapes(build_meta_model(shape, LAYERS, True, torch.bfloat16))
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, size in full.items():
        file = f"model-{name.split('.')[1] if name.startswith('layers.') else 0}.safetensors"
        groups.setdefault(file, {})["model." + name] = torch.full(size, 0.5, dtype=torch.bfloat16)
    for file, tensors in groups.items():
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in groups.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return shape


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def load(rank: int, folder: Path, shape: TargetShape, results: Any) -> None:
    """A rank: how far its resident memory rises above what it had before, at the worst moment of the load. Resident
    counts everything: its own pages, and those of mapped checkpoint files.
    """
    use_torch_kernels_on_cpu()
    disable_shm_all_reduce()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), TP), rank=rank, world_size=TP)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = status_bytes("VmRSS")
    plan = ShardPlan.build(shape, TP)
    engine = load_target(folder, shape, plan, rank, dist.group.WORLD, "cpu", torch.bfloat16, [1], True)
    peak, after = status_bytes("VmHWM") - before, status_bytes("VmRSS") - before
    held = sum(parameter.nbytes for parameter in engine.module.parameters())
    results.put((rank, held, peak, after))
    dist.barrier()


def test_peak_is_the_ranks_share_and_one_file(tmp_path: Path) -> None:
    shape = write_checkpoint(tmp_path)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=load, args=(rank, tmp_path, shape, results)) for rank in range(TP)]
    for process in ranks:
        process.start()
    found = [results.get(timeout=120) for _ in ranks]
    for process in ranks:
        process.join(timeout=30)
        assert process.exitcode == 0
    files = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    plan, largest, whole = ShardPlan.build(shape, TP), max(files), sum(files)
    for rank, held, peak, after in found:
        share = rank_parameters(shape, plan, rank, LAYERS, True) * 2
        assert held == share
        sizes = {"share": share, "peak": peak, "after": after, "file": largest}
        print(f"rank {rank}:", ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in sizes.items()))
        assert share <= peak <= 1.6 * share + largest < whole
