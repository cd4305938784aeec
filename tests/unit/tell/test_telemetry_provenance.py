"""Provenance, and that no secret gets out."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from recipe.tell.provenance import collect, config_hash, git_state, is_secret_name, redact, redact_argv, redact_text

SECRET = "f00dfeedf00dfeed"


@pytest.mark.parametrize(
    "name",
    ["token", "hf_token", "HF_TOKEN", "WANDB_API_KEY", "apiKey", "api-key", "accessToken", "password", "db_password",
     "client_secret", "secrets", "aws_secret_access_key", "Authorization", "PASSWORD_FILE", "apikey", "keys"],
)  # fmt: skip
def test_secret_names(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["token_budget", "mask_token_id", "max_new_tokens", "page_tokens", "mask_token", "eos_token", "tokens_per_s",
     "keep", "keyboard", "monkey", "tokenizer", "num_key_value_heads", "linear_num_key_heads", "author", "keypoints"],
)  # fmt: skip
def test_names_of_this_trade_are_not_secrets(name: str) -> None:
    assert not is_secret_name(name)


def test_redaction_is_recursive_and_leaves_the_rest() -> None:
    config = {
        "dflash": {
            "data": {"token_budget": 49152},
            "extra": [{"hf_token": SECRET}, {"nested": {"password": {"value": SECRET, "pin": 4711}}}],
        },
        "url": f"https://user:{SECRET}@example.org/x",
        "optimizer": {"params": {"lr": 6e-4, "betas": [0.9, 0.95]}},
    }
    clean = redact(config)
    text = json.dumps(clean)
    assert SECRET not in text and "4711" not in text
    assert clean["dflash"]["data"]["token_budget"] == 49152
    assert clean["optimizer"] == config["optimizer"]
    assert config["dflash"]["extra"][0]["hf_token"] == SECRET, "a copy, not the original"


@pytest.mark.parametrize(
    "argv",
    [["--api-key", SECRET], [f"--api-key={SECRET}"], ["--set", f"x.hf_token={SECRET}"], [f"WANDB_API_KEY={SECRET}"],
     [f"--header=Authorization: Bearer {SECRET}"], ["--password", SECRET, "--resume"]],
)  # fmt: skip
def test_command_lines(argv: list[str]) -> None:
    clean = redact_argv(["train.py", *argv])
    assert SECRET not in " ".join(clean) and clean[0] == "train.py" and len(clean) == 1 + len(argv)


def test_harmless_command_lines_stay() -> None:
    argv = ["train.py", "--set", "dflash.data.token_budget=2048", "--deepspeed_config", "a.json", "--resume"]
    assert redact_argv(argv) == argv


def test_text_with_an_environment_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", SECRET)
    assert SECRET not in redact_text(f"HTTP 401 for {SECRET}!")
    assert redact_text("password: hunter2x, token=abcdef12") == "password: [redacted], token=[redacted]"
    for harmless in ("mask token: 248070", "eos token: <|im_end|>", "https://example.org:8080/a@b"):
        assert redact_text(harmless) == harmless
    line = "step=420/10000 loss=1.8342 lr=5.8e-04 mask_token_id=5 token_budget=49152"
    assert redact_text(line) == line


def test_config_hash_ignores_order_only() -> None:
    assert config_hash({"a": 1, "b": {"c": 2, "d": 3}}) == config_hash({"b": {"d": 3, "c": 2}, "a": 1})
    assert config_hash({"a": 1}) != config_hash({"a": 2})


def test_git_state_follows_the_checkout(tmp_path: Path) -> None:
    assert git_state(tmp_path) == {"revision": None, "dirty": None}
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "one")
    assert git_state(tmp_path) == {"revision": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path)["dirty"] is True


def test_collect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    result = collect({"a": 1}, ["train.py", "--api-key", SECRET], gpus=["NVIDIA H200"])
    assert SECRET not in json.dumps(result)
    assert result["config_sha256"] == config_hash({"a": 1})
    assert {"python", "torch", "deepspeed"} <= result["versions"].keys()
    assert result["hardware"]["cpus"] >= 1 and result["hardware"]["memory_bytes"] > 2**28
    assert result["hardware"]["gpus"] == ["NVIDIA H200"]
