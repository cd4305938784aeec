"""Plain decoding, one target forward for each token: what speculative decoding must reproduce."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from recipe.choice import TARGET, refuse_no_token
from recipe.decode.cache import open_session
from recipe.decode.sampling import Sampler


@dataclass(frozen=True)
class PlainResult:
    """``tokens`` after the prompt (an end token included), forwards of the target, seconds after the prefill."""

    tokens: list[int]
    target_forwards: int
    decode_seconds: float


def now(device: torch.device) -> float:
    """Seconds on a monotonic clock, after all work queued on ``device`` has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def plain_generate(
    target: Any,
    prompt_ids: torch.Tensor,
    max_new_tokens: int,
    temperature: float = 0.0,
    *,
    stop_ids: Collection[int] = (),
    seed: int = 0,
    head: torch.Tensor | None = None,
) -> PlainResult:
    """Decode after ``prompt_ids`` int64 [P ≥ 1] until a stop id or ``max_new_tokens`` ≥ 1 tokens.

    Raises NotFinite where the target's logits are not finite.
    """
    sampler = Sampler(temperature, seed)
    tokens: list[int] = []

    def choose(logits: torch.Tensor) -> None:
        position = len(prompt_ids) + len(tokens)
        chosen = sampler(logits, position)[:1].tolist()
        refuse_no_token(chosen, TARGET, position)
        tokens.extend(chosen)

    with open_session(target, [], head) as session:
        result = session.prefill(prompt_ids)
        began = now(prompt_ids.device)
        choose(result.logits)
        while len(tokens) < max_new_tokens and tokens[-1] not in stop_ids:
            result = session.extend(prompt_ids.new_tensor(tokens[-1:]))
            session.keep(1)
            choose(result.logits)
        return PlainResult(tokens, len(tokens), now(prompt_ids.device) - began)
