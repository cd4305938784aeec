"""Measure a drafter by real decoding: tau, whether the output is the target's own, and how much faster it is."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipe.config.paths import heldout_prompts
from recipe.config.schema import Evaluation as EvaluationSettings
from recipe.data.tokenizer import load_tokenizer
from recipe.decode.batch import check_batches
from recipe.decode.drafter_cache import IncrementalDrafter
from recipe.decode.measure import Evaluation, Progress, Task, measure
from recipe.decode.prompts import encode_prompts, read_prompts, stop_ids
from recipe.decode.speculative import SpeculativeDecoder
from recipe.drafter.config import DrafterConfig
from recipe.drafter.export_layout import DTYPES, load_export, read_config
from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape, model_folder
from recipe.model_files.whole_model import load_whole_model
from recipe.target.architectures import ARCHITECTURES
from recipe.target.logits import refuse_changed_logits
from recipe.target.shard_plan import RankPlan, ShardPlan

SMALL = 50_000_000  # parameters
OPTIONS = {
    "dflash.layout.target_tp": "--tp",
    "dflash.target.path": "--target",
    "dflash.target.exact_sums": "--exact-sums",
}


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
    settings = EvaluationSettings.model_validate(ours.get("evaluation") or {})
    prompts = heldout_prompts(settings.prompts, ours["data"]["path"])
    return Source(exports[-1], ours["target"]["path"], ours["target"].get("revision"), prompts, settings)


def load_target(folder: Path, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The plain transformers model of a local folder, in evaluation mode. ConfigError when its files are no model."""
    from recipe.target.cpu_kernels import use_torch_kernels_on_cpu

    if device.type == "cpu":
        use_torch_kernels_on_cpu(force=True)
    model: nn.Module = load_whole_model(folder, dtype, "--target")
    return model.to(device)


def tokenizer_of(folder: Path) -> Any:
    """The target's tokenizer. ConfigError when the folder holds none that can be loaded."""
    fix = "name the target's folder with its tokenizer"
    if not any(next(folder.glob(name), None) for name in ("tokenizer*", "vocab*", "*.model", "*.tiktoken")):
        raise ConfigError("--target", str(folder), "has no tokenizer", fix)
    return load_tokenizer(folder, "--target")


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


