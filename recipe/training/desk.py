"""The leader's desk: everything that is written or shown about a run, from its first second to its last."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from recipe.agreement.scene import Scene
from recipe.check.describe import describe
from recipe.config import RunConfig
from recipe.errors import ConfigError, RunError
from recipe.process import ProcessId
from recipe.ring import RingTimeout
from recipe.tell.disk import DiskTrouble, reason
from recipe.tell.gpu import GpuSampler, Sample, device_names, load_nvml
from recipe.tell.gpu_roles import GpuNews, NodePost, flat, roles_of
from recipe.tell.logline import TrainLog
from recipe.tell.metrics import read_metrics
from recipe.tell.provenance import collect
from recipe.tell.run_dir import RunDir, write_atomic, write_json
from recipe.tell.status_writer import StatusWriter
from recipe.tell.wandb_run import WandbRun
from recipe.training.integrity import folder_name
from recipe.training.reporter import RunReporter, StartUp

Export = Callable[[Path, int], Path]
RESULTS = "results of evaluations (eval/)"


def gate_tokens(config: RunConfig) -> int:
    """Tokens that must be ready before the drafters start."""
    return config.dflash.ring.min_ready * config.dflash.data.token_budget


def start_sampler(scene: Scene, nvml: Any, then: Callable[[], None] = lambda: None) -> GpuSampler:
    """Samples the GPUs of this node; its first drafter has one. ``nvml`` None (a CPU machine): an inert one."""
    layout, telemetry = scene.config.dflash.layout, scene.config.dflash.telemetry
    post = NodePost(scene.store, roles_of(layout, torch.cuda.device_count()), scene.role.node)

    def sampled(samples: list[Sample]) -> None:
        post(samples)
        then()

    sampler = GpuSampler(nvml, telemetry.interval_s, sampled)
    sampler.start()
    return sampler


class Desk:
    """Opened before anything slow; told of the phases; closed by `finish`, or by the watchdog when a rank dies."""

    def __init__(self, scene: Scene, run_dir: RunDir) -> None:
        self.scene, self.run_dir, self._started = scene, run_dir, time.monotonic()
        self.wandb: WandbRun | None = None
        self.reporter: RunReporter | None = None
        self.evaluations: list[dict[str, Any]] = []
        config = scene.config
        nvml = load_nvml(config.dflash.telemetry.gpu) if scene.device.type == "cuda" else None
        self.log = TrainLog(run_dir.train_log)
        self.trouble = DiskTrouble(self.log.event)
        with self.trouble.survived("config.json"):
            write_atomic(run_dir.config_json, config.to_json())
        if not run_dir.config_json.exists():  # nothing is trained yet, and an export could not be made
            fix = "make room, or choose another dflash.run.output_dir"
            raise ConfigError("dflash.run.output_dir", str(run_dir.path), "its config.json cannot be written", fix)
        with self.trouble.survived("provenance.json"):
            write_json(run_dir.provenance_json, collect(config.model_dump(mode="json"), gpus=device_names(nvml)))
        self.status = StatusWriter(
            run_dir, scene.schedule.total_steps, stall_after_s=float(config.dflash.ring.timeout_s)
        )
        scene.watchdog.on_end.append(self._on_end)
        telemetry = config.dflash.telemetry
        self.wandb = WandbRun(
            run_dir,
            config.model_dump(mode="json"),
            config.dflash.run.name,
            telemetry.wandb.project,
            telemetry.wandb.mode,
        )
        self._gpu_news = GpuNews(scene.store, scene.role.nodes, telemetry.interval_s)
        self._sampler = start_sampler(scene, nvml, self._gpus_sampled)
        self.start_up = StartUp(scene.watchdog.phases, self.log, self.status)
        self.start_up.start()
        for line in describe(config, scene.notes).splitlines():
            self.log.line(line)
        self.log.event(self._opening())
        few = int((scene.rows.supervised < 2).sum())
        if few:
            self.log.event(f"{few} rows have fewer than two supervised tokens: they are read, and train nothing")

    def _gpus_sampled(self) -> None:
        """This node has a new sample, and others may; called in the sampler's thread."""
        rows = self._gpu_news.collect()
        self.status.gpus(rows)
        if self.wandb is not None:
            self.wandb.log_gpu(time.monotonic() - self._started, flat(rows))

    def _opening(self) -> str:
        role, schedule, ours = self.scene.role, self.scene.schedule, self.scene.config.dflash
        resumed = f", resumed at step {self.scene.first_step}" if self.scene.resume else ""
        return (
            f"run {ours.run.name}: {role.nodes} node(s) x ({role.replicas} target replica(s) of tp {role.tp} + "
            f"{role.drafters_per_node} drafter(s)) on {self.scene.device.type}, {len(self.scene.rows)} rows, "
            f"{schedule.epochs} epoch(s) x reuse {schedule.reuse} = {schedule.total_steps} steps{resumed}"
        )

    def fill(self) -> None:
        """Both sides are ready and the drafters wait for the reservoir: show how it fills."""
        self.start_up.stop()
        known = (self.scene.store.peek(f"process/{rank}") for rank in range(self.scene.role.world_size))
        self.status.processes([ProcessId.from_dict(process) for process in known if isinstance(process, dict)])
        self._say_kernels()
        ours, ring, said = self.scene.config.dflash, self.scene.ring, -1
        deadline = time.monotonic() + ours.ring.timeout_s
        while True:
            ready = min(ring.stats().ready_tokens // ours.data.token_budget, ours.ring.min_ready)
            self.status.filling(ready, ours.ring.min_ready)
            if ready != said:
                self.log.event(f"filling {ready}/{ours.ring.min_ready}")
                said, deadline = ready, time.monotonic() + ours.ring.timeout_s
            try:
                ring.wait_ready(gate_tokens(self.scene.config), 1.0)
                return
            except RingTimeout:
                if time.monotonic() > deadline:
                    raise

    def _say_kernels(self) -> None:
        """Which target ranks compute by slower functions than fla's kernels, and why; also in `status`."""
        found = {rank: self.scene.store.peek(f"kernels/{rank}") for rank in range(self.scene.role.world_size)}
        slow = {rank: str(why) for rank, why in found.items() if why is not None}
        for why in dict.fromkeys(slow.values()):
            ranks = [rank for rank, other in slow.items() if other == why]
            text = f"ranks {ranks}: the target's linear-attention layers run in torch's functions ({why})"
            self.log.event(text)
            self.status.kernels(text)

    def train(self, first_step: int) -> RunReporter:
        """Training starts now: what an earlier launch came to is not the run's result any more."""
        with self.trouble.survived("summary.json"):
            self.run_dir.summary_json.unlink(missing_ok=True)
        self.status.first_step(compiles=self.scene.device.type == "cuda")
        schedule = self.scene.schedule
        self.reporter = RunReporter(
            self.run_dir,
            self.scene.config,
            self.log,
            self.status,
            self.scene.ring,
            self.scene.device,
            first_step=first_step,
            steps=schedule.total_steps,
            epoch_of=schedule.epoch_of,
            log_metrics=self.wandb.log if self.wandb is not None else lambda record: None,
            gpu_window=self._gpu_news.window,
            trouble=self.trouble,
        )
        return self.reporter

    def evaluating(self) -> None:
        """Training is over and the last answers are awaited: show how far the target ranks are."""
        found = [beat for beat in self.scene.watchdog.phases().values() if beat["phase"] == "evaluating"]
        if found:
            most = max(found, key=lambda beat: int(beat["total"]))  # only the replica's first rank counts
            self.status.phase(f"evaluating step {most['step']}", int(most["done"]), int(most["total"]))

    def evaluated(self, answer: dict[str, Any]) -> None:
        """Real decoding of the drafter of an earlier step, by the target ranks. Raises RunError when logits were not
        finite: the run has then DIVERGED, although every step may have been fine."""
        assert self.reporter is not None
        step = int(answer["step"])
        if "not_finite" in answer:
            message = f"the evaluation of step {step}: {answer['not_finite']}"
            self.diverged(step, message)
            raise RunError(message)
        if why := answer.get("unread"):
            self.log.event(f"warning: step {step} is not evaluated: its drafter cannot be read ({why})")
            return
        if why := answer.get("unwritten"):
            self.trouble.failed(RESULTS, why)
        else:
            self.trouble.worked(RESULTS)
        self.evaluations.append(answer)
        tau = answer["tau"]
        ties = f" ({answer['ties']} numeric tie(s))" if answer["ties"] else ""
        self.log.event(
            f"eval step={step} tau={'-' if tau is None else f'{tau:.3f}'} "
            f"identical={answer['identical']}/{answer['prompts']}{ties} seconds={answer['seconds']:.1f}"
        )
        values = {key: answer[key] for key in ("tau", "identical", "prompts", "seconds") if answer[key] is not None}
        self.reporter.metrics.evaluation(step, values)
        if self.wandb is not None:
            self.wandb.log_evaluation(step, values)

    def diverged(self, step: int, message: str) -> None:
        self.log.event(f"diverged: {message}" + ("" if self.scene.dry_run else "; the newest checkpoint is kept"))
        self.status.diverged(step, message)

    def finish(self, export_run: Export) -> None:
        """Export the trained drafter, write what the run came to, and close."""
        assert self.reporter is not None
        steps = self.scene.schedule.total_steps
        if self.scene.dry_run:
            for line in self._accounts():
                self.log.event(line)
            self.log.event(f"one step done in {self.reporter.last['ms'] / 1000:.1f} s: this config runs here")
            self.status.done("dry run")
            self._close(0)
            return
        self.status.phase("exporting")
        try:
            export = export_run(self.run_dir.path, steps)
        except (OSError, SafetensorError, ConfigError) as error:
            rule = f"all {steps} steps are trained and saved, but the export cannot be written: {reason(error)}"
            raise RunError(f"{rule}; mend that, then --resume writes it") from error
        verdict = self.reporter.bottleneck()
        # A resume that had only the export left to do has trained no step.
        known = read_metrics(self.run_dir.metrics_jsonl)
        last = self.reporter.last or next((record for record in reversed(known) if "loss" in record), {})
        summary = {
            "steps": steps,
            "final_loss": last.get("loss"),
            "tau_est": last.get("tau_est"),
            "bottleneck": verdict.bottleneck,
            "target_wait_pct": round(verdict.target_wait_pct, 1),
            "drafter_wait_pct": round(verdict.drafter_wait_pct, 1),
            "seconds": round(time.monotonic() - self._started, 1),
            "checkpoint": str(self.run_dir.checkpoints / folder_name(steps)),
            "export": str(export),
            "metrics": str(self.run_dir.metrics_jsonl),
            # Skipped steps are those of the whole run; the others are counted from the last resume on.
            "counts": {"skipped": self.reporter.metrics.skipped_total, **self.reporter.totals},
            "counted_since_step": self.scene.first_step,
        }
        if self.evaluations:
            summary["tau"] = self.evaluations[-1]["tau"]
            summary["evaluation_s"] = round(sum(one["seconds"] for one in self.evaluations), 1)
        if self.reporter.warnings:
            summary["warnings"] = self.reporter.warnings
        with self.trouble.survived("summary.json"):
            write_json(self.run_dir.summary_json, summary)
        self.log.event(f"over the whole run: {verdict.line()}")
        for line in self._accounts():
            self.log.event(line)
        said = "; ".join([f"{steps} steps, export in {export}", *(f"warning: {one}" for one in self.reporter.warnings)])
        self.log.event(f"done: {said}")
        self.status.done(said)
        self._close(0)

    def _accounts(self) -> list[str]:
        """What did not train, and why: steps skipped in the whole run, all else since this launch began."""
        assert self.reporter is not None
        totals = self.reporter.totals
        said = {
            "barren": "deliveries trained nothing: no two supervised tokens in a row, so no anchor",
            "empty_steps": "steps had nothing supervised on any rank",
            "unmoved": "steps x ranks changed no weight",
        }
        skipped = self.reporter.metrics.skipped_total
        lines = [f"{skipped} steps were skipped for numbers that are not finite"] if skipped else []
        since = f" (since step {self.scene.first_step})" if self.scene.first_step else ""
        return lines + [f"{totals[name]} {text}{since}" for name, text in said.items() if totals.get(name)]

    def _on_end(self, report: dict[str, Any]) -> None:
        """The watchdog ends this process: say why in the files too."""
        self.log.note(report["line"])
        self.status.dead(report.get("rank"), report.get("role"), str(report.get("cause")))
        self.status.close()
        if self.wandb is not None:
            self.wandb.finish(1, timeout_s=3)

    def _close(self, code: int) -> None:
        self._sampler.stop()
        if self.wandb is not None:
            self.wandb.finish(code)
        self.status.close()
        self.log.close()
