"""Whether a resolved config can be carried out here: its data, ring and run folder, this machine's GPUs and memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipe.config.deepspeed_keys import RunConfig
from recipe.config.schema import Layout
from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape
from recipe.ring.segment import remove_dead_rings
from recipe.ring.sizing import RingSize, available_shm, check_fits, plan_ring
from recipe.tell.gpu import load_nvml
from recipe.tell.provenance import REDACTED, looks_secret
from recipe.tell.wandb_run import resolve_mode

if TYPE_CHECKING:
    import numpy as np

    from recipe.data.rows import Rows
    from recipe.data.schedule import Schedule

MASK_SHARE = 0.001  # of the rows, whose answers may hold the mask id: more is no slip
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Sizes:
    """What a config comes to on its data; tokens and steps are of the whole run's training split."""

    ring: RingSize
    rows: int
    tokens: int
    supervised: int
    total_steps: int
    warmup_steps: int
    peak_pages: int
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The same for a person to read."""
        share = 100 * self.supervised / self.tokens
        return [
            f"data: {self.rows} rows, {self.tokens} tokens, {self.supervised} of them supervised ({share:.0f} %)",
            f"steps: {self.total_steps}, the first {self.warmup_steps} with a rising learning rate",
            f"ring: {self.ring.n_pages} pages, {self.ring.bytes / 2**30:.2f} GiB; at most {self.peak_pages} in use",
            *self.notes,
        ]


def visible_gpus() -> int:
    """CUDA devices that a process started here would see (CUDA_VISIBLE_DEVICES respected); makes no CUDA context."""
    import torch

    return torch.cuda.device_count()


def ring_size(config: RunConfig, shape: TargetShape, lengths: Sequence[int] | None = None) -> RingSize:
    """The ring of a resolved config. ``lengths``: tokens of each row, for exact room in half-empty pages."""
    ours = config.dflash
    return plan_ring(
        hidden=shape.hidden_size,
        streams=len(ours.target.target_layer_ids or []) + ours.objective.soft_labels,
        dtype_bytes=DTYPE_BYTES[ours.target.dtype],
        token_budget=ours.data.token_budget,
        min_ready=ours.ring.min_ready,
        max_depth=ours.ring.max_depth,
        max_bytes=ours.ring.max_bytes,
        max_seq_len=ours.data.max_seq_len,
        page_tokens=ours.ring.page_tokens,
        lengths=lengths,
        reuse=ours.ring.reuse,
    )


def check_data(config: RunConfig, shape: TargetShape, nodes: int) -> Sizes:
    """What the run comes to on its data. Raises ConfigError when data or ring cannot be used."""
    from recipe.data.rows import Rows

    rows = Rows.open(config.dflash.data.path)
    supervised = int(rows.supervised.sum(dtype="int64"))
    _check_rows(config, shape, rows, supervised)
    schedule = _schedule(config, rows, nodes)
    _refuse_unreachable(config, schedule)
    size = ring_size(config, shape, rows.lengths.tolist())
    peak = schedule.peak_pages(size.page_tokens)
    if peak > size.n_pages:
        _refuse_peak(config, peak, size)
    return Sizes(
        ring=size,
        rows=len(rows),
        tokens=int(rows.lengths.sum(dtype="int64")),
        supervised=supervised,
        total_steps=schedule.total_steps,
        warmup_steps=config.warmup_steps(schedule.total_steps),
        peak_pages=peak,
        notes=_mask_in_rows(config, rows),
    )


def _mask_in_rows(config: RunConfig, rows: Rows) -> tuple[str, ...]:
    """A note where the mask id stands in the rows. Raises ConfigError when the answers use it as a word.

    A block whose anchor is the mask id looks as if nothing of it were known, and a slot that must predict it is given
    it. A few such places (a text that quotes the token) are lost, no more; an id of ordinary text spoils the drafter.
    """
    mask = config.dflash.drafter.mask_token_id
    found = rows.occurrences(-1 if mask is None else mask)
    if not found.rows:
        return ()
    where = f"stands in {found.rows} of {found.read} rows ({found.tokens} times), in {found.supervised_rows} of them"
    where += f" among the supervised tokens ({found.supervised_tokens} times)"
    if found.read < len(rows):
        where += f"; of all {len(rows)} rows only these were read"
    if found.supervised_rows > MASK_SHARE * found.read:
        fix = "use an id that the vocabulary reserves and text never uses, or prepare the data without those rows"
        raise ConfigError("dflash.drafter.mask_token_id", mask, where, fix)
    return (f"the mask id {mask} {where}",)


def _check_rows(config: RunConfig, shape: TargetShape, rows: Rows, supervised: int) -> None:
    data, again = config.dflash.data, "prepare the data again"
    if supervised == 0:
        rule = f"none of the {len(rows)} rows has a supervised token, so there is nothing to learn"
        raise ConfigError("dflash.data.path", data.path, rule, f"{again} and look at it with `prepare --show 5`")
    if not any(_teaches(rows[int(row)][1]) for row in (rows.supervised >= 2).nonzero()[0]):
        rule = (
            f"none of the {len(rows)} rows has two supervised tokens in a row, and a block needs them: nothing to learn"
        )
        raise ConfigError("dflash.data.path", data.path, rule, f"{again} and look at it with `prepare --show 5`")
    longest = int(rows.lengths.max())
    if longest > data.max_seq_len:
        rule = f"the data holds a row of {longest} tokens"
        fix = f"{again} with --max-seq-len {data.max_seq_len}, or set max_seq_len to {longest}"
        raise ConfigError("dflash.data.max_seq_len", data.max_seq_len, rule, fix)
    if rows.meta.get("tokenizer_hash"):
        rows.check_tokenizer(config.dflash.target.path)
    bound = rows.vocab_bound()
    if bound > shape.vocab_size:
        rule = f"its token ids go up to {bound - 1}, but the target's vocabulary has {shape.vocab_size}"
        raise ConfigError("dflash.data.path", data.path, rule, f"{again} with --tokenizer {config.dflash.target.path}")


def _teaches(mask: np.ndarray) -> bool:
    return bool((mask[1:] & mask[:-1]).any())


def _schedule(config: RunConfig, rows: Rows, nodes: int) -> Schedule:
    from recipe.data.schedule import Schedule

    data = config.dflash.data
    schedule = Schedule.of(config, rows.lengths, nodes)
    without = [node for node in range(nodes) if not schedule.batches(0, node)]
    if without:
        rule = f"{len(rows)} rows make fewer batches than there are nodes: nodes {without} of {nodes} have none"
        raise ConfigError("dflash.data.path", data.path, rule, "use more data, a smaller token_budget or fewer nodes")
    return schedule


def _refuse_unreachable(config: RunConfig, schedule: Schedule) -> None:
    """The drafters would wait for batches that an epoch does not have."""
    fewest = min(len(schedule.batches(0, node)) for node in range(schedule.nodes))
    wanted = config.dflash.ring.min_ready
    if wanted > fewest:
        rule = (
            f"can never be reached: an epoch has {fewest} batches of token_budget = {config.dflash.data.token_budget}"
        )
        raise ConfigError(
            "dflash.ring.min_ready", wanted, rule, f"use {fewest} or less, more data, or a smaller token_budget"
        )


def _refuse_peak(config: RunConfig, needed: int, size: RingSize) -> None:
    """min_ready cannot be reached: the draw needs more pages than the ring has."""
    ring = config.dflash.ring
    rule = f"drawing at random from it needs up to {needed} pages at once and the ring has {size.n_pages}: a deadlock"
    depth = -(-needed * ring.max_depth // size.n_pages)
    fix = f"raise max_depth to {depth} or more, or lower min_ready (a third of max_depth is safe)"
    if ring.max_bytes is not None:
        fix += ", or raise max_bytes"
    raise ConfigError("dflash.ring.min_ready", ring.min_ready, rule, fix)


def check_machine(config: RunConfig, size: RingSize, nodes: int) -> None:
    """The layout against this machine's GPUs, the ring against its memory. Raises ConfigError."""
    refuse_secrets(config.model_dump(mode="json"))
    layout = config.dflash.layout
    ranks = len(layout.target_gpus) + len(layout.drafter_gpus)
    gpus = visible_gpus() if layout.device == "cuda" else 0
    if layout.device == "cuda" and layout.share_gpus and gpus:
        _check_shared(layout, gpus)
    elif layout.device == "cuda" and gpus < ranks:
        rule = (
            f"{len(layout.target_gpus)} target + {len(layout.drafter_gpus)} drafter GPUs, but {gpus} are visible here"
        )
        fix = "change the two lists, look at CUDA_VISIBLE_DEVICES, or set dflash.layout.share_gpus to true"
        raise ConfigError("dflash.layout", ranks, rule, fix)
    remove_dead_rings(Path("/dev/shm"))  # what killed runs left must not count as used
    check_fits(size, available_shm())
    if nodes == 1 or "CROSS_SIZE" in os.environ:  # of several nodes the leader's environment alone counts
        resolve_mode(config.dflash.telemetry.wandb.mode)
    if layout.device == "cuda":
        load_nvml(config.dflash.telemetry.gpu)


