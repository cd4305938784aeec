"""One measurement of a drafter: every prompt decoded with it and by the target alone, and what the two say."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from recipe.choice import NotFinite
from recipe.decode.batch import generate_batch, plain_batch
from recipe.decode.metrics import (
    TAU_IS,
    Mismatch,
    accept_rate,
    explain_mismatch,
    first_difference,
    target_forwards_per_token,
    tau,
    tau_interval,
)
from recipe.decode.plain import PlainResult, plain_generate
from recipe.decode.prompts import Prompt
from recipe.decode.sampling import Sampler
from recipe.decode.speculative import DecodeResult, SpeculativeDecoder
from recipe.errors import ConfigError

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Evaluation:
    """One measurement. ``identical``: every speculative output equals the plain one, token by token.

    ``accept_rate[k-1]``: share of blocks whose first k drafts were accepted. ``target_forwards_per_token`` counts the
    prefill (plain decoding: 1). ``state_replays``: roll-backs in which the linear-attention layers alone were run
    again. ``speedup``: plain decoding seconds / speculative, prefill excluded. Times are of this machine. ``domains``:
    name -> tau, tau_ci, accept_rate, speedup, identical_prompts and prompts of each.
    """

    tau: float | None
    tau_ci: tuple[float, float] | None
    tau_is: str
    accept_rate: list[float | None]
    identical: bool
    identical_prompts: int
    mismatches: list[Mismatch]
    prompts: int
    skipped_too_long: int
    domains: dict[str, dict[str, Any]]
    tokens: int
    verify_forwards: int
    state_replays: int
    target_forwards_per_token: float | None
    speedup: float | None
    tokens_per_s: float | None
    plain_tokens_per_s: float | None
    seconds: float
    settings: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Task:
    """What to decode and how. ``max_length``: positions that the target has; longer prompts are left out. ``explain``
    False: whether rounding parted two outputs is not asked, which costs a forward for each token before that place.

    Raises ConfigError when nothing is left.
    """

    prompts: Sequence[Prompt]
    max_new_tokens: int
    temperature: float = 0.0
    stop_ids: Collection[int] = ()
    seed: int = 0
    max_length: int | None = None
    explain: bool = True
    skipped: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        most = self.max_length
        fitting = [p for p in self.prompts if most is None or len(p.ids) + self.max_new_tokens <= most]
        if not fitting:
            rule = f"no prompt leaves room for {self.max_new_tokens} new tokens in the target's {most} positions"
            raise ConfigError("--max-new-tokens", self.max_new_tokens, rule, "lower it, or use shorter prompts")
        self.skipped, self.prompts = len(self.prompts) - len(fitting), fitting


def measuring(
    decoder: SpeculativeDecoder,
    task: Task,
    device: torch.device | str = "cpu",
    *,
    known: dict[int, PlainResult] | None = None,
    batch_size: int = 1,
    settings: Mapping[str, Any] | None = None,
) -> Generator[int, None, Evaluation]:
    """`measure`, one answer at a time: yields the number of prompts done after each answer, so that a training loop
    can do other work between two. ``known``: plain answers by prompt, taken from there and put there: the target is
    frozen, so they need not be decoded twice. ``batch_size`` prompts are decoded together (`recipe.decode.batch`).
    ``seconds`` counts the work alone, not what happens between. Raises NotFinite, with the prompt's number.
    """
    results: list[DecodeResult] = []
    plains: list[PlainResult] = []
    mismatches: list[Mismatch] = []
    known = {} if known is None else known
    seconds, began = 0.0, time.perf_counter()
    for first in range(0, len(task.prompts), batch_size):
        chunk = range(first, min(first + batch_size, len(task.prompts)))
        ids = [task.prompts[index].ids.to(device) for index in chunk]
        if any(index not in known for index in chunk):
            with _numbered(chunk):
                known.update(zip(chunk, _plain(decoder, task, ids, chunk), strict=True))
            seconds += time.perf_counter() - began
            yield first
            began = time.perf_counter()
        plains += [known[index] for index in chunk]
        with _numbered(chunk):
            results += _speculative(decoder, task, ids, chunk)
        for index, prompt in zip(chunk, ids, strict=True):
            outputs = known[index].tokens, results[index].tokens
            mismatch = _unexplained(index, *outputs)
            if mismatch is not None and task.explain:
                sampler = Sampler(task.temperature, task.seed + index)
                mismatch = explain_mismatch(decoder.target, index, prompt, *outputs, decoder.head, sampler)
            mismatches += [] if mismatch is None else [mismatch]
        seconds += time.perf_counter() - began
        yield chunk.stop
        began = time.perf_counter()
    return _evaluation(
        decoder.proposer.block_size,
        task.prompts,
        results,
        plains,
        mismatches,
        skipped=task.skipped,
        seconds=seconds,
        settings=dict(settings or {}),
    )


@contextmanager
def _numbered(chunk: range) -> Iterator[None]:
    """What is decoded here are the prompts ``chunk``."""
    try:
        yield
    except NotFinite as error:
        assert isinstance(error.prompt, int)
        raise NotFinite(error.model, error.position, chunk[error.prompt]) from error


def _plain(decoder: SpeculativeDecoder, task: Task, ids: list[torch.Tensor], chunk: range) -> list[PlainResult]:
    seeds, limits = [task.seed + index for index in chunk], (task.max_new_tokens, task.temperature)
    if len(ids) > 1:
        return plain_batch(decoder.target, ids, *limits, task.stop_ids, seeds, decoder.head)
    stop = task.stop_ids
    return [plain_generate(decoder.target, ids[0], *limits, stop_ids=stop, seed=seeds[0], head=decoder.head)]


def _speculative(decoder: SpeculativeDecoder, task: Task, ids: list[torch.Tensor], chunk: range) -> list[DecodeResult]:
    seeds, limits = [task.seed + index for index in chunk], (task.max_new_tokens, task.temperature)
    if len(ids) > 1:
        return generate_batch(decoder, ids, *limits, task.stop_ids, seeds)
    return [decoder.generate(ids[0], *limits, stop_ids=task.stop_ids, seed=seeds[0])]


def measure(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    temperature: float = 0.0,
    stop_ids: Collection[int] = (),
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    max_length: int | None = None,
    progress: Progress | None = None,
    batch_size: int = 1,
    settings: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Decode every prompt twice, plainly and speculatively, ``batch_size`` of them together."""
    task = Task(prompts, max_new_tokens, temperature, stop_ids, seed, max_length)
    if torch.device(device).type == "cuda":  # kernels are compiled and tuned at their first use
        warm = task.prompts[0].ids.to(device)
        decoder.generate(warm, min(32, max_new_tokens), temperature, seed=seed)
        plain_generate(decoder.target, warm, min(8, max_new_tokens), temperature, seed=seed, head=decoder.head)
    steps = measuring(decoder, task, device, batch_size=batch_size, settings=settings)
    while True:
        try:
            done = next(steps)
        except StopIteration as end:
            assert isinstance(end.value, Evaluation)
            return end.value
        if progress is not None:
            progress(done, len(task.prompts))


