"""One rank from its first message to its last: agree, meet in the ring, work, leave. Entered by `recipe/train.py`."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import threading
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from recipe.agreement.nodes import compare, facts, probe_run_dir
from recipe.agreement.scene import START_UP_S, Scene
from recipe.check.checks import check
from recipe.check.derive import resolve
from recipe.check.feasibility import ring_size
from recipe.config import RunConfig, load_config_text
from recipe.config.changes import changes
from recipe.data.rows import Rows
from recipe.data.schedule import Schedule
from recipe.engine.worlds import init_world, leave_world, pick_device
from recipe.errors import ConfigError, RunError
from recipe.model_files.shapes import TargetShape
from recipe.prepare.ensure import ensure_rows
from recipe.process import ProcessId, secret_of
from recipe.ring import Ring, ring_path
from recipe.tell.run_dir import RunDir, is_run
from recipe.tell.status_writer import mark_dead
from recipe.training.checkpoint import steps_of
from recipe.training.resume import Resume, plan_resume, worlds_from_json
from recipe.watch import last_words
from recipe.watch.network import settle_interface
from recipe.watch.node_watch import NodeWatch
from recipe.watch.role import Role
from recipe.watch.store import ControlStore
from recipe.watch.watchdog import SLOW_S, Watchdog

LEAVE_S = 60.0
END_S = 24 * 3600.0  # targets are done long before the drafters; who dies meanwhile is noticed by the watchdog


class Launch:
    """The life of one rank."""

    def __init__(self, role: Role, config: RunConfig, args: argparse.Namespace, watch: NodeWatch) -> None:
        self.role, self.config, self.args = role, config, args
        secret = secret_of(os.getppid()) if role.nodes == 1 else b""  # of the launcher, which all ranks have in common
        run = launch_name(role, config, secret)
        settle_interface(os.environ["MASTER_ADDR"], role.nodes)
        self.store = ControlStore.connect(role, run, serve=role.rank == 0, secret=secret)
        self.store.claim(role)
        # Before the ring's own time-outs, which are raised by those who wait and not by the one that hangs.
        hang_s = 0.8 * config.dflash.ring.timeout_s
        names = role.places(config.dflash.layout)

        def connect() -> ControlStore:
            return ControlStore.connect(role, run, serve=False, secret=secret)

        self.watchdog = Watchdog(role, names, connect, hang_s, watch)
        self.run_dir: RunDir | None = None
        self.ring: Ring | None = None

    def run(self) -> None:
        """Does not return: ends the process with the run's exit code."""
        try:
            self._live()
            self._arrive_at_the_end()
        except ConfigError as error:
            self.watchdog.abort(str(error), code=2, error=error)
        except BaseException as error:
            said = str(error).splitlines()[0] if str(error) else ""
            self.watchdog.abort(f"{type(error).__name__}: {said}", error=error)
        self._leave()

    def _live(self) -> None:
        limit_threads(self.role, self.config)
        agreed = self._agree()
        self.config = load_config_text(agreed["config"], source="the resolved config")
        device = pick_device(self.role, self.config.dflash.layout.device, self.config.dflash.layout.share_gpus)
        rows = Rows.open(self.config.dflash.data.path)
        if self.role.nodes > 1 and self.role.local_rank == 0 and self.role.node > 0:
            compare(self.role.node, facts(self.config, rows), agreed["facts"])
            if not self.args.dry_run:  # a dry run writes nothing; its folder is node 0's own
                probe_run_dir(self.role.node, Path(agreed["run_dir"]), agreed["run_id"])
        worlds = worlds_from_json(agreed["worlds"])
        schedule = Schedule.of(self.config, rows.lengths, self.role.nodes, worlds)
        shape = TargetShape.resolve(self.config.dflash.target.path, self.config.dflash.target.revision)
        self.ring = self._meet(shape, rows, device)
        # Longer than the slowest save: others wait for its writer in a collective. The watchdog finds hangs sooner.
        init_world(self.role, self.store, device, max(self.config.dflash.ring.timeout_s, SLOW_S) + 60.0)
        scene = Scene(
            self.role, self.config, shape, device, rows, schedule, self.ring, self.watchdog, self.store,
            Path(agreed["run_dir"]), int(agreed["first_step"]), self.args.resume, self.args.dry_run,
            list(agreed["notes"]),
        )  # fmt: skip
        self.watchdog.progress("importing the model code")
        if self.role.kind == "target":
            from recipe.decode.in_loop import InLoopEvaluator
            from recipe.target.role import run_target

            run_target(scene, InLoopEvaluator)
        else:
            from recipe.training.export import export_run
            from recipe.training.role import run_drafter

            run_drafter(scene, self.run_dir, lambda folder, step: export_run(folder, step)[0])

    # -- agreeing ----------------------------------------------------------------------------------------------

    def _agree(self) -> dict[str, Any]:
        """The leader resolves, checks and opens the run directory; everybody else takes its word."""
        if self.role.is_leader:
            try:
                agreed = self._decide()
            except ConfigError as error:
                self.store.put("agreed", {"refused": True})
                self._refuse(str(error))
            self.store.put("agreed", agreed)
        self.watchdog.progress("checking")
        found = self.store.get("agreed", START_UP_S)
        assert isinstance(found, dict)
        if found.get("refused"):
            self._refuse(None)
        self.watchdog.on_end.append(self._clear_away if self.role.is_leader else self._note_death)
        self.watchdog.run_dir = Path(found["run_dir"])
        self.store.put(f"process/{self.role.rank}", ProcessId.own(self.role.rank, self.role.kind).to_dict())
        return found

    def _note_death(self, report: dict[str, Any]) -> None:
        """The leader notes a death itself, unless it is the one that died."""
        path = self.watchdog.run_dir
        if path is not None and report["code"] != 2 and is_run(path):
            mark_dead(RunDir(path), report["rank"], report["role"], report["cause"])

    def _clear_away(self, report: dict[str, Any]) -> None:
        """A user's mistake found late leaves nothing half-made behind, and a dry run never leaves anything."""
        if self.run_dir is None:
            return
        if self.args.dry_run:
            if last_words.folder() is None:  # else it goes with the command line's, when all have left
                shutil.rmtree(self.run_dir.path.parent, ignore_errors=True)
        elif report["code"] != 2 and not self.run_dir.status_json.exists():
            self._note_death(report)  # later on the desk does it
        elif report["code"] == 2 and not self.args.resume and not self._has_trained(self.run_dir):
            shutil.rmtree(self.run_dir.path, ignore_errors=True)

    @staticmethod
    def _has_trained(run_dir: RunDir) -> bool:
        """Whether there may be something to lose: metrics.jsonl is made when the first step begins."""
        return bool(steps_of(run_dir.checkpoints)) or run_dir.metrics_jsonl.exists()

    def _decide(self) -> dict[str, Any]:
        resolved = resolve(for_dry_run(self.config) if self.args.dry_run else self.config)
        ensure_rows(resolved)
        unchecked = self.args.replace or self.args.dry_run
        notes = check(resolved, nodes=self.role.nodes, resume=None if unchecked else self.args.resume)
        resume = self._find_resume(resolved) if self.args.resume else Resume(0, [], [])
        output_dir = resolved.dflash.run.output_dir
        if self.args.dry_run:  # below the command line's folder, which goes whatever becomes of this rank
            output_dir = tempfile.mkdtemp(prefix="dflash-check-", dir=last_words.folder())
        self.run_dir = RunDir.create(output_dir, resolved.dflash.run.name, self.args.resume, fresh=self.args.replace)
        common = facts(resolved, Rows.open(resolved.dflash.data.path)) if self.role.nodes > 1 else {}
        where = {"run_dir": str(self.run_dir.path), "run_id": self.run_dir.run_id}
        going_on = {"first_step": resume.step, "worlds": resume.to_json(), "notes": [*notes, *resume.notes]}
        return {"config": resolved.to_json(), "facts": common, **going_on, **where}

    def _find_resume(self, resolved: RunConfig) -> Resume:
        """Where to go on; found before the run's folder is touched."""
        found = plan_resume(resolved, Rows.open(resolved.dflash.data.path), self.role.nodes)
        run = resolved.dflash.run
        before = Path(os.path.expanduser(run.output_dir)) / run.name / "config.json"
        return replace(found, notes=[*found.notes, *changes(before, resolved)])

    def _refuse(self, message: str | None) -> None:
        """A user's mistake: one message from one rank, exit 2 from all, nothing left behind."""
        if message is not None:
            last_words.say({"code": 2, "cause": message}, None)
        self.store.arrive("refused", self.role, self.role.world_size, START_UP_S, self.watchdog.tick)
        self._part()
        os._exit(2)

    # -- meeting -----------------------------------------------------------------------------------------------

    def _meet(self, shape: TargetShape, rows: Rows, device: torch.device) -> Ring:
        """The node's ring: made by one rank, mapped and first touched by all, its name gone as soon as all have it."""
        node, local = self.role.node, self.role.world_size // self.role.nodes
        ours = self.config.dflash
        size = ring_size(self.config, shape, rows.lengths.tolist())
        spec = size.spec(ours.target.dtype, ours.ring.reuse)
        key, run_id = f"ring/{node}", ""
        if self.role.is_node_leader:
            # Random, because containers that share one /dev/shm may share pids as well.
            run_id = f"{ours.run.name}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
            path = ring_path(run_id, node)
            self.watchdog.on_end.append(lambda _: path.unlink(missing_ok=True))
            ring = Ring.create(path, spec, run_id, producers=self.role.replicas, on_wait=self._on_wait)
            if self.watchdog.is_ending():  # another thread may have cleared up before there was a ring
                ring.unlink()
            self.store.put(key, [str(path), run_id])
        else:
            found = self.store.get(key, START_UP_S)
            assert isinstance(found, list)
            ring = Ring.attach(found[0], found[1], spec=spec, on_wait=self._on_wait)
            self.watchdog.on_end.append(lambda _: ring.unlink())
        self.store.arrive(f"mapped/{node}", self.role, local, START_UP_S, self.watchdog.tick)
        ring.unlink()

        def progress(done: int, total: int) -> None:
            self.watchdog.progress("touching the ring's memory", done >> 20, total >> 20)

        ring.populate(self.role.local_rank, local, progress)
        if device.type == "cuda":
            self.watchdog.progress("pinning the ring's memory")
            ring.cuda_register()
        self.store.arrive(f"touched/{node}", self.role, local, START_UP_S, self.watchdog.tick)
        return ring

    def _on_wait(self, what: str, seconds: float) -> None:
        """Called about once a second in every wait for the ring: waiting is not hanging, the ring has its own limit."""
        self.watchdog.tick()

    # -- leaving -----------------------------------------------------------------------------------------------

    def _arrive_at_the_end(self) -> None:
        self.watchdog.progress("waiting for the others to end")
        self.store.arrive("end", self.role, self.role.world_size, END_S, self.watchdog.tick)

    def _leave(self) -> None:
        limit = threading.Timer(LEAVE_S, os._exit, (0,))  # all work is done and said; closing may not hang it
        limit.daemon = True
        limit.start()
        if self.ring is not None:
            self.ring.close()
        leave_world()
        if self.run_dir is not None:
            self.run_dir.close()
            if self.args.dry_run:
                shutil.rmtree(self.run_dir.path.parent, ignore_errors=True)
        self._part()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # a file on a full disk
                stream.flush()
        os._exit(0)  # everything is closed and said; a library's exit handler must not be able to hang a finished run

    def _part(self) -> None:
        """Nobody leaves while somebody still watches, or an exit would be taken for a death. Rank 0, which serves the
        store, leaves last."""
        self.watchdog.finish()
        try:
            self.store.arrive("unwatched", self.role, self.role.world_size, LEAVE_S, self._still_together)
            self.store.check_in("left")
            if self.role.rank == 0:
                self.store.wait_for("left", self.role, self.role.world_size, LEAVE_S, self._not_alone)
        except (RunError, RuntimeError, OSError):
            return  # somebody left in a hurry (killed): everything is done, so there is nothing to wait for

    def _still_together(self) -> None:
        """Called while a rank waits for the others to look away: it cannot miss that one of them was killed."""
        if self.watchdog.sibling_left():
            raise RunError("a rank of this node has left")

    def _not_alone(self) -> None:
        """A rank that was killed on its way out never counts itself out."""
        if self.role.nodes == 1 and self.role.world_size > 1 and self.watchdog.is_alone():
            raise RunError("all others have left")


def launch_name(role: Role, config: RunConfig, secret: bytes) -> str:
    """The same on all ranks of a launch and unlike that of any other: its keys in the control store begin with it.
    Nobody without the secret can tell it, so barriers and claims, which are plain counters, are not found either."""
    run = config.dflash.run
    parts = [os.path.abspath(run.output_dir), run.name]
    if role.nodes == 1:
        parts += [str(os.getppid()), secret.hex()]  # the launcher
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def for_dry_run(config: RunConfig) -> RunConfig:
    """One step, and no word of it to anybody outside."""
    raw = config.model_dump()
    raw["dflash"]["run"]["max_steps"] = 1
    raw["dflash"]["telemetry"]["wandb"]["mode"] = "disabled"
    return RunConfig.model_validate(raw)


def limit_threads(role: Role, config: RunConfig) -> None:
    """Share the cores of a machine without GPUs among its ranks; more threads than cores only wait for each other."""
    if config.dflash.layout.device == "cpu" or not torch.cuda.is_available():
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // (role.world_size // role.nodes)))
