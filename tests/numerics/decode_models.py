"""Tiny random targets and drafters, and proposers that are as good or as bad as a test wants."""

from __future__ import annotations

import random

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from recipe.decode.plain import plain_generate
from recipe.drafter.config import DrafterConfig
from recipe.target.cpu_kernels import use_torch_kernels_on_cpu

VOCAB, HIDDEN, TAPS, BLOCK, MASK = 120, 48, (0, 1, 2), 6, 119
FAMILIES = ("qwen3_5", "llama", "qwen3", "qwen3_sliding")


def tiny_target(family: str, seed: int = 0) -> nn.Module:
    """A random fp32 target on the CPU whose text is varied: large weights, no end token."""
    use_torch_kernels_on_cpu()
    common = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 80, "num_attention_heads": 6,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "initializer_range": 0.15, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if family == "qwen3_5":
        config = Qwen3_5TextConfig(
            num_hidden_layers=5, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=6,
            linear_key_head_dim=8, linear_value_head_dim=8, linear_conv_kernel_dim=4,
            layer_types=["linear_attention"] * 3 + ["full_attention", "linear_attention"], **common,
        )  # fmt: skip
    elif family == "llama":
        config = LlamaConfig(num_hidden_layers=4, **common)
    else:
        sliding = (
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2} if "sliding" in family else {}
        )
        config = Qwen3Config(num_hidden_layers=4, head_dim=16, **sliding, **common)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).float().eval()


def prompts(count: int, seed: int = 1) -> list[torch.Tensor]:
    """``count`` random prompts of 1 to 24 tokens."""
    draw = random.Random(seed)
    return [torch.tensor([draw.randrange(VOCAB) for _ in range(draw.randint(1, 24))]) for _ in range(count)]


def drafter_parts(
    seed: int = 0,
    layers: int = 3,
    layer_types: list[str] | None = None,
    window: int | None = None,
    causal: list[bool] | None = None,
    depth: int = 4,
) -> tuple[DrafterConfig, dict[str, torch.Tensor]]:
    """A drafter's config and random weights under the z-lab names. Random is bad: almost every draft is refused."""
    types = tuple(layer_types or ["full_attention"] * layers)
    config = DrafterConfig(
        hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, rms_norm_eps=1e-6, rope_theta=10000.0, vocab_size=VOCAB,
        max_position_embeddings=512,
        layer_types=types, in_block_causal=tuple(causal or [False] * layers), sliding_window=window, dtype="float32",
        block_size=BLOCK, mask_token_id=MASK, target_layer_ids=TAPS, num_target_layers=depth,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    shapes = {"fc.weight": (HIDDEN, len(TAPS) * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for layer in range(layers):
        at, mlp = f"layers.{layer}.self_attn.", f"layers.{layer}.mlp."
        shapes |= {at + "q_proj.weight": (48, HIDDEN), at + "o_proj.weight": (HIDDEN, 48)}
        shapes |= {at + f"{name}_proj.weight": (24, HIDDEN) for name in "kv"}
        shapes |= {at + f"{name}_norm.weight": (12,) for name in "qk"}
        shapes |= {mlp + f"{name}_proj.weight": (64, HIDDEN) for name in ("gate", "up")}
        shapes |= {mlp + "down_proj.weight": (HIDDEN, 64)}
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"layers.{layer}.{name}.weight": (HIDDEN,) for name in norms}
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * noise if len(shape) == 1 else 0.2 * noise
    return config, weights


_ANSWERS: dict[tuple[int, bytes], tuple[nn.Module, list[int]]] = {}
LONGEST = 40


def plain(target: nn.Module, prompt: torch.Tensor, limit: int) -> list[int]:
    """The first ``limit`` tokens of the plain greedy answer; computed once for each target and prompt."""
    key = (id(target), prompt.numpy().tobytes())
    if key not in _ANSWERS:
        _ANSWERS[key] = target, plain_generate(target, prompt, LONGEST).tokens
    assert limit <= LONGEST
    return _ANSWERS[key][1][:limit]


class Oracle:
    """Proposes the target's own greedy continuation, each draft spoilt with probability ``errors``."""

    block_size, target_layer_ids = BLOCK, list(TAPS)

    def __init__(self, target: nn.Module, errors: float = 0.0, seed: int = 0) -> None:
        self.target, self.errors, self.draw = target, errors, random.Random(seed)

    def begin(self, prompt_ids: torch.Tensor, max_length: int) -> None:
        self.future = plain(self.target, prompt_ids, LONGEST)
        self.at, self.prompt = 0, len(prompt_ids)

    def propose(self, taps: list[torch.Tensor], anchor: int, count: int) -> torch.Tensor:
        # Rows of taps: the prompt first, then those of the tokens that the last block committed.
        self.at += len(taps[0])
        begin = self.at - self.prompt + 1
        drafts = self.future[begin : begin + count]
        assert self.future[begin - 1] == anchor, "the taps do not cover what is committed"
        return torch.tensor([(t + 1) % VOCAB if self.draw.random() < self.errors else t for t in drafts])
