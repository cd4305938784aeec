"""What a target rank does: load its part of the frozen target, then produce until the run's last batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from recipe.agreement.evaluations import Evaluations
from recipe.agreement.scene import Scene
from recipe.engine.worlds import world_group
from recipe.target.capture import TapCapture
from recipe.target.cpu_kernels import refuse_torch_kernels, why_torch_kernels
from recipe.target.evaluation import SHARE, EvaluationTurns, Evaluator
from recipe.target.loader import LoadProgress
from recipe.target.open import open_target
from recipe.target.producer import Producer, ProducerPlace
from recipe.watch.watchdog import SLOW_S


class LoopEvaluator(Evaluator, Protocol):
    """`recipe.decode.in_loop.InLoopEvaluator`, which lives above this package."""

    def attach(self, engine: torch.nn.Module) -> None: ...


def run_target(scene: Scene, make_evaluator: Callable[[Scene, Evaluations], LoopEvaluator]) -> None:
    """From the agreed scene to the last published entry, and the last evaluation."""
    role, watchdog, target = scene.role, scene.watchdog, scene.config.dflash.target

    def loading(progress: LoadProgress) -> None:
        watchdog.progress("loading the target", progress.layers_done, progress.layers, note=progress.bar)

    why = why_torch_kernels(scene.shape, scene.device.type)
    if why is not None:
        if scene.device.type == "cuda" and not target.allow_torch_kernels:
            raise refuse_torch_kernels(why)
        scene.store.put(f"kernels/{role.rank}", why)  # the leader says it
    mail = Evaluations(scene.store, scene.run_path / "eval")
    evaluator = make_evaluator(scene, mail) if scene.evaluates else None
    engine = open_target(
        target.path,
        scene.shape,
        role.tp,
        role.tp_rank,
        world_group(),
        scene.device,
        scene.target_dtype,
        scene.taps,
        scene.soft_labels or evaluator is not None,
        loading,
        target.revision,
        target.exact_sums,
    )

    def produced(batches: int, tokens: int) -> None:
        watchdog.progress("producing", batches)

    def failed(error: BaseException) -> None:
        watchdog.abort(f"hand-off: {type(error).__name__}: {error}", error=error)

    turns = None
    if evaluator is not None:
        evaluator.attach(engine)
        budget_s = SHARE * scene.config.dflash.ring.timeout_s
        batches = scene.config.gradient_accumulation_steps * role.drafters_per_node
        turns = EvaluationTurns(mail, evaluator, role.tp_rank == 0, role.tp == 1, budget_s, batches, watchdog.tick)
    watchdog.progress("ready")
    scene.store.check_in("target-ready")
    producer = Producer(
        TapCapture(engine, scene.taps, scene.soft_labels),
        scene.ring,
        scene.rows,
        scene.schedule,
        ProducerPlace(role.node, role.replica, role.replicas, role.tp_rank, role.tp),
        scene.device,
        # Drafters that save give nothing back. Whether they hang, the watchdog judges, and much sooner.
        max(float(scene.config.dflash.ring.timeout_s), SLOW_S),
        produced,
        failed,
        turns,
    )
    producer.run(scene.first_step)
    if turns is not None:
        watchdog.progress("waiting for evaluations")
        turns.serve()
    watchdog.progress("produced everything")