def _unexplained(index: int, plain: list[int], other: list[int]) -> Mismatch | None:
    position = first_difference(plain, other)
    if position is None:
        return None
    one, two = (tokens[position] if position < len(tokens) else None for tokens in (plain, other))
    return Mismatch(index, position, one, two, gap=None, noise=None, numeric_tie=False)


def _evaluation(
    block_size: int,
    prompts: Sequence[Prompt],
    results: list[DecodeResult],
    plains: list[PlainResult],
    mismatches: list[Mismatch],
    *,
    skipped: int,
    seconds: float,
    settings: dict[str, Any],
) -> Evaluation:
    differ = {mismatch.prompt for mismatch in mismatches}
    domains = {}
    for name in sorted({prompt.domain for prompt in prompts}):
        places = [place for place, prompt in enumerate(prompts) if prompt.domain == name]
        mine = [results[place] for place in places]
        domains[name] = {
            "tau": tau(mine),
            "tau_ci": tau_interval(mine),
            "accept_rate": accept_rate(mine, block_size),
            "speedup": _ratio(tokens_per_s(mine), tokens_per_s([plains[place] for place in places])),
            "identical_prompts": sum(place not in differ for place in places),
            "prompts": len(mine),
        }
    speed, plain_speed = tokens_per_s(results), tokens_per_s(plains)
    return Evaluation(
        tau=tau(results),
        tau_ci=tau_interval(results),
        tau_is=TAU_IS,
        accept_rate=accept_rate(results, block_size),
        identical=not mismatches,
        identical_prompts=len(results) - len(mismatches),
        mismatches=mismatches,
        prompts=len(results),
        skipped_too_long=skipped,
        domains=domains,
        tokens=sum(len(result.tokens) for result in results),
        verify_forwards=sum(result.verify_forwards for result in results),
        state_replays=sum(result.state_replays for result in results),
        target_forwards_per_token=target_forwards_per_token(results),
        speedup=_ratio(speed, plain_speed),
        tokens_per_s=speed,
        plain_tokens_per_s=plain_speed,
        seconds=seconds,
        settings=settings,
    )


def tokens_per_s(results: Sequence[DecodeResult | PlainResult]) -> float | None:
    """The first token of each comes from the prefill, outside the clock. None without tokens or time."""
    tokens, clock = sum(len(r.tokens) - 1 for r in results), sum(r.decode_seconds for r in results)
    return tokens / clock if tokens and clock else None


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours and theirs else None
