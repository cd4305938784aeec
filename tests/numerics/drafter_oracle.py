"""A drafter written naively: float64, one anchor at a time, context cut to what it may see, no mask anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from recipe.drafter.batch import MicroBatch, assemble
from recipe.drafter.config import SLIDING, DrafterConfig
from recipe.drafter.model import DFlashDrafter


def tiny_config(**changes: object) -> DrafterConfig:
    sliding = changes.pop("window", None)
    values: dict[str, object] = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 97,
        "block_size": 5,
        "mask_token_id": 96,
        "target_layer_ids": (1, 4, 7),
        "num_target_layers": 12,
        "layer_types": (SLIDING, SLIDING, "full_attention") if sliding else ("full_attention",) * 3,
        "in_block_causal": (False,) * 3,
        "sliding_window": sliding,
        "dtype": "float32",
    }
    return DrafterConfig(**{**values, **changes})  # type: ignore[arg-type]


def random_batch(
    config: DrafterConfig, lengths: Sequence[int], per_document: int, seed: int = 0, slots: int | None = None
) -> MicroBatch:
    """A packed row with ``per_document`` random anchors in each document, the last position's neighbour included."""
    rng, total = np.random.default_rng(seed), sum(lengths)
    torch.manual_seed(seed)
    taps = [torch.randn(total, config.hidden_size) for _ in config.target_layer_ids]
    anchors = []
    for length in lengths:
        chosen = rng.permutation(length - 1)[:per_document]
        anchors.append(np.unique(np.append(chosen, length - 2)) if per_document else chosen)
    ids, mask = rng.integers(0, config.vocab_size - 1, total), rng.random(total) < 0.8
    return assemble(ids, mask, list(lengths), anchors, taps, torch.randn(total, config.hidden_size), slots)


def random_drafter(config: DrafterConfig, attention: str = "eager", seed: int = 0) -> DFlashDrafter:
    """Weights large enough that every part matters, norms away from one."""
    drafter = DFlashDrafter(config, attention).initialize(seed, std=0.2)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return drafter


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()


def _rotate(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """x [n, heads, D]; dimension i is paired with i + D/2."""
    half = x.shape[-1] // 2
    angle = position.double()[:, None] * theta ** (-torch.arange(half).double() / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def block_hidden(
    config: DrafterConfig,
    weights: Mapping[str, Tensor],
    features: Tensor,
    anchor_embedding: Tensor,
    mask_embedding: Tensor,
    anchor: int,
) -> Tensor:
    """[B, H] of one block. ``features`` [anchor, k·H]: everything before the anchor, in ``target_layer_ids`` order."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    b, d, eps = config.block_size, config.head_dim, config.rms_norm_eps
    context = _norm(features.double() @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = torch.stack([anchor_embedding] + [mask_embedding] * (b - 1)).double()
    for i in range(config.num_hidden_layers):
        p = {k.removeprefix(f"layers.{i}."): v for k, v in w.items() if k.startswith(f"layers.{i}.")}
        y = _norm(x, p["input_layernorm.weight"], eps)
        both, position = torch.cat([context, y]), torch.arange(anchor + b)
        q = _norm((y @ p["self_attn.q_proj.weight"].T).view(b, -1, d), p["self_attn.q_norm.weight"], eps)
        k = _norm((both @ p["self_attn.k_proj.weight"].T).view(anchor + b, -1, d), p["self_attn.k_norm.weight"], eps)
        v = (both @ p["self_attn.v_proj.weight"].T).view(anchor + b, -1, d)
        q, k = _rotate(q, position[anchor:], config.rope_theta), _rotate(k, position, config.rope_theta)
        group = q.shape[1] // k.shape[1]
        rows = []
        for o in range(b):
            first = 0
            if config.layer_types[i] == SLIDING and config.sliding_window is not None:
                first = max(0, anchor + o - config.sliding_window + 1)
            last = anchor + o + 1 if config.in_block_causal[i] else anchor + b
            heads = []
            for h in range(q.shape[1]):
                score = k[first:last, h // group] @ q[o, h] / d**0.5
                heads.append(score.softmax(0) @ v[first:last, h // group])
            rows.append(torch.cat(heads))
        x = x + torch.stack(rows) @ p["self_attn.o_proj.weight"].T
        y = _norm(x, p["post_attention_layernorm.weight"], eps)
        gate, up = y @ p["mlp.gate_proj.weight"].T, y @ p["mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ p["mlp.down_proj.weight"].T
    return _norm(x, w["norm.weight"], eps)


def all_hidden(drafter: DFlashDrafter, batch: MicroBatch, embedding: Tensor) -> Tensor:
    """float64 [real blocks, B, H], block by block."""
    features = torch.cat(batch.taps, dim=1)
    out = []
    for anchor, start, keep in zip(batch.host.anchors, batch.host.starts, batch.host.keep, strict=True):
        if keep:
            known = embedding[batch.input_ids[anchor]]
            mask = embedding[drafter.config.mask_token_id]
            weights = dict(drafter.named_parameters())
            local = int(anchor - start)
            out.append(block_hidden(drafter.config, weights, features[start:anchor], known, mask, local))
    return torch.stack(out)
