"""Check a run's JSON, then launch it with DeepSpeed and see it through.

python -m recipe train CONFIG                       one node: this one
python -m recipe train CONFIG --hostfile hostfile   the hosts of the file
python -m recipe train CONFIG --check               resolve, size, one dry step on the real layout, nothing written
python -m recipe train CONFIG --check --no-model    resolve and size only; needs neither weights, data nor GPUs
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from recipe.config import RunConfig, load_config
from recipe.errors import ConfigError

TRAIN_SCRIPT = Path(__file__).parents[1] / "train.py"
LINGER_S = 15.0  # for a launcher and ranks whose runner was killed: the last line comes when they are gone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="JSON of the run, for example ds_configs/demo.json")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override one key, for example dflash.ring.reuse=2; may be repeated")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="continue the run's newest checkpoint")
    parser.add_argument("--replace", action="store_true", help="set an older run of this name aside and start anew")
    parser.add_argument("--check", action="store_true", help="resolve, size and try one step; write nothing")
    parser.add_argument("--no-model", action="store_true", help="with --check: neither weights, data nor GPUs needed")
    parser.add_argument("--hostfile", metavar="FILE", help="hosts and slots for several nodes (default: this machine)")
    parser.add_argument("--master-port", type=int, metavar="PORT", help="control port of rank 0 (default: a free one)")


def run(args: argparse.Namespace) -> int:
    if args.no_model and not args.check:
        raise ConfigError("--no-model", True, "only goes with --check", "add --check")
    if args.resume and args.replace:
        raise ConfigError("--resume", True, "continues the run that --replace sets aside", "give one of the two")
    if args.master_port is not None and not 1 <= args.master_port <= 65535:
        raise ConfigError("--master-port", args.master_port, "must be 1 … 65535", "leave it out for a free port")
    if args.check and (args.resume or args.replace):
        raise ConfigError("--check", True, "tries a new run and writes nothing", "leave out --resume and --replace")
    config = load_config(args.config, args.overrides, say=print)
    hosts = _hosts(args.hostfile, config)
    resolved = _resolve_and_check(config, args, max(len(hosts), 1))
    if args.check and args.no_model:
        return 0
    before = _last_launch(resolved)
    code, words = _launch(_command(args, config, hosts))
    if args.check:  # what stands in the run's own folder is of an older launch
        return _say_check(code, words)
    if words:
        print(_with_result(resolved, words), file=sys.stderr)  # after everything that the launcher says at an end
        return code or 1
    return _confirm_done(resolved, code, before)


def _resolve_and_check(config: RunConfig, args: argparse.Namespace, nodes: int) -> RunConfig:
    from recipe.check.checks import check
    from recipe.check.derive import resolve
    from recipe.check.describe import describe
    from recipe.model_files.shapes import TargetShape
    from recipe.prepare.ensure import ensure_rows
    from recipe.target.verify import verify_target

    resolved = resolve(config)
    if not args.no_model:
        ensure_rows(resolved)
    fresh = args.replace or args.check
    notes = check(resolved, nodes=nodes, model=not args.no_model, resume=None if fresh else args.resume)
    if not args.no_model:
        verify_target(resolved, TargetShape.resolve(resolved.dflash.target.path, resolved.dflash.target.revision))
    if args.check:  # otherwise the run's leader says it, and writes it into train.log
        print(describe(resolved, notes), flush=True)
    return resolved


def _hosts(hostfile: str | None, config: RunConfig) -> list[str]:
    if hostfile is None:
        return []
    from recipe.config.hostfile import read_hostfile

    slots = read_hostfile(hostfile)
    wanted = len(config.dflash.layout.target_gpus) + len(config.dflash.layout.drafter_gpus)
    for host, count in slots.items():
        if count != wanted:
            raise ConfigError(
                "hostfile", f"{host} slots={count}", f"the layout needs {wanted} slots on every host", f"slots={wanted}"
            )
    # DeepSpeed goes through ssh for every hostfile. One host that is this machine needs none.
    return [] if len(slots) == 1 and _is_this_machine(*slots) else list(slots)


def _is_this_machine(host: str) -> bool:
    return host.lower() in ("localhost", "127.0.0.1", "::1", socket.gethostname().lower())


def free_port() -> int:
    """A port that was free a moment ago on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _command(args: argparse.Namespace, config: RunConfig, nodes: list[str]) -> list[str]:
    layout = config.dflash.layout
    script = Path(sys.executable).with_name("deepspeed")
    launcher = [str(script)] if script.exists() else [sys.executable, "-m", "deepspeed.launcher.runner"]
    if nodes:
        launcher += ["--hostfile", args.hostfile]
        if args.master_port:
            launcher += ["--master_port", str(args.master_port)]
    else:
        ranks = len(layout.target_gpus) + len(layout.drafter_gpus)
        # A path that exists nowhere: DeepSpeed would otherwise take /job/hostfile of the machine, unasked.
        launcher += ["--hostfile", os.devnull + ".none", "--num_gpus", str(ranks)]
        launcher += ["--master_addr", "127.0.0.1", "--master_port", str(args.master_port or free_port())]
    ours = [str(TRAIN_SCRIPT), "--deepspeed_config", str(Path(args.config))]
    for override in args.overrides:
        ours += ["--set", override]
    ours += ["--resume"] * args.resume + ["--replace"] * args.replace + ["--dry-run"] * args.check
    return launcher + ours


