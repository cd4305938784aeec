"""Several sequences going through the target together, each at its own place, exactly as if it went alone.

Sequences accept different numbers of drafts. So the cache of a batch has holes: a slot is written for every token of a
block, and a mask says which slots of a row still count; each row's positions are its own. Prompts are run one by one,
without any padding, and their caches put side by side. After a rejection the linear-attention layers are run again in
groups of rows that keep equally many tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicLayer

from recipe.decode.cache import TargetPass, TargetSession, copied
from recipe.decode.drafter_cache import IncrementalDrafter
from recipe.decode.plain import PlainResult, now
from recipe.decode.sampling import Sampler
from recipe.decode.speculative import Block, BlockProposer, DecodeResult, Proposer, SpeculativeDecoder, commit
from recipe.errors import ConfigError


class BatchSession(TargetSession):
    """n sequences. `start` them, then `extend_all` and `keep_all`, and `drop` those that have ended."""

    def __init__(self, model: nn.Module, target_layer_ids: Sequence[int], head: torch.Tensor | None = None) -> None:
        super().__init__(model, target_layer_ids, head)
        for layer in self._cache.layers:
            if not hasattr(layer, "recurrent_states") and type(layer) is not DynamicLayer:
                rule = f"this target keeps {type(layer).__name__}s, which are not decoded in batches"
                raise ConfigError("--batch-size", "more than 1", rule, "use --batch-size 1")
        self.lengths: list[int] = []
        self._valid = torch.empty(0)

    def _tap_hook(self, index: int) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            self._taps[index] = output[0] if isinstance(output, tuple) else output

        return hook

    @torch.inference_mode()
    def start(self, prompts: Sequence[torch.Tensor]) -> list[TargetPass]:
        """Run each prompt int64 [P] alone; results as `TargetSession.prefill` gives them."""
        passes, caches = [], []
        for prompt in prompts:
            with TargetSession(self.model, self.target_layer_ids, self.head) as alone:
                passes.append(alone.prefill(prompt))
                caches.append(alone._cache)
        self.lengths = [len(prompt) for prompt in prompts]
        longest = max(self.lengths)
        slots = torch.arange(longest, device=prompts[0].device)
        self._valid = slots < torch.tensor(self.lengths, device=slots.device)[:, None]
        self._cache = caches[0]
        for index, layer in enumerate(self._cache.layers):
            others = [cache.layers[index] for cache in caches]
            if hasattr(layer, "recurrent_states"):
                for states in ("conv_states", "recurrent_states"):
                    for key in getattr(layer, states):
                        getattr(layer, states)[key] = torch.cat([getattr(other, states)[key] for other in others])
            else:
                layer.keys, layer.values = (
                    torch.cat([_padded(getattr(other, name), longest) for other in others])
                    for name in ("keys", "values")
                )
        return passes

    @torch.inference_mode()
    def extend_all(self, tokens: torch.Tensor) -> TargetPass:
        """Run ``tokens`` int64 [n, q]: logits [n, q, V], taps k × [n, q, H]."""
        n, q = tokens.shape
        self._save_states()
        own = torch.ones(q, q, dtype=torch.bool, device=tokens.device).tril().expand(n, q, q)
        visible = torch.cat([self._valid[:, None].expand(n, q, -1), own], dim=-1)
        dtype = next(self.model.parameters()).dtype
        mask = torch.zeros(visible.shape, dtype=dtype, device=tokens.device)
        mask = mask.masked_fill(~visible, torch.finfo(dtype).min)[:, None]
        steps = torch.arange(q, device=tokens.device)
        positions = torch.tensor(self.lengths, device=tokens.device)[:, None] + steps
        output = self.model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=True,
            **{self._cache_name: self._cache},
        )  # fmt: skip
        logits = getattr(output, "logits", None)
        if logits is None:
            assert self.head is not None
            logits = nn.functional.linear(output.last_hidden_state, self.head)
        self._last_rows = q
        return TargetPass(logits, [self._taps[index] for index in self.target_layer_ids])

    @torch.inference_mode()
    def keep_all(self, rows: Sequence[int]) -> None:
        """Keep the first ``rows[i]`` (≥ 1) tokens of the last `extend_all` in sequence i."""
        q, most = self._last_rows, max(rows)
        kept = torch.arange(most, device=self._valid.device) < torch.tensor(rows, device=self._valid.device)[:, None]
        self._valid = torch.cat([self._valid, kept], dim=1)
        if most < q:
            self._crop_attention(q - most)
        behind = [index for index, count in enumerate(rows) if count < q]
        if behind:
            self._replay_rows(rows, behind)
        self.lengths = [length + count for length, count in zip(self.lengths, rows, strict=True)]
        self._before = None

    def _replay_rows(self, rows: Sequence[int], behind: Sequence[int]) -> None:
        linear = [layer for layer in self._cache.layers if hasattr(layer, "recurrent_states")]
        if not linear:
            return
        assert self._before is not None
        self.state_replays += len(behind)
        calls = list(self._linear_calls.values())
        merged = [(copied(layer.conv_states), copied(layer.recurrent_states)) for layer in linear]
        for count in sorted({rows[index] for index in behind}):
            chosen = torch.tensor([i for i in behind if rows[i] == count], device=self._valid.device)
            for layer, parts in zip(linear, self._before, strict=True):
                for name, saved in zip(("conv_states", "recurrent_states"), parts, strict=True):
                    for key, state in saved.items():
                        getattr(layer, name)[key] = state[chosen]
            for module, arguments, keywords in calls:
                if arguments:
                    arguments = (arguments[0][chosen, :count], *arguments[1:])
                else:
                    keywords = {**keywords, "hidden_states": keywords["hidden_states"][chosen, :count]}
                module(*arguments, **keywords)
            for layer, wholes in zip(linear, merged, strict=True):
                for name, whole in zip(("conv_states", "recurrent_states"), wholes, strict=True):
                    for key, state in whole.items():
                        state[chosen] = getattr(layer, name)[key]
        for layer, (conv, recurrent) in zip(linear, merged, strict=True):
            layer.conv_states.update(conv)
            layer.recurrent_states.update(recurrent)

    @torch.inference_mode()
    def drop(self, stay: Sequence[int]) -> None:
        """Only the sequences ``stay`` go on, in this order."""
        chosen = torch.tensor(stay, device=self._valid.device)
        self._valid, self.lengths = self._valid[chosen], [self.lengths[index] for index in stay]
        for layer in self._cache.layers:
            if hasattr(layer, "recurrent_states"):
                for states in (layer.conv_states, layer.recurrent_states):
                    states.update({key: state[chosen] for key, state in states.items()})
            else:
                layer.keys, layer.values = layer.keys[chosen], layer.values[chosen]


def _padded(states: torch.Tensor, length: int) -> torch.Tensor:
    """[1, heads, n, d] -> [1, heads, length, d]."""
    return nn.functional.pad(states, (0, 0, 0, length - states.shape[-2]))


class _Row:
    """One sequence on its way."""

    def __init__(self, prompt: torch.Tensor, sampler: Sampler, first: TargetPass, proposer: Proposer | None) -> None:
        self.prompt, self.sampler, self.proposer, self.taps = prompt, sampler, proposer, first.taps
        self.tokens = [int(sampler(first.logits, len(prompt))[0])]
        self.blocks: list[Block] = []
        self.replays = 0

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.tokens)


@torch.inference_mode()
def generate_batch(
    decoder: SpeculativeDecoder,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
    temperature: float,
    stop_ids: Collection[int],
    seeds: Sequence[int],
) -> list[DecodeResult]:
    """`SpeculativeDecoder.generate` of all prompts together; ``decode_seconds`` is each one's share."""
    block_size = decoder.proposer.block_size
    with BatchSession(decoder.target, decoder.proposer.target_layer_ids, decoder.head) as session:
        rows = _begin(session, prompts, temperature, seeds, decoder.proposer, max_new_tokens)
        began, live = now(prompts[0].device), _drop_done(session, rows, max_new_tokens, stop_ids)
        while live:
            counts = [min(block_size - 1, max_new_tokens - len(row.tokens)) for row in live]
            tokens = torch.zeros(len(live), 1 + max(counts), dtype=torch.int64, device=prompts[0].device)
            for place, (row, count) in enumerate(zip(live, counts, strict=True)):
                assert row.proposer is not None
                tokens[place, 0] = row.tokens[-1]
                tokens[place, 1 : 1 + count] = row.proposer.propose(row.taps, row.tokens[-1], count)
            result, kept = session.extend_all(tokens), []
            for place, (row, count) in enumerate(zip(live, counts, strict=True)):
                choices = row.sampler(result.logits[place, : 1 + count], row.position).tolist()
                drafts, room = tokens[place, 1 : 1 + count].tolist(), max_new_tokens - len(row.tokens)
                block, new = commit(drafts, choices, room, stop_ids)
                row.blocks.append(block)
                row.tokens.extend(new)
                row.taps = [tap[place, : len(new)] for tap in result.taps]
                kept.append(len(new))
            session.keep_all(kept)
            refused = {id(row) for row, keep, count in zip(live, kept, counts, strict=True) if keep < 1 + count}
            live = _drop_done(session, live, max_new_tokens, stop_ids)
            for row in live:  # as if alone: a sequence that has ended needs no state
                row.replays += id(row) in refused
        seconds = (now(prompts[0].device) - began) / len(rows)
        hybrid = bool(session._linear_calls)
    return [DecodeResult(row.tokens, row.blocks, row.replays if hybrid else 0, seconds) for row in rows]


