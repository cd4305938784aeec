"""Read one JSON file into a ``RunConfig``; whatever is wrong with it is said at once, in one message.

Order: syntax (line and column), duplicate keys, ``--set`` overrides, ``"auto"``, then the schema. All mistakes of
the last two stages are listed together.
"""

from __future__ import annotations

import json
import os
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from recipe.config.deepspeed_keys import RunConfig
from recipe.config.explain import explain
from recipe.config.keys import AUTO_KEYS, is_known, missing_key_error, sections
from recipe.config.paths import locate
from recipe.config.refused_keys import drop_neutral
from recipe.errors import ConfigError

Say = Callable[[str], object]


class ConfigErrors(ConfigError):
    """Several mistakes in one file; ``errors`` holds each, ``str()`` lists them all."""

    def __init__(self, source: str, errors: list[ConfigError]) -> None:
        first = errors[0]
        super().__init__(first.field, first.value, first.rule, first.fix)
        self.source, self.errors = source, errors

    def __str__(self) -> str:
        if len(self.errors) == 1:
            return f"in {self.source}: {self.errors[0]}"
        return f"{len(self.errors)} mistakes in {self.source}:\n" + "\n".join(f"- {error}" for error in self.errors)


def load_config(path: str | Path, overrides: Iterable[str] = (), say: Say = str) -> RunConfig:
    """The config in the JSON file ``path`` with ``KEY=VALUE`` ``overrides`` applied.

    ``path`` is looked up from the current directory, then from the repository root. A value of an override is read as
    JSON; what is not JSON is a string (``dflash.run.name=trial`` needs no quotes). ``say`` gets a line for a section
    whose ``type`` an override changes: the file's parameters that the new type does not take are left out.
    Raises ConfigError.
    """
    found = locate(path)
    if found is None or not found.is_file():
        rule = "no such file" if found is None else "is a folder" if found.is_dir() else "is no regular file"
        raise ConfigError("CONFIG", str(path), rule, "give the path of a JSON file, for example ds_configs/demo.json")
    try:
        text = found.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "CONFIG", str(path), f"cannot be read: {error}", "give a readable JSON file in UTF-8"
        ) from None
    return load_config_text(text, overrides, str(path), say)


def load_config_text(text: str, overrides: Iterable[str] = (), source: str = "the config", say: Say = str) -> RunConfig:
    """As ``load_config``, from the JSON text itself; ``source`` names it in messages."""
    overrides, raw, file = tuple(overrides), _parse_json(text, source), _parse_json(text, source)
    for override in overrides:
        _apply_override(raw, override)
    for section in ("optimizer", "scheduler"):
        _leave_out_of_another_type(section, file, raw, overrides, say)
    drop_neutral(raw)
    errors = [
        ConfigError(
            field, "auto", '"auto" is not resolved by anybody here', f"give a value, or remove {field} for its default"
        )
        for field in _unresolved_autos(raw)
    ]
    errors += _unusable_texts(raw)
    said = {error.field for error in errors}
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        errors += [mistake for mistake in explain(error, raw) if mistake.field not in said]
    if errors:
        raise ConfigErrors(source, errors)
    return config


