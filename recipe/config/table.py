"""docs/configuration.md's reference of all keys, made from the schema: `python -m recipe.config.table` writes it."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from recipe.config.keys import walk
from recipe.config.paths import REPOSITORY

PAGE = REPOSITORY / "docs" / "configuration.md"
BEGIN, END = "<!-- from the schema: python -m recipe.config.table -->", "<!-- end -->"


def table() -> str:
    """A Markdown table for DeepSpeed's sections, then one for each of ours: key, default as JSON, meaning."""
    sections: dict[str, list[str]] = {}
    for path, info in walk():
        ours = path.startswith("dflash.")
        title = f"`{'.'.join(path.split('.')[:2])}`" if ours else "DeepSpeed's keys"
        default = info.get_default(call_default_factory=True)
        shown = "" if default is PydanticUndefined or isinstance(default, BaseModel) else f"`{json.dumps(default)}`"
        key = path.split(".", 2)[2] if ours else path
        sections.setdefault(title, []).append(f"| `{key}` | {shown} | {info.description or ''} |")
    return "\n\n".join("\n".join([f"### {t}", "", "| key | default | meaning |", "| --- | --- | --- |", *rows])
                       for t, rows in sections.items())  # fmt: skip


def page(path: Path = PAGE) -> str:
    """docs/configuration.md with the table as the schema has it now."""
    head, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
