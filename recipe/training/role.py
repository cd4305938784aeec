"""What a drafter rank does: build the drafter and its engine, wait for the reservoir, train through the schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipe.agreement.evaluations import Evaluations
from recipe.agreement.scene import START_UP_S, Scene
from recipe.config import RunConfig
from recipe.drafter.config import DrafterConfig
from recipe.drafter.model import DFlashDrafter
from recipe.engine.engine import build_engine, name_bad_gradients
from recipe.engine.worlds import world_barrier
from recipe.errors import ConfigError
from recipe.model_files.weights import Checkpoint
from recipe.model_files.whole_model import embedding_scale
from recipe.objective.objective import Objective
from recipe.tell.gpu import load_nvml
from recipe.tell.run_dir import RunDir
from recipe.training.checkpoint import Checkpoints, saved_state, stored_config
from recipe.training.desk import Desk, Export, gate_tokens, start_sampler
from recipe.training.evaluation import EvaluationClerk
from recipe.training.feed import Feed
from recipe.training.health import Health
from recipe.training.identity import identity
from recipe.training.losses import Losses
from recipe.training.reporter import SilentReporter
from recipe.training.tally import Tally
from recipe.training.trainer import Diverged, Trainer


def run_drafter(scene: Scene, run_dir: RunDir | None, export: Export) -> None:
    """From the agreed scene to the last checkpoint. ``run_dir`` is the leader's, None elsewhere.

    ``export(run folder, step)`` writes the servers' format; it lives above this package, so it is handed in.
    """
    desk = Desk(scene, run_dir) if run_dir is not None else None
    sampler = None
    if scene.role.index == 0 and desk is None and scene.device.type == "cuda":  # another node's first drafter
        sampler = start_sampler(scene, load_nvml(scene.config.dflash.telemetry.gpu))
    embedding, head = _frozen(scene)
    engine = _engine(scene)
    checkpoints = _checkpoints(scene, engine)
    tally, losses = _so_far(scene)
    feed = _feed(scene)
    _wait_for_the_reservoir(scene, desk)
    run = scene.config.dflash.run
    reporter = desk.train(scene.first_step) if desk is not None else SilentReporter()
    clerk = _clerk(scene, desk, engine.module)

    def moved(phase: str, step: int, steps: int) -> None:
        scene.watchdog.progress(phase, step, steps, step)
        if clerk is not None and phase == "training":
            clerk.after_step(step)

    trainer = Trainer(
        engine,
        feed,
        Objective(scene.config.dflash.objective, scene.config.dflash.drafter.block_size),
        embedding,
        head,
        None if scene.dry_run else checkpoints,
        reporter,
        Health(engine.module, _streams(scene), name_bad_gradients(engine)),
        tally,
        who=scene.role.name,
        scale=scene.config.global_micro_batches(scene.role.nodes),
        log_every=run.log_every,
        save_every=run.save_every,
        losses=losses,
        moved=moved,
    )
    _train(scene, trainer, desk)
    feed.close()
    if sampler is not None:
        sampler.stop()
    if clerk is not None:
        scene.watchdog.progress("waiting for evaluations")
        clerk.finish()
    scene.watchdog.progress("exporting")
    if desk is not None:
        desk.finish(export)


def _checkpoints(scene: Scene, engine: Any) -> Checkpoints:
    """Where checkpoints go; when the run is resumed, ``engine`` has been loaded from the agreed one."""
    leads = scene.role.is_leader
    checkpoints = Checkpoints(
        scene.run_path / "checkpoints",
        engine.module.config,
        identity(scene.config, scene.rows.fingerprint) if leads else {},  # who does not write it need not read weights
        scene.schedule,
        scene.config.dflash.run.keep,
        leads,
        scene.device,
        scene.watchdog.tick,
    )
    if scene.resume:
        checkpoints.clean()
        refuse_another_drafter(scene.run_path, engine.module.config, scene.first_step)
        checkpoints.restore(engine, scene.first_step)
    return checkpoints


def refuse_another_drafter(run_path: Path, config: DrafterConfig, step: int) -> None:
    """ConfigError when the checkpoint to resume holds a drafter that computes something else than ``config`` does:
    an older version of this code may have read the target differently."""
    stored = stored_config(run_path, step)
    for name, ours in vars(config).items():
        if name != "dtype" and getattr(stored, name) != ours:
            rule = f"the drafter of its step {step} has {name} = {getattr(stored, name)}, this run's would have {ours}"
            raise ConfigError("--resume", str(run_path), rule, "start a new run")


def _so_far(scene: Scene) -> tuple[Tally, Losses]:
    """What the steps behind the checkpoint came to; empty for a new run. A dry run's one step may not be skipped."""
    ours = scene.config.dflash
    trained: dict[str, Any] = {}
    tally = Tally(0 if scene.dry_run else ours.run.max_skipped_steps)
    if scene.resume:
        trained = saved_state(scene.run_path / "checkpoints", scene.first_step).get("trained") or {}
        tally.restore(trained.get("steps"), scene.first_step, first=scene.role.is_leader)
    setting = {"objective": ours.objective.model_dump(mode="json"), "target dtype": ours.target.dtype}
    return tally, Losses(setting, trained.get("losses") or {})