def _launch(command: list[str]) -> tuple[int, str]:
    """Run the launcher; an interrupt or SIGTERM here ends the whole run, and so does our own death.

    Returns the exit code and the line in which the run said why it ended (empty when it said nothing).
    """
    from recipe.process import adopt_orphans, children_of, die_with_parent, wait_for_children
    from recipe.watch import last_words

    adopt_orphans()
    others = {pid for _, pid in children_of(os.getpid())}
    with tempfile.TemporaryDirectory(prefix="dflash-train-", ignore_cleanup_errors=True) as folder:
        words = Path(folder) / "last_words"
        environment = dict(os.environ, PYTHONUNBUFFERED="1", **{last_words.VARIABLE: f"{os.getpid()}:{words}"})
        runner = subprocess.Popen(command, env=environment, preexec_fn=die_with_parent)
        code = _see_through(runner, words)
        wait_for_children(others, LINGER_S)
        return code, words.read_text(encoding="utf-8").strip() if words.exists() else ""


def _see_through(runner: subprocess.Popen[bytes], words: Path) -> int:
    """Wait for the launcher's end, handing on what is meant for it, after a note of that for the ranks."""
    from recipe.watch.last_words import note_signal

    def forward(signum: int, _frame: object) -> None:
        note_signal(words, signal.Signals(signum))
        with contextlib.suppress(ProcessLookupError):
            runner.send_signal(signum)

    previous = signal.signal(signal.SIGTERM, forward)
    try:
        while True:
            try:
                code = runner.wait()
                break
            except KeyboardInterrupt:
                forward(signal.SIGINT, None)  # a terminal sends it to all; `kill -INT` sends it to us alone
    finally:
        signal.signal(signal.SIGTERM, previous)
    return code if code >= 0 else 128 - code


def _say_check(code: int, words: str) -> int:
    """The end of `--check`: nothing when it went well, else one line. Its log went with its folder: none is named."""
    if not words and code == 0:
        return 0
    why = re.sub(r"; (log: .*|the run had not made .*)$", "", words) or f"the launcher ended with code {code}"
    if not why.startswith("error: "):
        why = f"error: the check failed: {why.removeprefix('the run ends because of ')}"
    print(why, file=sys.stderr)
    return code or 1


def _with_result(config: RunConfig, words: str) -> str:
    """``words``, why the run ended, and whether all was done and saved by then: `status` says DONE in that case.

    Words that name a log are of a launch that has opened its folder: what stands there is its own.
    """
    from recipe.tell.run_dir import RunDir
    from recipe.tell.status import read_status

    try:
        status = read_status(RunDir.open(Path(config.dflash.run.output_dir) / config.dflash.run.name))
    except ConfigError:
        return words
    if status.state != "DONE" or "; log: " not in words:
        return words
    culprit = words.removeprefix("the run ends because of ")
    return f"error: the run is done ({status.message}), but its processes did not end well because of {culprit}"


def _last_launch(config: RunConfig) -> object:
    """What tells the launch that last wrote the run's status.json from any other; None where there is none."""
    from recipe.tell.status_fields import read_fields

    return read_fields(Path(config.dflash.run.output_dir) / config.dflash.run.name / "status.json").get("launch")


def _confirm_done(config: RunConfig, code: int, before: object) -> int:
    """A launcher that was killed lets the runner end with 0: only the run itself can say that it is done.

    ``before``: `_last_launch` when this one began, whose word on the end is not this one's.
    """
    from recipe.tell.run_dir import RunDir
    from recipe.tell.status import read_status

    try:
        run_dir = RunDir.open(Path(config.dflash.run.output_dir) / config.dflash.run.name)
    except ConfigError:
        print(f"error: the launcher ended with code {code}, before the run had made its folder", file=sys.stderr)
        return code or 1
    if before is not None and _last_launch(config) == before:
        print(f"error: the launcher ended with code {code}, before the run had begun", file=sys.stderr)
        return code or 1
    status = read_status(run_dir)
    if status.state == "DONE" and code == 0:
        return 0
    what = f"error: the launcher ended with code {code}, and the run is {status.state}: {status.message}"
    if status.state == "DONE":
        what = f"error: the run is done ({status.message}), but a process was killed while it left (code {code})"
    print(f"{what}; log: {run_dir.train_log}", file=sys.stderr)
    return code or 1
