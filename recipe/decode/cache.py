"""The target while it decodes: one call per block, the taps of that call, and an exact way back after a rejection.

Attention keys and values are cropped. The state of a linear-attention layer (Gated DeltaNet) cannot be cropped: it has
already absorbed the rejected tokens. So its states are copied before a block is run, and after a rejection they are put
back and only those layers are run again over the tokens that stay, from the inputs that they had in the block. Those
inputs are right because every layer is causal. This costs no target forward: no attention, no MLP and no head.

Works on plain transformers causal models (5.17 and later: the cache argument changed its name in 5.24) and on models of
the same module layout.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import DynamicCache

from recipe.decode.kernels import for_any_length
from recipe.errors import RunError
from recipe.target.capture import decoder_of, layers_of

Session = TypeVar("Session", bound="TargetSession")
States = list[tuple[dict[int, Any], dict[int, Any]]]


@dataclass(frozen=True)
class TargetPass:
    """One target forward over n tokens: ``logits`` [n, V] ([1, V] for a prefill), ``taps`` k × [n, H]."""

    logits: torch.Tensor
    taps: list[torch.Tensor]


def copied(states: dict[int, Any]) -> dict[int, Any]:
    return {key: None if state is None else state.clone() for key, state in states.items()}


def _put_back(states: dict[int, Any], saved: dict[int, Any]) -> None:
    for key, state in saved.items():
        if state is not None:
            states[key].copy_(state)  # in place: the cache may hold static addresses


def open_session(target: Any, target_layer_ids: Sequence[int], head: torch.Tensor | None = None) -> TargetSession:
    """A session on a model, or on anything that makes its own sessions (`recipe.decode.sharded`)."""
    make = getattr(target, "session", None)
    return TargetSession(target, target_layer_ids, head) if make is None else make(target_layer_ids)


class TargetSession:
    """One sequence going through the target. A context manager: its hooks are on the model only inside ``with``.

    ``head`` [V, H] is needed only for a model without a language head of its own. ``logits`` False: none are wanted
    ([n, 0] is handed out), as on the ranks of a sharded target that only take part.
    """

    def __init__(
        self,
        model: nn.Module,
        target_layer_ids: Sequence[int],
        head: torch.Tensor | None = None,
        logits: bool = True,
    ) -> None:
        self.model, self.head, self._wants_logits = model, head, logits
        self.layers = layers_of(decoder_of(model))
        outside = [layer for layer in target_layer_ids if not 0 <= layer < len(self.layers)]
        if outside:
            raise RunError(f"taps {outside} are outside the target's {len(self.layers)} layers")
        self.target_layer_ids = list(target_layer_ids)
        self.length = 0
        self.state_replays = 0
        arguments = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in arguments else "past_key_values"
        self._keeps_logits = "logits_to_keep" in arguments
        self._hooks: list[Any] = []
        self._taps: dict[int, torch.Tensor] = {}
        self._linear_calls: dict[int, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}
        self._before: States | None = None
        self._last_rows = 0
        self._cache = self._new_cache()

    def _new_cache(self) -> Any:
        cache = DynamicCache(config=self.model.config)
        for layer in cache.layers:
            # A sliding-window layer must remember what it would have dropped, or a crop cannot bring it back.
            if getattr(layer, "is_sliding", False) and hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        return cache

    def __enter__(self: Session) -> Session:
        for index in set(self.target_layer_ids):
            self._hooks.append(self.layers[index].register_forward_hook(self._tap_hook(index)))
        for index, layer in enumerate(self.layers):
            mixer = getattr(layer, "linear_attn", None)
            if mixer is not None:
                self._hooks.append(mixer.register_forward_pre_hook(self._linear_hook(index), with_kwargs=True))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _tap_hook(self, index: int) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            self._taps[index] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    def _linear_hook(self, index: int) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            self._linear_calls[index] = (module, arguments, dict(keywords))

        return hook

    @for_any_length
    def _run(self, tokens: torch.Tensor, last_row_only: bool) -> TargetPass:
        options: dict[str, Any] = {self._cache_name: self._cache, "use_cache": True}
        if self._keeps_logits and last_row_only:
            options["logits_to_keep"] = 1
        output = self.model(input_ids=tokens[None], **options)
        self.length += len(tokens)
        self._last_rows = len(tokens)
        return TargetPass(self._logits(output, last_row_only), [self._taps[index] for index in self.target_layer_ids])

    def _logits(self, output: Any, last_row_only: bool) -> torch.Tensor:
        logits = getattr(output, "logits", None)
        if logits is None:
            hidden = output.last_hidden_state[0, -1:] if last_row_only else output.last_hidden_state[0]
            if not self._wants_logits:
                return hidden[:, :0]
            if self.head is None:
                raise RunError(f"{type(self.model).__name__} gives no logits and no head was passed")
            return nn.functional.linear(hidden, self.head)
        return logits[0, -1:] if last_row_only else logits[0]

    @torch.inference_mode()
    def prefill(self, prompt: torch.Tensor) -> TargetPass:
        """Run ``prompt`` int64 [P]; the logits are those of the last token alone. It cannot be rolled back."""
        self._before = None
        return self._run(prompt, last_row_only=True)

    @torch.inference_mode()
    def extend(self, tokens: torch.Tensor) -> TargetPass:
        """Run ``tokens`` int64 [n] after what is cached. ``keep`` may then take back the tail of them."""
        self._save_states()
        return self._run(tokens, last_row_only=False)

    def _save_states(self) -> None:
        self._before = [
            (copied(layer.conv_states), copied(layer.recurrent_states))
            for layer in self._cache.layers
            if hasattr(layer, "recurrent_states")
        ]

    @torch.inference_mode()
    def keep(self, rows: int) -> None:
        """Keep the first ``rows`` (≥ 1) tokens of the last ``extend``: the cache is as if only they had run."""
        if self._before is None or not 1 <= rows <= self._last_rows:
            raise RunError(f"cannot keep {rows} of the last {self._last_rows} tokens")
        surplus = self._last_rows - rows
        if surplus:
            self._crop_attention(surplus)
            self._replay_linear(rows)
            self.length -= surplus
        elif any(getattr(layer, "record_past", False) for layer in self._cache.layers):
            self._crop_attention(0)
        self._before, self._last_rows = None, 0

    def _crop_attention(self, surplus: int) -> None:
        for layer in self._cache.layers:
            if not hasattr(layer, "recurrent_states"):
                layer.crop(-surplus)

    def _replay_linear(self, rows: int) -> None:
        linear = [layer for layer in self._cache.layers if hasattr(layer, "recurrent_states")]
        for layer, (conv, recurrent) in zip(linear, self._before or [], strict=True):
            _put_back(layer.conv_states, conv)
            _put_back(layer.recurrent_states, recurrent)
        for module, arguments, keywords in list(self._linear_calls.values()):
            if arguments:
                arguments = (arguments[0][:, :rows], *arguments[1:])
            else:
                keywords = {**keywords, "hidden_states": keywords["hidden_states"][:, :rows]}
            module(*arguments, **keywords)
        self.state_replays += bool(linear)
