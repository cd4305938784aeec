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

from recipe.choice import NotFinite
from recipe.decode.batch import BatchSession
from recipe.decode.cache import TargetPass, TargetSession
from recipe.errors import RunError
from recipe.model_files.weights import Checkpoint
from recipe.target.capture import decoder_of

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
    OPEN_BATCH = 6
    START = 7
    EXTEND_ALL = 8
    KEEP_ALL = 9
    DROP = 10


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

    def batch_session(self, target_layer_ids: Sequence[int]) -> BatchSession:
        return _LeadingBatch(self, target_layer_ids)

    def tell(self, call: Call, number: int = 0, numbers: torch.Tensor | Sequence[int] | None = None) -> None:
        """Announce a call: with one ``number``, or with as many ``numbers`` as it says, which follow."""
        self.tick()
        if self._share is None:
            return
        count = number if numbers is None else len(numbers)
        self._share(torch.tensor([call, count], dtype=torch.int64, device=self.device))
        if numbers is not None:
            sent = torch.tensor(numbers) if not isinstance(numbers, torch.Tensor) else numbers
            self._share(sent.to(self.device, torch.int64, copy=True))

    def close(self, error: BaseException | None) -> None:
        """A session has ended. After an error the others are inside a forward, or will be ended with this rank; but
        logits that are not finite are found between two calls."""
        if error is None or isinstance(error, NotFinite):
            self.tell(Call.CLOSE)

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
        self._target.close(error)

    def prefill(self, prompt: torch.Tensor) -> TargetPass:
        self._target.tell(Call.PREFILL, numbers=prompt)
        return super().prefill(prompt)

    def extend(self, tokens: torch.Tensor) -> TargetPass:
        self._target.tell(Call.EXTEND, numbers=tokens)
        return super().extend(tokens)

    def keep(self, rows: int) -> None:
        self._target.tell(Call.KEEP, rows)
        super().keep(rows)


class _LeadingBatch(BatchSession):
    def __init__(self, target: ShardedTarget, target_layer_ids: Sequence[int]) -> None:
        super().__init__(target.decoder, target_layer_ids, target.head)
        self._target = target

    def __enter__(self) -> _LeadingBatch:
        self._target.tell(Call.OPEN_BATCH)
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        self._target.close(error)

    def start(self, prompts: Sequence[torch.Tensor]) -> list[TargetPass]:
        lengths = torch.tensor([len(prompts), *map(len, prompts)], device=prompts[0].device)
        self._target.tell(Call.START, numbers=torch.cat([lengths, *prompts]))
        return super().start(prompts)

    def extend_all(self, tokens: torch.Tensor) -> TargetPass:
        rows = torch.tensor([len(tokens)], device=tokens.device)
        self._target.tell(Call.EXTEND_ALL, numbers=torch.cat([rows, tokens.flatten()]))
        return super().extend_all(tokens)

    def keep_all(self, rows: Sequence[int]) -> None:
        self._target.tell(Call.KEEP_ALL, numbers=rows)
        super().keep_all(rows)

    def drop(self, stay: Sequence[int]) -> None:
        self._target.tell(Call.DROP, numbers=stay)
        super().drop(stay)


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
        if call in (Call.OPEN, Call.OPEN_BATCH):
            kind = TargetSession if call == Call.OPEN else BatchSession
            session = kind(decoder, [], logits=False).__enter__()
        elif session is None or call not in set(Call):
            raise RunError(f"the first rank of the target said {call} {number}, which is no call on its session")
        elif call == Call.KEEP:
            session.keep(number)
        elif call == Call.CLOSE:
            session.__exit__(None, None, None)
            session = None
        else:
            numbers = torch.empty(number, dtype=torch.int64, device=device)
            share(numbers)
            _take_part(session, Call(call), numbers)


def _take_part(session: TargetSession, call: Call, numbers: torch.Tensor) -> None:
    """The other end of the calls that bring ``numbers`` int64 [m]."""
    if isinstance(session, BatchSession):
        count = int(numbers[0])
        if call == Call.START:
            session.start(numbers[1 + count :].split(numbers[1 : 1 + count].tolist()))
        elif call == Call.EXTEND_ALL:
            session.extend_all(numbers[1:].view(count, -1))
        else:
            (session.keep_all if call == Call.KEEP_ALL else session.drop)(numbers.tolist())
    else:
        (session.prefill if call == Call.PREFILL else session.extend)(numbers)


def leading_target(
    engine: nn.Module,
    checkpoint: Checkpoint,
    vocab_size: int,
    device: torch.device,
    share: Share | None,
    tick: Callable[[], None] = lambda: None,
) -> tuple[ShardedTarget, torch.Tensor]:
    """On the first rank: its part of a loaded target with the whole head (dtype of the embedding), and the embedding.

    Raises RunError when this rank holds only a part of the embedding.
    """
    decoder = decoder_of(engine)
    embedding: torch.Tensor = decoder.get_input_embeddings().weight.detach()
    if embedding.shape[0] != vocab_size:
        raise RunError(f"this rank holds {embedding.shape[0]} of {vocab_size} embedding rows")
    head = embedding if checkpoint.tied else checkpoint.head(device).to(embedding.dtype)
    checkpoint.close()
    return ShardedTarget(decoder, head, device, share, tick), embedding
