"""A target whose embedding module multiplies (Gemma): training, decoding and the reference client agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from recipe.decode.batch import generate_batch
from recipe.decode.drafter_cache import IncrementalDrafter
from recipe.decode.speculative import SpeculativeDecoder
from recipe.drafter.model import DFlashDrafter
from recipe.model_files.shapes import TargetShape
from recipe.model_files.whole_model import embedding_scale
from recipe.training.export import export_hf, load_export
from tests.numerics.decode_models import HIDDEN, VOCAB, drafter_parts, prompts
from tests.numerics.drafter_oracle import random_batch, random_drafter, tiny_config


@pytest.fixture(scope="module")
def gemma() -> torch.nn.Module:
    """A random Gemma 3 whose text is varied: few likely tokens, so that a random drafter hits some."""
    config = Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=80, num_attention_heads=6, num_key_value_heads=2,
        num_hidden_layers=4, head_dim=16, max_position_embeddings=512, layer_types=["full_attention"] * 4,
        initializer_range=0.15, tie_word_embeddings=False, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        model.lm_head.weight[2:].mul_(0.05)
    return model


def test_the_scale_is_what_the_module_does(gemma: torch.nn.Module) -> None:
    scale = embedding_scale(TargetShape.from_config(gemma.config.to_dict()))
    module, ids = gemma.get_input_embeddings(), torch.arange(1, VOCAB)
    assert torch.allclose(module(ids), module.weight[ids] * scale) and scale == HIDDEN**0.5


def test_decodes_as_the_reference_client_does(gemma: torch.nn.Module, tmp_path: Path) -> None:
    client = pytest.importorskip("dflash.model", reason="the reference client is not installed")
    client._cuda_time = lambda: 0.0
    config, weights = drafter_parts(5)
    config = replace(config, input_embedding_scale=HIDDEN**0.5)
    folder = export_hf(weights, config, tmp_path / "export", "float32")
    theirs = client.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    embed, head = gemma.get_input_embeddings().weight.detach(), gemma.lm_head.weight.detach()
    read, tensors = load_export(folder)
    ours = SpeculativeDecoder(gemma, IncrementalDrafter(read, tensors), embed, head)
    raw = SpeculativeDecoder(gemma, IncrementalDrafter(replace(read, input_embedding_scale=1.0), tensors), embed, head)
    texts, accepted, without = prompts(6, seed=4), [], []
    for prompt in texts:
        mine = ours.generate(prompt, 18)
        got = client.dflash_generate(theirs, gemma, prompt[None], 18, None, return_stats=True)
        assert got.output_ids[0, len(prompt) :].tolist() == mine.tokens and got.acceptance_lengths == mine.accepted
        accepted.append(mine.accepted)
        without.append(raw.generate(prompt, 18).accepted)
    assert accepted != without, "the scale makes no difference to what is drafted: nothing was compared"
    assert [one.accepted for one in generate_batch(ours, texts, 18, 0.0, (), range(6))] == accepted


def test_training_sees_the_scaled_rows() -> None:
    config = tiny_config(input_embedding_scale=7.0)
    batch, table = random_batch(config, [9, 14], 2), torch.randn(config.vocab_size, config.hidden_size)
    scaled = random_drafter(config)
    raw = DFlashDrafter(replace(config, input_embedding_scale=1.0), "eager")
    raw.load_state_dict(scaled.state_dict())
    assert torch.allclose(scaled(batch, table), raw(batch, 7.0 * table), atol=1e-6)
    assert not torch.allclose(scaled(batch, table), raw(batch, table), atol=0.1)
