"""Several sequences going through the target together, each at its own place, exactly as if it went alone.

Sequences accept different numbers of drafts. So the cache of a batch has holes: a slot is written for every token of a
block, and a mask says which slots of a row still count; each row's positions are its own. Prompts are run one by one,
without any padding, and their caches put side by side. After a rejection the linear-attention layers are run again in
groups of rows that keep equally many tokens. One drafter forward serves all sequences (`recipe.decode.drafter_batch`).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from recipe.choice import TARGET, most_likely, refuse_no_token
from recipe.decode.cache import TargetPass, TargetSession, copied
from recipe.decode.drafter_batch import BatchBlockProposer, BatchProposer, pad
from recipe.decode.kernels import for_any_length
from recipe.decode.plain import PlainResult, now
from recipe.decode.sampling import Sampler
from recipe.decode.speculative import Block, BlockProposer, DecodeResult, Proposer, SpeculativeDecoder, commit
from recipe.errors import ConfigError


def check_batches(config: Any) -> None:
    """ConfigError for a target, by its transformers config, whose caches cannot be put side by side."""
    for layer in DynamicCache(config=config).layers:
        if not hasattr(layer, "recurrent_states") and type(layer) is not DynamicLayer:
            rule = f"this target keeps {type(layer).__name__}s, which are not decoded in batches"
            raise ConfigError("--batch-size", "more than 1", rule, "use --batch-size 1")


class BatchSession(TargetSession):
    """n sequences. `start` them, then `extend_all` and `keep_all`, and `drop` those that have ended."""

    def __init__(
        self,
        model: nn.Module,
        target_layer_ids: Sequence[int],
        head: torch.Tensor | None = None,
        logits: bool = True,
    ) -> None:
        super().__init__(model, target_layer_ids, head, logits)
        check_batches(model.config)
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
            with TargetSession(self.model, self.target_layer_ids, self.head, self._wants_logits) as alone:
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
                    for key in _held(getattr(layer, states)):
                        getattr(layer, states)[key] = torch.cat([getattr(other, states)[key] for other in others])
            elif layer.keys is not None:
                layer.keys, layer.values = (
                    torch.cat([_padded(getattr(other, name), longest) for other in others])
                    for name in ("keys", "values")
                )
        return passes

    @for_any_length
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
        self._last_rows = q
        return TargetPass(self._all_logits(output), [self._taps[index] for index in self.target_layer_ids])

    def _all_logits(self, output: Any) -> torch.Tensor:
        """[n, q, V], or [n, q, 0] where none are wanted."""
        logits = getattr(output, "logits", None)
        if logits is None and not self._wants_logits:
            logits = output.last_hidden_state[..., :0]
        if logits is None:
            assert self.head is not None
            logits = nn.functional.linear(output.last_hidden_state, self.head)
        assert isinstance(logits, torch.Tensor)
        return logits

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
                    for key, state in _held(saved).items():
                        getattr(layer, name)[key] = state[chosen]
            for module, arguments, keywords in calls:
                if arguments:
                    arguments = (arguments[0][chosen, :count], *arguments[1:])
                else:
                    keywords = {**keywords, "hidden_states": keywords["hidden_states"][chosen, :count]}
                module(*arguments, **keywords)
            for layer, wholes in zip(linear, merged, strict=True):
                for name, whole in zip(("conv_states", "recurrent_states"), wholes, strict=True):
                    for key, state in _held(whole).items():
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
                    states.update({key: state[chosen] for key, state in _held(states).items()})
            elif layer.keys is not None:
                layer.keys, layer.values = layer.keys[chosen], layer.values[chosen]


def _held(states: dict[int, Any]) -> dict[int, torch.Tensor]:
    """Without the places of a rank that holds no head of a layer, and so no state of it."""
    return {key: state for key, state in states.items() if state is not None}


def _padded(states: torch.Tensor, length: int) -> torch.Tensor:
    """[1, heads, n, d] -> [1, heads, length, d]."""
    return nn.functional.pad(states, (0, 0, 0, length - states.shape[-2]))


def open_batch(target: Any, target_layer_ids: Sequence[int], head: torch.Tensor | None = None) -> BatchSession:
    """A session of a batch on a model, or on anything that makes its own (`recipe.decode.sharded`)."""
    make = getattr(target, "batch_session", None)
    return BatchSession(target, target_layer_ids, head) if make is None else make(target_layer_ids)


class _Row:
    """One sequence on its way; ``number``: its place among all that began."""

    def __init__(self, number: int, prompt: torch.Tensor, sampler: Sampler, first: TargetPass) -> None:
        self.number, self.prompt, self.sampler = number, prompt, sampler
        self.tokens = sampler(first.logits, len(prompt)).tolist()
        refuse_no_token(self.tokens, TARGET, len(prompt), number)
        self.blocks: list[Block] = []
        self.replays = 0

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.tokens)


class _Apart:
    """A `BatchProposer` of any proposer: a copy of it for each sequence."""

    def __init__(self, proposer: Proposer, prompts: Sequence[torch.Tensor], max_length: int) -> None:
        self.each = [copy.copy(proposer) for _ in prompts]
        for one, prompt in zip(self.each, prompts, strict=True):
            one.begin(prompt, max_length)

    def propose(
        self, taps: Sequence[torch.Tensor], given: Sequence[int], anchors: Sequence[int], counts: Sequence[int]
    ) -> torch.Tensor:
        drafts = torch.zeros(len(self.each), max(counts), dtype=torch.int64, device=taps[0].device)
        for place, (one, new, anchor, count) in enumerate(zip(self.each, given, anchors, counts, strict=True)):
            drafts[place, :count] = one.propose([tap[place, :new] for tap in taps], anchor, count)
        return drafts

    def drop(self, stay: Sequence[int]) -> None:
        self.each = [self.each[index] for index in stay]


def _batch_proposer(proposer: Proposer, prompts: Sequence[torch.Tensor], max_new_tokens: int) -> BatchProposer:
    longest = max(map(len, prompts)) + max_new_tokens + 1
    if isinstance(proposer, BlockProposer):
        return BatchBlockProposer(proposer, len(prompts), longest)
    return _Apart(proposer, prompts, longest)


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
    drafts_at_most, device = decoder.proposer.block_size - 1, prompts[0].device
    with open_batch(decoder.target, decoder.proposer.target_layer_ids, decoder.head) as session:
        passes = session.start(prompts)
        began = now(device)
        rows = live = _begun(prompts, temperature, seeds, passes)
        proposer = _batch_proposer(decoder.proposer, prompts, max_new_tokens)
        taps = [pad(parts) for parts in zip(*(first.taps for first in passes), strict=True)]
        given = [len(prompt) for prompt in prompts]
        while True:
            stay = _unfinished(live, max_new_tokens, stop_ids)
            if not stay:
                break
            if len(stay) < len(live):
                chosen = torch.tensor(stay, device=device)
                session.drop(stay)
                proposer.drop(stay)
                live, given, taps = [live[i] for i in stay], [given[i] for i in stay], [tap[chosen] for tap in taps]
            counts = [min(drafts_at_most, max_new_tokens - len(row.tokens)) for row in live]
            anchors = [row.tokens[-1] for row in live]
            drafts = proposer.propose(taps, given, anchors, counts).to(device)
            asked = torch.cat([torch.tensor(anchors, device=device)[:, None], drafts.clamp_min(0)], dim=1)
            result = session.extend_all(asked)
            given = _commit_all(live, counts, drafts, result.logits, max_new_tokens, stop_ids)
            taps = [tap[:, : max(given)] for tap in result.taps]
            session.keep_all(given)
            refused = {id(row) for row, keep, count in zip(live, given, counts, strict=True) if keep < 1 + count}
            for index in _unfinished(live, max_new_tokens, stop_ids):  # as if alone: who has ended needs no state
                live[index].replays += id(live[index]) in refused
        seconds = (now(device) - began) / len(rows)
        hybrid = bool(session._linear_calls)
    return [DecodeResult(row.tokens, row.blocks, row.replays if hybrid else 0, seconds) for row in rows]


def _commit_all(
    live: Sequence[_Row],
    counts: Sequence[int],
    drafts: torch.Tensor,
    logits: torch.Tensor,
    max_new_tokens: int,
    stop_ids: Collection[int],
) -> list[int]:
    """Append to each sequence what its block has brought; how many tokens that are."""
    chosen, given = _choose(live, logits), []
    for row, count, proposed, choices in zip(live, counts, drafts.tolist(), chosen, strict=True):
        room = max_new_tokens - len(row.tokens)
        block, new = commit(proposed[:count], choices[: 1 + count], room, stop_ids, row.position, row.number)
        row.blocks.append(block)
        row.tokens.extend(new)
        given.append(len(new))
    return given


@torch.inference_mode()
def plain_batch(
    target: Any,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
    temperature: float,
    stop_ids: Collection[int],
    seeds: Sequence[int],
    head: torch.Tensor | None = None,
) -> list[PlainResult]:
    """`plain_generate` of all prompts together; ``decode_seconds`` is each one's share."""
    device = prompts[0].device
    with open_batch(target, [], head) as session:
        passes = session.start(prompts)
        began = now(device)
        rows = live = _begun(prompts, temperature, seeds, passes)
        while True:
            stay = _unfinished(live, max_new_tokens, stop_ids)
            if not stay:
                break
            if len(stay) < len(live):
                session.drop(stay)
                live = [live[index] for index in stay]
            result = session.extend_all(torch.tensor([row.tokens[-1:] for row in live], device=device))
            for row, choices in zip(live, _choose(live, result.logits), strict=True):
                refuse_no_token(choices, TARGET, row.position, row.number)
                row.tokens += choices
            session.keep_all([1] * len(live))
        seconds = (now(device) - began) / len(rows)
    return [PlainResult(row.tokens, len(row.tokens), seconds) for row in rows]


def _begun(
    prompts: Sequence[torch.Tensor], temperature: float, seeds: Sequence[int], passes: Sequence[TargetPass]
) -> list[_Row]:
    parts = zip(prompts, seeds, passes, strict=True)
    return [_Row(number, ids, Sampler(temperature, seed), first) for number, (ids, seed, first) in enumerate(parts)]


def _choose(rows: Sequence[_Row], logits: torch.Tensor) -> list[list[int]]:
    """The target's choices for ``logits`` [n, q, V]. Greedy ones come over in one transfer: each is a wait."""
    if all(row.sampler.temperature == 0 for row in rows):
        found: list[list[int]] = most_likely(logits).tolist()
        return found
    return [row.sampler(logits[place], row.position).tolist() for place, row in enumerate(rows)]


def _unfinished(rows: Sequence[_Row], max_new_tokens: int, stop_ids: Collection[int]) -> list[int]:
    return [i for i, row in enumerate(rows) if len(row.tokens) < max_new_tokens and row.tokens[-1] not in stop_ids]
