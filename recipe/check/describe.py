"""What `train --check` shows: every derived value, the sizes that follow from it, and the notes of the checks."""

from __future__ import annotations

from collections.abc import Sequence

from recipe.check.feasibility import ring_size
from recipe.config.deepspeed_keys import RunConfig
from recipe.config.schema import Objective
from recipe.model_files.shapes import TargetShape

GIB = 2**30


def describe(config: RunConfig, notes: Sequence[str]) -> str:
    """A page of `name: value` lines; sizes are arithmetic, nothing is loaded."""
    ours = config.dflash
    shape = TargetShape.resolve(ours.target.path, ours.target.revision)
    size = ring_size(config, shape)
    layout, drafter, taps = ours.layout, ours.drafter, ours.target.target_layer_ids or []
    replicas = len(layout.target_gpus) // layout.target_tp
    width = (drafter.num_attention_heads or 0) * (drafter.head_dim or 0)
    kv = (drafter.num_key_value_heads or 0) * (drafter.head_dim or 0)
    hidden, inner = shape.hidden_size, drafter.intermediate_size or shape.intermediate_size
    trainable = drafter.num_layers * hidden * (2 * width + 2 * kv + 3 * inner) + len(taps) * hidden * hidden
    soft = ours.objective.soft_labels
    noise, ring = ours.objective.noise, ours.ring
    state = trainable * 12 / GIB / len(layout.drafter_gpus)
    frozen = (
        (1 if shape.tie_word_embeddings else 2) * shape.vocab_size * hidden * (2 if config.bf16.enabled else 4) / GIB
    )
    lines = {
        "run": f"{ours.run.name} in {ours.run.output_dir}",
        "layout": f"{len(layout.target_gpus)} target ranks ({replicas} replica(s) x tp {layout.target_tp}) + "
        f"{len(layout.drafter_gpus)} drafter ranks on each node, device {layout.device}",
        "target": f"{ours.target.path}: {shape.model_type}, {shape.num_layers} layers, hidden {hidden}, "
        f"vocabulary {shape.vocab_size}, {ours.target.dtype}",
        "taps": f"layers {', '.join(map(str, taps))}{' + last hidden state' if soft else ''}",
        "drafter": f"{drafter.num_layers} layers, {drafter.num_attention_heads}/{drafter.num_key_value_heads} heads of "
        f"{drafter.head_dim}, about {trainable / 1e6:.1f} M trainable parameters, block {drafter.block_size}, "
        f"mask id {drafter.mask_token_id}",
        "drafter state": f"about {state:.2f} GiB of masters and moments a rank, {frozen:.2f} GiB of frozen embedding "
        "and head",
        "objective": f"{ours.objective.loss}, soft labels {'on' if soft else 'off'}, {_gamma(ours.objective)}, "
        f"noise {noise.type} {noise.start} -> {noise.end}",
        "step": f"{config.gradient_accumulation_steps} micro-batches of {ours.data.token_budget} tokens and "
        f"{drafter.max_anchors} anchors a rank",
        "ring": f"min_ready {ring.min_ready}, max_depth {ring.max_depth}, reuse {ring.reuse}, "
        f"pages of {size.page_tokens} tokens: about {size.bytes / GIB:.2f} GiB of /dev/shm a node",
    }
    return "\n".join([f"  {name + ':':15s}{value}" for name, value in lines.items()] + [f"  {note}" for note in notes])


def _gamma(objective: Objective) -> str:
    if objective.loss == "dpace":
        return f"weighs by confidence (alpha {objective.dpace_alpha})"
    return f"gamma {objective.gamma}"
