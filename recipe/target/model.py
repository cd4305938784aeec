"""Building the target's decoder from its shape, without weights, and swapping one rank's sharded layers into it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from recipe.engine.tensor_parallel import (
    ColumnShard,
    GatherShard,
    IdleMixer,
    RowShard,
    SumOverRanks,
    adopt_process_group,
)
from recipe.model_files.shapes import TargetShape
from recipe.target.shard_plan import Heads, RankPlan, ShardPlan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def build_meta_model(
    shape: TargetShape, num_layers: int, final_norm: bool, dtype: torch.dtype, attention: str | None = None
) -> nn.Module:
    """transformers' own decoder (no head) with the first ``num_layers`` layers, all parameters on the meta device.

    ``attention``: transformers' own choice where None. Without ``final_norm`` the norm after the last layer is left
    out: a model trimmed after its deepest tap needs none.
    """
    settings = {key: value for key, value in shape.text_config.items() if key != "model_type"}
    settings["num_hidden_layers"] = num_layers
    if settings.get("layer_types"):
        settings["layer_types"] = list(shape.layer_types[:num_layers])
    settings["use_cache"] = False
    config = AutoConfig.for_model(shape.text_config["model_type"], **settings)
    with torch.device("meta"):
        model = AutoModel.from_config(config, dtype=dtype, attn_implementation=attention)
    if not final_norm:
        model.norm = nn.Identity()
    model.to(dtype)  # from_config builds in dtype, but modules may insist on fp32 parameters of their own
    return model.eval().requires_grad_(False)


def parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Parameter name -> shape."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def shard_model(model: nn.Module, shape: TargetShape, plan: ShardPlan, rank: int, group: ProcessGroup | None) -> None:
    """Replaces, in place, the linear layers of a meta model by ``rank``'s shards (still on meta).

    At degree 1 the model stays transformers' own, unchanged.
    """
    if plan.tp == 1:
        return
    adopt_process_group()
    part = plan.ranks[rank]
    for layer in model.layers:
        if hasattr(layer, "linear_attn"):
            _shard_delta_net(layer, shape, part, group)
        else:
            _shard_attention(layer, shape, part, group)
        if hasattr(layer.mlp, "experts"):
            _shard_mixture(layer.mlp, part, group)
        else:
            _shard_mlp(layer.mlp, "mlp", part, group, reduce=True)
        if plan.exact_sums:
            _make_sums_exact(layer, shape, plan, group)
    _choose_experts_implementation(model, plan)


def _make_sums_exact(layer: Any, shape: TargetShape, plan: ShardPlan, group: ProcessGroup | None) -> None:
    """Gathers in place of all-reduces, for the output rows of ``plan``. A mixture's ranks add in float32."""
    outputs = [stop - start for start, stop in (rank.outputs or (0, 0) for rank in plan.ranks)]
    value = shape.linear_value_head_dim or 0
    brought = {
        "o_proj": [rank.attention.count * shape.head_dim for rank in plan.ranks],
        "out_proj": [rank.delta.count * value for rank in plan.ranks if rank.delta is not None],
        "down_proj": [rank.mlp[1] - rank.mlp[0] for rank in plan.ranks],
    }
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, ColumnShard):
                child.fused_bias = True
            if isinstance(child, RowShard) and child.reduce:  # its weight is cut by output rows already
                setattr(parent, name, GatherShard(child.weight, child.bias, group, brought[name], outputs))
        for hook in parent._forward_hooks.values():
            if isinstance(hook, SumOverRanks):
                hook.in_float32 = True


def _shard_mlp(module: nn.Module, prefix: str, part: RankPlan, group: ProcessGroup | None, reduce: bool) -> None:
    for name in ("gate_proj", "up_proj"):
        _column(module, prefix, name, part, group)
    module.down_proj = _row(module, prefix, "down_proj", part, group, reduce)


def _shard_mixture(block: Any, part: RankPlan, group: ProcessGroup | None) -> None:
    """The router stays whole; experts and shared expert give partial sums, which are added before one all-reduce."""
    for name in ("gate_up_proj", "down_proj"):
        full, cut = getattr(block.experts, name), part.cuts[f"mlp.experts.{name}"]
        local = [cut.size if dim == cut.dim else size for dim, size in enumerate(full.shape)]
        setattr(block.experts, name, _meta_parameter(tuple(local), full.dtype))
    block.experts.intermediate_dim = part.cuts["mlp.experts.down_proj"].size
    if hasattr(block, "shared_expert"):
        _shard_mlp(block.shared_expert, "mlp.shared_expert", part, group, reduce=False)
    block.register_forward_hook(SumOverRanks(group))


