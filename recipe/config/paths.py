"""Where a relative path of a config points to: the current directory first, then the repository root."""

from __future__ import annotations

from pathlib import Path

#: The folder that holds ``recipe/`` and ``ds_configs/``.
REPOSITORY = Path(__file__).resolve().parents[2]


def locate(path: str | Path) -> Path | None:
    """The existing absolute path that ``path`` means, or None when there is neither.

    A hub id such as ``Qwen/Qwen3-8B`` is no existing path and gives None.
    """
    given = Path(path).expanduser()
    for candidate in (Path.cwd() / given, REPOSITORY / given):
        if candidate.exists():
            return candidate.resolve()
    return None
