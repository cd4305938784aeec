"""Logits that are not finite end every way of decoding, with model, prompt and position named: no tau from them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from recipe.choice import NO_TOKEN, NotFinite, most_likely
from recipe.decode.batch import generate_batch, plain_batch
from recipe.decode.drafter_cache import IncrementalDrafter
from recipe.decode.measure import measure
from recipe.decode.metrics import explain_mismatch
from recipe.decode.plain import plain_generate
from recipe.decode.prompts import Prompt as Held
from recipe.decode.sampling import Sampler
from recipe.decode.sharded import ShardedTarget
from recipe.decode.speculative import SpeculativeDecoder
from recipe.drafter.config import DrafterConfig
from recipe.prepare.answer import Sampling
from recipe.prepare.local_engine import LocalEngine
from recipe.run.cli import main
from recipe.training.export import export_hf
from tests.numerics.decode_models import BLOCK, Oracle, drafter_parts, prompts, tiny_target
from tests.tiny import MASK, make_target

NEW, NAN = 20, float("nan")


def poison(folder: Path, token: int) -> None:
    """NaN in one row of a tiny target's embedding, which is the head of its own as well no longer."""
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][token] = NAN
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_a_row_with_one_such_logit_has_no_token(value: float) -> None:
    logits = torch.tensor([[0.5, 2.0, 1.0]] * 3)
    logits[1, 0] = value
    assert most_likely(logits).tolist() == [1, NO_TOKEN, 1]
    for temperature in (0.0, 0.7):
        drawn = Sampler(temperature)(logits, 5).tolist()
        assert drawn[1] == NO_TOKEN and min(drawn[0], drawn[2]) >= 0
    assert most_likely(logits.bfloat16()).tolist() == [1, NO_TOKEN, 1]


@pytest.fixture(scope="module")
def healthy() -> nn.Module:
    return tiny_target("llama")


@pytest.fixture(scope="module")
def answers(healthy: nn.Module) -> list[list[int]]:
    return [plain_generate(healthy, one, NEW).tokens for one in prompts(4, seed=5)]


def spoilt(model: nn.Module, token: int, value: float = NAN) -> nn.Module:
    """The model as it is until ``token`` is read."""
    model = copy.deepcopy(model)
    model.get_input_embeddings().weight.data[token, 3] = value
    return model


@pytest.fixture(scope="module")
def breaking(healthy: nn.Module, answers: list[list[int]]) -> tuple[nn.Module, int, int]:
    """A target that breaks in the answer to one prompt only: (model, number of the prompt, place behind the token)."""
    ids = prompts(4, seed=5)
    for number in (2, 1, 3):
        others = {t for i, answer in enumerate(answers) if i != number for t in [*answer, *ids[i].tolist()]}
        for token in answers[number][1:-8]:
            if token not in others and token not in ids[number].tolist():
                first = answers[number].index(token)
                return spoilt(healthy, token), number, len(ids[number]) + first + 1
    raise AssertionError("no token stands in one answer only: choose other prompts")


def decoder_with(target: nn.Module, healthy: nn.Module) -> SpeculativeDecoder:
    """Every draft is right, so the token that breaks the target is read only where its answer has it."""
    return SpeculativeDecoder(target, Oracle(healthy))


def whole(target: nn.Module) -> ShardedTarget:
    return ShardedTarget(target.model, target.lm_head.weight.detach(), torch.device("cpu"))


