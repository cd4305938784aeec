"""The fused kernel equals the torch definition in float64: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

CASES = [(5, 501), (3, 4096), (3, 9001), (1, 248_320)]


def check(device: str) -> int:
    """Every combination of teacher, gradients and need_both on ragged widths; returns how many were compared."""
    from recipe.objective.fused_rows import fused_rows
    from recipe.objective.loss import rows_in_torch

    generator, compared = torch.Generator().manual_seed(0), 0
    for count, width in CASES:
        for soft, wanted, both in [(0, 0, 0), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 1, 0), (1, 1, 1)]:
            logits = torch.randn(count, width, generator=generator) * 5 - 40
            teacher = torch.randn(count, width, generator=generator) * 4 + 20 if soft else None
            labels = torch.randint(0, width, (count,), generator=generator)
            labels[0] = logits[0].argmax()
            parts = [x if x is None else x.to(device) for x in (logits, teacher, labels)]
            ours = fused_rows(*parts, 0.7, 0.6, torch.float32, bool(wanted), bool(both))
            wide = (logits.double(), None if teacher is None else teacher.double(), labels)
            exact = rows_in_torch(*wide, 0.7, 0.6, torch.float64, bool(wanted), bool(both))
            assert [x is None for x in ours] == [x is None for x in exact], (soft, wanted, both)
            for got, want in zip(ours, exact, strict=True):
                if got is not None and want is not None:
                    error = (got.double().cpu() - want).abs().max() / want.abs().max()
                    assert error < 2e-6, (count, width, soft, wanted, both, error)
                    compared += 1
            assert torch.equal(ours[0][2].cpu().double(), exact[0][2])
    return compared


def test_interpreted() -> None:
    """In its own process: Triton decides at its import whether it interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == 4 * (1 + 2 + 2 + 1 + 2 + 3)


@pytest.mark.gpu
def test_compiled() -> None:
    check("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-5), (torch.bfloat16, 1e-3)])
def test_row_losses_on_a_gpu(dtype: torch.dtype, bound: float) -> None:
    """Through the real head: loss and hidden gradient against the CPU's float64 path, at the largest vocabulary."""
    from recipe.objective.loss import row_losses

    generator = torch.Generator().manual_seed(1)
    hidden, teacher = (torch.randn(37, 256, generator=generator).to(dtype) for _ in range(2))
    head = (torch.randn(248_320, 256, generator=generator) / 8).to(dtype)
    labels = torch.randint(0, 248_320, (37,), generator=generator)
    results = []
    for place, kind in (("cuda", dtype), ("cpu", torch.float64)):
        rows = hidden.to(place, kind).requires_grad_()
        losses = row_losses(
            rows, head.to(place, kind), labels.to(place), teacher.to(place, kind), temperature=0.8, soft_weight=0.5,
            need_both=True, chunk_elements=8 * 248_320,
        )  # fmt: skip
        (losses.mixed + 0.3 * losses.cross_entropy).sum().backward()
        assert rows.grad is not None
        results.append([x.detach().double().cpu() for x in (losses.mixed, losses.cross_entropy, rows.grad)])
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() / want.norm() < (
            bound if got.ndim == 1 else max(bound, 5e-3 * (dtype != torch.float32))
        )


if __name__ == "__main__":
    print(check("cpu"))
