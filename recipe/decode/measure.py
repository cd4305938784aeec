"""One measurement of a drafter: every prompt decoded with it and by the target alone, and what the two say."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

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
from recipe.decode.speculative import DecodeResult, SpeculativeDecoder
from recipe.errors import ConfigError

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Evaluation:
    """One measurement. ``identical``: every speculative output equals the plain one, token by token.

    ``accept_rate[k-1]``: share of blocks whose first k drafts were accepted. ``target_forwards_per_token`` counts the
    prefill (plain decoding: 1). ``state_replays``: roll-backs in which the linear-attention layers alone were run
    again. ``speedup``: plain decoding seconds / speculative, prefill excluded. Times are of this machine.
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
    """What to decode and how. ``max_length``: positions that the target has; longer prompts are left out.

    Raises ConfigError when nothing is left.
    """

    prompts: Sequence[Prompt]
    max_new_tokens: int
    temperature: float = 0.0
    stop_ids: Collection[int] = ()
    seed: int = 0
    max_length: int | None = None
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
    settings: Mapping[str, Any] | None = None,
) -> Generator[int, None, Evaluation]:
    """`measure`, one answer at a time: yields the number of prompts done after each answer, so that a training loop
    can do other work between two. ``known``: plain answers by prompt, taken from there and put there: the target is
    frozen, so they need not be decoded twice. ``seconds`` counts the work alone, not what happens between.
    """
    results: list[DecodeResult] = []
    plains: list[PlainResult] = []
    mismatches: list[Mismatch] = []
    known = {} if known is None else known
    seconds, began = 0.0, time.perf_counter()
    for index, prompt in enumerate(task.prompts):
        ids, seed = prompt.ids.to(device), task.seed + index
        limits: dict[str, Any] = {"stop_ids": task.stop_ids, "seed": seed}
        if index not in known:
            known[index] = plain_generate(
                decoder.target, ids, task.max_new_tokens, task.temperature, head=decoder.head, **limits
            )
            seconds += time.perf_counter() - began
            yield index
            began = time.perf_counter()
        plains.append(known[index])
        results.append(decoder.generate(ids, task.max_new_tokens, task.temperature, **limits))
        mismatch = _compare(decoder, index, ids, known[index].tokens, results[-1].tokens, task.temperature)
        if mismatch is not None:
            mismatches.append(mismatch)
        seconds += time.perf_counter() - began
        yield index + 1
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
    settings: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Decode every prompt twice, plainly and speculatively, one after the other."""
    task = Task(prompts, max_new_tokens, temperature, stop_ids, seed, max_length)
    if torch.device(device).type == "cuda":  # kernels are compiled and tuned at their first use
        warm = task.prompts[0].ids.to(device)
        decoder.generate(warm, min(32, max_new_tokens), temperature, seed=seed)
        plain_generate(decoder.target, warm, min(8, max_new_tokens), temperature, seed=seed, head=decoder.head)
    steps = measuring(decoder, task, device, settings=settings)
    while True:
        try:
            done = next(steps)
        except StopIteration as end:
            assert isinstance(end.value, Evaluation)
            return end.value
        if progress is not None:
            progress(done, len(task.prompts))


def _compare(
    decoder: SpeculativeDecoder, index: int, ids: torch.Tensor, plain: list[int], other: list[int], temperature: float
) -> Mismatch | None:
    if temperature == 0:
        return explain_mismatch(decoder.target, index, ids, plain, other, decoder.head)
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
    domains = {}
    for name in sorted({prompt.domain for prompt in prompts}):
        mine = [result for result, prompt in zip(results, prompts, strict=True) if prompt.domain == name]
        domains[name] = {"tau": tau(mine), "tau_ci": tau_interval(mine), "prompts": len(mine)}
    # The first token of each comes from the prefill, outside the clock.
    ours = (sum(len(r.tokens) - 1 for r in results), sum(r.decode_seconds for r in results))
    theirs = (sum(len(p.tokens) - 1 for p in plains), sum(p.decode_seconds for p in plains))
    speed, plain_speed = (tokens / clock if tokens and clock else None for tokens, clock in (ours, theirs))
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
        speedup=speed / plain_speed if speed and plain_speed else None,
        tokens_per_s=speed,
        plain_tokens_per_s=plain_speed,
        seconds=seconds,
        settings=settings,
    )
