"""Rows of the plan for a type without a shard plan: what DeepSpeed's AutoTP would hold if it cut as it means to.

AutoTP cuts by whole key/value heads and shares MLP columns evenly; it cuts no experts. Whether it does so for this type
is tried before a launch (`stock_check`) and checked by the ranks at their start; these rows are estimates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape
from recipe.target.plan_cost import PlanRow
from recipe.target.shard_plan import split_even


def stock_parameters(shape: TargetShape) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of transformers' decoder of this type, built without weights. ConfigError when it cannot be."""
    from recipe.target.cpu_kernels import use_torch_kernels_on_cpu

    use_torch_kernels_on_cpu(force=True)
    import torch

    from recipe.target.model import build_meta_model, parameter_shapes

    try:
        return parameter_shapes(build_meta_model(shape, shape.num_layers, True, torch.bfloat16))
    except Exception as error:  # whatever transformers makes of a config.json that is not one of its own
        rule = f"transformers cannot build a model from it: {type(error).__name__}: {str(error).splitlines()[:1]}"
        raise ConfigError("model_type", shape.model_type, rule, "use a model type that transformers knows") from error


def stock_table(
    shape: TargetShape, degrees: Sequence[int], dtype_bytes: int, depth: int, rates: tuple[float, float]
) -> list[PlanRow]:
    """One row per degree at which every rank gets a key/value head. ``rates``: TFLOP/s and GB/s, as in `plan_table`.

    Of layers after the first ``depth`` nothing is counted.
    """
    parameters = stock_parameters(shape)
    layers = [size for name, size in parameters.items() if _layer(name) is not None and (_layer(name) or 0) < depth]
    outside = sum(_count(size) for name, size in parameters.items() if _layer(name) is None)
    held = sum(map(_count, layers))
    experts = int(shape.text_config.get("num_local_experts") or shape.text_config.get("num_experts") or 0)
    per_token = int(shape.text_config.get("num_experts_per_tok") or experts)
    work = sum(_count(size) * (per_token / experts if len(size) == 3 and experts else 1) for size in layers if size[1:])
    return list(_rows(shape, degrees, dtype_bytes, depth, rates, held, outside, work))


def _rows(
    shape: TargetShape,
    degrees: Sequence[int],
    dtype_bytes: int,
    depth: int,
    rates: tuple[float, float],
    held: int,
    outside: int,
    work: float,
) -> Iterator[PlanRow]:
    group = shape.num_attention_heads // shape.num_key_value_heads
    for tp in degrees:
        if tp > shape.num_key_value_heads:
            return
        kv = [stop - start for start, stop in split_even(shape.num_key_value_heads, tp)]
        share = [heads / shape.num_key_value_heads for heads in kv]  # AutoTP shares MLP columns alike
        sent = round(4 * depth * shape.hidden_size * dtype_bytes * (tp - 1) / tp)
        yield PlanRow(
            tp=tp,
            efficiency=1 / tp / max(share),
            rank_bytes=[round(outside + held * part) * dtype_bytes for part in share],
            heads=[heads * group for heads in kv],
            kv_heads=kv,
            value_heads=[],
            key_heads=[],
            mlp_columns=[round(shape.intermediate_size * part) for part in share],
            flop_share=share,
            all_reduce_bytes=sent,
            tokens_per_s=1 / (2 * work * max(share) / (rates[0] * 1e12) + sent / (rates[1] * 1e9)),
        )


def _layer(name: str) -> int | None:
    """The number in "layers.3.mlp.…" (or h.3, blocks.3), None outside the layers."""
    first, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if first in ("layers", "h", "blocks") and number.isdigit() else None


def _count(size: Sequence[int]) -> int:
    total = 1
    for length in size:
        total *= length
    return total
