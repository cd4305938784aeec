"""Where a relative path of a config points to: the current directory first, then the repository root."""

from __future__ import annotations

import os
from pathlib import Path

#: The folder that holds ``recipe/`` and ``ds_configs/``.
REPOSITORY = Path(__file__).resolve().parents[2]


def heldout_prompts(given: str | None, data: str) -> Path | None:
    """The prompts to evaluate with: ``dflash.evaluation.prompts``, or those that `prepare` held out of ``data``."""
    path = Path(given) if given else (locate(data) or Path(data)) / "heldout_prompts.jsonl"
    return path if path.is_file() else None


def locate(path: str | Path) -> Path | None:
    """The existing absolute path that ``path`` means, or None when there is neither.

    A hub id such as ``Qwen/Qwen3-8B`` is no existing path and gives None.
    """
    given = Path(os.path.expanduser(path))
    for candidate in (Path.cwd() / given, REPOSITORY / given):
        if candidate.exists():
            return candidate.resolve()
    return None
