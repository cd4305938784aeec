"""Every key of the config by its dotted path, and the hint for one that does not exist."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from functools import cache

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from recipe.config.deepspeed_keys import RunConfig
from recipe.config.refused_keys import REFUSED
from recipe.errors import ConfigError, nearest

#: The only places where ``"auto"`` means something to us.
AUTO_KEYS = frozenset(
    {
        "scheduler.params.total_num_steps",
        "scheduler.params.warmup_num_steps",
        "dflash.layout.device",
        "dflash.drafter.attention",
        "dflash.telemetry.wandb.mode",
    }
)


def sections(annotation: object) -> list[type[BaseModel]]:
    """The section classes that a field of this annotation can hold (none for a plain value)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        return [found for argument in typing.get_args(annotation) for found in sections(argument)]
    return []


def walk(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """``(dotted path, field)`` of every plain value, in the schema's order; variants of a section in turn."""
    seen: set[str] = set()
    for name, field in model.model_fields.items():
        inside = sections(field.annotation)
        if not inside:
            yield prefix + name, field
        for section in inside:
            for path, leaf in walk(section, f"{prefix}{name}."):
                if path not in seen:
                    seen.add(path)
                    yield path, leaf


@cache
def known_keys() -> tuple[str, ...]:
    """All dotted paths of plain values."""
    return tuple(path for path, _ in walk())


@cache
def _known_paths() -> frozenset[str]:
    return frozenset(path.rsplit(".", depth)[0] for path in known_keys() for depth in range(path.count(".") + 1))


def is_known(path: str) -> bool:
    """Whether ``path`` is a value or a section of the schema."""
    return path in _known_paths()


def missing_key_error(path: str, value: object, source: str | None = None) -> ConfigError:
    """The error for a key that does not exist: why it is refused, or the nearest name."""
    if path in REFUSED:
        return ConfigError(path, value, f"DeepSpeed's {path} is not used here: {REFUSED[path]}", f"remove {path}")
    rule = (
        "DeepSpeed and dflash know no such key"
        if "." not in path
        else f"there is no such key in {path.rsplit('.', 1)[0]}"
    )
    if source:
        rule = f"{source}: {rule}"
    return ConfigError(path, value, rule, f"remove it or correct its name.{_hint(path)}")


def _hint(path: str) -> str:
    """`` Did you mean 'x'?`` with a dotted path: same level first, then the same name elsewhere, then what is close."""
    parent, _, leaf = path.rpartition(".")
    level = [known for known in _known_paths() if known.rpartition(".")[0] == parent]
    if near := nearest(leaf, [known.rpartition(".")[2] for known in level]):
        return near.replace("'", f"'{parent}.", 1) if parent else near
    elsewhere = sorted(known for known in _known_paths() if known.rpartition(".")[2] == leaf)
    if elsewhere:
        return f" Did you mean {elsewhere[0]!r}?"
    return nearest(path, known_keys())
