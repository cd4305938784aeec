"""The table of all keys for the README, made from the schema: `python -m recipe.config.table` prints it."""

from __future__ import annotations

import json

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from recipe.config.keys import sections, walk


def table() -> str:
    """A Markdown table of every `dflash` key: name, default as JSON, meaning."""
    lines = ["| key (below `dflash`) | default | meaning |", "| --- | --- | --- |"]
    for path, info in walk():
        if not path.startswith("dflash.") or sections(info.annotation):
            continue
        default = info.get_default(call_default_factory=True)
        shown = "" if default is PydanticUndefined or isinstance(default, BaseModel) else json.dumps(default)
        lines.append(f"| `{path.removeprefix('dflash.')}` | `{shown}` | {info.description or ''} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
