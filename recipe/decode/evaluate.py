"""Measure a drafter by real decoding: tau, whether the output is the target's own, and how much faster it is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipe.config.schema import Evaluation as EvaluationSettings
from recipe.decode.drafter_cache import IncrementalDrafter
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
from recipe.decode.prompts import Prompt, encode_prompts, read_prompts
from recipe.decode.speculative import DecodeResult, SpeculativeDecoder
from recipe.drafter.config import DrafterConfig
from recipe.errors import ConfigError
from recipe.export_layout import DTYPES, load_export, read_config
from recipe.shapes import TargetShape, model_folder

SMALL = 50_000_000  # parameters
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
    """Decode every prompt twice, speculatively and plainly, one after the other. For use in a training loop too."""
    began = time.perf_counter()
    fitting = [p for p in prompts if max_length is None or len(p.ids) + max_new_tokens <= max_length]
    if not fitting:
        rule = f"no prompt leaves room for {max_new_tokens} new tokens in the target's {max_length} positions"
        raise ConfigError("--max-new-tokens", max_new_tokens, rule, "lower it, or use shorter prompts")
    if torch.device(device).type == "cuda":  # kernels are compiled and tuned at their first use
        warm = fitting[0].ids.to(device)
        decoder.generate(warm, min(32, max_new_tokens), temperature, seed=seed)
        plain_generate(decoder.target, warm, min(8, max_new_tokens), temperature, seed=seed, head=decoder.head)
    results: list[DecodeResult] = []
    plains: list[PlainResult] = []
    mismatches: list[Mismatch] = []
    for index, prompt in enumerate(fitting):
        ids = prompt.ids.to(device)
        result = decoder.generate(ids, max_new_tokens, temperature, stop_ids=stop_ids, seed=seed + index)
        plain = plain_generate(
            decoder.target, ids, max_new_tokens, temperature, stop_ids=stop_ids, seed=seed + index, head=decoder.head
        )
        results.append(result)
        plains.append(plain)
        mismatch = _compare(decoder, index, ids, plain.tokens, result.tokens, temperature)
        if mismatch is not None:
            mismatches.append(mismatch)
        if progress is not None:
            progress(index + 1, len(fitting))
    return _evaluation(
        decoder.proposer.block_size,
        fitting,
        results,
        plains,
        mismatches,
        skipped=len(prompts) - len(fitting),
        seconds=time.perf_counter() - began,
        settings=dict(settings or {}),
    )


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


@dataclass(frozen=True)
class Source:
    """What to evaluate: an export folder, and what its run says about target and prompts (None for a bare export)."""

    export: Path
    target: str | None
    revision: str | None
    prompts: Path | None
    settings: EvaluationSettings


def find_source(path: Path) -> Source:
    """``path``: a run directory (its newest export is taken) or an export folder. ConfigError when it is neither."""
    path = Path(path)
    try:
        data = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        rule = "is neither a run directory nor an export: it has no readable config.json"
        raise ConfigError("RUN|EXPORT", str(path), rule, "name runs/NAME or runs/NAME/export/step_…") from None
    if not isinstance(data, dict) or "dflash" not in data:
        return Source(path, None, None, None, EvaluationSettings())
    exports = sorted(found for found in path.glob("export/step_*") if (found / "config.json").is_file())
    exports = [found for found in exports if not found.name.endswith("-speculators")] or exports
    if not exports:
        raise ConfigError("RUN", str(path), "the run has no export yet", f"run: python -m recipe export {path}")
    ours = data["dflash"]
    prompts = (ours.get("evaluation") or {}).get("prompts")
    prompts = Path(prompts) if prompts else Path(ours["data"]["path"]) / "heldout_prompts.jsonl"
    settings = EvaluationSettings.model_validate(ours.get("evaluation") or {})
    return Source(exports[-1], ours["target"]["path"], ours["target"].get("revision"), prompts, settings)


def load_target(folder: Path, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The plain transformers model of a local folder, in evaluation mode."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from recipe.target.cpu_kernels import use_torch_kernels_on_cpu

    if device.type == "cpu":
        use_torch_kernels_on_cpu(force=True)
    logging.set_verbosity_error()  # its notes on missing kernels are no news here: cpu_kernels.py decides that
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.to(device).eval()


def stop_ids_of(model: nn.Module, tokenizer: Any) -> set[int]:
    """Every id that ends an answer: the generation config's and the tokenizer's."""
    ids: set[int] = set()
    for source in (getattr(model, "generation_config", None), tokenizer):
        value = getattr(source, "eos_token_id", None)
        ids |= set() if value is None else {value} if isinstance(value, int) else set(value)
    return ids


def check_fit(config: DrafterConfig, shape: TargetShape, depth_known: bool = True) -> None:
    """ConfigError when the drafter was trained for another target.

    ``depth_known`` False: the export does not hold the depth (some speculators folders); only the taps are checked.
    """
    pairs = (
        ("num_target_layers", config.num_target_layers, shape.num_layers),
        ("hidden_size", config.hidden_size, shape.hidden_size),
        ("vocab_size", config.vocab_size, shape.vocab_size),
    )
    for name, ours, theirs in pairs:
        if ours != theirs if depth_known or name != "num_target_layers" else ours > theirs:
            rule = f"the drafter was trained for a target with {ours}, this one has {theirs}"
            raise ConfigError(f"--target ({name})", theirs, rule, "name the target that the drafter was trained for")


def evaluate(
    export_or_run: Path,
    target: str | Path | None = None,
    prompts: Sequence[Mapping[str, Any]] | Path | None = None,
    num_prompts: int | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress | None = None,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Evaluation:
    """Evaluate an export, or the newest export of a run, against its target.

    ``target`` and ``prompts`` None: those of the run. ``num_prompts``, ``max_new_tokens`` None: the run's
    settings, or the schema's defaults. ``device`` auto: cuda where there is a
    GPU; ``dtype`` auto: bfloat16 there, float32 on the CPU. ConfigError for the user's mistakes, before weights load.
    """
    from transformers import AutoTokenizer

    for name, value in (("--num-prompts", num_prompts), ("--max-new-tokens", max_new_tokens)):
        if value is not None and value < 1:
            raise ConfigError(name, value, "must be at least 1", "raise it")
    if temperature < 0:
        raise ConfigError("--temperature", temperature, "must not be negative", "0 is greedy")
    source = find_source(export_or_run)
    num_prompts = num_prompts or source.settings.num_prompts
    max_new_tokens = max_new_tokens or source.settings.max_new_tokens
    config, weights = load_export(source.export)
    if target is None and source.target is None:
        raise ConfigError("--target", None, "an export does not know where its target is", "add --target PATH")
    folder = model_folder(str(target or source.target), None if target else source.revision)
    shape = TargetShape.resolve(str(folder))
    check_fit(config, shape, "num_target_layers" in read_config(source.export))
    rows = source.prompts if prompts is None else prompts
    if rows is None:
        raise ConfigError("--prompts", None, "an export does not know its held-out prompts", "add --prompts FILE")
    listed = read_prompts(rows) if isinstance(rows, (str, Path)) else list(rows)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    encoded = encode_prompts(listed[:num_prompts], tokenizer, template_kwargs)

    where = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else torch.device(device)
    kind = DTYPES["bfloat16" if where.type == "cuda" else "float32"] if dtype == "auto" else DTYPES[dtype]
    model = load_target(folder, where, kind)
    drafter = IncrementalDrafter(config, {name: tensor.to(where, kind) for name, tensor in weights.items()})
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    settings = {
        "export": str(source.export), "target": str(folder), "block_size": config.block_size,
        "max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "device": str(where),
        "dtype": str(kind).removeprefix("torch."), "template_kwargs": dict(template_kwargs or {}),
        "prompts_file": str(rows) if isinstance(rows, (str, Path)) else None, "rendered_prompt": encoded[0].text,
    }  # fmt: skip
    with _threads_for(model, where):
        return measure(
            SpeculativeDecoder(model, drafter, embed.detach(), head.detach()),
            encoded,
            max_new_tokens,
            temperature,
            stop_ids_of(model, tokenizer),
            device=where,
            seed=seed,
            max_length=shape.max_position_embeddings,
            progress=progress,
            settings=settings,
        )


@contextmanager
def _threads_for(model: nn.Module, device: torch.device) -> Iterator[None]:
    """One thread for a small model on a CPU: its operations last microseconds, and threads that wait for each other at
    every one cost more than they bring (5x on a busy 2-core machine, measured)."""
    before = torch.get_num_threads()
    if device.type == "cpu" and sum(p.numel() for p in model.parameters()) < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
