"""What the pages for users state about keys and files is true, and the README stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recipe.config import table
from recipe.config.keys import known_keys


def test_the_reference_lists_every_key_as_the_schema_has_it() -> None:
    text = table.PAGE.read_text(encoding="utf-8")
    assert text == table.page(), "run `python -m recipe.config.table`"
    listed = set(re.findall(r"^\| `([a-z_.0-9]+)` \|", text, re.M))
    assert {key.split(".", 2)[2] if key.startswith("dflash.") else key for key in known_keys()} <= listed


def test_every_key_that_a_page_names_exists(repository: Path) -> None:
    for page in (repository / "README.md", table.PAGE):
        named = set(re.findall(r"`(dflash\.[a-z_.]+)`", page.read_text(encoding="utf-8")))
        assert all(any(k == key or k.startswith(key + ".") for k in known_keys()) for key in named), named


DOCS = ("configuration", "running", "architecture", "design", "algorithm", "deepspeed", "performance")
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{page}.md" for page in DOCS))


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_a_page_names_exist(repository: Path, page: str) -> None:
    path = repository / page
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"\]\(([a-zA-Z0-9_./]+)\)", text):
        assert (path.parent / name).is_file(), name
    for name in re.findall(r"(?:ds_configs|docs|benchmarks/results)/[A-Za-z0-9._]+\.(?:json|md)", text):
        assert (repository / name).is_file(), name


def test_the_readme_is_read_in_one_sitting(repository: Path) -> None:
    lines = (repository / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 160
