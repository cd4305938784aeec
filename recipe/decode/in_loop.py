"""Real decoding during training, by the target ranks and with the target that they hold already.

Entered by `recipe.target.evaluation` through the `Evaluator` protocol. The first rank of the replica has prompts, head,
drafter and all results; the others only take part in its forwards (`recipe.decode.sharded`).
"""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from recipe.agreement.evaluations import Evaluations
from recipe.agreement.scene import Scene
from recipe.choice import NotFinite
from recipe.config.paths import heldout_prompts
from recipe.data.tokenizer import load_tokenizer
from recipe.decode.drafter_cache import IncrementalDrafter
from recipe.decode.measure import Evaluation, Task, measuring
from recipe.decode.plain import PlainResult
from recipe.decode.prompts import encode_prompts, read_prompts, stop_ids
from recipe.decode.sharded import ShardedTarget, follow, leading_target
from recipe.decode.speculative import SpeculativeDecoder
from recipe.drafter.export_layout import load_export
from recipe.engine.worlds import share_from_first
from recipe.errors import ConfigError
from recipe.model_files.shapes import model_folder
from recipe.model_files.weights import Checkpoint
from recipe.target.capture import decoder_of
from recipe.tell.disk import reason
from recipe.tell.run_dir import write_json


class InLoopEvaluator:
    """One rank of the replica that evaluates. Make it before the target is loaded: bad prompts are named first.

    Raises ConfigError on the first rank: no prompts, or none that fits.
    """

    def __init__(self, scene: Scene, mail: Evaluations) -> None:
        self.scene, self.mail = scene, mail
        self.share = share_from_first if scene.role.tp > 1 else None
        self._decoder: Any = None
        self._target: ShardedTarget | None = None
        self._embedding = torch.empty(0)
        self._known: dict[int, PlainResult] = {}
        self._steps: Generator[int, None, Evaluation] | None = None
        self._step = self._slices = 0
        self._began = 0.0
        self._unreadable: str | None = None
        self.task = self._task() if scene.role.tp_rank == 0 else None

    def _task(self) -> Task:
        ours, folder = self.scene.config.dflash, self._folder()
        path = heldout_prompts(ours.evaluation.prompts, ours.data.path)
        if path is None:
            rule = f"evaluation.every is set, and {ours.data.path} has no heldout_prompts.jsonl"
            raise ConfigError("dflash.evaluation.prompts", None, rule, "name a JSONL file of held-out conversations")
        field = "dflash.evaluation.prompts"
        tokenizer = load_tokenizer(folder, "dflash.target.path")
        rows = read_prompts(path, field)[: ours.evaluation.num_prompts]
        prompts = encode_prompts(rows, tokenizer, field=field)
        most = self.scene.shape.max_position_embeddings
        return Task(prompts, ours.evaluation.max_new_tokens, stop_ids=stop_ids(folder, tokenizer), max_length=most)

    def _folder(self) -> Path:
        target = self.scene.config.dflash.target
        return model_folder(target.path, target.revision)

    def attach(self, engine: torch.nn.Module) -> None:
        """The target is loaded: on the first rank, the head joins it."""
        self._decoder = decoder_of(engine)
        if self.task is None:
            return
        target, device, tick = self.scene.config.dflash.target, self.scene.device, self.scene.watchdog.tick
        checkpoint = Checkpoint(target.path, target.revision)
        vocabulary = self.scene.shape.vocab_size
        self._target, self._embedding = leading_target(engine, checkpoint, vocabulary, device, self.share, tick)

    def begin(self, step: int, folder: Path) -> None:
        assert self._target is not None and self.task is not None
        self._step, self._unreadable = step, None
        try:
            config, weights = load_export(folder)
        except (OSError, ConfigError) as error:  # a disk that fails must not end training
            self._unreadable = reason(error)
            return
        where, kind = self.scene.device, self.scene.target_dtype
        drafter = IncrementalDrafter(config, {name: tensor.to(where, kind) for name, tensor in weights.items()})
        decoder = SpeculativeDecoder(self._target, drafter, self._embedding, self._target.head)
        settings = {
            "step": step, "target": self.scene.config.dflash.target.path, "block_size": config.block_size,
            "max_new_tokens": self.task.max_new_tokens, "temperature": 0.0, "device": str(where),
            "dtype": str(kind).removeprefix("torch."), "target_tp": self.scene.role.tp, "in_loop": True,
        }  # fmt: skip
        self._steps = measuring(decoder, self.task, where, known=self._known, settings=settings)
        self._slices, self._began = 0, time.monotonic()

    def work(self, seconds: float) -> dict[str, Any] | None:
        assert self._target is not None and self.task is not None
        if self._unreadable is not None:
            self._target.leave()
            return {"unread": self._unreadable}
        assert self._steps is not None
        self._slices += 1
        deadline, found, broken = time.monotonic() + seconds, None, None
        while found is None and broken is None and time.monotonic() < deadline:
            try:
                done = next(self._steps)
                self.scene.watchdog.progress("evaluating", done, len(self.task.prompts), self._step)
            except StopIteration as end:
                found = end.value
            except NotFinite as error:  # the leader ends the run: no step can mend it
                broken = {"not_finite": str(error)}
        self._target.leave()
        return broken if found is None else self._report(found)

    def follow(self) -> None:
        assert self.share is not None
        self.scene.watchdog.progress("evaluating")
        follow(self._decoder, self.scene.device, self.share, self.scene.watchdog.tick)

    def _report(self, found: Evaluation) -> dict[str, Any]:
        self._steps = None
        ties = sum(one.numeric_tie for one in found.mismatches)
        unwritten = None
        try:
            write_json(self.mail.result(self._step), {"step": self._step, **found.to_dict()})
        except OSError as error:
            unwritten = reason(error)
        return {
            "unwritten": unwritten,
            "tau": found.tau,
            "tau_ci": found.tau_ci,
            "identical": found.identical_prompts,
            "ties": ties,
            "prompts": found.prompts,
            "seconds": found.seconds,
            "elapsed_s": time.monotonic() - self._began,
            "slices": self._slices,
        }
