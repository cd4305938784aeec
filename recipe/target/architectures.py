"""What the shard plan has to know of each model type whose layers follow its rules.

All other types are left to DeepSpeed's own AutoTP, behind a self-check.

A type belongs here when transformers computes its layers with these parts only: q, k, v and o projections (or Qwen3.5's
Gated DeltaNet), a gate/up/down MLP or a mixture of such experts, and norms over the hidden size or over single heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from recipe.model_files.shapes import TargetShape


@dataclass(frozen=True)
class Architecture:
    """``gated``: q_proj computes an output gate of the same width beside each query head. ``head_norms``: queries and
    keys are normalised head by head. ``norms``: norms over the hidden size in one layer. ``biases``: which projections
    of attention have one; None: all of them or none, as config.json's ``attention_bias`` says.
    """

    gated: bool = False
    head_norms: bool = False
    norms: int = 2
    biases: tuple[str, ...] | None = None


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(),
    "mistral": Architecture(biases=()),
    "ministral": Architecture(biases=()),
    "granite": Architecture(),
    "smollm3": Architecture(),
    "gemma": Architecture(),
    "gemma2": Architecture(norms=4),
    "gemma3": Architecture(head_norms=True, norms=4),
    "qwen2": Architecture(biases=("q_proj", "k_proj", "v_proj")),
    "qwen3": Architecture(head_norms=True),
    "qwen3_moe": Architecture(head_norms=True),
    "qwen3_5": Architecture(gated=True, head_norms=True),
    "qwen3_5_moe": Architecture(gated=True, head_norms=True),
}


def attention_biases(shape: TargetShape) -> tuple[str, ...]:
    """The projections of an attention layer that have a bias."""
    fixed = ARCHITECTURES[shape.model_type].biases
    if fixed is not None:
        return fixed
    return ("q_proj", "k_proj", "v_proj", "o_proj") if shape.text_config.get("attention_bias") else ()
