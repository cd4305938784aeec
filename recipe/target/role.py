"""What a target rank does: load its part of the frozen target, then produce until the run's last batch."""

from __future__ import annotations

from recipe.roles.worlds import world_group
from recipe.scene import Scene
from recipe.target.capture import TapCapture
from recipe.target.loader import LoadProgress, load_target
from recipe.target.producer import Producer, ProducerPlace
from recipe.target.shard_plan import ShardPlan


def run_target(scene: Scene) -> None:
    """From the agreed scene to the last published entry."""
    role, watchdog, target = scene.role, scene.watchdog, scene.config.dflash.target

    def loading(progress: LoadProgress) -> None:
        watchdog.progress("loading the target", progress.layers_done, progress.layers)

    engine = load_target(
        target.path,
        scene.shape,
        ShardPlan.build(scene.shape, role.tp),
        role.tp_rank,
        world_group(),
        scene.device,
        scene.target_dtype,
        scene.taps,
        scene.soft_labels,
        loading,
        target.revision,
    )

    def produced(batches: int, tokens: int) -> None:
        watchdog.progress("producing", batches)

    def failed(error: BaseException) -> None:
        watchdog.abort(f"hand-off: {type(error).__name__}: {error}", error=error)

    watchdog.progress("ready")
    scene.store.check_in("target-ready")
    producer = Producer(
        TapCapture(engine, scene.taps, scene.soft_labels),
        scene.ring,
        scene.rows,
        scene.schedule,
        ProducerPlace(role.node, role.replica, role.replicas, role.tp_rank, role.tp),
        scene.device,
        float(scene.config.dflash.ring.timeout_s),
        produced,
        failed,
    )
    producer.run(scene.first_step)
    watchdog.progress("produced everything")
