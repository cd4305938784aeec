"""A batch of sequences with ragged acceptance decodes exactly as each of them alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recipe.decode import batch
from recipe.decode.batch import generate_batch, plain_batch
from recipe.decode.drafter_cache import IncrementalDrafter
from recipe.decode.measure import measure
from recipe.decode.plain import plain_generate
from recipe.decode.prompts import Prompt
from recipe.decode.speculative import SpeculativeDecoder
from recipe.errors import ConfigError
from tests.numerics.decode_models import Oracle, drafter_parts, prompts, tiny_target

LENGTH = 13


@pytest.fixture(scope="module", params=["qwen3_5", "llama"])
def target(request: pytest.FixtureRequest) -> torch.nn.Module:
    return tiny_target(request.param)


def decoder_of(target: torch.nn.Module, kind: str) -> SpeculativeDecoder:
    if kind == "random":
        parts = IncrementalDrafter(*drafter_parts())
        embed, head = target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach()
        return SpeculativeDecoder(target, parts, embed, head)
    return SpeculativeDecoder(target, Oracle(target, errors=0.3))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_plain_decoding_of_a_batch(target: torch.nn.Module, temperature: float) -> None:
    ids = prompts(5, seed=3)
    alone = [plain_generate(target, one, LENGTH, temperature, seed=seed).tokens for seed, one in enumerate(ids)]
    assert len({tuple(tokens) for tokens in alone}) == 5
    stop = {alone[1][4]}  # some end early and leave the batch
    cut = [plain_generate(target, one, LENGTH, temperature, seed=s, stop_ids=stop).tokens for s, one in enumerate(ids)]
    assert [r.tokens for r in plain_batch(target, ids, LENGTH, temperature, (), range(5))] == alone
    assert [r.tokens for r in plain_batch(target, ids, LENGTH, temperature, stop, range(5))] == cut
    assert len({len(tokens) for tokens in cut}) > 1


@pytest.mark.parametrize("kind", ["random", "mixed"])
def test_speculative_decoding_of_a_batch(target: torch.nn.Module, kind: str) -> None:
    ids = prompts(4, seed=5)
    answers = [plain_generate(target, one, LENGTH).tokens for one in ids]
    stop = {answers[2][7]}
    for stops in ((), stop):
        alone = [plain_generate(target, one, LENGTH, stop_ids=stops).tokens for one in ids]
        together = generate_batch(decoder_of(target, kind), ids, LENGTH, 0.0, stops, range(4))
        assert [result.tokens for result in together] == alone
    accepted = [result.accepted for result in together]
    assert len({tuple(one) for one in accepted}) > 1, "acceptance was not ragged"
    if kind == "random":  # the same drafts as alone, hence the same blocks
        decoder = decoder_of(target, kind)
        single = [decoder.generate(one, LENGTH, stop_ids=stop) for one in ids]
        assert [one.blocks for one in single] == [one.blocks for one in together]


def test_no_attention_of_decoding_goes_to_cudnn(target: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would build a plan for every length; and what was allowed outside is allowed again afterwards."""
    attend, seen = torch.nn.functional.scaled_dot_product_attention, []

    def spy(*arguments: Any, **named: Any) -> torch.Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*arguments, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    before, decoder, ids = torch.backends.cuda.cudnn_sdp_enabled(), decoder_of(target, "random"), prompts(2, seed=5)
    assert before
    decoder.generate(ids[0], LENGTH)
    alone = len(seen)
    generate_batch(decoder, ids, LENGTH, 0.0, (), range(2))
    assert 0 < alone < len(seen) and not any(seen)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_the_measurement_is_the_same_in_batches(target: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [Prompt(ids, "", "ab"[n % 2]) for n, ids in enumerate(prompts(5, seed=8))]
    decoder = decoder_of(target, "random")
    one, many = (measure(decoder, listed, LENGTH, batch_size=size).to_dict() for size in (1, 3))
    for domain in (*one["domains"].values(), *many["domains"].values()):
        del domain["speedup"]
    clocks = {"seconds", "speedup", "tokens_per_s", "plain_tokens_per_s"}
    assert {k: v for k, v in one.items() if k not in clocks} == {k: v for k, v in many.items() if k not in clocks}
    assert one["identical"] and one["tau"] > 1 - 1e-9
    if one["state_replays"]:
        monkeypatch.setattr(batch.BatchSession, "_replay_rows", lambda *_: None)
        assert not measure(decoder, listed, LENGTH, batch_size=3).identical, "states that keep refused tokens"


def test_a_target_with_a_sliding_cache_is_refused() -> None:
    ids: Any = prompts(2)
    with pytest.raises(ConfigError, match="--batch-size"):
        plain_batch(tiny_target("qwen3_sliding"), ids, 4, 0.0, (), range(2))
