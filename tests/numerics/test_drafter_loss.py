"""The frozen-head losses against float64 with all logits in memory; every objective's gradient against autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recipe.config.schema import Objective as Section
from recipe.drafter.batch import MicroBatch, assemble
from recipe.objective.loss import row_losses
from recipe.objective.objective import Objective


def dense_rows(
    hidden: Tensor, head: Tensor, labels: Tensor, teacher: Tensor, temperature: float, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(cross-entropy, mixed, teacher entropy) of each row in float64, by the definitions."""
    hidden, head, teacher = hidden.double(), head.double(), teacher.double()
    log_p = (hidden @ head.T).log_softmax(-1)
    log_t = (teacher @ head.T / temperature).log_softmax(-1)
    ce = F.nll_loss(log_p, labels, reduction="none")
    kl = F.kl_div(log_p, log_t, reduction="none", log_target=True).sum(-1)
    return ce, share * kl + (1 - share) * ce, -(log_t.exp() * log_t).sum(-1)


def inputs(rows: int, width: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + vocab)
    head = (torch.randn(vocab, width, generator=generator) * 3 / width**0.5).to(dtype)
    hidden, teacher = (torch.randn(rows, width, generator=generator).to(dtype) for _ in range(2))
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[: rows // 2] = (hidden[: rows // 2].float() @ head.float().T).argmax(-1)
    return hidden, head, labels, teacher


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-6), (torch.bfloat16, 1e-3)])
@pytest.mark.parametrize("rows,vocab", [(37, 501), (3, 248_320)])
def test_rows_equal_float64(dtype: torch.dtype, bound: float, rows: int, vocab: int) -> None:
    hidden, head, labels, teacher = inputs(rows, 64, vocab, dtype)
    exact_input = hidden.double().requires_grad_()
    exact = dense_rows(exact_input, head, labels, teacher, 0.7, 0.6)
    hidden.requires_grad_()
    ours = row_losses(
        hidden, head, labels, teacher, temperature=0.7, soft_weight=0.6, need_both=True, chunk_elements=4 * vocab
    )
    for a, b in zip((ours.cross_entropy, ours.mixed, ours.entropy), exact, strict=True):
        assert a is not None and a.dtype == torch.float32
        assert (a.double() - b).abs().max() < bound * b.abs().max()
    assert torch.equal(ours.correct.bool(), (hidden.double() @ head.double().T).argmax(-1) == labels)
    scale = torch.linspace(0.2, 2.0, rows)
    (ours.mixed * scale + ours.cross_entropy * scale.flip(0)).sum().backward()
    (exact[1] * scale.double() + exact[0] * scale.flip(0).double()).sum().backward()
    assert hidden.grad is not None and exact_input.grad is not None
    error = (hidden.grad.double() - exact_input.grad).norm() / exact_input.grad.norm()
    assert error < (1e-4 if dtype == torch.float32 else 1e-2)  # an fp32 matmul sums 248,320 terms


