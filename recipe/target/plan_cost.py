"""What a shard plan costs: bytes, FLOP, efficiency and all-reduce volume per rank, and which split of the GPUs to take.

FLOP are those of the matrices (2 per parameter and token); attention over long contexts adds a few percent to them.
Speeds are estimates from a TFLOP/s that was given or measured, never a promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from recipe.config import RunConfig
from recipe.model_files.shapes import TargetShape
from recipe.target.architectures import ARCHITECTURES, attention_biases
from recipe.target.shard_plan import ShardPlan

H200_TARGET_TFLOPS = 448.0  # one H200, bf16, eager layers with fla's kernels (docs/performance.md)
H200_DRAFTER_TFLOPS = 440.0  # forward + backward with FlexAttention (docs/performance.md: 437)
H200_ALL_REDUCE_GB_S = 250.0  # sent by each rank: 168 MB in 0.67 ms between two H200 over NVLink (docs/performance.md)


@dataclass(frozen=True)
class PlanRow:
    """One degree. Per-rank lists have ``tp`` entries. ``efficiency``: ideal time / time of the fullest rank of each
    segment (0 to 1; communication not counted), since ranks wait for each other after every mixer and every MLP.

    ``heads``: query heads; ``mlp_columns``: of a dense MLP, or of each expert; ``rank_bytes``: bytes of weights,
    embedding included; ``flop_share``: part of the whole model's matrix FLOP (repeated key heads make their sum exceed
    1); ``all_reduce_bytes``: what a rank sends per token; ``tokens_per_s``: of one target of this degree, compute and
    all-reduce one after the other.
    """

    tp: int
    efficiency: float
    rank_bytes: list[int]
    heads: list[int]
    kv_heads: list[int]
    value_heads: list[int]
    key_heads: list[int]
    mlp_columns: list[int]
    flop_share: list[float]
    all_reduce_bytes: int
    tokens_per_s: float


def plan_table(
    shape: TargetShape,
    degrees: Sequence[int] = range(1, 9),
    dtype_bytes: int = 2,
    taps: Sequence[int] | None = None,
    need_last_hidden: bool = True,
    tflops: float = H200_TARGET_TFLOPS,
    all_reduce_gb_s: float = H200_ALL_REDUCE_GB_S,
    exact_sums: bool = False,
) -> list[PlanRow]:
    """One row per degree. Without ``need_last_hidden`` only the layers up to the deepest of ``taps`` count."""
    depth = shape.num_layers if need_last_hidden or not taps else max(taps) + 1
    speeds = (tflops * 1e12, all_reduce_gb_s * 1e9)
    plans = (ShardPlan.build(shape, tp, exact_sums) for tp in degrees)
    return [_row(shape, plan, depth, dtype_bytes, need_last_hidden, speeds) for plan in plans]


def with_head(rows: Sequence[PlanRow], shape: TargetShape, dtype_bytes: int) -> list[PlanRow]:
    """``rows`` of a target that also decodes during training: its first rank holds the head (a tied one it has)."""
    more = 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size * dtype_bytes
    return [replace(row, rank_bytes=[row.rank_bytes[0] + more, *row.rank_bytes[1:]]) for row in rows]


def layer_matrices(shape: TargetShape, plan: ShardPlan, rank: int) -> dict[str, int]:
    """Matrix parameters that ``rank`` multiplies a token with in one layer: by kind of mixer, in a dense "mlp", and in
    a "mixture" of experts (those that are active, the shared one and the whole router).
    """
    part, hidden, head = plan.ranks[rank], shape.hidden_size, shape.head_dim
    query_width = 3 if ARCHITECTURES[shape.model_type].gated else 2  # query (and gate) in, output back
    back = output_matrices(shape, plan, rank)
    attention = hidden * head * ((query_width - 1) * part.attention.count + 2 * part.attention.shared_count)
    attention += back["o_proj"]
    result = {"full_attention": attention, "mlp": 2 * hidden * (part.mlp[1] - part.mlp[0]) + back["down_proj"]}
    result["sliding_attention"] = attention
    if shape.moe is not None:
        result["mixture"] = _mixture(shape, plan, rank, shape.moe.experts_per_token)
    if part.delta is not None:
        key, value = shape.linear_key_head_dim or 0, shape.linear_value_head_dim or 0
        # value and gate z have one block per value head; b and a one row each
        keys, per_value_head = 2 * key * part.delta.shared_count, 2 * value + 2
        result["linear_attention"] = hidden * (keys + per_value_head * part.delta.count) + back["out_proj"]
    return result


def output_matrices(shape: TargetShape, plan: ShardPlan, rank: int) -> dict[str, int]:
    """Parameters of the projections back to the hidden size: this rank's input columns, or (exact sums) output rows."""
    part, hidden = plan.ranks[rank], shape.hidden_size
    held = {"o_proj": part.attention.count * shape.head_dim, "down_proj": part.mlp[1] - part.mlp[0], "out_proj": 0}
    if part.delta is not None:
        held["out_proj"] = part.delta.count * (shape.linear_value_head_dim or 0)
    if part.outputs is None:
        return {name: hidden * columns for name, columns in held.items()}
    rows = part.outputs[1] - part.outputs[0]
    return {name: rows * features for name, features in projected_features(shape).items()}


