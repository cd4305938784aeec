"""Loading the target's tokenizer without the network, and naming it by its content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from recipe.errors import ConfigError


def load_tokenizer(path: str | Path, field: str = "--tokenizer") -> Any:
    """The tokenizer of a folder or of a hub id in the local cache. Raises ConfigError under the name ``field``."""
    fix = "give the target's folder (with tokenizer.json), or a hub id that is already in the local cache"
    looks_local = str(path).startswith((".", "/", "~")) or str(path).count("/") > 1
    try:
        folder = Path(path).expanduser()
        missing = looks_local and not folder.exists()
    except (RuntimeError, ValueError, OSError) as error:  # ~ of nobody, a NUL in the name, a name too long
        raise ConfigError(field, str(path), f"is no path: {error}", fix) from error
    if missing:
        raise ConfigError(field, str(path), "there is no such folder", fix)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises many types here, all of which mean "no tokenizer"
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise ConfigError(field, str(path), f"holds no tokenizer that can be loaded ({reason})", fix) from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ConfigError(field, str(path), "has no fast tokenizer (tokenizer.json)", "convert it to tokenizer.json")
    template = tokenizer.chat_template
    if not isinstance(template, str | dict | None):
        raise ConfigError(
            field, str(path), f"its chat_template is {type(template).__name__}, not text", "mend the file"
        )
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def tokenizer_hash(tokenizer: Any) -> str:
    """sha256 of what decides the token ids: the whole tokenizer.json, less its padding and truncation."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content.pop("padding", None)
    content.pop("truncation", None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def template_hash(tokenizer: Any) -> str:
    """sha256 of the chat template and of the special tokens that it may print."""
    names = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(json.dumps([tokenizer.chat_template, names], sort_keys=True).encode()).hexdigest()


def special_strings(tokenizer: Any) -> set[str]:
    """The texts of all special tokens (control tokens such as an end of turn, not merely added words)."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return {text for text in added | set(tokenizer.all_special_tokens) if text}


def stop_ids(tokenizer: Any, path: str | Path | None = None) -> set[int]:
    """Ids that end a generation: the tokenizer's eos and those of generation_config.json in ``path``, or, without that
    file, of config.json, as transformers' `generate` takes them."""
    ids = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    names = ("generation_config.json", "config.json") if path else ()
    config = next((file for name in names if (file := Path(str(path)) / name).is_file()), None)
    if config:
        try:
            content = json.loads(config.read_text(encoding="utf-8"))
            eos = content.get("eos_token_id", (content.get("text_config") or {}).get("eos_token_id"))
        except (OSError, ValueError, AttributeError):  # damaged, or no JSON object
            eos = None
        ids.update(eos if isinstance(eos, list) else [eos])
    return {i for i in ids if type(i) is int}