def pick_device(name: str) -> torch.device:
    """The device that ``--device`` means. ConfigError for one that torch does not know or this machine lacks."""
    gpus = torch.cuda.device_count()
    if name == "auto":
        return torch.device("cuda" if gpus else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError("--device", name, "is no device for decoding", "use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ConfigError("--device", name, f"{gpus} GPUs are visible here", "use --device cpu, or another number")
    return device


def check_degree(tp: int, shape: TargetShape, device: torch.device, named: str) -> None:
    """ConfigError for a tensor-parallel degree that this target, or this machine, cannot have. ``named``: --device."""
    if tp < 1:
        raise ConfigError("--tp", tp, "must be at least 1", "raise it")
    if tp == 1:
        return
    gpus, cores = torch.cuda.device_count(), os.cpu_count() or 1
    if device.type == "cuda" and tp > gpus:
        raise ConfigError("--tp", tp, f"each rank has a GPU of its own, and {gpus} are visible here", "lower it")
    if device.index is not None:
        raise ConfigError("--device", named, f"names one GPU, and --tp {tp} takes the first {tp}", "use --device cuda")
    if device.type == "cpu" and tp > max(8, cores):
        raise ConfigError("--tp", tp, f"each rank is a process, and this machine has {cores} cores", "lower it")
    try:
        refuse_changed_logits(shape)
        planned = shape.model_type in ARCHITECTURES
        idle = [one.rank for one in ShardPlan.build(shape, tp).ranks if is_idle(one)] if planned else []
    except ConfigError as error:
        raise ConfigError("--tp", tp, error.rule, "use --tp 1") from None
    if idle:
        rule = f"this target has not enough heads and columns for it: rank {idle[0]} would hold none"
        raise ConfigError("--tp", tp, rule, f"use at most {tp - len(idle)}")


def is_idle(rank: RankPlan) -> bool:
    """Whether a rank holds no part of any layer that is shared out."""
    columns = [part for part in (rank.mlp, rank.experts, rank.shared_expert) if part is not None]
    heads = rank.attention.count + (rank.delta.count if rank.delta is not None else 0)
    return heads == 0 and all(start == stop for start, stop in columns)


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
    batch_size: int = 1,
    tp: int = 1,
    exact_sums: bool = False,
) -> Evaluation:
    """Evaluate an export, or the newest export of a run, against its target.

    ``target`` and ``prompts`` None: those of the run. ``num_prompts``, ``max_new_tokens`` None: the run's
    settings, or the schema's defaults. ``device`` auto: cuda where there is a GPU; ``dtype`` auto: bfloat16 there,
    float32 on the CPU. ``tp`` above 1: the target is cut over that many processes of this machine; with ``exact_sums``
    it computes one process's bits. ConfigError for the user's mistakes, before weights load.
    """
    _check_numbers(num_prompts, max_new_tokens, batch_size, temperature)
    where = pick_device(device)
    source = find_source(export_or_run)
    max_new_tokens = max_new_tokens or source.settings.max_new_tokens
    config, weights = load_export(source.export)
    folder = _target_of(source, target)
    shape = TargetShape.resolve(str(folder))
    check_fit(config, shape, "num_target_layers" in read_config(source.export))
    check_degree(tp, shape, where, device)
    if exact_sums and tp == 1:
        raise ConfigError("--exact-sums", True, "is for a target that is cut with --tp", "leave it out")
    if batch_size > 1:
        check_batches(_model_config(folder))
    rows = _rows_of(source, prompts)[: num_prompts or source.settings.num_prompts]
    tokenizer = tokenizer_of(folder)
    encoded, most = encode_prompts(rows, tokenizer, template_kwargs), shape.max_position_embeddings
    Task(encoded, max_new_tokens, max_length=most)  # prompts too long for the target: said before weights load

    kind = DTYPES["bfloat16" if where.type == "cuda" else "float32"] if dtype == "auto" else DTYPES[dtype]
    named = prompts if isinstance(prompts, (str, Path)) else source.prompts if prompts is None else None
    settings = {
        "export": str(source.export), "target": str(folder), "block_size": config.block_size,
        "max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "device": str(where),
        "batch_size": batch_size, "target_tp": tp, "exact_sums": exact_sums,
        "dtype": str(kind).removeprefix("torch."), "template_kwargs": dict(template_kwargs or {}),
        "prompts_file": None if named is None else str(named), "rendered_prompt": encoded[0].text,
    }  # fmt: skip
    with opened(folder, shape, config.target_layer_ids, where, kind, tp, exact_sums) as (model, embed, head):
        decoder = SpeculativeDecoder(model, drafter_on(config, weights, embed), embed, head)
        limits = (max_new_tokens, temperature, stop_ids(folder, tokenizer))
        how: dict[str, Any] = {"seed": seed, "max_length": most, "progress": progress, "batch_size": batch_size}
        return measure(decoder, encoded, *limits, device=embed.device, settings=settings, **how)


def _target_of(source: Source, target: str | Path | None) -> Path:
    if target is None and source.target is None:
        raise ConfigError("--target", None, "an export does not know where its target is", "add --target PATH")
    return model_folder(str(target or source.target), None if target else source.revision)


def _model_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever transformers makes of a config.json that is not one of its own
        rule = f"transformers cannot read its config.json ({type(error).__name__})"
        raise ConfigError("--target", str(folder), rule, "fetch config.json again, or use another model") from error


def _rows_of(source: Source, prompts: Sequence[Mapping[str, Any]] | Path | None) -> list[Mapping[str, Any]]:
    """The rows to decode: those given, of the file given, or those that the run held out."""
    rows = source.prompts if prompts is None else prompts
    if rows is None:
        rule = "there are no held-out prompts: an export knows none, and a run only those of its rows"
        raise ConfigError("--prompts", None, rule, "add --prompts FILE, or prepare the rows with --holdout")
    return [*read_prompts(rows)] if isinstance(rows, (str, Path)) else list(rows)


def _check_numbers(num_prompts: int | None, max_new_tokens: int | None, batch_size: int, temperature: float) -> None:
    counts = (("--num-prompts", num_prompts), ("--max-new-tokens", max_new_tokens), ("--batch-size", batch_size))
    for name, value in counts:
        if value is not None and value < 1:
            raise ConfigError(name, value, "must be at least 1", "raise it")
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ConfigError("--temperature", temperature, "must be a number that is not negative", "0 is greedy")


def drafter_on(
    config: DrafterConfig, weights: Mapping[str, torch.Tensor], embedding: torch.Tensor
) -> IncrementalDrafter:
    """The drafter on the device and in the dtype of the target's embedding."""
    return IncrementalDrafter(config, {name: tensor.to(embedding) for name, tensor in weights.items()})


@contextmanager
def opened(
    folder: Path,
    shape: TargetShape,
    taps: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    tp: int = 1,
    exact_sums: bool = False,
) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor]]:
    """The target to decode with, its embedding and its head [V, H]."""
    if tp > 1:
        from recipe.decode.local_ranks import sharded_target

        try:
            with sharded_target(folder, shape, tp, taps, device, dtype, exact_sums) as (target, embedding):
                yield target, embedding, target.head
        except ConfigError as error:  # found by code that thinks of a run's config
            raise ConfigError(OPTIONS.get(error.field, error.field), error.value, error.rule, error.fix) from error
        return
    model = load_target(folder, device, dtype)
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with _threads_for(model, device):
        yield model, embed.detach(), head.detach()


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
