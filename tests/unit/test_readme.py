"""The README's table of settings is the schema's, and the files that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

from recipe.config.keys import known_keys
from recipe.config.table import table


def test_the_readme_lists_every_key_as_the_schema_has_it(repository: Path) -> None:
    text = (repository / "README.md").read_text()
    assert table() in text, "run `python -m recipe.config.table` and put its output into README.md"
    listed = set(re.findall(r"^\| `([a-z_.0-9]+)` \|", text, re.M))
    assert {key.removeprefix("dflash.") for key in known_keys() if key.startswith("dflash.")} <= listed


def test_every_key_that_practitioners_are_sent_to_exists(repository: Path) -> None:
    text = (repository / "README.md").read_text()
    named = set(re.findall(r"`(dflash\.[a-z_.]+)`", text))
    assert named and all(any(k == key or k.startswith(key + ".") for k in known_keys()) for key in named), named


def test_the_files_that_the_readme_names_exist(repository: Path) -> None:
    text = (repository / "README.md").read_text()
    for name in re.findall(r"\]\(([a-zA-Z0-9_./]+)\)", text) + re.findall(r"ds_configs/[a-z0-9._]+\.json", text):
        assert (repository / name).is_file(), name
