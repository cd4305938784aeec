"""The one line that says why a run ends, and where a traceback goes: the guilty rank's to the user, others' to the log.

The command line (`recipe.train_cli`) names itself and a file in `RECIPE_LAST_WORDS` (``PID:PATH``); the first rank that
writes it has spoken for the node, and the command line prints it when the launcher has said everything that it says at
an end, so that the line is the last one on the screen. Under a bare `deepspeed` it goes to the terminal at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

from recipe.roles import process

VARIABLE = "RECIPE_LAST_WORDS"
#: Words of gloo, NCCL, the control store and the ring when somebody else is gone.
LOST_PEER = (
    "connection reset by peer", "connection closed by peer", "broken pipe", "gloo", "nccl", "remote worker",
    "failed to recv", "failed to send", "tcpstore", "socket", "without closing the ring", "died in the middle of",
)  # fmt: skip


def line(report: dict[str, Any], run_dir: Path | None) -> str:
    """``the run ends because of rank 2 (drafter 0, node 0): CAUSE; log: FILE``. A user's mistake: ``error: …``."""
    if report["code"] == 2:
        return f"error: {report['cause']}"
    who = f"rank {report['rank']}" if report["rank"] >= 0 else "a rank"
    who += f" ({report['role']})" if report["role"] else ""
    log = f"log: {run_dir / 'train.log'}" if run_dir is not None else "the run had not made its folder yet: no log"
    return f"the run ends because of {who}: {report['cause']}; {log}"


def say(report: dict[str, Any], run_dir: Path | None) -> None:
    """Once per node: into the file of the command line, which says it last, or to the terminal."""
    text = line(report, run_dir)
    pid, _, path = os.environ.get(VARIABLE, "").partition(":")
    if path and process.start_ticks(int(pid)) is None:
        shutil.rmtree(os.path.dirname(path), ignore_errors=True)  # the command line was killed: nobody else clears up
    if os.path.isdir(os.path.dirname(path)):
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(text + "\n")
            return
        except FileExistsError:
            return  # somebody has spoken
        except OSError:
            pass
    with contextlib.suppress(OSError, ValueError):
        print(f"\n{text}", file=sys.stderr, flush=True)


def is_of_a_lost_peer(error: BaseException) -> bool:
    """Whether ``error`` probably only tells that another rank is gone."""
    name, text = type(error).__name__, str(error).lower()
    if name in ("RingAborted", "RingTimeout") or name.startswith("Dist"):
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(word in text for word in LOST_PEER)


def keep_traceback(error: BaseException, who: str, run_dir: Path | None, guilty: bool) -> None:
    """The guilty rank's traceback is shown; every one goes into the log, in one piece."""
    text = "".join(traceback.format_exception(error))
    if guilty:
        with contextlib.suppress(OSError, ValueError):
            print(f"\n{who}:\n{text}", file=sys.stderr, flush=True, end="")
    if run_dir is None:
        return
    reason = "" if guilty else " ended because of another rank; what it saw of that"
    with contextlib.suppress(OSError), open(run_dir / "train.log", "a", encoding="utf-8") as file:
        file.write(f"{who}{reason}:\n{text}\n")
