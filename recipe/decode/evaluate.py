"""Measure a drafter by real decoding: tau, whether the output is the target's own, and how much faster it is."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipe.config.schema import Evaluation as EvaluationSettings
from recipe.decode.drafter_cache import IncrementalDrafter
from recipe.decode.measure import Evaluation, Progress, measure
from recipe.decode.prompts import encode_prompts, read_prompts
from recipe.decode.speculative import SpeculativeDecoder
from recipe.drafter.config import DrafterConfig
from recipe.errors import ConfigError
from recipe.export_layout import DTYPES, load_export, read_config
from recipe.shapes import TargetShape, model_folder

SMALL = 50_000_000  # parameters


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
) -> Evaluation:
    """Evaluate an export, or the newest export of a run, against its target.

    ``target`` and ``prompts`` None: those of the run. ``num_prompts``, ``max_new_tokens`` None: the run's
    settings, or the schema's defaults. ``device`` auto: cuda where there is a
    GPU; ``dtype`` auto: bfloat16 there, float32 on the CPU. ConfigError for the user's mistakes, before weights load.
    """
    from transformers import AutoTokenizer

    counts = (("--num-prompts", num_prompts), ("--max-new-tokens", max_new_tokens), ("--batch-size", batch_size))
    for name, value in counts:
        if value is not None and value < 1:
            raise ConfigError(name, value, "must be at least 1", "raise it")
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ConfigError("--temperature", temperature, "must be a number that is not negative", "0 is greedy")
    where = pick_device(device)
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

    kind = DTYPES["bfloat16" if where.type == "cuda" else "float32"] if dtype == "auto" else DTYPES[dtype]
    model = load_target(folder, where, kind)
    drafter = IncrementalDrafter(config, {name: tensor.to(where, kind) for name, tensor in weights.items()})
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    settings = {
        "export": str(source.export), "target": str(folder), "block_size": config.block_size,
        "max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "device": str(where),
        "batch_size": batch_size,
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
            batch_size=batch_size,
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
