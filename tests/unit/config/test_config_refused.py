"""Every key that DeepSpeed reads is either offered or refused by name; DeepSpeed itself is asked which it reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from recipe.config.keys import is_known
from recipe.config.load import ConfigErrors, load_config_text
from recipe.config.refused_keys import NEUTRAL, REFUSED


class Asked(dict[str, Any]):
    """A config that notes which keys are looked for in it."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.names: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.names.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.names.add(key)
        return super().__getitem__(key)

    def keys(self) -> Any:
        return self


def keys_of_deepspeed() -> set[str]:
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    asked = Asked({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "train_batch_size": 1})
    DeepSpeedConfig(asked)
    found = set(asked.names)
    types = Asked()
    DeepSpeedConfig({**asked, "data_types": types})
    found |= {f"data_types.{name}" for name in types.names}
    models = {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}
    for section, model in models.items():
        found |= {f"{section}.{field.alias or name}" for name, field in model.model_fields.items()}
    return found


def test_every_key_of_deepspeed_is_offered_or_refused_by_name() -> None:
    keys = keys_of_deepspeed()
    assert {"zero_optimization.stage", "prescale_gradients", "data_types.param_dtype", "nebula"} < keys
    neither = sorted(key for key in keys if not is_known(key) and key not in REFUSED)
    assert not neither
    assert not [key for key in REFUSED if is_known(key)]


def given(path: str, value: object) -> dict[str, Any]:
    content: Any = value
    for name in reversed(path.split(".")):
        content = {name: content}
    if path.startswith("scheduler"):
        content["scheduler"]["type"] = "WarmupLR"
    return content  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", sorted(REFUSED))
@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_refused_with_one_sentence_for_every_optimizer(path: str, optimizer: str) -> None:
    value = 7 if not isinstance(NEUTRAL.get(path, False), bool) else not NEUTRAL.get(path, False)
    content = given(path, value)
    content.setdefault("optimizer", {})["type"] = optimizer
    with pytest.raises(ConfigErrors) as refusal:
        load_config_text(json.dumps(content))
    assert [error.field for error in refusal.value.errors] == [path]
    assert f"is not used here: {REFUSED[path]}" in str(refusal.value) and "own meaning" not in str(refusal.value)
    with pytest.raises(Exception, match="is not used here"):
        load_config_text("{}", [f"{path}={json.dumps(value)}"])


@pytest.mark.parametrize("path", sorted(REFUSED))
def test_what_changes_nothing_passes(path: str) -> None:
    """Files copied from elsewhere, and config.json of older runs, spell defaults out."""
    plain = load_config_text(json.dumps(given("scheduler.type", "WarmupLR") if path.startswith("scheduler") else {}))
    for value in (None, NEUTRAL.get(path, False)):
        assert load_config_text(json.dumps(given(path, value))) == plain
    if NEUTRAL.get(path) is None:
        assert load_config_text(json.dumps(given(path, {"enabled": False, "more": 1}))) == plain
