"""What the target benchmark compares with: transformers on the same tensors, and float32 with torch's own kernels."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recipe.model_files.shapes import TargetShape
from recipe.model_files.weights import Checkpoint
from recipe.target.loader import load_parameters, rebuild_rotary
from recipe.target.model import build_meta_model, parameter_shapes, shard_model
from recipe.target.shard_plan import ShardPlan

KERNELS = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is wanted, in float32."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@contextmanager
def torch_kernels() -> Iterator[None]:
    """transformers' Gated DeltaNet on its own torch functions, whatever kernels it has found; put back afterwards."""
    modules = [m for n, m in sys.modules.items() if n.startswith("transformers.models.qwen3_5") and "modeling" in n]
    saved = [(m, name, getattr(m, name)) for m in modules for name in KERNELS if hasattr(m, name)]
    for module, name, function in saved:
        setattr(module, name, getattr(function, "__wrapped__", function))
    try:
        yield
    finally:
        for module, name, function in saved:
            setattr(module, name, function)


def _in_torch(layer: nn.Module) -> nn.Module:
    """A float32 copy of a layer; kernels that transformers bound to the module itself are set to torch's."""
    layer = copy.deepcopy(layer).float()
    for module in layer.modules():
        owner = sys.modules[type(module).__module__]
        for name, default in (("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"), ("causal_conv1d_fn", None)):
            if name in vars(module):
                setattr(module, name, getattr(owner, default) if default else None)
    return layer


def float32_taps(decoder: Any, ids: torch.Tensor, taps: Sequence[int]) -> list[torch.Tensor]:
    """The taps and the last hidden state [n, S, H] of a degree-1 decoder, computed layer by layer in float32."""
    caught: dict[int, torch.Tensor] = {}
    with torch_kernels():
        hidden = decoder.embed_tokens(ids).float()
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        rotary = decoder.rotary_emb(hidden, positions[None].expand(3, -1, -1) if _mrope(decoder) else positions)
        for index, layer in enumerate(decoder.layers):
            output = _in_torch(layer)(hidden, position_embeddings=rotary, attention_mask=None, position_ids=positions)
            hidden = output[0] if isinstance(output, tuple) else output
            caught[index] = hidden
            for old in [key for key in caught if key not in taps]:
                del caught[old]
        return [*(caught[tap] for tap in taps), copy.deepcopy(decoder.norm).float()(hidden)]


def _mrope(decoder: Any) -> bool:
    return hasattr(decoder.rotary_emb, "mrope_section")


@dataclass
class Reference:
    tensors: list[torch.Tensor]
    run: Callable[[torch.Tensor], Any]


def transformers_taps(shape: TargetShape, decoder: Any, ids: torch.Tensor, taps: Sequence[int]) -> Reference:
    """A model that transformers builds itself, holding the very tensors of ``decoder``, asked for its hidden states."""
    model: Any = build_meta_model(shape, shape.num_layers, True, decoder.embed_tokens.weight.dtype)
    model.load_state_dict(decoder.state_dict(), assign=True)
    rebuild_rotary(model, ids.device)

    def run(batch: torch.Tensor) -> Any:
        return model(input_ids=batch, use_cache=False, output_hidden_states=True)

    output = run(ids)
    tensors = [output.hidden_states[tap + 1] for tap in taps]
    return Reference([*tensors, output.last_hidden_state], run)


@dataclass
class Part:
    numbers: dict[str, Any]
    partial: list[torch.Tensor]  # outputs of the two mixers: this rank's summands


def run_alone(rank: Any, plan: ShardPlan, index: int) -> Part:
    """Rank ``index`` of ``plan`` without its group: its mixers' outputs against float32, and the time of its layers."""
    shape, device = rank.shape, rank.device
    depth = next(i for i, kind in enumerate(shape.layer_types) if kind == "full_attention") + 1
    model: Any = build_meta_model(shape, depth, True, rank.dtype)
    full = parameter_shapes(model)
    shard_model(model, shape, plan, index, None)
    load_parameters(model, full, Checkpoint(rank.args.folder), plan, index, device)
    rebuild_rotary(model, device)  # its buffers are on meta
    model.to(device)
    draw = torch.Generator(device).manual_seed(3)
    rows, length = rank.args.check
    hidden = torch.randn(rows, length, shape.hidden_size, generator=draw, device=device).to(rank.dtype)
    delta, attention = model.layers[0].linear_attn, model.layers[depth - 1].self_attn
    positions = torch.arange(length, device=device)[None]
    rotary = model.rotary_emb(hidden, positions[None].expand(3, -1, -1) if _mrope(model) else positions)
    arguments = {"position_embeddings": rotary, "attention_mask": None}
    first = rank.seconds(lambda: delta(hidden))
    found = [delta(hidden), attention(hidden, **arguments)[0]]
    with torch_kernels():
        wide = hidden.float()
        sharp = {"position_embeddings": tuple(x.float() for x in rotary), "attention_mask": None}
        wanted = [_in_torch(delta)(wide), _in_torch(attention)(wide, **sharp)[0]]
    part = plan.ranks[index]
    assert part.delta is not None
    numbers = {
        "value/key heads": [part.delta.count, part.delta.used],
        "query/kv heads": [part.attention.count, part.attention.used],
        "first_call_s": first,
        "linear_attn_to_float32": relative_error(found[0], wanted[0]),
        "self_attn_to_float32": relative_error(found[1], wanted[1]),
        "finite": all(bool(torch.isfinite(tensor).all()) for tensor in found),
        "four_layers_ms": {f"{n}x{s}": _time(rank, model, n, s) for n, s in rank.args.batches},
    }
    return Part(numbers, [tensor.float() for tensor in found])  # in float32: adding them up rounds no more


def _time(rank: Any, model: Any, rows: int, length: int) -> float:
    """Milliseconds of the layers, median of ``repeat``, communication left out."""
    ids = rank.ids(rows, length)

    def work() -> None:
        model(input_ids=ids, attention_mask=None, use_cache=False)

    work()
    passes = sorted(rank.seconds(work) for _ in range(rank.args.repeat))
    return 1e3 * passes[len(passes) // 2]
