"""The shard plan: plain data that says which rows or columns of each checkpoint tensor a tensor-parallel rank holds.

Query heads (and DeltaNet value heads) are cut as evenly as they go; the key/value heads that they read are repeated on
every rank that needs them; the MLP is cut in grains. Of a mixture of experts every rank holds its columns of every
expert, so that its share of the work does not depend on which experts the tokens choose.

Column-cut layers (q, k, v, gate, up, in_proj_*) take rows of the weight, row-cut layers (o, out, down) the matching
columns, and their products are summed over the ranks. With exact sums the latter are cut by output rows instead, and
inputs and outputs are gathered: no sum is split over ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from recipe.errors import ConfigError, RunError, nearest
from recipe.model_files.shapes import TargetShape
from recipe.target.architectures import ARCHITECTURES

SUPPORTED = tuple(ARCHITECTURES)
GRAINS = (64, 32, 16, 8)  # of MLP columns; matrix units like multiples of 64 and need multiples of 8
GRAIN_SLACK = 1.02  # a smaller grain is taken when the fullest rank would hold more than this times the ideal
ROW_CUT = ("self_attn.o_proj", "linear_attn.out_proj", "mlp.down_proj")
REPLICATED = (
    "embed_tokens.weight",
    "norm.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "pre_feedforward_layernorm.weight",
    "post_feedforward_layernorm.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "linear_attn.norm.weight",
    "mlp.gate.weight",  # the router: each rank must choose the same experts
    "mlp.shared_expert_gate.weight",
    *(f"{module}.bias" for module in ROW_CUT),  # unless cut by output
)
Range = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """``ranges`` of a checkpoint tensor along ``dim``, joined in this order, are what a rank holds."""

    dim: int
    ranges: tuple[Range, ...]

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True)
class Heads:
    """A contiguous range of heads, the range of shared (key) heads that they read, and which one each of them reads.

    ``reads[i]`` is the position, inside ``shared``, of the key head of head ``own[0] + i``.
    """

    own: Range
    shared: Range
    reads: tuple[int, ...]

    @property
    def count(self) -> int:
        return self.own[1] - self.own[0]

    @property
    def shared_count(self) -> int:
        return self.shared[1] - self.shared[0]

    @property
    def even(self) -> bool:
        """True when every shared head serves equally many heads, so that native grouped attention can be used."""
        return len(set(Counter(self.reads).values())) <= 1

    @property
    def used(self) -> int:
        """Key heads that the layer sees after regrouping: ``shared_count`` when even, else one per head."""
        return self.shared_count if self.even else self.count


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds. ``delta`` is None for a model without DeltaNet. ``mlp``: columns of a dense MLP;
    ``experts``: of each expert of a mixture, ``shared_expert``: of the one that every token passes (None: there is
    none). ``outputs``: hidden features that it makes, with exact sums. ``cuts``: parameter name inside a layer -> Cut.
    """

    rank: int
    attention: Heads
    delta: Heads | None
    mlp: Range
    cuts: dict[str, Cut]
    experts: Range | None = None
    shared_expert: Range | None = None
    outputs: Range | None = None