def _check_shared(layout: Layout, gpus: int) -> None:
    """Ranks that talk through NCCL need a GPU each: those of one target replica, and the drafters."""
    targets, tp = layout.target_gpus, layout.target_tp
    worlds = [targets[start : start + tp] for start in range(0, len(targets), tp)] + [layout.drafter_gpus]
    for ranks in worlds:
        if len({rank % gpus for rank in ranks}) < len(ranks):
            rule = f"ranks {ranks} work together and would share a GPU: rank r uses GPU r mod {gpus}"
            raise ConfigError("dflash.layout.share_gpus", True, rule, "use fewer ranks on that side")
    if max(targets) >= gpus:
        rule = f"DeepSpeed inference takes GPU {max(targets)} for rank {max(targets)}, and {gpus} are visible here"
        raise ConfigError("dflash.layout.target_gpus", targets, rule, "give the targets the first numbers")


def refuse_secrets(values: object, path: str = "") -> None:
    """A config is stored with its run, and shown: raises ConfigError for a value that holds a password or key."""
    if isinstance(values, dict):
        for key, value in values.items():
            refuse_secrets(value, f"{path}.{key}" if path else str(key))
    elif isinstance(values, list):
        for index, value in enumerate(values):
            refuse_secrets(value, f"{path}[{index}]")
    elif isinstance(values, str) and looks_secret(values):
        fix = "take it out; keys belong in the environment (WANDB_API_KEY, HF_TOKEN)"
        raise ConfigError(path, REDACTED, "holds a password or key, and a config is stored and shown", fix)


def check_run_folder(config: RunConfig, resume: bool) -> None:
    """The run folder is new and can be made, or is there to be resumed. Raises ConfigError; changes nothing."""
    from recipe.tell.run_dir import has_checkpoint, is_run

    run = config.dflash.run
    folder = Path(run.output_dir) / run.name
    if resume:
        if not has_checkpoint(folder):
            rule = f"{folder} has no checkpoint: there is nothing to resume"
            raise ConfigError("--resume", run.name, rule, "check dflash.run.name and output_dir, or drop --resume")
        return
    ours = is_run(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        rule = f"{folder} {'is an earlier run' if ours else 'exists already and is not a run'}"
        fix = (
            "add --resume or --replace, or choose another dflash.run.name" if ours else "choose another dflash.run.name"
        )
        raise ConfigError("dflash.run.name", run.name, rule, fix)
    parent = Path(run.output_dir)
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        rule = f"{parent} is not a folder that can be written"
        raise ConfigError("dflash.run.output_dir", run.output_dir, rule, "choose a writable folder")
