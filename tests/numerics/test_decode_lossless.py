"""Speculative decoding gives what plain decoding gives, on every kind of target and with every kind of drafter."""

from __future__ import annotations

import pytest
import torch

from recipe.decode.cache import TargetSession
from recipe.decode.drafter_cache import IncrementalDrafter
from recipe.decode.plain import plain_generate
from recipe.decode.speculative import SpeculativeDecoder
from tests.numerics.decode_models import (
    BLOCK,
    FAMILIES,
    MASK,
    VOCAB,
    Oracle,
    drafter_parts,
    plain,
    prompts,
    tiny_target,
)

LENGTH = 14


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> torch.nn.Module:
    torch.manual_seed(0)
    return tiny_target(request.param)


def decoder_of(target: torch.nn.Module, kind: str) -> SpeculativeDecoder:
    if kind == "random":
        drafter = IncrementalDrafter(*drafter_parts())
        return SpeculativeDecoder(target, drafter, target.get_input_embeddings().weight, target.lm_head.weight)
    return SpeculativeDecoder(target, Oracle(target, errors={"perfect": 0.0, "mixed": 0.3}[kind]))


def test_plain_decoding_equals_transformers_generate(target: torch.nn.Module) -> None:
    seen = set()
    for prompt in prompts(4):
        ours = plain_generate(target, prompt, LENGTH).tokens
        theirs = target.generate(prompt[None], max_new_tokens=LENGTH, do_sample=False)[0, len(prompt) :]
        assert ours == theirs.tolist()
        seen |= set(ours)
    assert len(seen) > 16, "a target that repeats itself tests nothing"


def check_lossless(target: torch.nn.Module, kind: str, count: int) -> None:
    decoder = decoder_of(target, kind)
    accepted: list[int] = []
    for prompt in prompts(count):
        result = decoder.generate(prompt, LENGTH)
        assert result.tokens == plain(target, prompt, LENGTH)
        assert sum(result.accepted) == LENGTH - 1
        assert all(1 <= one <= BLOCK for one in result.accepted)
        accepted += result.accepted
    mean = sum(accepted) / len(accepted)
    if kind == "random":
        assert mean < 1.5, "the bad drafter must force rejections"
    if kind == "mixed":
        assert set(accepted) == set(range(1, BLOCK + 1)), "every length of acceptance must occur"


@pytest.mark.parametrize("kind", ["random", "mixed", "perfect"])
def test_lossless(target: torch.nn.Module, kind: str) -> None:
    check_lossless(target, kind, 20)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "mixed"])
def test_lossless_on_200_prompts(target: torch.nn.Module, kind: str) -> None:
    check_lossless(target, kind, 200)


def test_perfect_drafter_reaches_block_size(target: torch.nn.Module) -> None:
    result = decoder_of(target, "perfect").generate(prompts(1)[0], 1 + 4 * BLOCK)
    assert result.accepted == [BLOCK] * 4 and result.state_replays == 0
    assert [block.accepted for block in result.blocks] == [BLOCK - 1] * 4


def test_sampling_is_lossless_too(target: torch.nn.Module) -> None:
    """The random numbers belong to positions, so the same seed must give the same sample with and without drafts."""
    decoder, greedy = decoder_of(target, "mixed"), 0
    for prompt in prompts(3):
        sampled = plain_generate(target, prompt, LENGTH, 0.7, seed=5).tokens
        assert decoder_with_future(decoder, sampled).generate(prompt, LENGTH, 0.7, seed=5).tokens == sampled
        greedy += sampled == plain(target, prompt, LENGTH)
        assert sampled != plain_generate(target, prompt, LENGTH, 0.7, seed=6).tokens
    assert greedy == 0, "a temperature that changes nothing tests nothing"


def decoder_with_future(decoder: SpeculativeDecoder, future: list[int]) -> SpeculativeDecoder:
    class Known(Oracle):
        def begin(self, prompt_ids: torch.Tensor, max_length: int) -> None:
            self.future, self.at, self.prompt = future + [0] * BLOCK, 0, len(prompt_ids)

    return SpeculativeDecoder(decoder.target, Known(decoder.target, errors=0.3))


@pytest.mark.parametrize("limit", [1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1])
def test_length_limits(target: torch.nn.Module, limit: int) -> None:
    prompt = prompts(1)[0]
    for kind in ("perfect", "random"):
        result = decoder_of(target, kind).generate(prompt, limit)
        assert result.tokens == plain(target, prompt, limit)
        assert len(result.tokens) == limit and sum(result.accepted) == limit - 1
        assert all(block.proposed <= limit - 1 for block in result.blocks)


def test_end_token_inside_a_block(target: torch.nn.Module) -> None:
    """Every second token of the answer in turn is the end token: nothing after its first occurrence is counted."""
    prompt = prompts(3)[2]
    answer = plain(target, prompt, 2 * BLOCK)
    for stop in answer[::2]:
        cut = answer[: answer.index(stop) + 1]
        for kind in ("perfect", "random", "mixed"):
            result = decoder_of(target, kind).generate(prompt, len(answer), stop_ids={stop})
            assert result.tokens == cut
            assert sum(result.accepted) == len(cut) - 1
            assert all(b.accepted <= b.proposed and b.accepted <= b.committed for b in result.blocks)
        assert plain_generate(target, prompt, len(answer), stop_ids={stop}).tokens == cut


def hooks(model: torch.nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("rows", [1, 2, 3, 5, BLOCK])
def test_rollback_is_exact(target: torch.nn.Module, rows: int) -> None:
    """After keep(rows) the target continues as if the refused tokens had never been run, to 1e-4."""
    prompt, block = prompts(2, seed=9)
    block = block.repeat(BLOCK)[:BLOCK]
    kept, after, before = block[:rows], torch.arange(7), hooks(target)
    with TargetSession(target, [0, 2]) as session:
        session.prefill(prompt)
        for _ in range(2):  # twice: a second rollback starts from a replayed state
            session.extend(torch.cat([kept, torch.full((BLOCK - rows + 2,), MASK)]))
            session.keep(rows)
        got = session.extend(after)
        assert session.length == len(prompt) + 2 * rows + 7
    assert hooks(target) == before, "hooks were left on the target"
    with torch.inference_mode():
        whole = target(torch.cat([prompt, kept, kept, after])[None], output_hidden_states=True)
    torch.testing.assert_close(got.logits, whole.logits[0, -7:], rtol=1e-4, atol=1e-4)
    for tap, layer in zip(got.taps, [0, 2], strict=True):
        torch.testing.assert_close(tap, whole.hidden_states[layer + 1][0, -7:], rtol=1e-4, atol=1e-4)


def test_many_tokens_at_once_equal_one_at_a_time(target: torch.nn.Module) -> None:
    """The continuation of a recurrent state by a block is that by single tokens."""
    prompt, block = torch.arange(11) % VOCAB, torch.arange(40, 40 + BLOCK)
    with TargetSession(target, [1]) as together, TargetSession(target, [1]) as single:
        together.prefill(prompt), single.prefill(prompt)
        block_pass = together.extend(block)
        rows = []
        for token in block:
            rows.append(single.extend(token[None]).logits)
            single.keep(1)
    torch.testing.assert_close(block_pass.logits, torch.cat(rows), rtol=1e-4, atol=1e-4)
