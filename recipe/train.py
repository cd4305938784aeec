"""Entry point of every rank: `deepspeed … recipe/train.py --deepspeed_config FILE [--resume] [--set KEY=VALUE]`.

Reads like the run: find the role, agree on the configuration, meet in the ring, then produce or train, and leave.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from recipe.watch.node_watch import NodeWatch

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the launcher puts recipe/ itself first, which hides packages


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="one rank of a run; started by the deepspeed launcher")
    parser.add_argument("--deepspeed_config", required=True, metavar="FILE", help="the run's JSON")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--resume", action="store_true", help="continue the run's newest checkpoint")
    parser.add_argument("--replace", action="store_true", help="start anew where a finished run of that name stands")
    parser.add_argument("--dry-run", action="store_true", help="one optimizer step, nothing written; used by --check")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def quieten() -> None:
    """Keep four libraries' notes to their own developers out of the user's terminal; errors still come through."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    warnings.filterwarnings("ignore", message="Triton is not supported on current platform")
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if not Path("/dev/nvidiactl").exists() else "cuda")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a store that is gone would be reported with C++ stacks
    # DeepSpeed asks its own scheduler for a rate before the first step and warns itself about it.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "before it has started" not in record.getMessage())


def leave_together(watch: NodeWatch, error: Exception) -> NoReturn:
    """A user's mistake is the same for all ranks of a node: the first one says it and leaves first."""
    from recipe.watch import last_words

    watch.stop()
    watch.say_farewell(watch.report(watch.rank, str(error), 2))
    if watch.local_rank == 0:
        last_words.say({"code": 2, "cause": str(error)}, None)
    else:
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline and watch.lives(watch.rank - watch.local_rank):
            time.sleep(0.1)
    os._exit(2)


def main(argv: list[str] | None = None) -> None:
    # Before any import that may start a thread: SIGTERM, SIGINT and SIGHUP are blocked everywhere and left to the
    # watchdog, which answers them even while the main thread sits in a collective.
    blocked = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    quieten()
    args = parse_arguments(argv)
    from recipe.process import die_with_parent, free_children
    from recipe.watch import last_words
    from recipe.watch.node_watch import NodeWatch

    die_with_parent()
    free_children(blocked)
    watch = NodeWatch()
    from recipe.config import load_config
    from recipe.errors import ConfigError, RunError
    from recipe.watch.role import Role

    try:
        config = load_config(args.deepspeed_config, args.overrides)
        from recipe.check.checks import check_layout
        from recipe.run.launch import Launch

        check_layout(config)
        launch = Launch(Role.from_environment(config.dflash.layout), config, args, watch)
    except ConfigError as error:
        leave_together(watch, error)
    except RunError as error:  # the control store could not be reached, or is another launch's
        watch.stop()
        report = watch.departure() or watch.report(watch.rank, str(error))
        watch.say_farewell(report)
        last_words.say(report, None)
        os._exit(1)
    launch.run()


if __name__ == "__main__":
    main()
