"""Capturing taps: the outputs of chosen decoder layers, by forward hooks, without logits and without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def decoder_of(model: nn.Module) -> Any:
    """The bare decoder (with ``layers`` and ``norm``) inside an engine, a causal model or a vision-language model."""
    inner: Any = model
    for _ in range(4):
        if hasattr(inner, "layers"):
            return inner
        for name in ("module", "language_model", "model"):
            if hasattr(inner, name):
                inner = getattr(inner, name)
                break
    raise TypeError(f"{type(model).__name__} has no decoder layers")


class TapCapture:
    """Runs the target over a batch and hands out its taps.

    ``taps`` are 0-based layer ids, in the order in which they are handed out; tap L equals transformers'
    ``hidden_states[L+1]`` bit for bit (except that transformers reports its very last entry after the final norm). With
    ``need_last_hidden`` one more tensor follows: the last hidden state *after* the final norm, which the head reads.
    """

    def __init__(self, model: nn.Module, taps: Sequence[int], need_last_hidden: bool = False) -> None:
        self._decoder = decoder_of(model)
        self._taps, self._need_last_hidden = tuple(taps), need_last_hidden
        self._caught: dict[int, torch.Tensor] = {}
        self._hooks = [self._decoder.layers[tap].register_forward_hook(self._catcher(tap)) for tap in set(taps)]

    @torch.no_grad()
    def capture(self, input_ids: torch.Tensor) -> list[torch.Tensor]:
        """input_ids [n, S] (right-padded with any valid id; no mask is needed, causality keeps padding out) on the
        model's device -> k taps [n, S, H], then the last hidden state if asked for. Nothing else stays alive, here
        or in the model; rows of padding hold values without meaning.
        """
        self._caught.clear()
        try:
            output = self._decoder(input_ids=input_ids, attention_mask=None, use_cache=False)
            tensors = [self._caught[tap] for tap in self._taps]
        finally:
            self._caught.clear()
        if self._need_last_hidden:
            tensors.append(output.last_hidden_state)
        return tensors

    def close(self) -> None:
        """Takes the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def _catcher(self, tap: int) -> Any:
        def catch(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._caught[tap] = output[0] if isinstance(output, tuple) else output

        return catch
