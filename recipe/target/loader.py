"""Loading one rank's part of the target: streamed from safetensors, wrapped by DeepSpeed inference, then asserted."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recipe.engine.tensor_parallel import inference_engine
from recipe.errors import ConfigError, RunError
from recipe.model_files.shapes import TargetShape
from recipe.model_files.weights import Checkpoint
from recipe.target.cpu_kernels import use_torch_kernels_on_cpu
from recipe.target.model import build_meta_model, parameter_shapes, shard_model
from recipe.target.pieces import Piece
from recipe.target.shard_plan import ShardPlan
from recipe.target.verify import check_pieces, pieces_of_rank

if TYPE_CHECKING:
    from deepspeed import InferenceEngine
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class LoadProgress:
    """How far a load is: whole layers done, bytes of this rank's share read and in all, seconds since the start."""

    layers_done: int
    layers: int
    bytes_read: int
    seconds: float
    bytes_in_all: int

    @property
    def gb_per_s(self) -> float:
        return self.bytes_read / 1e9 / max(self.seconds, 1e-9)

    @property
    def bar(self) -> str:
        """ "[#####-----] 12.3 of 26.9 GB, 3.1 GB/s": 20 places, this rank's share."""
        filled = 20 * self.bytes_read // max(self.bytes_in_all, 1)
        sizes = f"{self.bytes_read / 1e9:.1f} of {self.bytes_in_all / 1e9:.1f} GB"
        return f"[{'#' * filled}{'-' * (20 - filled)}] {sizes}, {self.gb_per_s:.1f} GB/s"


def load_target(
    path: str | Path | Checkpoint,
    shape: TargetShape,
    plan: ShardPlan,
    tp_rank: int,
    group: ProcessGroup | None,
    device: str | torch.device,
    dtype: torch.dtype,
    taps: Sequence[int],
    need_last_hidden: bool,
    progress: Callable[[LoadProgress], None] | None = None,
    revision: str | None = None,
) -> InferenceEngine:
    """This rank's target, ready for TapCapture: DeepSpeed's inference engine (``.module`` is transformers' decoder).

    ``group``: the tensor-parallel group of ``plan.tp`` ranks, None at degree 1. ``taps``: 0-based layer ids; without
    ``need_last_hidden`` the layers after the deepest tap and the final norm are neither built nor read.
    All ranks of the default world must call this together (see ``inference_engine``). Weights go slice by slice to
    ``device``; no more host memory is used than the rank's share and the pages of one file.

    Raises ConfigError for the user's mistakes (taps beyond the target, a broken checkpoint file by name), RunError when
    the plan or the loaded model is not what it has to be.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # DeepSpeed moves the module to the current device
    else:
        use_torch_kernels_on_cpu()
    _check_arguments(shape, plan, tp_rank, group, taps, need_last_hidden)
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path, revision)
    depth = shape.num_layers if need_last_hidden else max(taps) + 1
    model = build_meta_model(shape, depth, need_last_hidden, dtype)
    full_shapes = parameter_shapes(model)
    shard_model(model, shape, plan, tp_rank, group)
    load_parameters(model, full_shapes, checkpoint, plan, tp_rank, device, progress)
    rebuild_rotary(model, device)  # its buffers are on meta; the engine moves the module
    engine = inference_engine(model, dtype, group)
    rebuild_rotary(model, device)  # the engine has rounded inv_freq to dtype
    check_loaded(model, full_shapes, plan, tp_rank, device, dtype)
    return engine


def load_parameters(
    model: nn.Module,
    full_shapes: dict[str, tuple[int, ...]],
    checkpoint: Checkpoint,
    plan: ShardPlan,
    rank: int,
    device: torch.device,
    progress: Callable[[LoadProgress], None] | None = None,
) -> None:
    """Fills every (meta) parameter of a sharded model with this rank's part, file after file, on ``device``."""
    start, bytes_read = time.monotonic(), 0
    parameters = dict(model.named_parameters())
    pieces = pieces_of_rank({name: full_shapes[name] for name in parameters}, plan, rank, checkpoint)
    check_pieces(checkpoint, pieces)  # all of them before the first is read
    shapes = {name: plan.local_shape(rank, name, full_shapes[name]) for name in parameters}
    in_all = sum(math.prod(local) * parameters[name].dtype.itemsize for name, local in shapes.items())
    left = Counter(_layer_of(piece.parameter) for piece in pieces)
    layers = sum(layer >= 0 for layer in left)
    for piece in pieces:
        name = piece.parameter
        if parameters[name].is_meta:
            value = torch.empty(shapes[name], dtype=parameters[name].dtype, device=device)
            parameters[name] = nn.Parameter(value, requires_grad=False)
            module_name, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module_name), attribute, parameters[name])
        place = parameters[name].data[piece.place]
        _read_piece(checkpoint, piece, place)
        bytes_read += place.nbytes
        left[_layer_of(name)] -= 1
        if progress is not None and left[_layer_of(name)] == 0:
            done = sum(layer >= 0 and count == 0 for layer, count in left.items())
            progress(LoadProgress(done, layers, bytes_read, time.monotonic() - start, in_all))
    checkpoint.close()


