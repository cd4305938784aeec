"""The one line that says why a run ends, and where a traceback goes: the guilty rank's to the user, others' to the log.

The command line (`recipe.run.train_cli`) names itself and a file in `RECIPE_LAST_WORDS` (``PID:PATH``); the first rank
that writes it has spoken for the node, and the command line prints it when the launcher has said everything that it
says at an end, so that it is the last line on the screen. Under a bare `deepspeed` it goes to the terminal at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from recipe import process

VARIABLE = "RECIPE_LAST_WORDS"
TOLD = "told"  # beside that file
HEARD = {
    signal.SIGTERM: "it was told to end (SIGTERM)",
    signal.SIGINT: "interrupted (Ctrl-C, SIGINT)",
    signal.SIGHUP: "closed (SIGHUP)",
}
#: Words of gloo, NCCL, the control store and the ring when somebody else is gone.
LOST_PEER = (
    "connection reset by peer", "connection closed by peer", "broken pipe", "gloo", "nccl", "remote worker",
    "failed to recv", "failed to send", "tcpstore", "socket", "without closing the ring", "died in the middle of",
)  # fmt: skip


def line(report: dict[str, Any], run_dir: Path | None) -> str:
    """``the run ends because of rank 2 (drafter 0, node 0): CAUSE; log: FILE``. A user's mistake: ``error: …``."""
    if report["code"] == 2:
        return f"error: {report['cause']}"
    log = f"log: {run_dir / 'train.log'}" if run_dir is not None else "the run had not made its folder yet: no log"
    return f"the run ends because of {blamed(report)}: {cause(report)}; {log}"


def blamed(report: dict[str, Any]) -> str:
    """``rank 2 (drafter 0, node 0)``, or what is no rank: the command line, the runner, the launcher, a terminal."""
    return str(report["who"]) if report.get("who") else _rank(report)


def cause(report: dict[str, Any]) -> str:
    """The cause; where no rank is to blame, with the rank that saw it."""
    return f"{report['cause']}, seen by {_rank(report)}" if report.get("who") else str(report["cause"])


def _rank(report: dict[str, Any]) -> str:
    who = f"rank {report['rank']}" if report["rank"] >= 0 else "a rank"
    return who + (f" ({report['role']})" if report["role"] else "")


def command_line() -> tuple[int, Path] | None:
    """(pid, file for the last words) of the command line that started this launch; None under a bare `deepspeed`."""
    pid, _, path = os.environ.get(VARIABLE, "").partition(":")
    return (int(pid), Path(path)) if path and pid.isdecimal() else None


def folder() -> Path | None:
    """The command line's temporary folder, which it removes at its end; None under a bare `deepspeed`, or on another
    node than the command line's."""
    found = command_line()
    return found[1].parent if found is not None and found[1].parent.is_dir() else None


def note_signal(words: Path, signum: signal.Signals) -> None:
    """The command line was told to end: it says so before it hands that on, and the ranks read it."""
    with contextlib.suppress(OSError):
        words.with_name(TOLD).write_text(HEARD.get(signum, signum.name), encoding="utf-8")


def noted_signal(words: Path) -> str | None:
    """How the command line was told to end, or None."""
    with contextlib.suppress(OSError):
        return words.with_name(TOLD).read_text(encoding="utf-8")
    return None


def say(report: dict[str, Any], run_dir: Path | None, loud: bool = True) -> None:
    """Once per node: into the file of the command line, which says it last, or to the terminal.

    Several ranks may write the file, the first one has spoken; only one of them may be ``loud`` and use the terminal.
    """
    text = line(report, run_dir)
    pid, path = command_line() or (0, Path())
    if pid and process.start_ticks(pid) is None:
        shutil.rmtree(path.parent, ignore_errors=True)  # the command line was killed: nobody else clears up
    if pid and path.parent.is_dir():
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(text + "\n")
            return
        except FileExistsError:
            return  # somebody has spoken
        except OSError:
            pass
    if loud:
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
