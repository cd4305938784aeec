"""Decoding with a sharded target: its first rank decides everything, the other ranks follow its calls.

Every rank of the group has to take part in every forward, with the same tokens. Two ranks that each chose tokens for
themselves could part at a rounding difference and then wait for each other for ever. So only the first rank holds head,
drafter and sampler; it says each call on its session to the others before it makes it, in one or two small broadcasts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import nn

from recipe.decode.cache import TargetPass, TargetSession
from recipe.errors import RunError

Share = Callable[[torch.Tensor], None]
"""Makes an int64 tensor on every rank of the group what it is on the first, in place."""


class Call(IntEnum):
    """What the first rank does next."""

    OPEN = 0
    PREFILL = 1
    EXTEND = 2
    KEEP = 3
    CLOSE = 4
    LEAVE = 5


class ShardedTarget:
    """The first rank's target, given to `SpeculativeDecoder` and `plain_generate` in the place of a model.

    Args:
        decoder: this rank's part, a transformers decoder without a head.
        head: [V, H], whole.
        device: of the decoder.
        share: None for a target that is not sharded: nobody has to be told.
        tick: called before every forward, for a watchdog.
    """

    def __init__(
        self,
        decoder: nn.Module,
        head: torch.Tensor,
        device: torch.device,
        share: Share | None = None,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.decoder, self.head, self.device, self._share, self.tick = decoder, head, device, share, tick

    def session(self, target_layer_ids: Sequence[int]) -> TargetSession:
        return _LeadingSession(self, target_layer_ids)

    def tell(self, call: Call, number: int = 0, tokens: torch.Tensor | None = None) -> None:
        """Announce a call: ``number`` of rows, or of the ``tokens`` that follow."""
        self.tick()
        if self._share is None:
            return
        count = number if tokens is None else len(tokens)
        self._share(torch.tensor([call, count], dtype=torch.int64, device=self.device))
        if tokens is not None:
            self._share(tokens.to(self.device, torch.int64, copy=True))

    def leave(self) -> None:
        """The followers go back to what they did before."""
        self.tell(Call.LEAVE)


class _LeadingSession(TargetSession):
    def __init__(self, target: ShardedTarget, target_layer_ids: Sequence[int]) -> None:
        super().__init__(target.decoder, target_layer_ids, target.head)
        self._target = target

    def __enter__(self) -> _LeadingSession:
        self._target.tell(Call.OPEN)
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if error is None:  # else the others are inside a forward, or will be ended with this rank
            self._target.tell(Call.CLOSE)

    def prefill(self, prompt: torch.Tensor) -> TargetPass:
        self._target.tell(Call.PREFILL, tokens=prompt)
        return super().prefill(prompt)

    def extend(self, tokens: torch.Tensor) -> TargetPass:
        self._target.tell(Call.EXTEND, tokens=tokens)
        return super().extend(tokens)

    def keep(self, rows: int) -> None:
        self._target.tell(Call.KEEP, rows)
        super().keep(rows)


def follow(decoder: nn.Module, device: torch.device, share: Share, tick: Callable[[], None] = lambda: None) -> None:
    """On every rank but the first: take part in its calls until it leaves. ``tick`` is called at each of them.

    Raises RunError when what arrives is no call, which says that the ranks have lost each other.
    """
    session: TargetSession | None = None
    while True:
        header = torch.empty(2, dtype=torch.int64, device=device)
        share(header)
        tick()
        call, number = header.tolist()
        if call == Call.LEAVE:
            return
        if call == Call.OPEN:
            session = TargetSession(decoder, [], logits=False).__enter__()
        elif session is None or call not in set(Call):
            raise RunError(f"the first rank of the target said {call} {number}, which is no call on its session")
        elif call == Call.KEEP:
            session.keep(number)
        elif call == Call.CLOSE:
            session.__exit__(None, None, None)
            session = None
        else:
            tokens = torch.empty(number, dtype=torch.int64, device=device)
            share(tokens)
            (session.prefill if call == Call.PREFILL else session.extend)(tokens)
