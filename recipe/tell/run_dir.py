"""The folder of one run: made once, locked by the process that trains in it, written to only by whole files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from recipe.errors import ConfigError
from recipe.process import ProcessId

MARKER = ".run.json"
LOCK = ".lock"
_held: set[int] = set()


def _close_locks_in_child() -> None:
    # A forked child shares the lock's open file; if it outlived us, the lock would too.
    for fd in _held:
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_close_locks_in_child)


def write_atomic(path: str | os.PathLike[str], data: str | bytes, durable: bool = True) -> None:
    """Write ``data`` to a temporary name beside ``path`` and rename it: a reader sees the old file or the new one.

    ``durable`` also syncs file and folder, so that the content survives a power cut. Raises OSError; then ``path`` is
    as it was and no temporary file is left.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    payload = data.encode() if isinstance(data, str) else data
    try:
        with open(temporary, "wb") as file:
            file.write(payload)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_json(path: str | os.PathLike[str], value: Any, durable: bool = True) -> None:
    """`write_atomic` of indented JSON. Non-finite numbers are written as NaN and Infinity, as Python reads them."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", durable)


def has_checkpoint(run: Path) -> bool:
    """Whether there is something to resume from. A kill may have come between a checkpoint and its name in `latest`."""
    folder = run / "checkpoints"
    return os.path.lexists(folder / "latest") or any(folder.glob("step_*/state.json"))


class RunDir:
    """Paths of one run folder. ``create`` makes or resumes it and holds its lock; ``open`` only reads."""

    def __init__(self, path: Path, lock_fd: int | None = None) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self.config_json = path / "config.json"
        self.provenance_json = path / "provenance.json"
        self.train_log = path / "train.log"
        self.metrics_jsonl = path / "metrics.jsonl"
        self.status_json = path / "status.json"
        self.checkpoints = path / "checkpoints"
        self.export = path / "export"
        self.eval = path / "eval"
        self.report_html = path / "report.html"
        self.summary_json = path / "summary.json"

    @classmethod
    def create(
        cls, output_dir: str | os.PathLike[str], name: str, resume: bool = False, *, fresh: bool = False
    ) -> RunDir:
        """Make ``output_dir/name`` and lock it until `close` (or the end of this process, however it ends).

        ``resume`` reopens a run that has a checkpoint. ``fresh`` renames an older run of ours to ``name.previous``, or
        to a name with the time when a run that came to something has that name already. Raises ConfigError: the folder
        is taken, in use, not ours, not writable, or there is nothing to resume.
        """
        if resume and fresh:
            raise ConfigError("--resume", True, "a run is either resumed or started afresh", "drop one of the two")
        path = Path(os.path.expanduser(output_dir)).resolve() / name
        try:
            if resume:
                return cls._resume(path)
            if fresh:
                return cls._replace(path)
            return cls._make(path)
        except OSError as error:
            rule = f"the run folder cannot be made or written ({error.strerror})"
            fix = "choose a writable dflash.run.output_dir"
            raise ConfigError("dflash.run.output_dir", str(output_dir), rule, fix) from error

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDir:
        """An existing run, unlocked. A bare name is looked up under ``runs/`` too. Raises ConfigError if it is none."""
        candidates = [Path(os.path.expanduser(path))]
        if os.sep not in os.fspath(path):
            candidates.append(Path("runs") / path)
        for candidate in candidates:
            if is_run(candidate):
                return cls(candidate.resolve())
        rule = "is not a run folder" if candidates[0].exists() else "does not exist"
        raise ConfigError("RUN", str(path), rule, "give the folder that training made, for example runs/demo")

    @classmethod
    def _make(cls, path: Path) -> RunDir:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            ours = is_run(path)
            rule = "a run of this name exists already" if ours else "the folder exists and is not a run"
            fix = (
                "--resume it, choose another dflash.run.name, or remove it"
                if ours
                else "choose another dflash.run.name"
            )
            raise ConfigError("dflash.run.name", path.name, f"{rule} ({path})", fix)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Built under another name and renamed when it is locked and marked: there is no moment at which the folder
        # exists without its lock, and of two processes that start at once exactly one wins the rename.
        staging = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
        staging.mkdir()
        lock_fd: int | None = None
        try:
            for folder in ("checkpoints", "export", "eval"):
                (staging / folder).mkdir()
            lock_fd = _lock(staging)
            _mark(staging, uuid.uuid4().hex[:12], time.time())
            os.rename(staging, path)
        except BaseException as error:
            _unlock(lock_fd)
            shutil.rmtree(staging, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                rule = f"another process made this run just now ({path})"
                raise ConfigError("dflash.run.name", path.name, rule, "choose another dflash.run.name") from error
            raise
        return cls(path, lock_fd)

    @classmethod
    def _resume(cls, path: Path) -> RunDir:
        if not is_run(path):
            rule = f"there is no run to resume ({path})"
            raise ConfigError("--resume", path.name, rule, "check dflash.run.name, or start without --resume")
        lock_fd = _lock(path)
        if not has_checkpoint(path):
            _unlock(lock_fd)
            rule = f"the run ended before its first checkpoint ({path / 'checkpoints'}): there is nothing to resume"
            raise ConfigError("--resume", path.name, rule, "remove the folder and start without --resume")
        marker = json.loads((path / MARKER).read_text())
        _mark(path, marker["run_id"], marker["created"])
        # The last launch's end is not this one's: until the new status is written, the run is starting.
        (path / "status.json").unlink(missing_ok=True)
        return cls(path, lock_fd)

    @classmethod
    def _replace(cls, path: Path) -> RunDir:
        if not is_run(path):
            return cls._make(path)  # absent, empty, or somebody else's (refused there)
        old_lock = _lock(path)  # refuses while that run lives
        try:
            previous = path.with_name(path.name + ".previous")
            if is_run(previous) and not _is_of_worth(previous):
                shutil.rmtree(previous)
            elif previous.exists():
                previous = path.with_name(f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}")
            os.rename(path, previous)
            return cls._make(path)
        finally:
            _unlock(old_lock)

    @property
    def run_id(self) -> str:
        """Random name of this run, the same after a resume."""
        return str(self.marker()["run_id"])

    def marker(self) -> dict[str, Any]:
        """``run_id``, ``created`` (seconds since 1970) and ``process`` (the last one that made or resumed the run)."""
        return dict(json.loads((self.path / MARKER).read_text()))

    def close(self) -> None:
        """Give the lock back. Safe to call twice."""
        _unlock(self._lock_fd)
        self._lock_fd = None

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_of_worth(run: Path) -> bool:
    """Whether a run has come to something: a checkpoint, or its end. Such a run is never dropped."""
    return (run / "summary.json").exists() or any((run / "checkpoints").glob("step_*"))


def is_run(path: Path) -> bool:
    """Whether ``path`` is a folder that `RunDir.create` made."""
    try:
        marker = json.loads((path / MARKER).read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(marker, dict) and "run_id" in marker


def _mark(path: Path, run_id: str, created: float) -> None:
    write_json(path / MARKER, {"run_id": run_id, "created": created, "process": ProcessId.own().to_dict()})


def _lock(path: Path) -> int | None:
    """Lock the folder by flock, which the kernel drops with its owner. None where the file system has no locks."""
    fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino != os.stat(path / LOCK).st_ino:
            raise BlockingIOError  # the folder was replaced between our open and our lock
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            print(f"warning: {path} is on a file system without locks; do not start two runs in it", flush=True)
            return None
        if not isinstance(error, BlockingIOError):
            raise
        rule = f"another process is using this run{_user(path)} ({path})"
        raise ConfigError(
            "dflash.run.name", path.name, rule, "end that process, or choose another dflash.run.name"
        ) from error
    _held.add(fd)
    return fd


def _user(path: Path) -> str:
    try:
        process = ProcessId.from_dict(json.loads((path / MARKER).read_text())["process"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f": pid {process.pid} on {process.host}"


def _unlock(fd: int | None) -> None:
    if fd is not None and fd in _held:
        _held.discard(fd)
        os.close(fd)
