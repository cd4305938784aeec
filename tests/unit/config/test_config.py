"""Reading one JSON: what is accepted, what is refused, and what the user is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipe.config import ConfigErrors, RunConfig, load_config, load_config_text
from recipe.config.keys import AUTO_KEYS, is_known, known_keys, walk
from recipe.errors import ConfigError

CONFIGS = sorted((Path(__file__).resolve().parents[3] / "ds_configs").glob("*.json"))


def refused(content: Any, overrides: tuple[str, ...] = ()) -> ConfigErrors:
    text = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(ConfigErrors) as caught:
        load_config_text(text, overrides)
    return caught.value


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_load_and_write_themselves_back(path: Path) -> None:
    config = load_config(path)
    again = load_config_text(config.to_json())
    assert again == config
    assert again.to_json() == config.to_json()


@pytest.mark.parametrize(
    ("path", "value", "hint"),
    [
        ("gradient_cliping", 0.1, "'gradient_clipping'"),
        ("zero_optimisation", {"stage": 2}, "'zero_optimization'"),
        ("zero_optimization.stagee", 2, "'zero_optimization.stage'"),
        ("optimizer.params.learning_rate", 1.0, ""),
        ("optimizer.params.lrr", 1.0, "'optimizer.params.lr'"),
        ("optimizer.params.momentun", 1.0, "'optimizer.params.momentum'"),
        ("dflash.ring.min_redy", 3, "'dflash.ring.min_ready'"),
        ("dflash.objective.noise.stat", 3, "'dflash.objective.noise.start'"),
        ("block_size", 16, "'dflash.drafter.block_size'"),
        ("dflash.drafter.token_budget", 16, "'dflash.data.token_budget'"),
        ("dflsh", {}, "'dflash'"),
        ("wandb", {"enabled": True}, "dflash.telemetry.wandb"),
        ("gradient_allreduce_op", "sum", "would scale it"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_name(path: str, value: Any, hint: str) -> None:
    error = refused(nested(path, value))
    assert error.field == path
    assert hint in str(error)


@pytest.mark.parametrize("path", [key for key in known_keys() if key not in AUTO_KEYS])
def test_auto_is_refused_everywhere_else(path: str) -> None:
    content = nested(path, "auto")
    if path.startswith("scheduler."):
        content["scheduler"].setdefault("type", "WarmupCosineLR")
    error = refused(content)
    assert path in [mistake.field for mistake in error.errors]


@pytest.mark.parametrize("path", sorted(AUTO_KEYS))
def test_auto_is_accepted_where_it_is_resolved(path: str) -> None:
    content = nested(path, "auto")
    if path.startswith("scheduler."):
        content["scheduler"]["type"] = "WarmupCosineLR"
    assert isinstance(load_config_text(json.dumps(content)), RunConfig)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("dflash.drafter.block_size", 1, "at least 2"),
        ("dflash.objective.noise.start", -0.1, "at least 0"),
        ("dflash.objective.noise.end", -0.1, "at least 0"),
        ("dflash.objective.gamma", -1, "greater than 0"),
        ("dflash.objective.gamma", 0, "greater than 0"),
        ("dflash.ring.min_ready", 0, "at least 1"),
        ("dflash.ring.min_ready", "30", "an integer"),
        ("dflash.ring.min_ready", 2.5, "an integer"),
        ("dflash.ring.min_ready", True, "an integer"),
        ("dflash.run.warmup_ratio", 1.5, "at most 1"),
        ("dflash.run.name", "../x", "letters, digits"),
        ("dflash.run.epochs", 0, "at least 1"),
        ("dflash.layout.target_gpus", [], "at least 1 item"),
        ("dflash.target.target_layer_ids", [3, -1], "at least 0"),
        ("dflash.drafter.mask_token_id", -1, "at least 0"),
        ("dflash.objective.soft_labels", 1, "true or false"),
        ("dflash.target.dtype", "bf16", "'bfloat16' or 'float32'"),
        ("train_micro_batch_size_per_gpu", 2, "one packed row"),
        ("gradient_clipping", "1.0", "a number"),
        ("gradient_clipping", -1, "at least 0"),
        ("gradient_accumulation_steps", -1, "at least 1"),
        ("zero_optimization.stage", 3, "stage 3"),
        ("fp16.enabled", True, "loss scaling"),
        ("bf16.check_grad_overflow", False, "not finite"),
        ("data_types.grad_accum_dtype", "bf16", "'fp32'"),
        ("optimizer.params.torch_adam", False, "compiled"),
        ("optimizer.type", "adamw", "'AdamW'"),
        ("optimizer.type", "muon", "'Muon'"),
        ("optimizer.type", None, "AdamW, Adam, Muon"),
        ("optimizer", {"type": "Muon", "params": {"lr": 0.02}}, "muon_lr (matrices) and adam_lr (norms)"),
        ("optimizer", {"type": "Adam", "params": {"muon_lr": 0.02}}, "another optimizer.type"),
        ("optimizer", 3, "an object"),
        ("optimizer.params.lr", 0, "greater than 0"),
        ("optimizer.params.betas", [0.9], "at least 2 item"),
        ("scheduler.type", "Cosine", "WarmupCosineLR"),
        ("scheduler.type", "WSD", "WarmupStableDecayLR"),
        ("scheduler", {"type": "WarmupStableDecayLR", "params": {"decay_ratio": 0}}, "greater than 0"),
        ("scheduler", {"type": "WarmupStableDecayLR", "params": {"decay_ratio": 1.5}}, "at most 1"),
        ("scheduler", {"type": "WarmupStableDecayLR", "params": {"decay_type": "sqrt"}}, "'1-sqrt'"),
        ("scheduler", {"type": "WarmupCosineLR", "params": {"decay_ratio": 0.4}}, "another scheduler.type"),
        ("scheduler", "WarmupLR", "an object"),
        ("dflash", None, "an object"),
        ("dflash.ring", [], "an object"),
        ("dflash.data.token_budget", 10**12, "at most 2147483647"),
        ("dflash.data.max_batch_size", 2**31, "at most 2147483647"),
        ("gradient_accumulation_steps", 10**30, "at most 2147483647"),
        ("dflash.drafter.num_layers", 10**6, "at most 1024"),
        ("dflash.drafter.head_dim", 10**9, "at most 1048576"),
        ("dflash.drafter.init_from", "", "must not be empty"),
    ],
)
def test_value_outside_its_range_names_field_value_and_rule(path: str, value: Any, words: str) -> None:
    error = refused(nested(path, value))
    assert error.field.startswith(path)
    assert words in error.rule + error.fix
    assert repr(value)[1:-1] in str(error) or repr(error.value) in str(error)
    assert "Fix:" in str(error)


def test_all_mistakes_are_listed_at_once() -> None:
    error = refused({"gradient_cliping": 1, "dflash": {"ring": {"reuse": 0}, "data": {"token_budget": "auto"}}})
    assert {mistake.field for mistake in error.errors} == {
        "gradient_cliping",
        "dflash.ring.reuse",
        "dflash.data.token_budget",
    }
    for mistake in error.errors:
        assert mistake.field in str(error)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"bf16": {},\n "dflash": {,}}', "line 2 column 13"),
        ('{"bf16": {"enabled": true,}}', "line 1"),
        ("", "line 1"),
        ("[]", "one JSON object"),
        ('{"gradient_clipping": NaN}', "NaN"),
        ('{"dflash": {"ring": {"reuse": 1, "reuse": 2}}}', "twice"),
    ],
)
def test_broken_json_says_where(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config_text(text)
    assert words in str(caught.value)


def test_an_overflowing_number_is_refused() -> None:
    assert refused('{"optimizer": {"params": {"lr": 1e999}}}').field == "optimizer.params.lr"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"steps_per_print": ' + "9" * 5000 + "}", "absurd number"),
        ("[" * 100_000, "nested far too deeply"),
        (json.dumps({"dflash": {"data": {"path": "a\0b"}}}), "dflash.data.path = 'a\\x00b': holds a NUL"),
        (json.dumps({"dflash": {"run": {"output_dir": "~nosuchuser/x"}}}), "there is no user 'nosuchuser'"),
        (json.dumps({"dflash": {"run": {"name": "x" * 300}}}), "dflash.run.name"),
        (json.dumps({"dflash": {"data": {"path": "\ud800"}}}), "dflash.data.path = '\\ud800': is no valid text"),
        (json.dumps({"dflash": {"data": {"path": "x" * 300}}}), "is too long for a path"),
        (json.dumps({"dflash": {"data": {"path": "x/" * 3000}}}), "is too long for a path"),
    ],
    ids=["digits", "nesting", "NUL", "nobody", "long name", "surrogate", "long part", "long path"],
)
def test_absurd_input_is_one_message(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config_text(text)
    assert words in str(error.value)


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert str(path) in str(caught.value)
        assert ("is a folder" if path.is_dir() else "no such file") in str(caught.value)


def test_a_relative_path_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("ds_configs/demo.json").dflash.run.name == "demo-train"
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "ds_configs" / "demo.json").write_text('{"dflash": {"run": {"name": "nearer"}}}')
    assert load_config("ds_configs/demo.json").dflash.run.name == "nearer"


def test_overrides_are_typed_by_json() -> None:
    overrides = (
        "dflash.ring.reuse=2",
        "dflash.run.name=trial",
        "dflash.target.target_layer_ids=[1, 2]",
        "scheduler=null",
    )
    config = load_config("ds_configs/demo.json", overrides)
    assert (config.dflash.ring.reuse, config.dflash.run.name, config.scheduler) == (2, "trial", None)
    assert config.dflash.target.target_layer_ids == [1, 2]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("dflash.ring.reus=2", "'dflash.ring.reuse'"),
        ("ring.reuse=2", "'dflash.ring.reuse'"),
        ("dflash.ring.reuse", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("dflash.ring.reuse=two", "an integer"),
        ("dflash.ring=3", "an object"),
        ("dflash.ring.reuse=0", "at least 1"),
    ],
)
def test_a_wrong_override_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("ds_configs/demo.json", (override,))
    assert words in str(caught.value)


def test_every_key_says_what_it_is() -> None:
    silent = [path for path, field in walk() if not field.description and field.annotation is not None]
    assert set(silent) <= {"scheduler.type", "dflash.telemetry.wandb.project"}


def test_is_known_follows_sections() -> None:
    assert is_known("dflash.objective.noise") and is_known("dflash.objective.noise.start") and is_known("optimizer")
    assert not is_known("dflash.noise") and not is_known("")


class TestDeepSpeedDict:
    """What reaches ``deepspeed.initialize``."""

    def test_reference(self) -> None:
        config = load_config("ds_configs/qwen3.6_27b_5t3d.json")
        got = config.deepspeed_dict(total_steps=1000, warmup_steps=config.warmup_steps(1000))
        assert "dflash" not in got and "auto" not in json.dumps(got)
        assert got["scheduler"]["params"]["total_num_steps"] == 1000
        assert got["scheduler"]["params"]["warmup_num_steps"] == 40
        assert got["optimizer"]["params"]["torch_adam"] is True
        assert got["zero_optimization"]["stage"] == 2 and got["data_types"] == {"grad_accum_dtype": "fp32"}

    @pytest.mark.parametrize(("ratio", "total", "steps"), [(0.04, 1000, 40), (0.04, 10, 1), (0.0, 10, 0), (1.0, 7, 7)])
    def test_warmup_arithmetic(self, ratio: float, total: int, steps: int) -> None:
        config = load_config("ds_configs/demo.json", (f"dflash.run.warmup_ratio={ratio}",))
        assert config.warmup_steps(total) == steps
        assert config.deepspeed_dict(total, steps)["scheduler"]["params"]["warmup_num_steps"] == max(1, steps)

    def test_explicit_steps_win(self) -> None:
        config = load_config_text(
            json.dumps(
                {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5, "warmup_num_steps": 2}}}
            )
        )
        params = config.deepspeed_dict(1000, 40)["scheduler"]["params"]
        assert (params["total_num_steps"], params["warmup_num_steps"]) == (5, 2)
        assert params["warmup_max_lr"] == config.optimizer.highest_rates == [config.optimizer.params.lr]

    def test_plain_adam_is_not_adamw(self) -> None:
        params = load_config_text('{"optimizer": {"type": "Adam"}}').deepspeed_dict(1, 0)["optimizer"]["params"]
        assert params["adam_w_mode"] is False

    def test_deepspeed_reads_it_as_meant(self) -> None:
        """DeepSpeed's own config class is the oracle: it must see the values that the file has."""
        from deepspeed.runtime.config import DeepSpeedConfig

        config = load_config("ds_configs/qwen3.6_27b_5t3d.json", ("gradient_clipping=0.25", "optimizer.type=Muon"))
        seen = DeepSpeedConfig(config.deepspeed_dict(100, 4) | {"train_batch_size": 4})
        assert seen.gradient_clipping == 0.25
        assert seen.zero_optimization_stage == 2
        assert seen.bfloat16_config.enabled and seen.grad_accum_dtype == "fp32"
        assert seen.gradient_accumulation_steps == 4 and seen.train_micro_batch_size_per_gpu == 1
        assert seen.scheduler_name == "WarmupCosineLR" and seen.scheduler_params["total_num_steps"] == 100
        rates = [seen.optimizer_params[key] for key in ("muon_lr", "adam_lr")]
        assert seen.optimizer_name == "muon" and rates == [0.02, 6e-4]
