"""Block-speculative decoding (docs/algorithm.md): the drafter proposes a block, one target forward checks it.

At the top of every round the target and the drafter's context have seen the positions below ``start``; the token at
``start`` (the anchor) is committed but has not been run. The first token comes from the prefill and is not counted: a
block records what its verify forward committed, accepted drafts plus one bonus token, at most ``block_size``.

A variant of the drafter differs here only in its ``Proposer`` (`recipe.drafter.variant`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from recipe.choice import DRAFTER, TARGET, refuse_no_token
from recipe.decode.cache import open_session
from recipe.decode.drafter_cache import IncrementalDrafter
from recipe.decode.plain import now
from recipe.decode.sampling import Sampler
from recipe.drafter.pieces import embed as embed_scaled
from recipe.drafter.variant import DFLASH, Variant


class Proposer(Protocol):
    """Proposes drafts. ``block_size`` counts the anchor; ``target_layer_ids`` are the taps that it wants."""

    block_size: int
    target_layer_ids: Sequence[int]

    def begin(self, prompt_ids: torch.Tensor, max_length: int) -> None:
        """A new sequence, of at most ``max_length`` positions."""

    def propose(self, taps: list[torch.Tensor], anchor: int, count: int) -> torch.Tensor:
        """``count`` drafts int64 for the positions after the anchor, NO_TOKEN (`recipe.choice`) where none can be
        chosen. ``taps``: k × [n, H], the rows not yet given."""


class BlockProposer:
    """Drafts of a trained drafter: the block is the anchor and mask tokens; ``variant`` says how drafts are chosen."""

    def __init__(
        self, drafter: IncrementalDrafter, embed: torch.Tensor, head: torch.Tensor, variant: Variant = DFLASH
    ) -> None:
        self.drafter, self.embed, self.head, self.variant = drafter, embed, head, variant
        self.block_size = drafter.config.block_size
        self.target_layer_ids: Sequence[int] = drafter.config.target_layer_ids

    def begin(self, prompt_ids: torch.Tensor, max_length: int) -> None:
        self.drafter.begin(max_length)

    def propose(self, taps: list[torch.Tensor], anchor: int, count: int) -> torch.Tensor:
        block = torch.tensor([anchor] + [self.drafter.config.mask_token_id] * count, device=self.embed.device)
        rows = embed_scaled(block, self.embed, self.drafter.config.input_embedding_scale)
        hidden = self.drafter.forward(taps, rows)
        return self.variant.draft(hidden, lambda rows: nn.functional.linear(rows.to(self.head.dtype), self.head))


@dataclass(frozen=True)
class Block:
    """One verify forward: drafts that could still count (an end token closes the block), drafts accepted, committed."""

    proposed: int
    accepted: int
    committed: int


@dataclass(frozen=True)
class DecodeResult:
    """``tokens`` after the prompt, an end token included and nothing after it; ``accepted``: committed per verify."""

    tokens: list[int]
    blocks: list[Block]
    state_replays: int
    decode_seconds: float

    @property
    def accepted(self) -> list[int]:
        return [block.committed for block in self.blocks]

    @property
    def verify_forwards(self) -> int:
        return len(self.blocks)

    @property
    def target_forwards(self) -> int:
        """Verify forwards and the prefill: plain decoding needs one for each token."""
        return len(self.blocks) + 1


class SpeculativeDecoder:
    """``target``: a causal model, or a `ShardedTarget`. ``drafter``: a DFlashDrafter, an IncrementalDrafter, or any
    Proposer (then ``embed`` [V, H] and ``head`` [V, H], the target's, may be left out).
    """

    def __init__(
        self,
        target: Any,
        drafter: nn.Module | IncrementalDrafter | Proposer,
        embed: torch.Tensor | None = None,
        head: torch.Tensor | None = None,
    ) -> None:
        self.target, self.head = target, head
        self.proposer: Proposer
        if hasattr(drafter, "propose"):
            self.proposer = drafter  # type: ignore[assignment]
            return
        if embed is None or head is None:
            raise ValueError("a drafter needs the target's embedding and head")
        if isinstance(drafter, nn.Module):
            drafter = IncrementalDrafter.of_module(drafter)
        assert isinstance(drafter, IncrementalDrafter)
        self.proposer = BlockProposer(drafter, embed, head)

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: torch.Tensor,
        max_new_tokens: int,
        temperature: float = 0.0,
        *,
        stop_ids: Collection[int] = (),
        seed: int = 0,
    ) -> DecodeResult:
        """Decode after ``prompt_ids`` int64 [P ≥ 1] until a stop id or ``max_new_tokens`` ≥ 1 tokens.

        A draft is accepted iff it equals the target's own choice at its place: the most likely token, or at temperature
        above 0 an independent sample. Either way the output is distributed as the target's. Raises NotFinite where the
        logits of either model are not finite.
        """
        if prompt_ids.ndim != 1 or len(prompt_ids) < 1 or max_new_tokens < 1:
            raise ValueError("generate needs a prompt of at least one token and max_new_tokens of at least 1")
        sampler = Sampler(temperature, seed)
        with open_session(self.target, self.proposer.target_layer_ids, self.head) as session:
            result = session.prefill(prompt_ids)
            began = now(prompt_ids.device)
            self.proposer.begin(prompt_ids, len(prompt_ids) + max_new_tokens + 1)
            tokens = sampler(result.logits, len(prompt_ids)).tolist()
            refuse_no_token(tokens, TARGET, len(prompt_ids))
            taps, blocks = result.taps, []
            while len(tokens) < max_new_tokens and tokens[-1] not in stop_ids:
                # The last block is cut at the length limit, as the reference client does it.
                count = min(self.proposer.block_size - 1, max_new_tokens - len(tokens))
                drafts = self.proposer.propose(taps, tokens[-1], count)
                # NO_TOKEN is no id, and is refused only when the drafts come over: until then any id will do.
                asked = torch.cat([prompt_ids.new_tensor(tokens[-1:]), drafts.clamp_min(0).to(prompt_ids)])
                result, position = session.extend(asked), len(prompt_ids) + len(tokens)
                choices = sampler(result.logits, position).tolist()
                block, new = commit(drafts.tolist(), choices, max_new_tokens - len(tokens), stop_ids, position)
                blocks.append(block)
                tokens.extend(new)
                if len(tokens) < max_new_tokens and tokens[-1] not in stop_ids:
                    session.keep(len(new))
                    taps = [tap[: len(new)] for tap in result.taps]
            return DecodeResult(tokens, blocks, session.state_replays, now(prompt_ids.device) - began)


def commit(
    drafts: list[int], choices: list[int], room: int, stop_ids: Collection[int], position: int = 0, prompt: int = 0
) -> tuple[Block, list[int]]:
    """The leading drafts that equal the target's choices, and its next choice; cut at an end token and at room.

    Raises NotFinite for a draft or a choice that could not be made; ``position`` (of the first) and ``prompt`` name it.
    """
    refuse_no_token(drafts, DRAFTER, position, prompt)
    refuse_no_token(choices, TARGET, position, prompt)
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == choices[accepted]:
        accepted += 1
    new = choices[: accepted + 1][:room]
    proposed = len(drafts)
    for place, token in enumerate(new):
        if token in stop_ids:
            new = new[: place + 1]
            if place < accepted:
                # Drafts behind an accepted end token never had a chance to count: they are not proposals.
                proposed = place + 1
            break
    return Block(proposed, min(accepted, proposed, len(new)), len(new)), new
