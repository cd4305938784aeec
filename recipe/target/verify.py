"""Whether a checkpoint holds what config.json implies: names, shapes and dtypes, from the files' headers alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from recipe.config import RunConfig
from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape, model_folder
from recipe.model_files.weights import Checkpoint
from recipe.target.architectures import ARCHITECTURES
from recipe.target.logits import needs_logits, refuse_changed_logits
from recipe.target.pieces import Piece, pieces_of
from recipe.target.shard_plan import ShardPlan


def pieces_of_rank(
    full_shapes: Mapping[str, tuple[int, ...]], plan: ShardPlan, rank: int, checkpoint: Checkpoint
) -> list[Piece]:
    """What ``rank`` reads, file after file, in the order of the parameters within a file.

    ``full_shapes``: parameter -> its whole shape, for the parameters that this rank holds. ConfigError names a tensor
    that the checkpoint lacks.
    """
    names = frozenset(checkpoint.names)
    pieces = [
        piece for name, full in full_shapes.items() for piece in pieces_of(name, full, plan.cut(rank, name), names)
    ]
    order = {file: i for i, file in enumerate(dict.fromkeys(checkpoint.file_of(piece.source) for piece in pieces))}
    return sorted(pieces, key=lambda piece: order[checkpoint.file_of(piece.source)])


def check_pieces(checkpoint: Checkpoint, pieces: Sequence[Piece]) -> None:
    """ConfigError that names the first file, and tensor in it, of another shape or of a dtype that is no weight's."""
    for piece in pieces:
        checkpoint.expect(piece.source, piece.full)


def verify_target(config: RunConfig, shape: TargetShape) -> None:
    """Before a launch: every tensor that the target and the drafter of a resolved config will read, by its header.

    Imports transformers' code of this model type (seconds). Raises ConfigError: an unknown model type, a missing or
    truncated file, a tensor whose shape contradicts config.json or whose dtype cannot be computed with; for a type
    without a shard plan, a degree at which AutoTP fails or is wrong (tried on two random layers).
    """
    from recipe.target.cpu_kernels import refuse_torch_kernels, use_torch_kernels_on_cpu

    ours = config.dflash
    slow = shape.hybrid and ours.layout.device == "cuda" and not ours.target.allow_torch_kernels
    if slow and PathFinder.find_spec("fla") is None:  # whether it works, the ranks find out: its import is slow
        raise refuse_torch_kernels("flash-linear-attention is not installed")
    use_torch_kernels_on_cpu(force=True)  # nothing is computed in this process, and fla takes long to import
    # as every rank sets it; without it DeepSpeed, which the model code imports, warns of machines without a GPU
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if Path("/dev/nvidiactl").exists() else "cpu")
    import torch

    from recipe.target.model import build_meta_model, parameter_shapes

    asking, taps = needs_logits(ours), ours.target.target_layer_ids or []
    last = asking is not None
    depth = shape.num_layers if last or not taps else max(taps) + 1
    source = str(model_folder(ours.target.path, ours.target.revision) / "config.json")
    try:
        full_shapes = parameter_shapes(build_meta_model(shape, depth, last, torch.bfloat16))
        if asking is not None:
            refuse_changed_logits(shape, asking)
    except ConfigError:
        raise
    except Exception as error:  # whatever transformers makes of a config.json that is not one of its own
        rule = f"transformers cannot build a model from it: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ConfigError(source, shape.model_type, rule, "fetch config.json again, or use another model") from error
    checkpoint = Checkpoint(ours.target.path, ours.target.revision)
    if shape.model_type in ARCHITECTURES:  # the rest is read by transformers, under names that it alone knows
        check_pieces(checkpoint, pieces_of_rank(full_shapes, ShardPlan.build(shape, 1), 0, checkpoint))
    vocabulary = (shape.vocab_size, shape.hidden_size)
    checkpoint.expect(checkpoint.embedding_name if checkpoint.tied else "lm_head.weight", vocabulary)
    checkpoint.close()
    if shape.model_type not in ARCHITECTURES and ours.layout.target_tp > 1:
        _try_autotp(config, shape)


def _try_autotp(config: RunConfig, shape: TargetShape) -> None:
    from recipe.target.stock_check import check_without_weights

    target, tp = config.dflash.target, config.dflash.layout.target_tp
    if target.exact_sums:
        raise no_exact_sums(shape)
    unknown = check_without_weights(shape, tp, target.dtype)
    if unknown is not None:
        print(
            f"not known before the start: whether AutoTP cuts {shape.model_type} rightly ({unknown}); the ranks check"
        )


def no_exact_sums(shape: TargetShape) -> ConfigError:
    """What the user reads who asks it of AutoTP."""
    rule = f"{shape.model_type} is sharded by DeepSpeed's AutoTP, which adds up the ranks' parts"
    return ConfigError("dflash.target.exact_sums", True, rule, "set it to false")