def projected_features(shape: TargetShape) -> dict[str, int]:
    """What the projections back to the hidden size read in the whole model."""
    values = (shape.linear_num_value_heads or 0) * (shape.linear_value_head_dim or 0)
    return {
        "o_proj": shape.num_attention_heads * shape.head_dim,
        "out_proj": values,
        "down_proj": shape.intermediate_size,
    }


def sent_features(shape: TargetShape, plan: ShardPlan, layers: Sequence[tuple[str, bool]]) -> float:
    """Features per token that a ring sends in all: a sum costs the hidden state twice (to be added, and the result).

    With exact sums inputs and outputs are gathered; a mixture's sum goes in float32 and comes back in the model's own
    dtype.
    """
    hidden = shape.hidden_size
    if not plan.exact_sums:
        return 4.0 * hidden * len(layers)
    wide, total = projected_features(shape), 0.0
    for kind, sparse in layers:
        total += hidden + wide["out_proj" if kind == "linear_attention" else "o_proj"]
        total += 3.0 * hidden if sparse else hidden + wide["down_proj"]
    return total


def _mixture(shape: TargetShape, plan: ShardPlan, rank: int, experts: int) -> int:
    """Matrix parameters of ``experts`` of a mixture's experts on ``rank``, of its shared expert and of its router."""
    part, moe = plan.ranks[rank], shape.moe
    assert moe is not None and part.experts is not None
    own, shared = part.experts, part.shared_expert or (0, 0)
    router = moe.experts + (1 if moe.shared_intermediate_size else 0)
    return shape.hidden_size * (3 * experts * (own[1] - own[0]) + 3 * (shared[1] - shared[0]) + router)


def rank_parameters(shape: TargetShape, plan: ShardPlan, rank: int, depth: int, final_norm: bool) -> int:
    """All parameters that ``rank`` holds: its matrices, small vectors, and the whole embedding."""
    part, hidden = plan.ranks[rank], shape.hidden_size
    matrices = layer_matrices(shape, plan, rank)
    norms = ARCHITECTURES[shape.model_type].norms * hidden
    total = shape.vocab_size * hidden + (hidden if final_norm else 0)
    for kind, sparse in mixers_and_mixtures(shape, depth):
        total += matrices[kind] + norms
        total += _mixture(shape, plan, rank, shape.moe.experts) if sparse and shape.moe else matrices["mlp"]
        if shape.text_config.get("mlp_bias") and not sparse:
            total += 2 * (part.mlp[1] - part.mlp[0]) + _outputs(shape, plan, rank)
        if kind == "linear_attention":
            total += _delta_vectors(shape, plan, rank)
        else:
            total += _attention_vectors(shape, plan, rank)
    return total


def mixers_and_mixtures(shape: TargetShape, depth: int) -> list[tuple[str, bool]]:
    """Of the first ``depth`` layers: the kind of mixer, and whether the MLP is a mixture of experts."""
    sparse = shape.moe.layers if shape.moe is not None else (False,) * shape.num_layers
    return list(zip(shape.layer_types[:depth], sparse[:depth], strict=True))


def _outputs(shape: TargetShape, plan: ShardPlan, rank: int) -> int:
    """Hidden features whose bias ``rank`` holds."""
    start, stop = plan.ranks[rank].outputs or (0, shape.hidden_size)
    return stop - start


def _attention_vectors(shape: TargetShape, plan: ShardPlan, rank: int) -> int:
    heads, head, architecture = plan.ranks[rank].attention, shape.head_dim, ARCHITECTURES[shape.model_type]
    biases = attention_biases(shape)
    output_bias = _outputs(shape, plan, rank) if "o_proj" in biases else 0  # held by a rank without heads too
    if heads.count == 0:
        return output_bias
    queries = heads.count * (2 if architecture.gated else 1)
    qkv_bias = head * (queries + 2 * heads.shared_count) if "q_proj" in biases else 0
    return output_bias + qkv_bias + (2 * head if architecture.head_norms else 0)


def _delta_vectors(shape: TargetShape, plan: ShardPlan, rank: int) -> int:
    heads = plan.ranks[rank].delta
    if heads is None or heads.count == 0:
        return 0
    key, value = shape.linear_key_head_dim or 0, shape.linear_value_head_dim or 0
    conv = (2 * heads.used * key + heads.count * value) * (shape.linear_conv_kernel_dim or 0)
    return conv + 2 * heads.count + value