def _choose_experts_implementation(model: nn.Module, plan: ShardPlan) -> None:
    """Grouped matrix products want rows of whole 16 bytes; experts cut finer than that are computed one by one."""
    sizes = [rank.experts[1] - rank.experts[0] for rank in plan.ranks if rank.experts is not None]
    itemsize = next(model.parameters()).element_size()
    if any(size == 0 or size * itemsize % 16 for size in sizes):
        model.config._experts_implementation = "eager"


def _shard_attention(layer: Any, shape: TargetShape, part: RankPlan, group: ProcessGroup | None) -> None:
    module, heads = layer.self_attn, part.attention
    output = _row(module, "self_attn", "o_proj", part, group)
    if heads.count == 0:
        layer.self_attn = IdleMixer(output, "o_proj", returns_tuple=True)
        return
    select = None if heads.even else torch.tensor(heads.reads, device="cpu")
    _column(module, "self_attn", "q_proj", part, group)
    for name in ("k_proj", "v_proj"):
        _column(module, "self_attn", name, part, group, select, shape.head_dim)
    module.o_proj = output
    module.num_key_value_groups = heads.count // heads.used


def _shard_delta_net(layer: Any, shape: TargetShape, part: RankPlan, group: ProcessGroup | None) -> None:
    module, heads = layer.linear_attn, part.delta
    assert heads is not None, "a DeltaNet layer needs a plan with DeltaNet heads"
    output = _row(module, "linear_attn", "out_proj", part, group)
    if heads.count == 0:
        layer.linear_attn = IdleMixer(output, "out_proj", returns_tuple=False)
        return
    unit = math.gcd(module.head_k_dim, module.head_v_dim)
    select = None if heads.even else _regroup_qkv(heads, module.head_k_dim // unit, module.head_v_dim // unit)
    _column(module, "linear_attn", "in_proj_qkv", part, group, select, unit)
    for name in ("in_proj_z", "in_proj_b", "in_proj_a"):
        _column(module, "linear_attn", name, part, group)
    module.out_proj = output
    module.num_v_heads, module.num_k_heads = heads.count, heads.used
    module.key_dim, module.value_dim = heads.used * module.head_k_dim, heads.count * module.head_v_dim
    module.conv_dim = 2 * module.key_dim + module.value_dim
    old, dtype = module.conv1d, module.conv1d.weight.dtype
    module.conv1d = nn.Conv1d(
        module.conv_dim,
        module.conv_dim,
        old.kernel_size,
        padding=old.padding,
        groups=module.conv_dim,
        bias=old.bias is not None,
        device="meta",
        dtype=dtype,
    ).requires_grad_(False)
    for name in ("A_log", "dt_bias"):
        full = getattr(module, name)
        setattr(module, name, _meta_parameter((heads.count,), full.dtype))


def _regroup_qkv(heads: Heads, key_units: int, value_units: int) -> torch.Tensor:
    """Output units of in_proj_qkv ([queries | keys | values], each key head once) with one key head per value head."""
    block = heads.shared_count * key_units
    keys = [head * key_units + i for head in heads.reads for i in range(key_units)]
    values = [2 * block + i for i in range(heads.count * value_units)]
    return torch.tensor([*keys, *(block + i for i in keys), *values], device="cpu")


def _meta_parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def _column(
    parent: nn.Module,
    prefix: str,
    name: str,
    part: RankPlan,
    group: ProcessGroup | None,
    select: torch.Tensor | None = None,
    unit: int = 1,
) -> None:
    full = parent.get_submodule(name)
    rows = part.cuts[f"{prefix}.{name}.weight"].size
    weight = _meta_parameter((rows, full.weight.shape[1]), full.weight.dtype)
    bias = None if full.bias is None else _meta_parameter((rows,), full.bias.dtype)
    setattr(parent, name, ColumnShard(weight, bias, group, select, unit))


def _row(
    parent: nn.Module, prefix: str, name: str, part: RankPlan, group: ProcessGroup | None, reduce: bool = True
) -> RowShard:
    full = parent.get_submodule(name)
    cut, size = part.cuts[f"{prefix}.{name}.weight"], list(full.weight.shape)
    size[cut.dim] = cut.size
    weight = _meta_parameter(tuple(size), full.weight.dtype)
    bias = None if full.bias is None else _meta_parameter((size[0],), full.bias.dtype)
    return RowShard(weight, bias, group, reduce)
