"""Weights & Biases, at arm's length: never asks, never blocks, never ends a run. One W&B run per launch."""

from __future__ import annotations

import importlib
import netrc
import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from recipe.errors import ConfigError
from recipe.tell.provenance import redact, redact_text
from recipe.tell.run_dir import RunDir, write_atomic

Mode = Literal["auto", "online", "offline", "disabled"]
_SERVER = "https://api.wandb.ai"
_ID_FILE = ".wandb_id"
_INIT_TIMEOUT_S = 15.0
_FINISH_TIMEOUT_S = 30.0


def key_configured(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether an API key is there without asking anybody: WANDB_API_KEY, or netrc for the server in use."""
    if environment.get("WANDB_API_KEY", "").strip():
        return True
    host = urlparse(environment.get("WANDB_BASE_URL", _SERVER)).hostname or ""
    path = Path(environment.get("NETRC") or Path(environment.get("HOME", "~")).expanduser() / ".netrc")
    try:
        return netrc.netrc(str(path)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def resolve_mode(mode: Mode, environment: Mapping[str, str] = os.environ) -> Literal["online", "offline", "disabled"]:
    """``auto`` is WANDB_MODE if set, else online with a key and disabled without.

    Raises ConfigError for an explicit ``online`` without a key: wandb would stop and ask for it.
    """
    has_key = key_configured(environment)
    if mode == "online" and not has_key:
        fix = "set WANDB_API_KEY, run `wandb login`, or use mode auto or offline"
        rule = "no W&B key is configured" + _where(environment)
        raise ConfigError("dflash.telemetry.wandb.mode", mode, rule, fix)
    if mode != "auto":
        return mode
    wish = environment.get("WANDB_MODE", "").lower()
    if wish in ("offline", "dryrun"):
        return "offline"
    return "online" if has_key and wish not in ("disabled",) else "disabled"


def _where(environment: Mapping[str, str]) -> str:
    """On several nodes the key of the shell is not there; that of the leader's own host counts, and no other."""
    if environment.get("CROSS_SIZE", "1") == "1":
        return ""
    return (
        f" on {socket.gethostname()}, where the run's leader is (the shell's WANDB_API_KEY does not travel to the "
        "nodes: run `wandb login` on the hostfile's first host)"
    )


class WandbRun:
    """One run at W&B, or nothing at all; the calls are the same. Only drafter rank 0 makes one.

    Training numbers live on the axis ``train/step``, GPU samples on ``gpu/seconds``: neither can make the other go
    backwards, also after a resume, which continues the W&B run whose id is in the run folder.
    """

    def __init__(
        self,
        run_dir: RunDir,
        config: Mapping[str, Any],
        name: str,
        project: str,
        mode: Mode = "auto",
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._run: Any = None
        self._mutex = threading.Lock()
        resolved = resolve_mode(mode, environment)
        if resolved == "disabled":
            why = f"no key is configured{_where(environment)}" if mode == "auto" else "disabled"
            print(f"wandb: off ({why}); metrics are in {run_dir.metrics_jsonl}", flush=True)
            return
        try:
            self._run = _init(run_dir, redact(dict(config)), name, project, resolved)
        except Exception as error:  # whatever wandb's reason: the numbers are on disk anyway
            print(f"warning: wandb is off: {_first_line(error)}", flush=True)

    @property
    def active(self) -> bool:
        """Whether anything is sent or stored."""
        return self._run is not None

    def log(self, record: Mapping[str, Any]) -> None:
        """A record of `Metrics.flush`."""
        values = {f"train/{key}": value for key, value in record.items() if isinstance(value, (int, float))}
        if ring := record.get("ring"):
            values["train/ring_ready"] = ring[0]
        self._send(values)

    def log_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of an evaluation, on the axis of the steps."""
        self._send({"train/step": step, **{f"eval/{key}": value for key, value in values.items()}})

    def log_gpu(self, seconds: float, sample: Mapping[str, Any]) -> None:
        """GPU numbers by node and role, on an axis of their own; may be called from the sampler's thread."""
        self._send({"gpu/seconds": seconds, **{f"gpu/{key}": value for key, value in sample.items()}})

    def finish(self, exit_code: int = 0, timeout_s: float | None = None) -> None:
        """End the W&B run, as failed if ``exit_code`` is not 0. Call it always, also when the run dies.

        Waits for the upload no longer than ``timeout_s`` (None: 30 s; a watchdog that must end soon gives less).
        """
        with self._mutex:
            run, self._run = self._run, None
        if run is None:
            return
        # A thread, because without a network wandb may try for longer than anybody wants to wait.
        thread = threading.Thread(target=_quietly, args=(run.finish, exit_code), daemon=True)
        thread.start()
        thread.join(_FINISH_TIMEOUT_S if timeout_s is None else timeout_s)
        if thread.is_alive():
            print("warning: wandb did not finish uploading; `wandb sync` can do it later", flush=True)

    def _send(self, values: Mapping[str, Any]) -> None:
        with self._mutex:
            if self._run is None:
                return
            try:
                self._run.log(dict(values))
            except Exception as error:
                self._run = None
                print(f"warning: wandb is off from here on: {_first_line(error)}", flush=True)


def reachable(environment: Mapping[str, str] = os.environ, timeout_s: float = 5.0) -> bool:
    """Whether the W&B server takes a connection. Asked first, because wandb itself retries far beyond its time-out."""
    if any(environment.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True  # the proxy decides; wandb knows how to ask it
    server = urlparse(environment.get("WANDB_BASE_URL", _SERVER))
    try:
        port = server.port or (80 if server.scheme == "http" else 443)
        socket.create_connection((server.hostname or "", port), timeout_s).close()
    except (OSError, ValueError):
        return False
    return True


def _first_line(error: Exception) -> str:
    lines = redact_text(str(error)).splitlines()
    return lines[0] if lines else type(error).__name__


def _quietly(finish: Any, exit_code: int) -> None:
    try:
        finish(exit_code=exit_code)
    except Exception as error:
        print(f"warning: wandb: {_first_line(error)}", flush=True)


def _init(run_dir: RunDir, config: Mapping[str, Any], name: str, project: str, mode: str) -> Any:
    wandb = importlib.import_module("wandb")  # slow to import, so only where it is used
    id_file = run_dir.path / _ID_FILE
    known = id_file.read_text().strip() if id_file.exists() else None
    run_id = known or run_dir.run_id
    settings = wandb.Settings(
        init_timeout=_INIT_TIMEOUT_S,
        finish_timeout=_FINISH_TIMEOUT_S,
        console="off",  # train.log is our own; wandb's capture would swallow a crash's last words
        silent=True,
        disable_git=True,
        save_code=False,
        x_disable_stats=True,  # one set of system curves: ours
    )
    if mode == "online" and not reachable():
        print("warning: wandb cannot be reached; kept offline, `wandb sync` can send it later", flush=True)
        mode = "offline"
    run = wandb.init(
        project=project,
        name=name,
        id=run_id,
        resume="allow",
        mode=mode,
        dir=str(run_dir.path),
        config=config,
        settings=settings,
    )
    if known is None:
        write_atomic(id_file, run_id + "\n")
    run.define_metric("train/step")
    run.define_metric("train/*", step_metric="train/step")
    run.define_metric("eval/*", step_metric="train/step")
    run.define_metric("gpu/seconds")
    run.define_metric("gpu/*", step_metric="gpu/seconds")
    print(f"wandb: {mode}, {run.url if mode == 'online' else run_dir.path / 'wandb'}", flush=True)
    return run
