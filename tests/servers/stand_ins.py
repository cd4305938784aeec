"""Import single modules of a package for real, from its unpacked sources, with blanks for whatever they import besides.

A module that is named runs as it stands in the wheel. Every other module of the package, and every package that is not
installed, becomes a blank: its names are empty classes that take any argument; used as a decorator, one returns the
function unchanged. No ``__init__.py`` of the package runs.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class _BlankType(type):
    def __bool__(cls) -> bool:
        return False

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return blank(name)

    def __iter__(cls) -> Iterator[Any]:
        return iter(())  # else __getitem__ would make every blank endless

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return super().__call__()


def blank(name: str) -> Any:
    """An empty class: it can be a base, a type, a decorator or a value, and does nothing."""
    inside = {
        "__getattr__": lambda self, attribute: blank(attribute),
        "__call__": _decorate,
        "__bool__": lambda _: False,
    }
    return _BlankType(name, (), inside)


def _decorate(self: Any, *args: Any, **kwargs: Any) -> Any:
    return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else None


class _BlankModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = blank(name)
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves ``package`` from ``root`` and the packages ``absent`` from nothing.

    ``real``: modules that run; ``given``: module -> {name: value} to put into a blank.
    """

    def __init__(
        self, root: Path, package: str, real: Collection[str], absent: Sequence[str] = (),
        given: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        self.root, self.package, self.real = root, package, set(real)
        self.absent, self.given = (package, *absent), dict(given or {})

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.split(".")[0] not in self.absent:
            return None
        if fullname in self.real:
            place = self.root / fullname.replace(".", "/")
            file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            return importlib.util.spec_from_file_location(
                fullname, file, submodule_search_locations=[str(place)] if place.is_dir() else None
            )
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _BlankModule(spec.name)
        vars(module).update(self.given.get(spec.name, {}))
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs in a blank."""

    def install(self) -> Finder:
        sys.meta_path.insert(0, self)
        return self

    def load(self, name: str) -> ModuleType:
        """The real module ``name``."""
        assert name in self.real, name
        return importlib.import_module(name)