@torch.inference_mode()
def plain_batch(
    target: nn.Module,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
    temperature: float,
    stop_ids: Collection[int],
    seeds: Sequence[int],
    head: torch.Tensor | None = None,
) -> list[PlainResult]:
    """`plain_generate` of all prompts together; ``decode_seconds`` is each one's share."""
    with BatchSession(target, [], head) as session:
        rows = _begin(session, prompts, temperature, seeds)
        began, live = now(prompts[0].device), _drop_done(session, rows, max_new_tokens, stop_ids)
        while live:
            last = torch.tensor([row.tokens[-1:] for row in live], device=prompts[0].device)
            result = session.extend_all(last)
            for place, row in enumerate(live):
                row.tokens.append(int(row.sampler(result.logits[place], row.position)[0]))
            session.keep_all([1] * len(live))
            live = _drop_done(session, live, max_new_tokens, stop_ids)
        seconds = (now(prompts[0].device) - began) / len(rows)
    return [PlainResult(row.tokens, len(row.tokens), seconds) for row in rows]


def _begin(
    session: BatchSession,
    prompts: Sequence[torch.Tensor],
    temperature: float,
    seeds: Sequence[int],
    proposer: Proposer | None = None,
    max_new_tokens: int = 0,
) -> list[_Row]:
    passes = session.start(prompts)
    rows = []
    for prompt, seed, first in zip(prompts, seeds, passes, strict=True):
        own = None if proposer is None else _fresh(proposer)
        if own is not None:
            own.begin(prompt, len(prompt) + max_new_tokens + 1)
        rows.append(_Row(prompt, Sampler(temperature, seed), first, own))
    return rows


def _fresh(proposer: Proposer) -> Proposer:
    """The same proposer with a context of its own."""
    own = copy.copy(proposer)
    if isinstance(own, BlockProposer):
        own.drafter = IncrementalDrafter(own.drafter.config, own.drafter.weights)
    return own


def _drop_done(session: BatchSession, rows: list[_Row], max_new_tokens: int, stop_ids: Collection[int]) -> list[_Row]:
    stay = [i for i, row in enumerate(rows) if len(row.tokens) < max_new_tokens and row.tokens[-1] not in stop_ids]
    if stay and len(stay) < len(rows):
        session.drop(stay)
    return [rows[index] for index in stay]
