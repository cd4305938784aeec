"""Turn a checkpoint of a run into a folder that the reference client, vLLM and SGLang load.

`hf` is the z-lab layout (DFlashDraftModel: vLLM method "dflash", SGLang algorithm DFLASH, PyPI package dflash);
`speculators` is the layout of the speculators package (DFlashSpeculator), with the target's embedding and head inside.
The folder is read back and compared, tensor by tensor, before it gets its name.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from safetensors import SafetensorError

from recipe.drafter.config import DrafterConfig
from recipe.drafter.export_layout import (
    VERSIONS,
    Tensors,
    export_hf,
    load_export,
    refuse_occupied,
    tensor_shapes,
    understood,
)
from recipe.drafter.export_speculators import export_speculators
from recipe.drafter.variant import DFLASH
from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape
from recipe.tell.run_dir import RunDir, is_run
from recipe.tell.status import read_status

__all__ = ["add_arguments", "export_hf", "export_run", "export_speculators", "load_export", "run", "serve_commands",
           "tensor_shapes"]  # fmt: skip

HYBRID = " --mamba-radix-cache-strategy extra_buffer"  # up to SGLang 0.5.13: --mamba-scheduler-strategy


def serve_commands(
    folder: Path, config: DrafterConfig, target: str, layout: str = "hf", hybrid: bool = False
) -> list[str]:
    """The commands that serve ``target`` with this drafter, for the releases in ``VERSIONS``.

    vLLM counts drafts (B - 1), SGLang the anchor too (B); SGLang does not read the speculators layout. ``hybrid``: the
    target has recurrent layers, whose states SGLang restores only with that cache strategy. vLLM's flash_attn is for
    the drafter, which attends to both sides: not every backend can. The target keeps its own.
    """
    speculative = {
        "method": "dflash", "model": str(folder), "num_speculative_tokens": DFLASH.drafts_per_block(config.block_size),
        "attention_backend": "flash_attn",
    }  # fmt: skip
    vllm = f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(speculative))}"
    if layout == "speculators":
        return [vllm]  # not `vllm serve FOLDER`, which vLLM refuses where the target is a folder, too
    return [
        vllm,
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {shlex.quote(str(folder))} --speculative-num-draft-tokens {config.block_size}"
        + (HYBRID if hybrid else ""),
    ]


def target_of_run(run_dir: Path) -> tuple[str, str | None]:
    """(path, revision) of the target in a run's config.json. ConfigError when it is no run directory."""
    try:
        target = json.loads((run_dir / "config.json").read_text())["dflash"]["target"]
        return str(target["path"]), target.get("revision")
    except (OSError, ValueError, KeyError, TypeError):
        rule = 'is no run directory: it has no config.json with an object "dflash"'
        raise ConfigError("RUN", str(run_dir), rule, "name a folder under runs/") from None


def read_checkpoint(run_dir: Path, step: int | None) -> tuple[DrafterConfig, Tensors, int]:
    """Config, weights and step of a checkpoint. ConfigError when there is none, or it cannot be read."""
    from recipe.training.checkpoint import load_weights  # imports DeepSpeed: only when it is needed

    fix = "choose another step with --step, or train again"
    try:
        with understood(run_dir / "checkpoints"):
            return load_weights(run_dir, step)
    except (OSError, SafetensorError) as error:
        rule = f"a file of its checkpoint cannot be read ({error})"
        raise ConfigError("RUN", str(run_dir), rule, fix) from None
    except ConfigError as error:
        if error.field != "--resume":
            raise
        raise ConfigError("RUN", str(run_dir), f"none of its checkpoints is whole: {error.rule}", fix) from None


def export_run(
    run_dir: Path, step: int | None = None, layout: str = "hf", output: Path | None = None, dtype: str | None = None
) -> tuple[Path, DrafterConfig, int]:
    """Export a checkpoint (None: the newest) of ``run_dir``. Returns folder, config and step.

    ``output`` None: ``RUN/export/step_…`` (``…-speculators`` for that layout). ``dtype`` None: the drafter's own.
    """
    target, revision = target_of_run(run_dir)
    if output is not None:
        refuse_occupied(output)
    config, weights, step = read_checkpoint(run_dir, step)
    dtype = dtype or config.dtype
    if output is None:
        output = run_dir / "export" / (f"step_{step:08d}" + ("" if layout == "hf" else f"-{layout}"))
    if layout == "hf":
        return export_hf(weights, config, output, dtype), config, step
    from recipe.model_files.weights import Checkpoint

    checkpoint = Checkpoint(target, revision)
    try:
        names = json.loads((checkpoint.folder / "config.json").read_text()).get("architectures") or []
        embed, head = checkpoint.embedding(), checkpoint.head()
    finally:
        checkpoint.close()
    return export_speculators(weights, config, output, dtype, target, embed, head, names), config, step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m recipe export`."""
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory (runs/NAME)")
    parser.add_argument("--step", type=int, help="checkpoint to export (default: the newest)")
    parser.add_argument("--format", choices=["hf", "speculators"], default="hf", help="layout (default: hf)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder to write (default: RUN/export/step_…)")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], help="dtype of the tensors (default: the drafter's)"
    )


def run(args: argparse.Namespace) -> int:
    """Export, and print how to serve the result. Raises ConfigError for the user's mistakes."""
    folder, config, step = export_run(args.run, args.step, args.format, args.output, args.dtype)
    target, revision = target_of_run(args.run)
    try:
        hybrid, note = TargetShape.resolve(target, revision).hybrid, None
    except ConfigError:  # the export does not need it
        hybrid, note = False, f"{target} is not on this machine; if it has recurrent layers, sglang also needs:{HYBRID}"
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    print(f"exported step {step} as {args.format} to {folder} ({size:.1f} MB, read back equal)")
    if is_run(args.run) and (status := read_status(RunDir(args.run))).state == "DIVERGED":
        print(f"warning: this run has DIVERGED: {status.message}")
    print(f"serve it with (vLLM {VERSIONS['vllm']}, SGLang {VERSIONS['sglang']}; other releases: docs/servers.md):")
    for command in serve_commands(folder.resolve(), config, target, args.format, hybrid):
        print(f"  {command}")
    if note is not None:
        print(note)
    if (args.dtype or config.dtype) == "float32" and args.format == "hf":
        print("sglang loads a float32 drafter as float16; for a bfloat16 target, export with --dtype bfloat16")
    if args.format == "hf" and config.input_embedding_scale != 1.0:
        print(
            "vLLM (0.34) does not read input_embedding_scale, which this drafter needs: use --format speculators there"
        )
    return 0
