"""Choosing tokens from logits, so that a choice depends on its position and not on who asks for it."""

from __future__ import annotations

import torch

from recipe.choice import most_likely


class Sampler:
    """Greedy at temperature 0, else a sample of softmax(logits / temperature).

    The random numbers belong to (seed, absolute position). So plain and speculative decoding with the same seed
    draw the same token from the same distribution, and their outputs can be compared token by token at any temperature.
    """

    def __init__(self, temperature: float = 0.0, seed: int = 0) -> None:
        if temperature < 0:
            raise ValueError(f"temperature {temperature} is negative")
        self.temperature, self.seed = temperature, seed

    def __call__(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        """Tokens int64 [n] for ``logits`` [n, V], where row i decides the token at absolute ``position + i``; NO_TOKEN
        (`recipe.choice`) for a row that is not finite."""
        return most_likely(self.scores(logits, position))

    def scores(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        """What the choice is the maximum of, [n, V] in units of the logits: an error of a logit moves its score by as
        much. Greedy: the logits. Else float32, with noise of (seed, position)."""
        if self.temperature == 0:
            return logits
        generator = torch.Generator(device=logits.device)
        waits = torch.empty_like(logits, dtype=torch.float32)
        for row in range(len(logits)):
            # Spread the pairs (seed, position) over 63 bits: neighbours must not share a stream.
            mixed = (
                self.seed * 0x9E3779B97F4A7C15 + (position + row) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB
            ) % 2**63
            generator.manual_seed(mixed)
            waits[row].exponential_(generator=generator)
        # The first of exponential clocks with rates p rings for token v with probability p_v: the one with the largest
        # p / wait, and so with the largest logit / T - log(wait). A draw may round to zero.
        return logits.float() - self.temperature * waits.clamp_min_(torch.finfo(torch.float32).tiny).log_()
