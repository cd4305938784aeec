"""The golden training steps of an independent trainer: hidden output, loss, D-PACE and every gradient norm."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recipe.config.schema import Objective as Section
from recipe.drafter.batch import MicroBatch, assemble
from recipe.drafter.config import SLIDING, DrafterConfig
from recipe.drafter.model import DFlashDrafter
from recipe.objective.objective import Objective

GOLDEN = Path(__file__).parent / "golden"
OBJECTIVES = {
    "dflash_gamma_4.0": Section(loss="dflash", soft_labels=False, gamma=4.0),
    "dflash_gamma_None": Section(loss="dflash", soft_labels=False, gamma=1e12),
    "dpace_gamma_None": Section(loss="dpace", soft_labels=False, dpace_alpha=0.5),
}


class Step:
    """One golden file: the drafter in float64 and its two rows, packed as two documents of one micro-batch."""

    def __init__(self, name: str) -> None:
        facts = json.loads((GOLDEN / f"dflash_step_{name}.json").read_text())
        self.tensors = load_file(GOLDEN / f"dflash_step_{name}.safetensors")
        self.expected = facts["expected"]
        shape = {k: v for k, v in facts["config"].items() if k != "dpace_alpha"}
        types = tuple(shape.pop("layer_types"))
        self.config = DrafterConfig(
            **{k: tuple(v) if isinstance(v, list) else v for k, v in shape.items()},
            layer_types=types,
            num_target_layers=12,
            in_block_causal=tuple(kind == SLIDING for kind in types),  # that trainer's convention
            dtype="float64",
        )
        self.drafter = DFlashDrafter(self.config, "eager").double()
        prefix = "drafter."
        self.drafter.load_state_dict({k[len(prefix) :]: v for k, v in self.tensors.items() if k.startswith(prefix)})
        self.embedding, self.head = self.tensors["target.embed"].double(), self.tensors["target.head"].double()
        self.keep = self.tensors["keep"].bool()

    def batch(self) -> MicroBatch:
        ids, mask, taps = (self.tensors[k] for k in ("input_ids", "loss_mask", "taps"))
        rows, length = ids.shape
        anchors = [self.tensors["anchors"][r][self.keep[r]].numpy() for r in range(rows)]
        packed = taps.double().reshape(rows * length, -1).split(self.config.hidden_size, dim=1)
        flat = (x.reshape(-1).numpy() for x in (ids, mask.bool()))
        return assemble(*flat, [length] * rows, anchors, [t.contiguous() for t in packed])


@pytest.fixture(scope="module", params=["full", "sliding"])
def step(request: pytest.FixtureRequest) -> Step:
    return Step(request.param)


def test_hidden_output_matches(step: Step) -> None:
    batch = step.batch()
    hidden = step.drafter(batch, step.embedding).view(len(batch.anchors), step.config.block_size, -1)
    expected = step.tensors["output_hidden"].double()
    expected = expected.view(*step.keep.shape, step.config.block_size, -1)[step.keep]
    # SpecForge's rotary tables and norms are fp32.
    assert (hidden - expected).abs().max() / expected.abs().max() < 1e-5


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_norms_match(step: Step, name: str) -> None:
    expected, batch = step.expected[name], step.batch()
    objective = Objective(OBJECTIVES[name], step.config.block_size)
    step.drafter.zero_grad()
    sums = objective.sums(step.drafter(batch, step.embedding), batch, step.head)
    assert sums.loss_sum.item() == pytest.approx(expected["numerator"], rel=1e-5)
    if name.startswith("dflash"):
        assert objective.supervised_weight(batch) == pytest.approx(expected["denominator"], rel=1e-6)
    hits = sum(float(sums.metrics[f"acc@{k}"][0]) for k in range(1, step.config.block_size))
    rows = sum(float(sums.metrics[f"acc@{k}"][1]) for k in range(1, step.config.block_size))
    assert hits / rows == pytest.approx(expected["accuracy"], abs=1e-9)
    (sums.loss_sum / expected["denominator"]).backward()
    norms = {k: p.grad.norm().item() for k, p in step.drafter.named_parameters() if p.grad is not None}
    assert norms.keys() == expected["grad_norm"].keys()
    worst = max(abs(norms[k] / v - 1) for k, v in expected["grad_norm"].items())
    assert worst < 1e-5, f"{worst:.2e}"


def test_padded_blocks_change_nothing(step: Step) -> None:
    """Slots beyond the anchors are finite and leave loss and gradients as they are."""
    objective = Objective(OBJECTIVES["dflash_gamma_4.0"], step.config.block_size)
    results = []
    for slots in (None, 13):
        batch = step.batch()
        if slots:
            anchors = [batch.host.anchors[batch.host.starts == start] - start for start, _ in batch.host.spans]
            lengths = [stop - start for start, stop in batch.host.spans]
            ids = batch.input_ids.numpy()
            batch = assemble(ids, batch.host.loss_mask, lengths, anchors, batch.taps, slots=slots)
            assert len(batch.anchors) == slots > int(batch.keep.sum())
        step.drafter.zero_grad()
        hidden = step.drafter(batch, step.embedding)
        assert torch.isfinite(hidden).all()
        loss = objective.sums(hidden, batch, step.head).loss_sum
        loss.backward()
        results.append((loss.item(), [p.grad.clone() for p in step.drafter.parameters()]))
    assert np.isclose(results[0][0], results[1][0], rtol=1e-12)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
