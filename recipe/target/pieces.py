"""Which tensors of a checkpoint a parameter is read from: one, or (experts stored one by one) many."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from recipe.target.shard_plan import Cut

EXPERTS = ".mlp.experts."


@dataclass(frozen=True)
class Piece:
    """``cut`` (None: all) of the checkpoint's tensor ``source``, whose shape has to be ``full``; ``place``: the index
    at which it goes into the local ``parameter``.
    """

    parameter: str
    source: str
    full: tuple[int, ...]
    cut: Cut | None
    place: tuple[int | slice, ...] = ()


def pieces_of(parameter: str, full: Sequence[int], cut: Cut | None, names: Collection[str]) -> list[Piece]:
    """The pieces of a parameter of shape ``full`` of which a rank holds ``cut``; ``names``: what the checkpoint has.

    transformers computes with fused experts, gate_up_proj [experts, (gate, up), hidden] and down_proj [experts, hidden,
    columns]. Checkpoints have these, or a gate, an up and a down projection per expert.
    """
    if parameter in names or EXPERTS not in parameter or cut is None:
        return [Piece(parameter, parameter, tuple(full), cut)]
    layer, _, projection = parameter.rpartition(".")
    experts = range(full[0])
    if projection == "down_proj":
        inner = Cut(1, cut.ranges)
        return [Piece(parameter, f"{layer}.{e}.down_proj.weight", (full[1], full[2]), inner, (e,)) for e in experts]
    columns, hidden = full[1] // 2, full[2]
    held = cut.ranges[0][1] - cut.ranges[0][0]
    halves = (("gate_proj", cut.ranges[0], slice(0, held)), ("up_proj", cut.ranges[0], slice(held, 2 * held)))
    return [
        Piece(parameter, f"{layer}.{e}.{name}.weight", (columns, hidden), Cut(0, (rows,)), (e, place))
        for e in experts
        for name, rows, place in halves
    ]