def rebuild_rotary(model: Any, device: torch.device) -> None:
    """A fresh rotary embedding, with its fp32 ``inv_freq``, in place of one that was built on meta or rounded; and
    Gemma's fp32 factor of the embedding likewise.
    """
    model.rotary_emb = type(model.rotary_emb)(config=model.config).to(device)
    scale = getattr(model.embed_tokens, "scalar_embed_scale", None)
    if scale is not None:
        model.embed_tokens.embed_scale = torch.tensor(scale, device=device)


def check_loaded(
    model: Any,
    full_shapes: dict[str, tuple[int, ...]],
    plan: ShardPlan,
    rank: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Asserts what was loaded: names, local shapes, parameter bytes, device, dtype, head counts, fp32 ``inv_freq``.

    Raises RunError that names the parameter.
    """
    parameters = dict(model.named_parameters())
    idle = {name for name in full_shapes if name not in parameters}
    if parameters.keys() - full_shapes.keys() or any(not _may_be_absent(plan, rank, name) for name in idle):
        raise RunError(f"sharding changed the parameter names: missing {sorted(idle)[:3]}")
    expected_bytes = 0
    for name, parameter in parameters.items():
        local = plan.local_shape(rank, name, full_shapes[name])
        if tuple(parameter.shape) != local:
            raise RunError(f"rank {rank}: {name} is {tuple(parameter.shape)}, the shard plan says {local}")
        if parameter.device.type != device.type or parameter.dtype != dtype:
            raise RunError(f"rank {rank}: {name} is {parameter.dtype} on {parameter.device}, not {dtype} on {device}")
        expected_bytes += torch.Size(local).numel() * dtype.itemsize
    held = sum(parameter.nbytes for parameter in parameters.values())
    if held != expected_bytes:
        raise RunError(f"rank {rank} holds {held} bytes of parameters, the shard plan says {expected_bytes}")
    _check_heads(model, plan, rank)
    for name, buffer in model.named_buffers():
        if buffer.device.type != device.type or (name.endswith("inv_freq") and buffer.dtype != torch.float32):
            raise RunError(f"rank {rank}: buffer {name} is {buffer.dtype} on {buffer.device}")


def _check_arguments(
    shape: TargetShape,
    plan: ShardPlan,
    rank: int,
    group: ProcessGroup | None,
    taps: Sequence[int],
    need_last_hidden: bool,
) -> None:
    beyond = [tap for tap in taps if not 0 <= tap < shape.num_layers]
    if beyond:
        rule = f"the target has layers 0 to {shape.num_layers - 1}"
        raise ConfigError("dflash.target.target_layer_ids", list(taps), rule, "name layers inside the target")
    if not taps and not need_last_hidden:
        raise ConfigError("dflash.target.target_layer_ids", [], "nothing to capture", "name at least one tap")
    size = 1 if group is None else group.size()
    if size != plan.tp or not 0 <= rank < plan.tp or len(plan.ranks) != plan.tp:
        raise RunError(f"rank {rank} of a group of {size} cannot follow a shard plan for tp={plan.tp}")
    plan.verify(shape)


def _layer_of(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("layers.") else -1


def _read_piece(checkpoint: Checkpoint, piece: Piece, place: torch.Tensor) -> None:
    """Straight into ``place``, a view of this rank's parameter on its device."""
    if piece.cut is None:
        _copy(checkpoint.tensor(piece.source, place.device), place, piece)
        return
    offset = 0
    for start, stop in piece.cut.ranges:
        value = checkpoint.cut(piece.source, piece.cut.dim, start, stop, place.device)
        _copy(value, place.narrow(piece.cut.dim, offset, stop - start), piece)
        offset += stop - start


def _copy(value: torch.Tensor, place: torch.Tensor, piece: Piece) -> None:
    if value.shape != place.shape:  # copy_ would repeat it
        raise RunError(f"{piece.source}: {list(value.shape)} is read for {list(place.shape)} of {piece.parameter}")
    place.copy_(value)


def _may_be_absent(plan: ShardPlan, rank: int, name: str) -> bool:
    """A rank without any head of a mixer keeps nothing of it but its output projection."""
    part = plan.ranks[rank]
    no_attention = ".self_attn." in name and part.attention.count == 0
    return no_attention or (".linear_attn." in name and part.delta is not None and part.delta.count == 0)


def _check_heads(model: Any, plan: ShardPlan, rank: int) -> None:
    part = plan.ranks[rank]
    for index, layer in enumerate(model.layers):
        experts = getattr(layer.mlp, "experts", None)
        if experts is not None and part.experts is not None:
            columns = part.experts[1] - part.experts[0]
            if (experts.intermediate_dim, experts.down_proj.shape[-1]) != (columns, columns):
                raise RunError(f"rank {rank}: layer {index} has experts of {experts.intermediate_dim} columns")
        attention, delta = getattr(layer, "self_attn", None), getattr(layer, "linear_attn", None)
        expected: tuple[int, ...]
        found: tuple[int, ...]
        if part.attention.count and attention is not None:
            expected, found = (part.attention.count // part.attention.used,), (attention.num_key_value_groups,)
        elif delta is not None and part.delta is not None and part.delta.count:
            expected = (part.delta.count, part.delta.used, delta.conv1d.weight.shape[0])
            found = (delta.num_v_heads, delta.num_k_heads, 2 * delta.key_dim + delta.value_dim)
        else:
            continue
        if expected != found:
            raise RunError(f"rank {rank}: layer {index} has head counts {found}, the shard plan says {expected}")
