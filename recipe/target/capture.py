"""Capturing taps: the outputs of chosen decoder layers, by forward hooks, without logits and without a cache."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

LAYER_LISTS = ("layers", "h", "blocks")
WRAPPERS = ("module", "language_model", "model", "transformer", "gpt_neox", "decoder")


def decoder_of(model: nn.Module) -> Any:
    """The bare decoder (with its list of layers) inside an engine, a causal model or a vision-language model."""
    inner: Any = model
    for _ in range(5):
        if any(isinstance(getattr(inner, name, None), nn.ModuleList) for name in LAYER_LISTS):
            return inner
        inner = next((getattr(inner, name) for name in WRAPPERS if hasattr(inner, name)), inner)
    raise TypeError(f"{type(model).__name__} has no decoder layers")


def layers_of(decoder: nn.Module) -> nn.ModuleList:
    """The decoder's layers, whatever the list is called."""
    lists = (getattr(decoder, name, None) for name in LAYER_LISTS)
    return next(found for found in lists if isinstance(found, nn.ModuleList))


class _Enough(Exception):
    """The deepest tap has been caught, and nothing behind it is wanted."""


class TapCapture:
    """Runs the target over a batch and hands out its taps. Layers behind the deepest tap are not computed unless the
    last hidden state is asked for: a target that also evaluates is loaded whole.

    ``taps`` are 0-based layer ids, in the order in which they are handed out; tap L equals transformers'
    ``hidden_states[L+1]`` bit for bit (except that transformers reports its very last entry after the final norm). With
    ``need_last_hidden`` one more tensor follows: the last hidden state *after* the final norm, which the head reads.
    """

    def __init__(self, model: nn.Module, taps: Sequence[int], need_last_hidden: bool = False) -> None:
        self._decoder = decoder_of(model)
        self._taps, self._need_last_hidden = tuple(taps), need_last_hidden
        self._caught: dict[int, torch.Tensor] = {}
        self._capturing = False  # an evaluation runs the model too, and wants all of it
        layers = layers_of(self._decoder)
        cut = not need_last_hidden and max(taps) + 1 < len(layers)
        self._last_wanted = max(taps) if cut else None
        self._hooks = [layers[tap].register_forward_hook(self._catcher(tap)) for tap in set(taps)]

    @torch.no_grad()
    def capture(self, input_ids: torch.Tensor) -> list[torch.Tensor]:
        """input_ids [n, S] (right-padded with any valid id; no mask is needed, causality keeps padding out) on the
        model's device -> k taps [n, S, H], then the last hidden state if asked for. Nothing else stays alive, here
        or in the model; rows of padding hold values without meaning.
        """
        self._caught.clear()
        self._capturing, output = True, None
        try:
            with contextlib.suppress(_Enough):
                output = self._decoder(input_ids=input_ids, attention_mask=None, use_cache=False)
            tensors = [self._caught[tap] for tap in self._taps]
        finally:
            self._capturing = False
            self._caught.clear()
        if self._need_last_hidden:
            assert output is not None
            tensors.append(output.last_hidden_state)
        return tensors

    def close(self) -> None:
        """Takes the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def _catcher(self, tap: int) -> Any:
        def catch(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not self._capturing:
                return
            self._caught[tap] = output[0] if isinstance(output, tuple) else output
            if tap == self._last_wanted:
                raise _Enough

        return catch
