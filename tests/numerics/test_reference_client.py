"""The reference client (PyPI `dflash`, test-only) loads our export and decodes as we do: same tokens, same tau."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from recipe.decode.drafter_cache import IncrementalDrafter
from recipe.decode.speculative import SpeculativeDecoder
from recipe.drafter.config import FULL, SLIDING
from recipe.drafter.init_from import load_drafter
from recipe.errors import ConfigError
from recipe.training.export import export_hf, load_export
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


def test_what_the_reference_client_saves_can_be_started_from(tmp_path: Path) -> None:
    """`drafter.init_from` in the z-lab layout, made by their own classes; what differs is refused by name."""
    wanted, _ = drafter_parts(5)
    data = {key: value for key, value in wanted.to_dict().items() if key not in ("architectures", "dtype")}
    theirs = client.DFlashDraftModel(Qwen3Config(**data)).float()
    theirs.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["architectures"] == ["DFlashDraftModel"]
    config, weights = load_drafter(tmp_path, wanted)
    assert {name: tensor.shape for name, tensor in theirs.state_dict().items()} == {
        name: tensor.shape for name, tensor in weights.items()
    }
    assert all(torch.equal(tensor, weights[name]) for name, tensor in theirs.state_dict().items())
    changes = {"block_size": BLOCK + 2, "target_layer_ids": (0, 1), "mask_token_id": 7, "head_dim": 16}
    for name, value in changes.items():
        with pytest.raises(ConfigError, match=f"its {name} is .*{re.escape(repr(getattr(config, name)))}"):
            load_drafter(tmp_path, replace(wanted, **{name: value}))