WAYS: dict[str, Callable[[nn.Module, nn.Module, list[torch.Tensor], int], Any]] = {
    "plain": lambda t, h, ids, n: plain_generate(t, ids[n], NEW),
    "plain, sampled": lambda t, h, ids, n: plain_generate(t, ids[n], NEW, 1e-6),  # noise too small to change a choice
    "plain, a batch": lambda t, h, ids, n: plain_batch(t, ids, NEW, 0.0, (), range(4)),
    "speculative": lambda t, h, ids, n: decoder_with(t, h).generate(ids[n], NEW),
    "speculative, a batch": lambda t, h, ids, n: generate_batch(decoder_with(t, h), ids, NEW, 0.0, (), range(4)),
    "first rank of many": lambda t, h, ids, n: decoder_with(whole(t), h).generate(ids[n], NEW),
    "measured": lambda t, h, ids, n: measure(decoder_with(t, h), [Held(i, "", "") for i in ids], NEW),
    "measured in batches": lambda t, h, ids, n: measure(
        decoder_with(t, h), [Held(i, "", "") for i in ids], NEW, batch_size=3
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_target_that_breaks_on_the_way(way: str, healthy: nn.Module, breaking: tuple[nn.Module, int, int]) -> None:
    target, number, position = breaking
    with pytest.raises(NotFinite, match="the target's logits are not finite") as caught:
        WAYS[way](target, healthy, prompts(4, seed=5), number)
    alone = way in ("plain", "plain, sampled", "speculative", "first rank of many")
    # A block is one forward, in which attention multiplies what it must not see by zero: NaN comes through.
    earliest = position if "speculative" not in way and way != "first rank of many" else position - BLOCK + 1
    assert caught.value.prompt == (0 if alone else number) and earliest <= caught.value.position <= position


@pytest.mark.parametrize("way", WAYS)
def test_a_target_that_is_broken_from_the_start(way: str, healthy: nn.Module) -> None:
    """Without a check drafter and target would agree on token 0 for ever: tau would be the block's size."""
    target, ids = copy.deepcopy(healthy), prompts(4, seed=5)
    target.lm_head.weight.data[7] = NAN
    with pytest.raises(NotFinite) as caught:
        WAYS[way](target, healthy, ids, 0)
    assert (caught.value.model, caught.value.prompt, caught.value.position) == ("target", 0, len(ids[0]))


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.mlp.up_proj.weight", "norm.weight"])
@pytest.mark.parametrize("together", [1, 3])
def test_a_broken_drafter(name: str, together: int, healthy: nn.Module) -> None:
    config, weights = drafter_parts()
    weights[name].view(-1)[5] = float("inf")
    embed, head = healthy.get_input_embeddings().weight.detach(), healthy.lm_head.weight.detach()
    decoder = SpeculativeDecoder(healthy, IncrementalDrafter(config, weights), embed, head)
    ids = prompts(3, seed=5)
    with pytest.raises(NotFinite, match="the drafter's logits") as caught:
        measure(decoder, [Held(one, "", "") for one in ids], NEW, batch_size=together)
    assert (caught.value.prompt, caught.value.position) == (0, len(ids[0]) + 1)


def test_what_pads_a_batch_may_be_anything(healthy: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts behind a row's own count mean nothing, so they are no reason to end."""
    from recipe.decode import batch

    propose, padded = batch._Apart.propose, []

    def pad_with_nothing(self: Any, taps: Any, given: Any, anchors: Any, counts: Any) -> torch.Tensor:
        drafts = propose(self, taps, given, anchors, counts)
        padded.extend(count for count in counts if count < max(counts))
        for row, count in zip(drafts, counts, strict=True):
            row[count:] = NO_TOKEN
        return drafts

    monkeypatch.setattr(batch._Apart, "propose", pad_with_nothing)
    ids = prompts(4, seed=5)
    decoder = SpeculativeDecoder(healthy, Oracle(healthy, errors=0.3))
    found = generate_batch(decoder, ids, NEW, 0.0, (), range(4))
    assert padded and [one.tokens for one in found] == [plain_generate(healthy, one, NEW).tokens for one in ids]


def test_a_mismatch_is_not_judged_by_such_logits(healthy: nn.Module) -> None:
    target, ids = copy.deepcopy(healthy), prompts(1)[0]
    target.lm_head.weight.data[:] = NAN
    with pytest.raises(NotFinite, match="prompt 6"):
        explain_mismatch(target, 6, ids, [1, 2, 3], [1, 5, 3])


def test_the_engine_of_regenerate_names_the_row(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "target", kind="llama")
    engine = LocalEngine(str(folder), batch_size=4)
    ids, sampling = [[20, 31, 44], [60, 71], [88, 90, 91, 93]], Sampling(12)
    before = engine.generate(ids, sampling, [0, 1, 2])
    said = [answer.token_ids or [] for answer in before]
    elsewhere = {t for row in (0, 2) for t in [*said[row], *ids[row]]} | set(ids[1])
    token = next(t for t in said[1][:-1] if t not in elsewhere)
    engine.model.get_input_embeddings().weight.data = engine.model.get_input_embeddings().weight.data.clone()
    engine.model.lm_head.weight = nn.Parameter(engine.model.lm_head.weight.data.clone())  # no longer tied
    engine.model.get_input_embeddings().weight.data[token] = NAN
    with pytest.raises(NotFinite) as caught:
        engine.generate(ids, sampling, [0, 1, 2])
    position = len(ids[1]) + said[1].index(token) + 1
    assert (caught.value.model, caught.value.prompt, caught.value.position) == ("target", 1, position)
    with pytest.raises(NotFinite):
        engine.generate(ids, Sampling(12, temperature=1e-6), [0, 1, 2])
    assert not engine.model._forward_hooks
    engine.model.get_input_embeddings().weight.data[token] = 0.0
    assert len(engine.generate(ids, sampling, [0, 1, 2])) == 3


def test_regenerate_names_the_prompt_and_writes_no_answer_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, rows, output = make_target(tmp_path / "target", kind="llama"), tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    poison(folder, token=21)
    rows.write_text("".join(json.dumps({"id": f"chat{i}", "prompt": f"w{20 + i} w40"}) + "\n" for i in range(3)))
    command = ["regenerate", "--input", str(rows), "--output", str(output), "--model", str(folder), "--engine", "local",
               "--max-tokens", "4", "--batch-size", "1"]  # fmt: skip
    assert main(command) == 1
    assert "error: prompt chat1, position " in capsys.readouterr().err
    assert "chat1" not in output.read_text()


def test_evaluate_refuses_a_target_of_nan_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line, on an export and a target with one NaN row of the embedding that every prompt uses."""
    from recipe.config.schema import Drafter
    from recipe.drafter.model import DFlashDrafter
    from recipe.model_files.shapes import TargetShape

    folder = make_target(tmp_path / "target", kind="llama")
    shape = TargetShape.resolve(str(folder))
    section = Drafter(num_layers=2, block_size=8, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                      intermediate_size=64)  # fmt: skip
    config = DrafterConfig.build(section, shape, [1, 3, 5], MASK, dtype="float32")
    export = export_hf(DFlashDrafter(config).initialize(0).state_dict(), config, tmp_path / "export", "float32")
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"w20 w{30 + i}"}) + "\n" for i in range(3)))
    command = ["evaluate", str(export or tmp_path / "export"), "--target", str(folder), "--prompts", str(rows),
               "--max-new-tokens", "16", "--json", str(tmp_path / "found.json")]  # fmt: skip
    assert main(command) == 0 and json.loads((tmp_path / "found.json").read_text())["tau"] >= 1
    (tmp_path / "found.json").unlink()
    poison(folder, token=20)
    capsys.readouterr()
    for more in ([], ["--batch-size", "2"], ["--temperature", "0.7"]):
        assert main([*command, *more]) == 1
        printed = capsys.readouterr()
        assert "error: prompt 0, position " in printed.err and "the target's logits are not finite" in printed.err
        assert "tau" not in printed.out and not (tmp_path / "found.json").exists()
