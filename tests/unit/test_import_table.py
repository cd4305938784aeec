"""docs/architecture.md's table, held by the syntax tree of every module: who may import whom."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "recipe").rglob("*.py"))
#: Only `recipe.engine` and `recipe.watch` may touch these.
COLLECTIVES = ("deepspeed", "torch.distributed")
#: These two meet only in the ring.
STRANGERS = {"recipe.target": "recipe.drafter", "recipe.drafter": "recipe.target"}


def table() -> list[list[str]]:
    """Module prefixes of each row of the table, from the top."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| *\d+ *\|([^|]*)\|", text, flags=re.MULTILINE)
    return [re.findall(r"`(recipe[\w.]*)`", row) for row in rows]


def row_of(module: str, rows: list[list[str]]) -> int | None:
    """Index of the row that has the longest prefix of ``module``."""
    best, where = -1, None
    for index, prefixes in enumerate(rows):
        for prefix in prefixes:
            if (module == prefix or module.startswith(prefix + ".")) and len(prefix) > best:
                best, where = len(prefix), index
    return where


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """``(dotted name, line)`` of everything a module imports or reaches as ``torch.distributed``, inside functions too.

    Names for annotations only (``if TYPE_CHECKING:``) do not count: nothing is imported when the module runs.
    """
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    for node in running_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield (f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}") else base), node.lineno
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed", node.lineno


def running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but the bodies of ``if TYPE_CHECKING:``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for other in node.orelse:
                yield from running_nodes(other)
            continue
        yield node
        yield from running_nodes(node)


def is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir() or name in COLLECTIVES


def inside(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def broken_rules(path: Path, rows: list[list[str]]) -> list[str]:
    """What a module imports although the table does not let it."""
    module, found = name_of(path), []
    own = row_of(module, rows)
    for name, line in imports(path):
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        if any(inside(name, forbidden) for forbidden in COLLECTIVES) and not any(
            inside(module, room) for room in ("recipe.engine", "recipe.watch")
        ):
            found.append(f"{where}: only recipe.engine and recipe.watch may")
        if any(inside(module, one) and inside(name, other) for one, other in STRANGERS.items()):
            found.append(f"{where}: target and drafter meet only in the ring")
        if not inside(name, "recipe") or name == "recipe" or module == "recipe":
            continue
        if path.name == "__init__.py" and inside(name, module):
            continue  # a package hands on its own modules
        other = row_of(name, rows)
        if other is None:
            found.append(f"{where}: no row of the table has it")
        elif own is not None and other > own:
            found.append(f"{where}: its row is below")
    return found


def test_every_module_has_a_row() -> None:
    rows = table()
    assert len(rows) >= 10
    missing = [name_of(path) for path in MODULES if name_of(path) != "recipe" and row_of(name_of(path), rows) is None]
    assert not missing, f"add to the table of docs/architecture.md: {missing}"


def test_modules_import_rows_above_only() -> None:
    rows = table()
    broken = [rule for path in MODULES for rule in broken_rules(path, rows)]
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("recipe/ring/bad.py", "from recipe.target import loader"),
        ("recipe/ring/bad.py", "import deepspeed"),
        ("recipe/drafter/bad.py", "import torch\nx = torch.distributed.get_rank()"),
        ("recipe/drafter/bad.py", "from torch import distributed"),
        ("recipe/drafter/bad.py", "from torch.distributed import all_reduce"),
        ("recipe/drafter/bad.py", "from recipe.target.capture import TapCapture"),
        ("recipe/target/bad.py", "from recipe import drafter"),
        ("recipe/target/bad.py", "def f():\n    from ..drafter import model"),
        ("recipe/config/load.py", "from recipe.check.checks import check"),
    ],
)
def test_a_forbidden_import_is_found(module: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("target", "drafter", "ring", "config"):
        (tmp_path / "recipe" / package).mkdir(parents=True)
    (tmp_path / "recipe" / "config" / "checks.py").touch()
    path = tmp_path / module
    path.write_text(line + "\n")
    rows = table()
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    assert broken_rules(path, rows)
