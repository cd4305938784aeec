"""The drafter's incremental forward equals a fresh one over the whole context, written out naively in float64."""

from __future__ import annotations

import pytest
import torch

from recipe.decode.drafter_cache import IncrementalDrafter
from recipe.decode.speculative import SpeculativeDecoder
from recipe.drafter.config import DrafterConfig
from tests.numerics.decode_models import BLOCK, HIDDEN, TAPS, drafter_parts, prompts, tiny_target

FULL, SLIDING = "full_attention", "sliding_attention"
LAYOUTS: dict[str, dict] = {
    "full": {},
    "sliding and causal": {"layer_types": [SLIDING, SLIDING, FULL], "window": 7, "causal": [True, True, False]},
    "sliding": {"layer_types": [SLIDING] * 3, "window": BLOCK},
    "causal": {"causal": [True] * 3},
}


def oracle(
    config: DrafterConfig, weights: dict[str, torch.Tensor], taps: list[torch.Tensor], block: torch.Tensor
) -> torch.Tensor:
    """docs/algorithm.md, one position after another, float64: hidden states of the block after all of ``taps``."""
    w = {name: tensor.double() for name, tensor in weights.items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * w[name]

    def rope(x: torch.Tensor, position: int) -> torch.Tensor:
        half = config.head_dim // 2
        angle = position * config.rope_theta ** (-torch.arange(half).double() / half)
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1
        )

    context = norm(torch.cat([tap.double() for tap in taps], -1) @ w["fc.weight"].T, "hidden_norm.weight")
    start, x = len(context), block.double()
    groups = config.num_attention_heads // config.num_key_value_heads
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}."
        normed = norm(x, at + "input_layernorm.weight")
        inputs = torch.cat([context, normed])
        keys, values, queries = (
            (rows @ w[at + f"self_attn.{name}_proj.weight"].T).view(len(rows), -1, config.head_dim)
            for name, rows in (("k", inputs), ("v", inputs), ("q", normed))
        )
        keys, queries = norm(keys, at + "self_attn.k_norm.weight"), norm(queries, at + "self_attn.q_norm.weight")
        sliding = config.layer_types[layer] == "sliding_attention"
        causal = config.in_block_causal[layer]
        rows = []
        for offset in range(len(x)):
            position, mixed = start + offset, []
            seen = [
                j
                for j in range(len(inputs))
                if not (causal and j > position) and not (sliding and position - j >= config.sliding_window)
            ]
            for head in range(config.num_attention_heads):
                query = rope(queries[offset, head], position)
                scores = torch.stack([query @ rope(keys[j, head // groups], j) for j in seen]) / config.head_dim**0.5
                mixed.append(scores.softmax(0) @ values[seen, head // groups])
            rows.append(torch.cat(mixed))
        x = x + torch.stack(rows) @ w[at + "self_attn.o_proj.weight"].T
        normed = norm(x, at + "post_attention_layernorm.weight")
        gate, up = normed @ w[at + "mlp.gate_proj.weight"].T, normed @ w[at + "mlp.up_proj.weight"].T
        x = x + (torch.nn.functional.silu(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    return norm(x, "norm.weight")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_incremental_forward_equals_the_oracle_at_every_step(layout: str) -> None:
    config, weights = drafter_parts(3, **LAYOUTS[layout])
    drafter = IncrementalDrafter(config, weights)
    generator = torch.Generator().manual_seed(0)
    drafter.begin(40)
    seen = [torch.empty(0, HIDDEN) for _ in TAPS]
    for rows in (9, 1, BLOCK, 3, 2):
        taps = [torch.randn(rows, HIDDEN, generator=generator) for _ in TAPS]
        block = torch.randn(BLOCK, HIDDEN, generator=generator)
        seen = [torch.cat(pair) for pair in zip(seen, taps, strict=True)]
        got = drafter.forward(taps, block)
        torch.testing.assert_close(got.double(), oracle(config, weights, seen, block), rtol=1e-4, atol=1e-4)


def test_every_round_of_decoding_drafts_what_a_fresh_drafter_would() -> None:
    """In a real decode, with real taps: the drafts of each round equal those of a drafter that starts anew."""
    target = tiny_target("llama")
    parts = drafter_parts(4)
    embed, head = target.get_input_embeddings().weight, target.lm_head.weight
    decoder = SpeculativeDecoder(target, IncrementalDrafter(*parts), embed, head)
    rounds: list[tuple[list[torch.Tensor], int, list[int]]] = []
    real = decoder.proposer.propose

    def recorded(taps: list[torch.Tensor], anchor: int, count: int) -> torch.Tensor:
        drafts = real(taps, anchor, count)
        rounds.append(([tap.clone() for tap in taps], anchor, drafts.tolist()))
        return drafts

    decoder.proposer.propose = recorded  # type: ignore[method-assign]
    prompt = prompts(1)[0]
    result = decoder.generate(prompt, 16)
    text = torch.cat([prompt, torch.tensor(result.tokens)])
    start = len(prompt)
    for (_, anchor, drafts), committed in zip(rounds, result.accepted, strict=True):
        with torch.inference_mode():
            states = target(text[None, :start], output_hidden_states=True).hidden_states
            fresh = IncrementalDrafter(*parts)
            fresh.begin(start + BLOCK)
            block = torch.tensor([anchor] + [parts[0].mask_token_id] * len(drafts))
            hidden = fresh.forward([states[layer + 1][0] for layer in TAPS], embed[block])
            assert anchor == text[start]
            assert (hidden[1:] @ head.T).argmax(-1).tolist() == drafts
        start += committed
    assert len(rounds) > 5
