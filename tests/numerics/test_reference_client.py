"""The reference client (PyPI `dflash`, test-only) loads our export and decodes as we do: same tokens, same tau."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recipe.decode.drafter_cache import IncrementalDrafter
from recipe.decode.speculative import SpeculativeDecoder
from recipe.drafter.config import FULL, SLIDING
from recipe.export import export_hf, load_export
from tests.numerics.decode_models import BLOCK, drafter_parts, prompts, tiny_target

client = pytest.importorskip("dflash.model", reason="the reference client is not installed: pip install dflash==0.1.0")

LAYOUTS: dict[str, dict] = {
    "full": {},
    "sliding and causal": {"layer_types": [SLIDING, SLIDING, FULL], "window": 8, "causal": [True, True, False]},
    "sliding": {"layer_types": [SLIDING] * 3, "window": 8},
    "causal": {"causal": [True] * 3},
}


def agreeing(target: torch.nn.Module) -> torch.nn.Module:
    """The same target, with most of its head turned down: few likely tokens, so that a random drafter hits some."""
    with torch.no_grad():
        target.lm_head.weight[2:].mul_(0.05)
    return target


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(request: pytest.FixtureRequest) -> torch.nn.Module:
    return agreeing(tiny_target(request.param))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_tokens_and_same_tau(target: torch.nn.Module, tmp_path: Path, layout: str) -> None:
    config, weights = drafter_parts(5, **LAYOUTS[layout])
    folder = export_hf(weights, config, tmp_path / "export", "float32")
    theirs = client.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    assert theirs.block_size == BLOCK and list(theirs.target_layer_ids) == list(config.target_layer_ids)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    embed, head = target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach()
    ours = SpeculativeDecoder(target, IncrementalDrafter(*load_export(folder)), embed, head)
    committed, rates = 0, set()
    client._cuda_time = lambda: 0.0  # its clock synchronises a GPU that a CPU machine does not have
    for prompt in prompts(4, seed=4):
        mine = ours.generate(prompt, 18)
        stop = mine.tokens[11]
        for stops in ([], [stop]):
            mine = ours.generate(prompt, 18, stop_ids=set(stops))
            got = client.dflash_generate(theirs, target, prompt[None], 18, stops or None, return_stats=True)
            assert got.output_ids[0, len(prompt) :].tolist() == mine.tokens
            assert got.acceptance_lengths == mine.accepted
            committed += sum(mine.accepted)
            rates |= set(mine.accepted)
    assert committed > 60 and len(rates) > 1, "drafts that are never accepted compare nothing"
