"""``python -m recipe VERB``: one door to every verb.

A verb's module is imported only when the verb is used, so that ``--help`` answers at once and never loads torch.
Each has ``add_arguments(parser)`` and ``run(args) -> int``. Exit codes: 0 done, 1 a fault of the run, 2 the user's
mistake, 130 interrupted; `status` documents its own.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple, NoReturn

from recipe import __version__
from recipe.errors import ConfigError, RunError, nearest


class Verb(NamedTuple):
    """Where a verb lives and what it does, in one line."""

    module: str
    summary: str


VERBS: dict[str, Verb] = {
    "demo": Verb("recipe.demo.run", "train a small drafter end to end on this machine and print its tau"),
    "prepare": Verb("recipe.prepare.prepare", "conversations -> tokenised rows with an exact loss mask"),
    "regenerate": Verb("recipe.prepare.regenerate", "let a served target answer the prompts (on-policy data)"),
    "train": Verb("recipe.run.train_cli", "train a drafter: one JSON, one DeepSpeed launch"),
    "evaluate": Verb("recipe.decode.evaluate_cli", "real block-speculative decoding: tau, losslessness, speed-up"),
    "export": Verb("recipe.training.export", "checkpoint -> folder that dflash, vLLM and SGLang load"),
    "status": Verb("recipe.tell.status_cli", "is the run healthy, and what is it doing?"),
    "report": Verb("recipe.tell.report", "one HTML page about a run"),
    "plan": Verb("recipe.target.plan_table", "what each rank holds at each tensor-parallel degree"),
    "bench": Verb("recipe.run.bench", "measure stages on this machine"),
    "fetch-smollm2": Verb(
        "recipe.demo.smollm2", "get SmolLM2-135M-Instruct and real chats for ds_configs/smollm2_135m.json"
    ),
}


class Parser(argparse.ArgumentParser):
    """argparse with this project's shape of an error: ``error: …`` and exit 2, without the usage block."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n  Fix: see {self.prog} --help\n")


def overview() -> str:
    """The text of ``python -m recipe --help``."""
    width = max(map(len, VERBS))
    lines = [f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items()]
    return (
        "usage: python -m recipe VERB [options]\n\nTrain a DFlash drafter for a frozen target language model.\n\n"
        "verbs:\n"
        + "\n".join(lines)
        + "\n\n`python -m recipe VERB --help` explains one verb. A run's settings are one JSON file (ds_configs/).\n"
    )


def build_parser(name: str) -> tuple[Parser, ModuleType]:
    """``(parser, module)`` of one verb; imports its module."""
    verb = VERBS[name]
    module = importlib.import_module(verb.module)
    parser = Parser(
        prog=f"python -m recipe {name}",
        description=(module.__doc__ or verb.summary).strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return parser, module


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        return _print(overview())
    if argv[0] in ("-V", "--version"):
        return _print(f"dflash-recipe {__version__}\n")
    name = argv[0]
    if name not in VERBS:
        print(f"error: VERB = {name!r}: there is no such verb.{nearest(name, VERBS)}", file=sys.stderr)
        print(f"  Fix: one of {', '.join(VERBS)}", file=sys.stderr)
        return 2
    return _guarded(name, argv[1:])


def _guarded(name: str, arguments: list[str]) -> int:
    """The verb with the user's mistakes, an interrupt and a closed pipe turned into exit codes."""
    try:
        parser, module = build_parser(name)
        code = module.run(parser.parse_args(arguments))
        if sys.stdout is not None:  # closed by the caller: `>&-`
            sys.stdout.flush()
        return int(code or 0)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RunError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # `recipe … | head`: stdout must not be flushed again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return _say_fault(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _say_fault(error: RunError | OSError) -> int:
    """One line for a fault; 2 when it is only a name that no file can have, or a folder that is gone."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        print(
            f"error: {str(error.filename)[:60]}…: the name is too long for a file\n  Fix: shorten it", file=sys.stderr
        )
        return 2
    if isinstance(error, FileNotFoundError) and not _here_exists():
        print("error: the current folder has been removed\n  Fix: cd to one that exists", file=sys.stderr)
        return 2
    print(f"error: {error}", file=sys.stderr)
    return 1


def _here_exists() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _print(text: str) -> int:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
