"""Real launches without the price of imports: a process that has imported everything once and forks whole launches.

`python -m tests.integration.fork_server` reads one JSON object a line, ``{"argv": […], "env": {…}, "output": FILE}``,
and runs `python -m recipe ARGV` in a forked child with its own session. Where that child, the DeepSpeed runner or its
launcher would start a Python program, `ForkingPopen` forks instead and calls the same program's entry point with the
same arguments and environment: the command line, `deepspeed`, `deepspeed.launcher.launch` and `recipe/train.py` run as
four levels of processes, as in a real launch, only nothing is imported again. The exit code is written to FILE.rc.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
PRELOAD = (
    "torch", "torch._inductor.compile_fx", "torch.utils.flop_counter", "torch.utils.serialization.config",
    "deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch", "deepspeed.ops.op_builder.all_ops",
    "deepspeed.module_inject.auto_ep_layer", "transformers", "datasets", "numpy.ctypeslib",
    "transformers.models.qwen3_5.modeling_qwen3_5", "transformers.models.qwen3.modeling_qwen3",
    "recipe.train", "recipe.run.launch", "recipe.run.train_cli", "recipe.target.role",
    "recipe.training.role", "recipe.training.export",
    "recipe.drafter.init_from", "recipe.tell.status", "recipe.check.describe", "tests.integration.death",
)  # fmt: skip


class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Starts the Python programs of a launch by `fork`; anything else is started as ever."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        command = [str(word) for word in args] if not isinstance(args, str) else [args]
        program = entry_point(command)
        if program is None:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        _, preexec_fn, _, _, cwd, env = rest[:6]
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            self.pid, self._child_created = pid, True
            return
        as_after_exec(env if env is not None else dict(os.environ), cwd, preexec_fn)
        leave_with(program)


def entry_point(command: list[str]) -> Callable[[], Any] | None:
    """What `python …` or `deepspeed …` would run, or None for another program."""
    words = command[1:]
    while words[:1] == ["-u"]:
        words = words[1:]
    if Path(command[0]).name == "deepspeed":
        module, arguments = "deepspeed.launcher.runner", words
    elif words[:2] == ["-m", "deepspeed.launcher.launch"]:
        module, arguments = words[1], words[2:]
    elif words and words[0].endswith("recipe/train.py"):
        module, arguments = "recipe.train", words[1:]
    else:
        return None

    def run() -> Any:
        sys.argv = [words[0] if module == "recipe.train" else module, *arguments]
        kind = module.rpartition(".")[2]
        name = f"rank{os.environ['LOCAL_RANK']}" if kind == "train" else {"launch": "launcher"}.get(kind, kind)
        note_pid(name)
        if kind == "train":
            importlib.import_module("tests.integration.death").prepare()
        return importlib.import_module(module).main()

    return run


def note_pid(name: str) -> None:
    """So that the test can aim."""
    (Path(os.environ["FORK_SERVER_PIDS"]) / name).write_text(str(os.getpid()))


def as_after_exec(environment: dict[str, str], cwd: str | None, preexec_fn: Callable[[], Any] | None) -> None:
    """What exec does and fork does not: default signal handlers, the new environment."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    if cwd is not None:
        os.chdir(cwd)
    if preexec_fn is not None:
        preexec_fn()


def leave_with(program: Callable[[], Any]) -> None:
    """Run ``program`` as an interpreter would, and end this process with its exit code."""
    code = 1
    try:
        result = program()
        code = result if isinstance(result, int) else 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start(request: dict[str, Any]) -> int:
    """Fork the command line of one launch."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    for fd in (1, 2):
        os.dup2(output, fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.close(output)
    as_after_exec({**os.environ, **request["env"]}, None, None)
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    sys.argv = ["recipe", *request["argv"]]
    note_pid("cli")
    leave_with(lambda: importlib.import_module("recipe.run.cli").main(request["argv"]))
    return 0


def serve() -> None:
    """Start what is asked for and write down how it ended, until standard input is closed."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # ranks whose launcher was killed become ours
    from recipe.target.cpu_kernels import use_torch_kernels_on_cpu

    use_torch_kernels_on_cpu()  # hides fla, before anything imports it
    for module in PRELOAD:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("ready", file=answers, flush=True)
    outputs: dict[int, str] = {}
    while True:
        if select.select([0], [], [], 0.05)[0]:
            line = sys.stdin.readline()
            if not line:
                os._exit(0)
            request = json.loads(line)
            pid = start(request)
            outputs[pid] = request["output"]
            print(pid, file=answers, flush=True)
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid in outputs:
                    Path(outputs.pop(pid) + ".rc").write_text(str(os.waitstatus_to_exitcode(status)))
        except ChildProcessError:
            pass


if __name__ == "__main__":
    serve()
