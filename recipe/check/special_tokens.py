"""The ids that a model folder gives its special tokens, from its JSON files alone: no tokenizer, no model is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe.errors import ConfigError
from recipe.model_files.shapes import model_folder


@dataclass(frozen=True)
class SpecialTokens:
    """``mask``: the tokenizer's mask token or None. ``reserved``: pad, eos and bos ids with the role's name."""

    mask: int | None = None
    reserved: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, path: str, revision: str | None = None) -> SpecialTokens:
        """Of a model folder or of a hub id in the local cache; empty when there is neither (a bundled shape)."""
        try:
            folder = model_folder(path, revision)
        except ConfigError:
            return cls()
        settings = _read(folder / "special_tokens_map.json") | _read(folder / "tokenizer_config.json")
        ids = _ids_of_tokens(folder, settings)
        reserved: dict[int, str] = {}
        for role in ("bos", "pad", "eos"):  # a later role's name wins where ids coincide
            for source in (_read(folder / "config.json"), _read(folder / "generation_config.json")):
                for scope in (_object(source.get("text_config")), source):
                    reserved.update(dict.fromkeys(_as_ids(scope.get(f"{role}_token_id")), role))
            found = ids.get(_text(settings.get(f"{role}_token")))
            if found is not None:
                reserved[found] = role
        return cls(mask=ids.get(_text(settings.get("mask_token"))), reserved=reserved)


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty when there is none or it is damaged (the loader reports damage)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _ids_of_tokens(folder: Path, settings: dict[str, Any]) -> dict[str | None, int]:
    """Id of each token text: the vocabulary, then what was added to it. Entries of a wrong type are left out."""
    tokenizer = _read(folder / "tokenizer.json")
    ids: dict[str | None, Any] = {}
    ids.update(_object(_object(tokenizer.get("model")).get("vocab")))
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        ids[_text(token)] = _object(token).get("id")
    for number, token in _object(settings.get("added_tokens_decoder")).items():
        ids[_text(token)] = int(number) if str(number).isdecimal() else None
    return {text: number for text, number in ids.items() if text is not None and type(number) is int}


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _as_ids(value: Any) -> list[int]:
    return [number for number in (value if isinstance(value, list) else [value]) if isinstance(number, int)]