@dataclass(frozen=True)
class ShardPlan:
    """One RankPlan per rank of a tensor-parallel group of ``tp``. ``exact_sums``: o, out and down projections are cut
    by output rows, and no sum is split over ranks (of a mixture's experts it is).
    """

    model_type: str
    tp: int
    ranks: tuple[RankPlan, ...]
    exact_sums: bool = False

    @classmethod
    def build(cls, shape: TargetShape, tp: int, exact_sums: bool = False) -> ShardPlan:
        """The plan for any ``tp`` ≥ 1. ConfigError names a model type that cannot be sharded."""
        if tp < 1:
            raise ConfigError("dflash.layout.target_tp", tp, "a tensor-parallel degree is at least 1", "use 1 or more")
        if shape.model_type not in SUPPORTED:
            rule = f"this model type has no shard plan; those that have one: {', '.join(SUPPORTED)}"
            hint = "train with target_tp 1, or try a higher one: DeepSpeed's AutoTP is then checked at the start."
            hint += nearest(shape.model_type, SUPPORTED)
            raise ConfigError("model_type", shape.model_type, rule, hint)
        _require_whole_groups(shape)
        queries = split_heads(shape.num_attention_heads, shape.num_key_value_heads, tp)
        values: Sequence[Heads | None] = [None] * tp
        if shape.hybrid:
            values = split_heads(shape.linear_num_value_heads or 0, shape.linear_num_key_heads or 1, tp)
        dense = split_columns(shape.intermediate_size, tp)
        experts, shared = _split_mixture(shape, tp)
        exact_sums = exact_sums and tp > 1
        outputs: Sequence[Range | None] = split_columns(shape.hidden_size, tp) if exact_sums else [None] * tp
        parts = zip(queries, values, dense, experts, shared, outputs, strict=True)
        ranks = tuple(
            RankPlan(i, attention, delta, mlp, _cuts(shape, attention, delta, mlp, own, always, out), own, always, out)
            for i, (attention, delta, mlp, own, always, out) in enumerate(parts)
        )
        return cls(shape.model_type, tp, ranks, exact_sums)

    def cut(self, rank: int, name: str) -> Cut | None:
        """What ``rank`` holds of parameter ``name`` ("layers.3.mlp.up_proj.weight"); None: the whole of it."""
        inner = inside_layer(name)
        if inner in REPLICATED and inner not in self.ranks[rank].cuts:
            return None
        try:
            return self.ranks[rank].cuts[inner]
        except KeyError:
            raise RunError(f"the shard plan of {self.model_type} does not say how to cut {name!r}") from None

    def local_shape(self, rank: int, name: str, full: Sequence[int]) -> tuple[int, ...]:
        """Shape of this rank's part of a parameter of shape ``full``."""
        local, cut = list(full), self.cut(rank, name)
        if cut is not None:
            local[cut.dim] = cut.size
        return tuple(local)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def verify(self, shape: TargetShape) -> None:
        """Checks the plan against the shape by brute force, independently of how it was built; RunError otherwise.

        Every head and MLP column is summed over exactly once, each head reads its own key head, and the cuts of each
        pair of column- and row-cut layers name the same heads in the same order.
        """
        _verify_heads(
            "attention", [r.attention for r in self.ranks], shape.num_attention_heads, shape.num_key_value_heads
        )
        if shape.hybrid:
            deltas = [r.delta for r in self.ranks if r.delta is not None]
            _verify_heads("DeltaNet", deltas, shape.linear_num_value_heads or 0, shape.linear_num_key_heads or 1)
        _verify_partition("MLP columns", [r.mlp for r in self.ranks], shape.intermediate_size)
        if shape.moe is not None:
            own, shared = [r.experts or (0, 0) for r in self.ranks], [r.shared_expert or (0, 0) for r in self.ranks]
            _verify_partition("columns of each expert", own, shape.moe.intermediate_size)
            _verify_partition("columns of the shared expert", shared, shape.moe.shared_intermediate_size)
        if self.exact_sums:
            _verify_partition("hidden features", [r.outputs or (0, 0) for r in self.ranks], shape.hidden_size)
        for rank in self.ranks:
            wanted = _cuts(shape, rank.attention, rank.delta, rank.mlp, rank.experts, rank.shared_expert, rank.outputs)
            for name in wanted.keys() | rank.cuts.keys():
                if rank.cuts.get(name) != wanted.get(name):
                    raise RunError(
                        f"shard plan: rank {rank.rank} cuts {name!r} otherwise than its heads and columns say"
                    )


def inside_layer(name: str) -> str:
    """ "layers.3.mlp.up_proj.weight" -> "mlp.up_proj.weight"; other names unchanged."""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def split_even(total: int, parts: int) -> list[Range]:
    """``total`` things in ``parts`` contiguous ranges as evenly as they go, the larger ones first."""
    base, extra = divmod(total, parts)
    starts = [i * base + min(i, extra) for i in range(parts + 1)]
    return [(starts[i], starts[i + 1]) for i in range(parts)]


