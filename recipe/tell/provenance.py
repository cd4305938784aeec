"""Where a run comes from: command, code, versions, machine. And the one place that knows what a secret looks like."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REDACTED = "[redacted]"
PACKAGES = (
    "torch",
    "deepspeed",
    "transformers",
    "flash-linear-attention",
    "triton",
    "datasets",
    "safetensors",
    "pydantic",
    "numpy",
    "wandb",
    "nvidia-ml-py",
)
_ALWAYS = {"secret", "secrets", "password", "passwords", "passwd", "passphrase", "credential", "credentials"}
# Not "tokens": in this trade that is a count.
_AS_LAST_WORD = {"token", "key", "keys", "auth", "authorization", "cookie"}
_JOINED = re.compile(r"(apikey|secretkey|accesskey|authtoken|accesstoken|apitoken|hftoken|password|secret)s?$")
# A tokenizer's vocabulary speaks of tokens too; none of these holds a secret.
_VOCABULARY = {"mask", "pad", "eos", "bos", "unk", "sep", "cls", "image", "special", "added", "additional"}
_NAMED = r"(?i)([\w.-]*(?:api[_-]?key|secret|password|passwd|[_-]token|\btoken)\s*[=:]\s*)"
_IN_TEXT = (
    # In running text a bare number or <|marker|> after "token:" is an id or a special token.
    (re.compile(_NAMED + r"(?!\[redacted|<)(?=\S*[A-Za-z])[^\s,;\"'}]{6,}"), r"\1"),
    (re.compile(r"(\w+://[^\s/:@]*:)[^\s/@]+(?=@)"), r"\1"),
    (re.compile(r"(?i)(bearer\s+)[\w.~+/-]{8,}=*"), r"\1"),
    (re.compile(r"\b()(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[opsu]_[A-Za-z0-9]{20,})"), r"\1"),
)


def is_secret_name(name: str) -> bool:
    """Whether a key of this name holds a secret: ``hf_token``, ``WANDB_API_KEY``; not ``token_budget``."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    if not words:
        return False
    if _ALWAYS & set(words) or _JOINED.search("".join(words)):
        return True
    return words[-1] in _AS_LAST_WORD and not (_VOCABULARY & set(words))


def redact(value: Any) -> Any:
    """A copy without secrets: whole values under secret names, at any depth, and secrets inside strings."""
    if isinstance(value, Mapping):
        return {key: _blank(item) if is_secret_name(str(key)) else redact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(item) for item in value]
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """``text`` without anything that looks like a secret or equals one of this process's environment secrets."""
    for name, secret in os.environ.items():
        if len(secret) >= 8 and is_secret_name(name):
            text = text.replace(secret, REDACTED)
    for pattern, keep in _IN_TEXT:
        text = pattern.sub(keep + REDACTED, text)
    return text


def looks_secret(text: str) -> bool:
    """Whether a text holds a password in a URL, a bearer token, ``api_key=…`` or a key of a known form."""
    return any(pattern.search(text) for pattern, _ in _IN_TEXT)


def redact_argv(argv: Sequence[str]) -> list[str]:
    """The command line; the word after a secret option (``--api-key abc``) is blanked too."""
    result: list[str] = []
    blank_next = False
    for word in argv:
        option, equals, _ = word.partition("=")
        secret = is_secret_name(option.lstrip("-").rpartition(".")[2])
        if blank_next and not word.startswith("-"):
            result.append(REDACTED)
        else:
            result.append(option + equals + REDACTED if equals and secret else redact_text(word))
        blank_next = secret and not equals and word.startswith("-")
    return result


def _blank(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _blank(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_blank(item) for item in value]
    return value if value is None or isinstance(value, bool) else REDACTED


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON: the same for any order of keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def collect(config: Mapping[str, Any], argv: Sequence[str] | None = None, gpus: Sequence[str] = ()) -> dict[str, Any]:
    """What provenance.json holds. ``gpus`` are names from `gpu.device_names`; no secret is in the result."""
    return {
        "argv": redact_argv(sys.argv if argv is None else argv),
        "working_directory": os.getcwd(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": socket.gethostname(),
        "config_sha256": config_hash(config),
        "git": git_state(Path(__file__).resolve().parents[2]),
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": {
            "machine": platform.machine(),
            "kernel": platform.release(),
            "cpu": _cpu_name(),
            "cpus": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "gpus": list(gpus),
        },
    }


def git_state(folder: Path) -> dict[str, Any]:
    """``revision`` (None outside a checkout) and ``dirty``: whether tracked files differ from it."""
    revision = _git(folder, "rev-parse", "HEAD")
    if revision is None:
        return {"revision": None, "dirty": None}
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    # Without optional locks: reading must not touch the index while the user commits.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