def _parse_json(text: str, source: str) -> dict[str, Any]:
    """The JSON object in ``text``: no duplicate key, no NaN or Infinity."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise ConfigError(key, value, f"the key occurs twice in one object of {source}", "keep one of them")
            seen[key] = value
        return seen

    def no_constant(name: str) -> Any:
        raise ConfigError("CONFIG", name, f"{source} holds {name}, which is not JSON", "write a finite number")

    try:
        raw = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        line = text.splitlines()[error.lineno - 1].strip() if text.strip() else ""
        rule = f"not valid JSON at {where}: {error.msg}"
        fix = f"mend the line {line[:80]!r} (JSON has no comments and no trailing commas)"
        raise ConfigError("CONFIG", source, rule, fix) from None
    except RecursionError:
        rule, fix = "is nested far too deeply", "write the objects that this project and DeepSpeed know"
        raise ConfigError("CONFIG", source, rule, fix) from None
    except ValueError as error:  # Python converts no integer of thousands of digits
        raise ConfigError("CONFIG", source, f"holds an absurd number ({error})"[:120], "mend the number") from None
    if not isinstance(raw, dict):
        raise ConfigError("CONFIG", source, "must hold one JSON object", 'begin with {"dflash": {…}}')
    return raw


def _apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one ``KEY=VALUE`` in ``raw``; the key must be one that the schema knows."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError("--set", override, "must be KEY=VALUE", "for example --set dflash.ring.reuse=2")
    if not is_known(key):
        raise missing_key_error(key, text, "--set")
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    except (RecursionError, ValueError) as error:
        raise ConfigError("--set", override[:80], f"is no usable value ({error})"[:120], "mend the value") from None
    *parents, leaf = key.split(".")
    node = raw
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise ConfigError(
                "--set", override, f"{parent} is {node!r} in the file, not an object", "mend the file first"
            )
    node[leaf] = value


def _leave_out_of_another_type(
    section: str, file: dict[str, Any], raw: dict[str, Any], overrides: tuple[str, ...], say: Say
) -> None:
    """Where an override gave ``section`` another type: remove the file's parameters that this type does not take."""
    old, new = file.get(section), raw.get(section)
    if not (isinstance(old, dict) and isinstance(new, dict) and isinstance(new.get("params"), dict)):
        return
    given = {override.partition("=")[0] for override in overrides}
    known = _parameters(section, new.get("type"))
    if f"{section}.type" not in given or known is None:
        return
    out = [key for key in new["params"] if key not in known and f"{section}.params.{key}" not in given]
    for key in out:
        del new["params"][key]
    if out:
        say(
            f"{section}.type = {new['type']}: the file's {', '.join(out)} left out, which it does not take; what the "
            "file and --set do not give has its default"
        )


def _parameters(section: str, kind: object) -> set[str] | None:
    """Names of what ``section.params`` takes with ``type`` = ``kind``; None for an unknown type."""
    for variant in sections(RunConfig.model_fields[section].annotation):
        if kind in typing.get_args(variant.model_fields["type"].annotation):
            return set(sections(variant.model_fields["params"].annotation)[0].model_fields)
    return None


def _unusable_texts(node: Any, path: str = "") -> Iterator[ConfigError]:
    """Texts that no system takes as the path that most of ours are, or that cannot be written back as JSON."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _unusable_texts(value, f"{path}.{key}" if path else key)
    elif isinstance(node, str) and "\0" in node:
        yield ConfigError(path, node[:80], "holds a NUL character", "remove it")
    elif isinstance(node, str) and any("\ud800" <= letter <= "\udfff" for letter in node):
        yield ConfigError(path, node[:80], "is no valid text (half of a surrogate pair)", "write it in UTF-8")
    elif isinstance(node, str) and _is_too_long(node):
        rule = "is too long for a path: 4095 bytes, and 255 between two slashes"
        yield ConfigError(path, f"{node[:60]}…", rule, "shorten it")
    elif isinstance(node, str) and node.startswith("~") and os.path.expanduser(node) == node:
        yield ConfigError(path, node, f"there is no user {node.split('/')[0][1:]!r} here", "give the whole path")


def _is_too_long(text: str) -> bool:
    """Whether every system call would refuse it as a file's name."""
    parts = text.encode().split(b"/")
    return sum(map(len, parts)) + len(parts) > 4096 or max(map(len, parts)) > 255


def _unresolved_autos(node: Any, path: str = "") -> Iterator[str]:
    """Dotted paths that hold ``"auto"`` where nobody resolves it."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _unresolved_autos(value, f"{path}.{key}" if path else key)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _unresolved_autos(value, f"{path}[{index}]")
    elif node == "auto" and path not in AUTO_KEYS:
        yield path
