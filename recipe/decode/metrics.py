"""What decoding results say: tau, acceptance by position, intervals, and where two outputs part.

tau = tokens committed by verify forwards / verify forwards: accepted drafts and the bonus token count, the token of the
prefill does not, nothing behind an end token does. 1 is a useless drafter, ``block_size`` a perfect one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from recipe.choice import TARGET, most_likely, refuse_no_token
from recipe.decode.cache import open_session
from recipe.decode.sampling import Sampler
from recipe.decode.speculative import DecodeResult

TAU_IS = "tokens committed per verify forward: bonus token included, prefill token excluded"


def tau(results: Sequence[DecodeResult]) -> float | None:
    """Ratio of sums over all results; None when there was no verify forward."""
    forwards = sum(result.verify_forwards for result in results)
    return sum(sum(result.accepted) for result in results) / forwards if forwards else None


def tau_interval(
    results: Sequence[DecodeResult], seed: int = 0, resamples: int = 2000, level: float = 0.95
) -> tuple[float, float] | None:
    """Bootstrap interval of tau over prompts (blocks of one prompt are not independent). None below two prompts."""
    pairs = np.array([(sum(r.accepted), r.verify_forwards) for r in results if r.blocks], dtype=np.float64)
    if len(pairs) < 2:
        return None
    drawn = np.random.default_rng(seed).integers(0, len(pairs), size=(resamples, len(pairs)))
    sums = pairs[drawn].sum(axis=1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def accept_rate(results: Sequence[DecodeResult], block_size: int) -> list[float | None]:
    """For k = 1 … block_size - 1: the share of blocks whose first k drafts were all accepted.

    Blocks that ended before k, at the length limit or at an accepted end token, are left out for that k.
    """
    blocks = [block for result in results for block in result.blocks]
    rates: list[float | None] = []
    for k in range(1, block_size):
        asked = [block for block in blocks if block.proposed >= k]
        rates.append(sum(block.accepted >= k for block in asked) / len(asked) if asked else None)
    return rates


def target_forwards_per_token(results: Sequence[DecodeResult]) -> float | None:
    """Target forwards, the prefill included, for each generated token. Plain decoding: exactly 1."""
    tokens = sum(len(result.tokens) for result in results)
    return sum(result.target_forwards for result in results) / tokens if tokens else None


@dataclass(frozen=True)
class Mismatch:
    """Speculative and plain output differ from ``position`` (0 = first new token) on.

    Both computed afresh by the target alone: ``gap``: by how much plain's token leads the other in what the sampler
    chooses by (`Sampler.scores`); ``noise``: how far rounding moves the lead of one token over another there.
    ``numeric_tie``: both tokens are within ``noise`` of the best, so either output is right. Not a tie: a fault.
    """

    prompt: int
    position: int
    plain: int | None
    speculative: int | None
    gap: float | None
    noise: float | None
    numeric_tie: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position where two token lists differ (a missing token differs from any); None when equal."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


def explain_mismatch(
    target: Any,
    index: int,
    prompt_ids: torch.Tensor,
    plain: Sequence[int],
    speculative: Sequence[int],
    head: torch.Tensor | None = None,
    sampler: Sampler | None = None,
) -> Mismatch | None:
    """None when the outputs are equal, else where they part and whether rounding explains it.

    ``sampler``: of both outputs; None is greedy. Costs ``position`` target forwards. Raises NotFinite: a tie cannot be
    judged by logits that are not finite.
    """
    position = first_difference(plain, speculative)
    if position is None:
        return None
    if position >= min(len(plain), len(speculative)):
        longer = plain[position] if len(plain) > position else None
        other = speculative[position] if len(speculative) > position else None
        return Mismatch(index, position, longer, other, None, None, False)
    logits = _logits_after(target, prompt_ids, plain[:position], head)
    refuse_no_token([min(most_likely(torch.stack(logits)).tolist())], TARGET, len(prompt_ids) + position, index)
    noise = rounding_noise(*logits)
    scores = (sampler or Sampler()).scores(logits[0][None], len(prompt_ids) + position)[0].float()
    one, two = float(scores[plain[position]]), float(scores[speculative[position]])
    tie = float(scores.max()) - min(one, two) <= noise
    return Mismatch(index, position, plain[position], speculative[position], one - two, noise, tie)


def _logits_after(
    target: Any, prompt_ids: torch.Tensor, tokens: Sequence[int], head: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two computations of the logits [V] behind prompt and ``tokens``: all at once, and token by token."""
    known = torch.cat([prompt_ids, prompt_ids.new_tensor(list(tokens))])
    with open_session(target, [], head) as session:
        at_once = session.prefill(known).logits[-1]
    with open_session(target, [], head) as session:
        # Less than the prompt first: without new tokens the two ways would be the same computation, and say nothing.
        first = max(1, len(prompt_ids) - 1)
        one_by_one = session.prefill(known[:first]).logits[-1]
        for place in range(first, len(known)):
            one_by_one = session.extend(known[place : place + 1]).logits[-1]
            session.keep(1)
    return at_once, one_by_one


def rounding_noise(one: torch.Tensor, other: torch.Tensor) -> float:
    """How far rounding may move the lead of one token over another, from two computations of the same logits [V].

    Each of the two tokens moves by at most what any token was seen to move, and by one rounding of its own. More than
    8 roundings of the largest logit (2e-5 of it in float32) is believed of no computation: that is a fault of its own.
    """
    largest, precision = float(one.abs().max()), torch.finfo(one.dtype).eps
    seen = 2 * float((one.float() - other.float()).abs().max()) + precision * largest
    return min(seen, max(8 * precision, 2e-5) * largest)
