"""One rank from its first message to its last: agree, meet in the ring, work, leave. Entered by `recipe/train.py`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from recipe.config import RunConfig, load_config_text
from recipe.config.checks import check
from recipe.config.derive import resolve
from recipe.config.feasibility import ring_size
from recipe.data.rows import Rows
from recipe.data.schedule import Schedule
from recipe.errors import ConfigError
from recipe.ring import Ring, ring_path
from recipe.roles.role import Role
from recipe.roles.store import ControlStore
from recipe.roles.watchdog import Watchdog
from recipe.roles.worlds import init_world, leave_world, pick_device
from recipe.scene import START_UP_S, Scene
from recipe.shapes import TargetShape
from recipe.telemetry.process import ProcessId
from recipe.telemetry.run_dir import RunDir, is_run
from recipe.telemetry.status_writer import mark_dead

END_S = 24 * 3600.0  # targets are done long before the drafters; who dies meanwhile is noticed by the watchdog


class Launch:
    """The life of one rank."""

    def __init__(self, role: Role, config: RunConfig, args: argparse.Namespace) -> None:
        self.role, self.config, self.args = role, config, args
        self.store = ControlStore.connect(role, serve=role.rank == 0)
        # The ring's own time-outs are the better witnesses, so they get the first word.
        hang_s = 1.5 * config.dflash.ring.timeout_s
        self.watchdog = Watchdog(role, lambda: ControlStore.connect(role, serve=False), hang_s)
        self.run_dir: RunDir | None = None
        self.ring: Ring | None = None

    def run(self) -> None:
        """Does not return: ends the process with the run's exit code."""
        try:
            self._live()
        except ConfigError as error:
            self.watchdog.abort(f"error: {error}", code=2)
        except BaseException as error:
            traceback.print_exc()
            self.watchdog.abort(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        self._leave()

    def _live(self) -> None:
        limit_threads(self.role, self.config)
        agreed = self._agree()
        self.config = load_config_text(agreed["config"], source="the resolved config")
        device = pick_device(self.role, self.config.dflash.layout.device)
        rows = Rows.open(self.config.dflash.data.path)
        schedule = Schedule.of(self.config, rows.lengths, self.role.nodes)
        shape = TargetShape.resolve(self.config.dflash.target.path, self.config.dflash.target.revision)
        self.ring = self._meet(shape, rows, device)
        init_world(self.role, self.store, device, self.config.dflash.ring.timeout_s + 60.0)
        scene = Scene(
            self.role, self.config, shape, device, rows, schedule, self.ring, self.watchdog, self.store,
            Path(agreed["run_dir"]), int(agreed["first_step"]), self.args.resume,
        )  # fmt: skip
        self.watchdog.progress("importing the model code")
        if self.role.kind == "target":
            from recipe.target.role import run_target

            run_target(scene)
        else:
            from recipe.drafter.role import run_drafter
            from recipe.export import export_run

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
        self.watchdog.run_dir = Path(found["run_dir"])
        self.store.put(f"process/{self.role.rank}", ProcessId.own(self.role.rank, self.role.kind).to_dict())
        if not self.role.is_leader:
            self.watchdog.on_end.append(self._note_death)
        return found

    def _note_death(self, report: dict[str, Any]) -> None:
        """The leader notes a death itself, unless it is the one that died."""
        if is_run(Path(self.watchdog.run_dir or "")):
            mark_dead(RunDir(Path(self.watchdog.run_dir or "")), report["rank"], report["role"], report["cause"])

    def _decide(self) -> dict[str, Any]:
        from recipe.drafter.checkpoint import find_resume
        from recipe.drafter.role import identity

        if self.args.dry_run:
            raw = self.config.model_dump()
            raw["dflash"]["run"] |= {"output_dir": tempfile.mkdtemp(prefix="dflash-check-"), "max_steps": 1}
            self.config = RunConfig.model_validate(raw)
        resolved = resolve(self.config)
        run = resolved.dflash.run
        check(resolved, nodes=self.role.nodes, resume=None if self.args.replace else self.args.resume)
        self.run_dir = RunDir.create(run.output_dir, run.name, self.args.resume, fresh=self.args.replace)
        first_step = find_resume(self.run_dir.checkpoints, identity(resolved)) if self.args.resume else 0
        return {"config": resolved.to_json(), "run_dir": str(self.run_dir.path), "first_step": first_step}

    def _refuse(self, message: str | None) -> None:
        """A user's mistake: one message from one rank, exit 2 from all, nothing left behind."""
        if message is not None:
            print(f"error: {message}", file=sys.stderr, flush=True)
        self.store.arrive("refused", self.role, self.role.world_size, 60.0, self.watchdog.tick)
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
            run_id = f"{ours.run.name}-{os.getpid()}"
            path = ring_path(run_id, node)
            ring = Ring.create(path, spec, run_id, producers=self.role.replicas, on_wait=self._on_wait)
            self.store.put(key, [str(path), run_id])
        else:
            found = self.store.get(key, START_UP_S)
            assert isinstance(found, list)
            ring = Ring.attach(found[0], found[1], spec=spec, on_wait=self._on_wait)
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

    def _leave(self) -> None:
        self.watchdog.progress("waiting for the others to end")
        self.store.arrive("end", self.role, self.role.world_size, END_S, self.watchdog.tick)
        self.store.put("ended", True)
        if self.ring is not None:
            self.ring.close()
        leave_world()
        if self.run_dir is not None:
            self.run_dir.close()
            if self.args.dry_run:
                shutil.rmtree(self.run_dir.path.parent, ignore_errors=True)
        self._part()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # everything is closed and said; a library's exit handler must not be able to hang a finished run

    def _part(self) -> None:
        """Rank 0 serves the store, so it leaves last."""
        self.store.put("ended", True)
        self.watchdog.finish()
        self.store.check_in("left")
        if self.role.rank == 0:
            self.store.wait_for("left", self.role, self.role.world_size, 60.0, self.watchdog.tick)


def limit_threads(role: Role, config: RunConfig) -> None:
    """Share the cores of a machine without GPUs among its ranks; more threads than cores only wait for each other."""
    if config.dflash.layout.device == "cpu" or not torch.cuda.is_available():
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // (role.world_size // role.nodes)))
