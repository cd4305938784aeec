"""What a capture leaves alive: the tensors that it hands out, and nothing else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from recipe.target.capture import TapCapture, decoder_of, layers_of

IDS = torch.arange(12).reshape(2, 6)


@pytest.fixture
def without_gc() -> Iterator[None]:
    """Whatever dies here dies by its reference count: on a GPU, memory must not wait for the collector."""
    gc.disable()
    yield
    gc.enable()


def decoder(kind: str, layers: int = 4) -> Any:
    settings = {"vocab_size": 31, "hidden_size": 32, "num_hidden_layers": layers, "intermediate_size": 48}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model(kind, **settings)).eval()


@pytest.mark.parametrize("last", [False, True], ids=["trimmed", "with the last hidden state"])
def test_only_what_is_handed_out_stays_alive(without_gc: None, last: bool) -> None:
    model = decoder("llama")
    computed: list[weakref.ref[torch.Tensor]] = []

    def watch(_module: Any, _inputs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, torch.Tensor):
            computed.append(weakref.ref(tensor))

    for module in model.modules():
        module.register_forward_hook(watch)
    capture = TapCapture(model, [1, 0], last)
    states = capture.capture(IDS)
    assert len(computed) > 20
    alive = {id(ref()) for ref in computed} - {id(None)}
    assert alive <= {id(state) for state in states}
    handed_out = [weakref.ref(state) for state in states]
    del states
    assert all(ref() is None for ref in handed_out)
    assert not capture._caught


def test_nothing_behind_the_deepest_tap_is_computed_and_no_cache_is_made() -> None:
    model, ran, caches = decoder("qwen3"), list[int](), list[Any]()

    def note(layer: Any, _inputs: Any, settings: dict[str, Any]) -> None:
        ran.append(layer.self_attn.layer_idx)
        caches.append(settings.get("cache", settings.get("past_key_values")))

    for layer in layers_of(model):
        layer.register_forward_pre_hook(note, with_kwargs=True)
    TapCapture(model, [1]).capture(IDS)
    assert ran == [0, 1] and caches == [None, None]
    ran.clear()
    TapCapture(model, [1], need_last_hidden=True).capture(IDS)
    assert ran == [0, 1, 2, 3]


def test_a_failed_forward_leaves_nothing_and_close_takes_the_hooks_off(without_gc: None) -> None:
    model = decoder("llama")
    capture = TapCapture(model, [0], True)
    with pytest.raises(IndexError):
        capture.capture(IDS + 100)
    assert not capture._caught
    capture.close()
    assert not any(module._forward_hooks for module in model.modules())


def test_the_decoder_is_found_under_its_usual_names() -> None:
    for kind in ("llama", "gpt_neox", "gpt2"):
        model = decoder(kind)
        assert decoder_of(model) is model and len(layers_of(model)) == 4
    with pytest.raises(TypeError, match="Linear has no decoder layers"):
        decoder_of(torch.nn.Linear(2, 2))
