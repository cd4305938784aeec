"""What all nodes of a run must have in common, compared before anything is loaded: the run folder, the data, the code.

Node 0's leader resolves the config and makes the run folder; the other nodes take its word. They hold their own copies
of everything else, and a copy that differs would train on other rows, or hang, without a word.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import socket
import time
from pathlib import Path

from recipe.config import RunConfig
from recipe.data.rows import Rows
from recipe.errors import ConfigError
from recipe.model_files.fingerprint import fingerprint
from recipe.model_files.shapes import model_folder
from recipe.tell.run_dir import MARKER

PACKAGES = ("torch", "deepspeed", "transformers")
PROBE_S = 15.0  # a network file system may show a new folder late


def facts(config: RunConfig, rows: Rows) -> dict[str, str]:
    """What has to be the same on every node, by name, as short texts."""
    target = config.dflash.target
    return {
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in PACKAGES},
        "code of recipe/": _code(),
        "data": rows.fingerprint,
        "target": fingerprint(model_folder(target.path, target.revision)),
    }


def compare(node: int, mine: dict[str, str], leaders: dict[str, str]) -> None:
    """Raises ConfigError naming the first fact in which this node differs from node 0, with both values."""
    for name, wanted in leaders.items():
        if mine.get(name) != wanted:
            fix = "use one shared file system, or the same environment and copies on every node"
            rule = f"node {node} ({socket.gethostname()}) has another {name} than node 0, which has {wanted}"
            raise ConfigError(name, mine.get(name), rule, fix)


def probe_run_dir(node: int, path: Path, run_id: str, wait_s: float = PROBE_S) -> None:
    """Raises ConfigError if this node does not see the run folder that node 0 just made, or cannot write to it."""
    deadline = time.monotonic() + wait_s
    while (seen := _run_id(path)) != run_id and time.monotonic() < deadline:
        time.sleep(0.2)
    here = f"node {node} ({socket.gethostname()})"
    fix = "set dflash.run.output_dir to a folder on a file system that all nodes share"
    if seen != run_id:
        what = f"sees another folder there (run {seen})" if seen else "does not see it"
        rule = f"node 0 made the run folder, but {here} {what}"
        raise ConfigError("dflash.run.output_dir", str(path), rule, fix)
    if not os.access(path / "checkpoints", os.W_OK | os.X_OK):
        raise ConfigError("dflash.run.output_dir", str(path), f"{here} cannot write to the run folder", fix)


def _run_id(path: Path) -> str | None:
    try:
        return str(json.loads((path / MARKER).read_text())["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _code() -> str:
    """Of all of recipe's Python files: a checkout that was not brought up to date on one node differs here."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