def split_heads(heads: int, shared: int, tp: int) -> list[Heads]:
    """Heads cut evenly, each range with the shared heads that it reads. 24 over 4 at tp=5: 5,5,5,5,4."""
    group, result = heads // shared, []
    for start, stop in split_even(heads, tp):
        first, last = (start // group, (stop - 1) // group + 1) if stop > start else (0, 0)
        reads = tuple(head // group - first for head in range(start, stop))
        result.append(Heads((start, stop), (first, last), reads))
    return result


def split_columns(columns: int, tp: int) -> list[Range]:
    """MLP columns in whole grains: the largest grain that keeps the fullest rank within GRAIN_SLACK of the ideal.

    If none does, the smallest aligned one is taken, or an unaligned one where ranks would go without columns.
    """
    fitting = [grain for grain in GRAINS if columns % grain == 0 and columns // grain >= tp]
    fair = (grain for grain in fitting if -(-(columns // grain) // tp) * grain * tp <= GRAIN_SLACK * columns)
    grain = next(fair, min(fitting, default=None) or _largest_power_of_two(columns, tp))
    return [(start * grain, stop * grain) for start, stop in split_even(columns // grain, tp)]


def _largest_power_of_two(columns: int, tp: int) -> int:
    """The largest power of two that divides ``columns`` and leaves a grain for each rank; 1 when there is none."""
    return max((g for g in (4, 2) if columns % g == 0 and columns // g >= tp), default=1)


def _split_mixture(shape: TargetShape, tp: int) -> tuple[Sequence[Range | None], Sequence[Range | None]]:
    """Columns of each expert, and of the shared expert, by rank."""
    nothing: Sequence[Range | None] = [None] * tp
    if shape.moe is None:
        return nothing, nothing
    shared = shape.moe.shared_intermediate_size
    return split_columns(shape.moe.intermediate_size, tp), split_columns(shared, tp) if shared else nothing


def _require_whole_groups(shape: TargetShape) -> None:
    pairs = [("num_attention_heads", shape.num_attention_heads, shape.num_key_value_heads)]
    if shape.hybrid:
        pairs.append(("linear_num_value_heads", shape.linear_num_value_heads or 0, shape.linear_num_key_heads or 1))
    for name, heads, shared in pairs:
        if heads % shared:
            raise ConfigError(name, heads, f"not a multiple of its {shared} key heads", "check the model's config.json")


def _scaled(heads: Range, unit: int, offset: int = 0) -> Range:
    return (offset + heads[0] * unit, offset + heads[1] * unit)


def _cuts(
    shape: TargetShape,
    attention: Heads,
    delta: Heads | None,
    mlp: Range,
    experts: Range | None,
    shared_expert: Range | None,
    outputs: Range | None,
) -> dict[str, Cut]:
    """Layer-internal parameter name -> Cut, for every parameter that is not replicated."""
    head = shape.head_dim
    # A gated attention's q_proj has the rows [heads, (query, gate), head_dim].
    query_rows = 2 * head if ARCHITECTURES[shape.model_type].gated else head
    rows: dict[str, tuple[Range, ...]] = {
        "self_attn.q_proj": (_scaled(attention.own, query_rows),),
        "self_attn.k_proj": (_scaled(attention.shared, head),),
        "self_attn.v_proj": (_scaled(attention.shared, head),),
        "mlp.gate_proj": (mlp,),
        "mlp.up_proj": (mlp,),
    }
    columns = {"self_attn.o_proj": _scaled(attention.own, head), "mlp.down_proj": mlp}
    cuts: dict[str, Cut] = {}
    if shape.moe is not None and experts is not None:
        up = _scaled(experts, 1, shape.moe.intermediate_size)
        cuts["mlp.experts.gate_up_proj"] = Cut(1, (experts, up))  # [experts, (gate, up), hidden]
        cuts["mlp.experts.down_proj"] = Cut(2, (experts,))  # [experts, hidden, columns]
    if shared_expert is not None:
        rows["mlp.shared_expert.gate_proj"] = rows["mlp.shared_expert.up_proj"] = (shared_expert,)
        columns["mlp.shared_expert.down_proj"] = shared_expert
    if delta is not None:
        rows |= _delta_rows(shape, delta)
        columns["linear_attn.out_proj"] = _scaled(delta.own, shape.linear_value_head_dim or 0)
        for bare in ("A_log", "dt_bias"):
            cuts[f"linear_attn.{bare}"] = Cut(0, (delta.own,))
    for module, ranges in rows.items():
        cuts[f"{module}.weight"] = cuts[f"{module}.bias"] = Cut(0, ranges)
    for module, columns_held in columns.items():
        if outputs is None or module not in ROW_CUT:
            cuts[f"{module}.weight"] = Cut(1, (columns_held,))
        else:
            cuts[f"{module}.weight"] = cuts[f"{module}.bias"] = Cut(0, (outputs,))
    return cuts


def _delta_rows(shape: TargetShape, delta: Heads) -> dict[str, tuple[Range, ...]]:
    key, value = shape.linear_key_head_dim or 0, shape.linear_value_head_dim or 0
    all_keys = (shape.linear_num_key_heads or 0) * key
    values = _scaled(delta.own, value, 2 * all_keys)
    # The projection computes each key head once; the convolution comes after regrouping, so its rows are repeated.
    if delta.even:
        conv_keys = [_scaled(delta.shared, key)]
    else:
        conv_keys = [_scaled((delta.shared[0] + i, delta.shared[0] + i + 1), key) for i in delta.reads]
    conv = [(start + offset, stop + offset) for offset in (0, all_keys) for start, stop in conv_keys]
    return {
        "linear_attn.in_proj_qkv": (_scaled(delta.shared, key), _scaled(delta.shared, key, all_keys), values),
        "linear_attn.conv1d": (*conv, values),
        "linear_attn.in_proj_z": (_scaled(delta.own, value),),
        "linear_attn.in_proj_b": (delta.own,),
        "linear_attn.in_proj_a": (delta.own,),
    }


def _verify_partition(what: str, ranges: Sequence[Range], total: int) -> None:
    held = Counter(i for start, stop in ranges for i in range(start, stop))
    wrong = [i for i in range(total) if held[i] != 1] + [i for i in held if not 0 <= i < total]
    if wrong:
        raise RunError(f"shard plan: {what} {wrong[:4]} of {total} are not held by exactly one rank")


def _verify_heads(what: str, ranks: Sequence[Heads], heads: int, shared: int) -> None:
    _verify_partition(f"{what} heads", [r.own for r in ranks], heads)
    for index, rank in enumerate(ranks):
        read = [rank.shared[0] + i for i in rank.reads]
        if read != [head // (heads // shared) for head in range(*rank.own)] or set(read) != set(range(*rank.shared)):
            raise RunError(f"shard plan: rank {index} maps {what} heads {rank.own} to the wrong key heads {read}")
