"""The shard plan: the paper numbers of Qwen3.6-27B, brute-force coverage for many shapes, and broken plans."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from recipe.errors import ConfigError, RunError
from recipe.model_files.shapes import TargetShape
from recipe.target.plan_cost import layer_matrices, plan_table, rank_parameters
from recipe.target.shard_plan import Cut, ShardPlan, split_columns

QWEN = TargetShape.resolve("Qwen/Qwen3.6-27B")


def shape_of(**changes: Any) -> TargetShape:
    return dataclasses.replace(QWEN, **changes)


def test_27b_on_five_gpus_is_the_reference_layout() -> None:
    plan = ShardPlan.build(QWEN, 5)
    assert [r.attention.count for r in plan.ranks] == [5, 5, 5, 5, 4]
    assert [r.attention.shared_count for r in plan.ranks] == [1, 2, 2, 2, 1]
    assert [r.delta.count for r in plan.ranks if r.delta] == [10, 10, 10, 9, 9]
    assert [r.delta.shared_count for r in plan.ranks if r.delta] == [4, 4, 4, 3, 3]
    assert [r.delta.used for r in plan.ranks if r.delta] == [10, 10, 10, 3, 3]  # what fla's kernels get
    assert [r.mlp[1] - r.mlp[0] for r in plan.ranks] == [3520, 3520, 3456, 3456, 3456]
    row = plan_table(QWEN, [5])[0]
    assert 1 / row.efficiency <= 1.045
    assert max(row.flop_share) * 5 <= 1.045
    whole = plan_table(QWEN, [1])[0]
    embedding = QWEN.vocab_size * QWEN.hidden_size * 2  # every rank holds all of it
    assert max(row.rank_bytes) - embedding <= 1.045 * (whole.rank_bytes[0] - embedding) / 5
    assert whole.efficiency == plan_table(QWEN, [4])[0].efficiency == 1.0


def test_27b_matrices_are_the_known_number_of_parameters() -> None:
    whole = rank_parameters(QWEN, ShardPlan.build(QWEN, 1), 0, 64, final_norm=True)
    assert (whole - QWEN.vocab_size * QWEN.hidden_size) / 1e9 == pytest.approx(24.35, abs=0.01)


def test_every_row_and_column_is_held_by_brute_force() -> None:
    """Rebuilds each projection's rows from the cuts, head by head, for random shapes and degrees."""
    generator = random.Random(3)
    for _ in range(60):
        kv, group = generator.choice([1, 2, 3, 4]), generator.choice([1, 2, 3, 6])
        keys, values_per_key = generator.choice([1, 2, 4]), generator.choice([1, 2, 3])
        shape = shape_of(
            num_attention_heads=kv * group,
            num_key_value_heads=kv,
            head_dim=3,
            linear_num_key_heads=keys,
            linear_num_value_heads=keys * values_per_key,
            linear_key_head_dim=2,
            linear_value_head_dim=5,
            intermediate_size=generator.choice([1, 7, 48, 96, 640]),
        )
        plan = ShardPlan.build(shape, generator.randint(1, 9))
        plan.verify(shape)
        out_columns, down_columns, queries, conv = [], [], [], []
        for rank, part in enumerate(plan.ranks):
            rows = {name: expand(plan.cut(rank, f"layers.0.{name}.weight")) for name in PROJECTIONS}
            out_columns += rows["self_attn.o_proj"]
            down_columns += rows["mlp.down_proj"]
            assert rows["mlp.up_proj"] == rows["mlp.gate_proj"] == rows["mlp.down_proj"]
            queries += rows["self_attn.q_proj"]
            read = [rows["self_attn.k_proj"][3 * i : 3 * i + 3] for i in part.attention.reads]
            assert read == [[3 * (head // group) + d for d in range(3)] for head in range(*part.attention.own)], (
                "a query head reads another key head than its own"
            )
            assert part.delta is not None
            conv += conv_rows_by_value_head(rows["linear_attn.conv1d"], part.delta.used, part.delta.count)
            assert set(rows["linear_attn.conv1d"]) == set(rows["linear_attn.in_proj_qkv"])
        heads, total = kv * group, keys * values_per_key
        assert queries == list(range(heads * 3 * 2)) and out_columns == list(range(heads * 3))
        assert down_columns == list(range(shape.intermediate_size))
        assert conv == [
            ([2 * (v // values_per_key) + d for d in range(2)], [4 * keys + 5 * v + d for d in range(5)])
            for v in range(total)
        ]


PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
PROJECTIONS += ("linear_attn.in_proj_qkv", "linear_attn.conv1d")


def expand(cut: Cut | None) -> list[int]:
    assert cut is not None
    return [i for start, stop in cut.ranges for i in range(start, stop)]


def conv_rows_by_value_head(rows: list[int], key_heads: int, value_heads: int) -> list[tuple[list[int], list[int]]]:
    """(query rows, value rows) that each value head of a rank sees after native grouping. Key size 2, value size 5."""
    if value_heads == 0:
        return []
    values = rows[4 * key_heads :]
    group = value_heads // key_heads
    return [(rows[2 * (v // group) : 2 * (v // group) + 2], values[5 * v : 5 * v + 5]) for v in range(value_heads)]


def test_grains_are_64_for_large_mlps_and_smaller_for_small_ones() -> None:
    assert all(start % 64 == 0 for tp in range(1, 9) for start, _ in split_columns(17408, tp))
    assert [stop - start for start, stop in split_columns(192, 5)] == [40, 40, 40, 40, 32]
    assert [stop - start for start, stop in split_columns(24, 5)] == [8, 4, 4, 4, 4]
    assert [stop - start for start, stop in split_columns(3, 5)] == [1, 1, 1, 0, 0]


def test_broken_plans_are_refused() -> None:
    plan = ShardPlan.build(QWEN, 5)
    plan.verify(QWEN)
    first, second = plan.ranks[0], plan.ranks[1]
    shifted = dataclasses.replace(first.cuts["mlp.down_proj.weight"], ranges=((64, 3584),))
    wrong_reads = dataclasses.replace(second.attention, reads=(1, 1, 1, 1, 0))
    broken = [
        dataclasses.replace(first, cuts=first.cuts | {"mlp.down_proj.weight": shifted}),
        dataclasses.replace(first, mlp=(0, 3456)),
        dataclasses.replace(first, attention=second.attention),
        dataclasses.replace(first, delta=second.delta),
    ]
    for rank in broken:
        with pytest.raises(RunError, match="shard plan"):
            dataclasses.replace(plan, ranks=(rank, *plan.ranks[1:])).verify(QWEN)
    with pytest.raises(RunError, match="wrong key heads"):
        rank = dataclasses.replace(second, attention=wrong_reads)
        dataclasses.replace(plan, ranks=(first, rank, *plan.ranks[2:])).verify(QWEN)
    with pytest.raises(RunError, match="does not say how to cut"):
        plan.cut(0, "layers.0.mlp.new_thing.weight")


MIXTURE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}  # Qwen3-30B-A3B


def test_mixture_of_experts_is_cut_by_columns_of_every_expert() -> None:
    shape = TargetShape.from_config(MIXTURE)
    assert shape.moe is not None and shape.moe.layers == (True,) * 48
    named = {("num_local_experts" if key == "num_experts" else key): value for key, value in MIXTURE.items()}
    assert TargetShape.from_config(named) == shape
    whole = ShardPlan.build(shape, 1)
    embedding = shape.vocab_size * shape.hidden_size
    held = rank_parameters(shape, whole, 0, 48, final_norm=True) - embedding
    assert held / 1e9 == pytest.approx(29.9, abs=0.05)  # the model card: 29.9 B without embeddings
    active = sum(layer_matrices(shape, whole, 0)[part] for part in ("full_attention", "mixture")) * 48
    assert (active + 2 * embedding) / 1e9 == pytest.approx(3.3, abs=0.1)  # and 3.3 B active, embeddings included
    row, plan = plan_table(shape, [5])[0], ShardPlan.build(shape, 5)
    assert [r.experts[1] - r.experts[0] for r in plan.ranks if r.experts] == [160, 152, 152, 152, 152]
    assert max(row.rank_bytes) - 2 * embedding <= 1.06 * 2 * held / 5
    assert row.tokens_per_s > 4 * plan_table(QWEN, [5])[0].tokens_per_s  # the work is that of the active experts
    plan.verify(shape)
    fused = plan.cut(1, "layers.7.mlp.experts.gate_up_proj")
    assert fused == Cut(1, ((160, 312), (768 + 160, 768 + 312)))
    assert plan.local_shape(1, "layers.7.mlp.experts.gate_up_proj", (128, 1536, 2048)) == (128, 304, 2048)
    assert plan.local_shape(1, "layers.7.mlp.experts.down_proj", (128, 2048, 768)) == (128, 2048, 152)
    assert plan.cut(4, "layers.7.mlp.gate.weight") is None, "every rank routes by the whole router"


def test_broken_mixtures_are_refused() -> None:
    shape = TargetShape.from_config(
        MIXTURE | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 512}
        | {f"linear_{name}": 16 for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")}
        | {"linear_conv_kernel_dim": 4}
    )  # fmt: skip
    plan = ShardPlan.build(shape, 3)
    plan.verify(shape)
    first = plan.ranks[0]
    assert first.shared_expert == (0, 176)
    one_half = Cut(1, (first.experts or (0, 0),) * 2)  # the gate's columns in place of the up projection's
    for broken, message in (
        (dataclasses.replace(first, experts=(0, 128)), "columns of each expert"),
        (dataclasses.replace(first, shared_expert=(16, 176)), "columns of the shared expert"),
        (dataclasses.replace(first, cuts=first.cuts | {"mlp.experts.gate_up_proj": one_half}), "gate_up_proj"),
    ):
        with pytest.raises(RunError, match=message):
            dataclasses.replace(plan, ranks=(broken, *plan.ranks[1:])).verify(shape)


def test_unsupported_models_are_named() -> None:
    with pytest.raises(ConfigError, match="olmo2"):
        ShardPlan.build(shape_of(model_type="olmo2"), 2)
    with pytest.raises(ConfigError, match="at least 1"):
        ShardPlan.build(QWEN, 0)
    with pytest.raises(ConfigError, match="not a multiple"):
        ShardPlan.build(shape_of(num_key_value_heads=5), 2)