def test_memory_does_not_grow_with_rows() -> None:
    """No tensor of more than one chunk's logits is ever made, however many rows there are."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return out

    vocab, chunk = 4001, 8 * 4001
    for rows in (16, 400):
        hidden, head, labels, teacher = inputs(rows, 32, vocab, torch.float32)
        with Largest() as seen:
            row_losses(hidden.requires_grad_(), head, labels, teacher, chunk_elements=chunk).mixed.sum().backward()
        assert seen.elements == head.numel()
        assert chunk < head.numel() < rows * vocab or rows == 16


def test_no_gradient_is_formed_in_evaluation() -> None:
    hidden, head, labels, teacher = inputs(9, 16, 50, torch.float32)
    with torch.no_grad():
        losses = row_losses(hidden.requires_grad_(), head, labels, teacher)
    assert not losses.mixed.requires_grad
    hard = row_losses(hidden, head, labels)
    assert hard.entropy is None and torch.equal(hard.cross_entropy, hard.mixed)


BLOCK, WIDTH, VOCAB = 6, 16, 61


def block_batch(documents: Sequence[int], seed: int = 0, slots: int | None = None) -> MicroBatch:
    rng, total = np.random.default_rng(seed), sum(documents)
    anchors = [np.sort(rng.permutation(n - 1)[: max(1, n // 4)]) for n in documents]
    ids, mask = rng.integers(0, VOCAB, total), rng.random(total) < 0.75
    generator = torch.Generator().manual_seed(seed)
    taps, last = (torch.randn(total, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return assemble(ids, mask, list(documents), anchors, [taps], last, slots)


def naive_objective(section: Section, hidden: Tensor, batch: MicroBatch, head: Tensor) -> tuple[Tensor, float]:
    """(loss sum, denominator) by loops over blocks and slots, from all the logits."""
    assert batch.last_hidden is not None
    total, weight = hidden.sum() * 0.0, 0.0
    blocks = hidden.view(-1, BLOCK, WIDTH)
    gamma = section.gamma or 4.0
    for i, (anchor, keep, stop) in enumerate(zip(batch.host.anchors, batch.host.keep, batch.host.stops, strict=True)):
        slots = [o for o in range(1, BLOCK) if keep and anchor + o < stop and batch.host.loss_mask[anchor + o]]
        ce, mixed = {}, {}
        for o in slots:
            row = int(anchor) + o
            log_p = (head @ blocks[i, o]).log_softmax(0)
            teacher = (head @ batch.last_hidden[row - 1] / section.temperature).softmax(0)
            ce[o] = -log_p[batch.input_ids[row]]
            kl = (teacher * (teacher.log() - log_p)).sum()
            share = section.soft_weight if section.soft_labels else 0.0
            mixed[o] = share * kl + (1 - share) * ce[o]
        for o in slots:
            if section.loss == "dpace":
                confidence = {s: (1 - section.dpace_alpha) * (-ce[s]).exp() + section.dpace_alpha for s in slots}
                prefixes = [torch.stack([confidence[s] for s in slots if s <= j]).prod() for j in slots if j >= o]
                total, weight = total + torch.stack(prefixes).sum().detach() * mixed[o], weight + 1.0
            else:
                decay = float(np.exp(-(o - 1) / gamma))
                total, weight = total + decay * mixed[o], weight + decay
        accepted = sum((torch.stack([-ce[s] for s in slots if s <= o]).sum().exp() for o in slots), hidden.sum() * 0.0)
        total = total - section.acceptance_weight * accepted
    return total, weight


OBJECTIVES = {
    "hard": Section(loss="dflash", soft_labels=False, gamma=3.0),
    "soft": Section(loss="dflash", soft_labels=True, temperature=1.0, gamma=3.0),
    "mixed": Section(loss="dflash", soft_labels=True, temperature=0.6, soft_weight=0.7),
    "dpace": Section(loss="dpace", soft_labels=False),
    "dpace-soft": Section(loss="dpace", soft_labels=True, soft_weight=0.5, dpace_alpha=0.2),
    "acceptance": Section(loss="dflash", soft_labels=False, acceptance_weight=0.8),
    "everything": Section(loss="dpace", soft_labels=True, soft_weight=0.9, acceptance_weight=0.3, temperature=1.5),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_and_gradient_equal_the_definition(name: str) -> None:
    section, batch = OBJECTIVES[name], block_batch((19, 7, 33), slots=17)
    head = torch.randn(VOCAB, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 0.7
    hidden = torch.randn(17 * BLOCK, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    results, objective = [], Objective(section, BLOCK)
    definitions = (
        lambda h: objective.sums(h, batch, head).loss_sum,
        lambda h: naive_objective(section, h, batch, head)[0],
    )
    for compute in definitions:
        leaf = hidden.clone().requires_grad_()
        loss = compute(leaf)
        loss.backward()
        results.append((loss.item(), leaf.grad))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-7)  # slot weights are fp32
    assert results[0][1] is not None and results[1][1] is not None
    assert (results[0][1] - results[1][1]).abs().max() < 1e-6 * results[1][1].abs().max()
    assert objective.supervised_weight(batch) == pytest.approx(naive_objective(section, hidden, batch, head)[1])


def test_sums_do_not_depend_on_how_documents_are_grouped() -> None:
    """Two micro-batches add up to the one that holds both: loss, weight and every metric."""
    objective = Objective(OBJECTIVES["everything"], BLOCK)
    head = torch.randn(VOCAB, WIDTH, dtype=torch.float64)
    whole = block_batch((19, 26))
    cut = 19
    parts = []
    for (start, stop), own in zip(whole.host.spans, (whole.host.anchors < cut, whole.host.anchors >= cut), strict=True):
        assert whole.last_hidden is not None
        local = whole.host.anchors[own] - start
        ids, mask = whole.input_ids[start:stop].numpy(), whole.host.loss_mask[start:stop]
        taps, last = [t[start:stop] for t in whole.taps], whole.last_hidden[start:stop]
        parts.append(assemble(ids, mask, [stop - start], [local], taps, last))
    hidden = torch.randn(len(whole.anchors) * BLOCK, WIDTH, dtype=torch.float64)
    split = hidden.split([len(p.anchors) * BLOCK for p in parts])
    one = objective.sums(hidden, whole, head)
    many = [objective.sums(h, p, head) for h, p in zip(split, parts, strict=True)]
    assert one.loss_sum.item() == pytest.approx(sum(m.loss_sum.item() for m in many))
    assert objective.supervised_weight(whole) == pytest.approx(sum(objective.supervised_weight(p) for p in parts))
    for name, (numerator, denominator) in one.metrics.items():
        assert numerator.item() == pytest.approx(sum(m.metrics[name][0].item() for m in many)), name
        assert denominator.item() == pytest.approx(sum(m.metrics[name][1].item() for m in many)), name


def test_metrics_count_prefixes_of_whole_blocks_only() -> None:
    """Hidden states that name a token outright: the accepted prefix is known by construction."""
    ids = np.arange(20) % VOCAB
    batch = assemble(ids, np.ones(20), [20], [np.array([1, 3, 17])], [torch.zeros(20, VOCAB)])
    head = torch.eye(VOCAB) * 9
    said = ids[np.array([[1], [3], [17 - 17]]) + np.arange(BLOCK)]
    said[2, :3] = ids[17:20]
    said[0, 3] = 60  # first block: two right, then wrong, then right again
    hidden = F.one_hot(torch.from_numpy(said.reshape(-1)), VOCAB).float()
    metrics = Objective(Section(loss="dflash", soft_labels=False), BLOCK).sums(hidden, batch, head).metrics
    value = {name: (n.item(), d.item()) for name, (n, d) in metrics.items()}
    assert value["tau_est"] == (3 + 6, 2)  # the third block runs past the end: not counted
    assert value["acc@1"] == (3, 3) and value["acc@3"] == (1, 2) and value["acc@5"] == (2, 2)


def test_zero_weight_batch_gives_zero_loss_and_gradients() -> None:
    batch = block_batch((9,))
    batch = replace(batch, host=replace(batch.host, loss_mask=np.zeros(9, bool)))
    hidden = torch.randn(len(batch.anchors) * BLOCK, WIDTH, requires_grad=True)
    for section in OBJECTIVES.values():
        objective = Objective(section, BLOCK)
        sums = objective.sums(hidden, batch, torch.randn(VOCAB, WIDTH))
        assert objective.supervised_weight(batch) == 0.0 and sums.loss_sum.item() == 0.0
        sums.loss_sum.backward()
        assert hidden.grad is not None and hidden.grad.count_nonzero() == 0