def _row(
    shape: TargetShape,
    plan: ShardPlan,
    depth: int,
    dtype_bytes: int,
    final_norm: bool,
    speeds: tuple[float, float],
) -> PlanRow:
    tp, layers = plan.tp, mixers_and_mixtures(shape, depth)
    whole = layer_matrices(shape, ShardPlan.build(shape, 1), 0)
    per_rank = [layer_matrices(shape, plan, rank) for rank in range(tp)]
    slowest = {kind: max(rank[kind] for rank in per_rank) for kind in whole}

    def model_sum(layer: dict[str, int]) -> int:
        return sum(layer[kind] + layer["mixture" if sparse else "mlp"] for kind, sparse in layers)

    efficiency = model_sum(whole) / tp / model_sum(slowest)
    all_reduce = round(sent_features(shape, plan, layers) * dtype_bytes * (tp - 1) / tp)
    mixture = shape.moe is not None and any(sparse for _, sparse in layers)
    columns = [(rank.experts or (0, 0)) if mixture else rank.mlp for rank in plan.ranks]
    deltas = [rank.delta for rank in plan.ranks if rank.delta is not None]
    return PlanRow(
        tp=tp,
        efficiency=efficiency,
        rank_bytes=[rank_parameters(shape, plan, r, depth, final_norm) * dtype_bytes for r in range(tp)],
        heads=[rank.attention.count for rank in plan.ranks],
        kv_heads=[rank.attention.shared_count for rank in plan.ranks],
        value_heads=[delta.count for delta in deltas],
        key_heads=[delta.shared_count for delta in deltas],
        mlp_columns=[stop - start for start, stop in columns],
        flop_share=[model_sum(rank) / model_sum(whole) for rank in per_rank],
        all_reduce_bytes=all_reduce,
        tokens_per_s=1 / (2 * model_sum(slowest) / speeds[0] + all_reduce / speeds[1]),
    )


@dataclass(frozen=True)
class Split:
    """One way to use the GPUs: ``replicas`` targets of degree ``tp`` and ``drafters`` GPUs that train.

    ``target_tokens_per_s`` counts new tokens, ``drafter_tokens_per_s`` tokens consumed (each is delivered ``reuse``
    times); ``tokens_per_s`` is what the pair trains on. ``bound`` is the side that limits it.
    """

    replicas: int
    tp: int
    drafters: int
    target_tokens_per_s: float
    drafter_tokens_per_s: float
    tokens_per_s: float
    bound: str


def drafter_flop_per_token(config: RunConfig, shape: TargetShape) -> float:
    """Training FLOP of a resolved config's drafter per context token, for full micro-batches with the most anchors.

    6·(P - fc)·Q + 6·(fc + kv)·C + 4·H·V·Q over C context tokens, with Q block rows and P trainable parameters.
    """
    ours, hidden = config.dflash, shape.hidden_size
    drafter, taps = ours.drafter, ours.target.target_layer_ids
    heads, kv_heads, head_dim = drafter.num_attention_heads, drafter.num_key_value_heads, drafter.head_dim
    intermediate = drafter.intermediate_size
    assert taps and heads and kv_heads and head_dim and intermediate, "resolve the config first"
    kv = drafter.num_layers * 2 * hidden * kv_heads * head_dim
    layers = drafter.num_layers * hidden * (2 * heads * head_dim + 3 * intermediate) + kv
    fc, context = len(taps) * hidden * hidden, ours.data.token_budget
    rows = min(drafter.max_anchors, context) * drafter.block_size
    flop = 6 * layers * rows + 6 * (fc + kv) * context + 4 * hidden * shape.vocab_size * rows
    return flop / context


def recommend_splits(
    rows: Sequence[PlanRow], gpus: int, drafter_flop: float, reuse: int, drafter_tflops: float, memory_bytes: float
) -> list[Split]:
    """All splits of ``gpus`` GPUs whose target fits in ``memory_bytes`` a GPU, the fastest first.

    Equally fast ones: fewer ranks per target first (fewer collectives).
    """
    splits = []
    for row in rows:
        if max(row.rank_bytes) > 0.8 * memory_bytes:  # leave room for activations
            continue
        for replicas in range(1, (gpus - 1) // row.tp + 1):
            drafters = gpus - replicas * row.tp
            target, draft = replicas * row.tokens_per_s, drafters * drafter_tflops * 1e12 / drafter_flop
            bound = "target" if target * reuse < draft else "drafter"
            splits.append(Split(replicas, row.tp, drafters, target, draft, min(target * reuse, draft), bound))
    return sorted(splits, key=lambda split: (-split.tokens_per_s, split.tp))