def _wait_for_the_reservoir(scene: Scene, desk: Desk | None) -> None:
    """Returns on all drafters of all nodes when their rings hold what training begins with."""
    scene.watchdog.progress("ready")
    targets = scene.role.nodes * scene.role.replicas * scene.role.tp
    scene.store.wait_for("target-ready", scene.role, targets, START_UP_S, scene.watchdog.tick)
    if desk is not None:
        desk.fill()
    scene.ring.wait_ready(gate_tokens(scene.config), START_UP_S)
    # No node's drafters sit in a collective while another node's still wait for their ring.
    scene.store.arrive("filled", scene.role, scene.role.drafter_world, START_UP_S, scene.watchdog.tick)


def _train(scene: Scene, trainer: Trainer, desk: Desk | None) -> None:
    try:
        trainer.run(scene.first_step)
    except Diverged as error:  # on all ranks in the same step
        if desk is not None:
            desk.diverged(error.step, str(error))
        world_barrier()  # the first to leave ends the run, and the leader must have written why
        raise


def _clerk(scene: Scene, desk: Desk | None, module: DFlashDrafter) -> EvaluationClerk | None:
    """Who asks for evaluations: the leader does, if the run has any."""
    if desk is None or not scene.evaluation_every:
        return None

    def waits() -> None:
        scene.watchdog.tick()
        desk.evaluating()

    clerk = EvaluationClerk(
        Evaluations(scene.store, scene.run_path / "eval"),
        module,
        scene.evaluation_every,
        scene.schedule.total_steps,
        desk.evaluated,
        desk.log.event,
        desk.trouble,
        waits,
    )
    clerk.start(scene.first_step)
    return clerk


def _streams(scene: Scene) -> list[str]:
    """Names of what a row of the ring carries."""
    return [f"tap of layer {layer}" for layer in scene.taps] + ["last hidden state"] * scene.soft_labels


def compute_dtype(config: RunConfig) -> torch.dtype:
    return torch.bfloat16 if config.bf16.enabled else torch.float32


def _frozen(scene: Scene) -> tuple[Tensor, Tensor]:
    """The target's embedding and head, [V, H] each, outside the engine; one tensor when they are tied."""
    scene.watchdog.progress("loading embedding and head")
    target = scene.config.dflash.target
    checkpoint = Checkpoint(target.path, target.revision)
    dtype = compute_dtype(scene.config)
    embedding = checkpoint.embedding(scene.device).to(dtype)
    head = embedding if checkpoint.tied else checkpoint.head(scene.device).to(dtype)
    checkpoint.close()
    if scene.dry_run:  # a run finds it in the step that uses the row, if any does
        for name, table in (("embedding", embedding), ("head", head)):
            _refuse_bad_rows(scene, name, table)
    return embedding, head


def _refuse_bad_rows(scene: Scene, name: str, table: Tensor) -> None:
    """ConfigError for values of ``table`` [V, H] that are not finite: sums of rows show them without a copy of it."""
    bad = (~torch.isfinite(table.sum(1, dtype=torch.float32))).nonzero().flatten().tolist()
    if bad:
        tokens = ", ".join(map(str, bad[:4])) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
        rule = f"its {name} is not finite (NaN or inf) for token {tokens}: steps with it would be skipped"
        raise ConfigError("dflash.target.path", scene.config.dflash.target.path, rule, "fetch or convert it again")


def _engine(scene: Scene) -> Any:
    """The drafter under ZeRO. Weights are the same on every rank: drawn from the seed, or read from init_from."""
    scene.watchdog.progress("building the drafter")
    ours = scene.config.dflash
    mask_id = ours.drafter.mask_token_id
    assert mask_id is not None, "resolve() fills it"
    config = DrafterConfig.build(
        ours.drafter,
        scene.shape,
        scene.taps,
        mask_id,
        dtype="bfloat16" if scene.config.bf16.enabled else "float32",
        input_embedding_scale=embedding_scale(scene.shape),
        sliding_is_causal=True,  # what SGLang always does, and vLLM by default (docs/decisions.md)
    )
    module = DFlashDrafter(config, ours.drafter.attention).initialize(ours.run.seed)
    if ours.drafter.init_from is not None:
        from recipe.drafter.init_from import load_drafter

        _, weights = load_drafter(ours.drafter.init_from, config)
        module.load_state_dict(weights)
    steps = scene.schedule.rate_steps
    settings = scene.config.deepspeed_dict(steps, scene.config.warmup_steps(steps))
    return build_engine(module.to(scene.device), settings)


def _feed(scene: Scene) -> Feed:
    ours = scene.config.dflash
    on_gpu = scene.device.type == "cuda"
    return Feed(
        scene.schedule,
        scene.rows,
        scene.ring,
        (scene.role.node, scene.role.index),
        taps=len(scene.taps),
        last_hidden=scene.soft_labels,
        max_anchors=ours.drafter.max_anchors,
        slots=ours.drafter.max_anchors if on_gpu else None,
        noise=ours.objective.noise,
        seed=ours.run.seed,
        device=scene.device,
        timeout_s=float(ours.ring.timeout_s),
    )
