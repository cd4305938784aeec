"""An append-only JSONL that survives kill -9: each line is synced before it counts, a torn last line is cut off."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from recipe.errors import ConfigError


class Journal:
    """``done``: the ids already written. Refuses a file that was begun with other settings, or that is in use.

    ``overwrite``: what is there stays until the first new row: a mistake that is found before costs nothing.
    """

    def __init__(self, path: Path, settings: dict[str, Any], overwrite: bool = False) -> None:
        self.path, self.settings, self.overwrite = path, settings, overwrite
        self.beside = path.with_name(path.name + ".settings.json")
        self.done: set[str] = set()

    def __enter__(self) -> Journal:
        name = str(self.path)
        if name.startswith("~") and os.path.expanduser(name) == name:
            raise ConfigError("--output", name, "there is no such user here", "give the whole path")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b")
        except OSError as error:
            raise ConfigError("--output", str(self.path), f"cannot be written: {error}", "use another place") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise ConfigError(
                "--output", str(self.path), "is being written by another process", "wait for it"
            ) from error
        try:
            if not self.overwrite:
                self._check_settings()
                self._recover()
        except BaseException:
            self._file.close()
            raise
        return self

    def _check_settings(self) -> None:
        if self.path.stat().st_size:
            try:
                begun = dict(json.loads(self.beside.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError):
                fix = "give a new file, or --overwrite"
                raise ConfigError("--output", str(self.path), "exists and was not begun by `regenerate`", fix) from None
            changed = [k for k in self.settings if begun.get(k) != self.settings[k]]
            if changed == ["input"]:
                fix = "use the same files, a new output, or --overwrite"
                raise ConfigError("--output", str(self.path), "was begun with other --input files or contents", fix)
            if changed:
                was = ", ".join(f"{k} {begun.get(k)!r}, now {self.settings[k]!r}" for k in changed)
                fix = "use the same settings, a new file, or --overwrite"
                raise ConfigError("--output", str(self.path), f"was begun with other settings ({was})", fix)
        else:
            self.beside.write_text(json.dumps(self.settings) + "\n", encoding="utf-8")

    def _recover(self) -> None:
        """Read the ids; cut a last line off that a killed job left unfinished. Damage elsewhere is not ours to cut."""
        self._file.seek(0)
        whole = 0
        lines = enumerate(self._file, 1)
        for number, line in lines:
            try:
                name = json.loads(line)["id"] if line.endswith(b"\n") else None
            except (ValueError, KeyError, TypeError):
                name = None
            if not isinstance(name, str):
                if next(lines, None) is not None:
                    fix = "mend or remove this line, give a new file, or --overwrite"
                    raise ConfigError("--output", f"{self.path}:{number}", "is no line that `regenerate` wrote", fix)
                break
            self.done.add(name)
            whole += len(line)
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)

    def append(self, row: dict[str, Any]) -> None:
        """Write one row; when this returns it is on disk."""
        if self.overwrite:
            self.overwrite = False
            self._file.truncate(0)
            self._check_settings()
        self._file.write(json.dumps(row, ensure_ascii=True).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done.add(row["id"])

    def __exit__(self, *_: object) -> None:
        self._file.close()
