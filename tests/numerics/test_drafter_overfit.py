"""Model, labels and loss together: a drafter that has learned one sequence drafts whole blocks of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recipe.config.schema import Objective as Section
from recipe.drafter.batch import assemble
from recipe.drafter.model import DFlashDrafter
from recipe.objective.objective import Objective
from tests.numerics.drafter_oracle import block_hidden, tiny_config


@pytest.mark.parametrize("loss", ["dflash", "dpace"])
def test_overfit_sequence_is_drafted_whole(loss: str) -> None:
    """The naive drafter decodes: slot o must name the token at anchor + o. A shifted label would give tau 1."""
    torch.manual_seed(0)
    config = tiny_config(num_hidden_layers=2, layer_types=("full_attention",) * 2, in_block_causal=(False,) * 2)
    length = 40
    rng = np.random.default_rng(0)
    ids, anchors = rng.integers(0, config.vocab_size - 1, length), np.arange(1, length - config.block_size)
    taps = [torch.randn(length, config.hidden_size) for _ in config.target_layer_ids]
    batch = assemble(ids, np.ones(length), [length], [anchors], taps)
    embedding, head = (torch.randn(config.vocab_size, config.hidden_size) for _ in range(2))
    drafter = DFlashDrafter(config, "eager").initialize(0, std=0.1)
    objective = Objective(Section(loss=loss, soft_labels=False), config.block_size)
    optimizer, weight = torch.optim.AdamW(drafter.parameters(), lr=1e-2), objective.supervised_weight(batch)
    tau = 0.0
    for _ in range(150):
        sums = objective.sums(drafter(batch, embedding), batch, head)
        optimizer.zero_grad()
        (sums.loss_sum / weight).backward()
        optimizer.step()
        tau = (sums.metrics["tau_est"][0] / sums.metrics["tau_est"][1]).item()
        if tau == config.block_size:
            break
    assert tau == config.block_size
    weights, features = dict(drafter.named_parameters()), torch.cat(taps, 1)
    for anchor in (int(anchors[0]), 17, int(anchors[-1])):
        known, mask = embedding[ids[anchor]], embedding[config.mask_token_id]
        hidden = block_hidden(config, weights, features[:anchor], known, mask, anchor)
        drafts = (hidden[1:] @ head.double().T).argmax(-1)
        assert drafts.tolist() == ids[anchor + 1 : anchor + config.block_size].tolist()
