"""pydantic's validation errors as ConfigErrors: the field's path as the user wrote it, value, rule and fix."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from recipe.config.deepspeed_keys import OPTIMIZERS, SCHEDULERS
from recipe.config.keys import is_known, missing_key_error
from recipe.errors import ConfigError, nearest

#: Reasons that a bare range or type would not tell.
REASONS = {
    "zero_optimization.stage": "stages 1 and 2 are supported; stage 3 cuts the weights themselves: a few layers "
    "beside a frozen embedding and head do not need it, and export could not read them whole",
    "fp16.enabled": "fp16 would need loss scaling, which the exact loss normalisation excludes",
    "bf16.check_grad_overflow": "DeepSpeed would apply gradients that are not finite, and every weight would be lost",
    "optimizer.params.torch_adam": "DeepSpeed's own Adam is compiled on first use, and no test covers it",
    "train_micro_batch_size_per_gpu": "must be 1: one packed row is one DeepSpeed sample",
    "dflash.drafter.block_size": "must be an integer of at least 2: the anchor and one drafted token",
}
FIXES = {
    "bf16.check_grad_overflow": "leave it true",
    "optimizer.params.torch_adam": "set it to true, or remove it",
    "zero_optimization.stage": "set it to 2",
    "fp16.enabled": 'use "bf16": {"enabled": true} instead',
    "train_micro_batch_size_per_gpu": "set it to 1 and choose dflash.data.token_budget for the size of a micro-batch",
}
TYPES = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "finite_number": "a finite number",
}


def explain(error: ValidationError, raw: dict[str, Any]) -> list[ConfigError]:
    """One ConfigError for each field with a mistake (a field that may be of several types gives one, not several)."""
    found: dict[str, ConfigError] = {}
    for detail in error.errors(include_url=False):
        path = _path(detail["loc"], raw)
        if path not in found:
            found[path] = _one(path, detail)
    return list(found.values())


def _path(loc: tuple[int | str, ...], raw: Any) -> str:
    """``dflash.layout.target_gpus[2]``: pydantic's location without the tags of unions, which the user never wrote."""
    path, node = "", raw
    for position, part in enumerate(loc):
        if isinstance(part, int):
            path += f"[{part}]"
            node = node[part] if isinstance(node, list) and part < len(node) else None
        elif isinstance(node, dict) and (part in node or position == len(loc) - 1):
            path += f".{part}" if path else part
            node = node.get(part)
    return path


def _one(path: str, detail: ErrorDetails) -> ConfigError:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _other_type(path, value, detail["loc"]) if is_known(path) else missing_key_error(path, value)
    if kind.startswith("union_tag"):
        given = value.get("type") if isinstance(value, dict) else value
        if not isinstance(value, dict):
            return ConfigError(path, value, "must be an object or null", 'give {"type": "WarmupCosineLR"}')
        return ConfigError(f"{path}.type", given, f"must be one of {', '.join(SCHEDULERS)}", _choose(given, SCHEDULERS))
    if path == "optimizer.type":
        return ConfigError(path, value, f"must be one of {', '.join(OPTIMIZERS)}", _choose(value, OPTIMIZERS))
    if kind == "missing":
        return ConfigError(path, None, "must be given", f"add {path}")
    rule = REASONS.get(path) or _rule(kind, context, detail["msg"])
    return ConfigError(path, value, rule, FIXES.get(path) or _fix(path, kind, value, context))


def _other_type(path: str, value: object, loc: tuple[int | str, ...]) -> ConfigError:
    """For a key that exists in a section of another ``type``; pydantic's location names the type."""
    section, kind = path.partition(".")[0], loc[1]
    if (section, kind) == ("optimizer", "Muon"):
        fix = "give muon_lr (matrices) and adam_lr (norms)" if path.endswith(".lr") else "remove it"
    else:
        fix = f"remove it, or choose another {section}.type"
    return ConfigError(path, value, f"belongs to another {section}.type", fix)


def _rule(kind: str, context: dict[str, Any], message: str) -> str:
    """The broken rule in plain words."""
    bounds = {"greater_than_equal": ("ge", "at least"), "greater_than": ("gt", "greater than")}
    bounds |= {"less_than_equal": ("le", "at most"), "less_than": ("lt", "less than")}
    if kind in bounds:
        key, words = bounds[kind]
        return f"must be {words} {context[key]}"
    if kind == "literal_error":
        return f"must be one of {context['expected']}"
    if kind in ("too_short", "too_long"):
        words, key = ("at least", "min_length") if kind == "too_short" else ("at most", "max_length")
        return f"must have {words} {context[key]} item(s)"
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "string_pattern_mismatch":
        return "letters, digits, '.', '_' and '-' only, beginning with a letter or digit"
    if kind in TYPES:
        return f"must be {TYPES[kind]}"
    return message[0].lower() + message[1:]


def _fix(path: str, kind: str, value: object, context: dict[str, Any]) -> str:
    if kind == "literal_error":
        return _choose(value, [word.strip(" '") for word in context["expected"].replace(" or ", ",").split(",")])
    if kind in TYPES and isinstance(value, str):
        return f"write {path} as {TYPES[kind]}, without quotes"
    return f"change {path}, or remove it for its default"


def _choose(value: object, choices: list[str] | tuple[str, ...]) -> str:
    same = [choice for choice in choices if choice.lower() == str(value).lower()]
    hint = f" Did you mean {same[0]!r}?" if same else nearest(str(value), choices)
    return f"choose one of them.{hint}"
