"""Without a GPU, transformers' own torch functions must serve the Gated DeltaNet, not fla's Triton kernels."""

from __future__ import annotations

import pytest
import torch

from recipe.target.cpu_kernels import FUNCTIONS, use_torch_kernels_on_cpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU machine the kernels stay")
def test_torch_versions_are_put_back_and_run() -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as module

    use_torch_kernels_on_cpu()
    assert use_torch_kernels_on_cpu() == []  # a second call finds nothing to do
    for name in FUNCTIONS:
        assert getattr(module, name).__module__ == module.__name__ and not hasattr(getattr(module, name), "__wrapped__")
    queries, values = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 4)
    decay, beta = -torch.rand(1, 5, 2), torch.rand(1, 5, 2)
    output, _ = module.torch_chunk_gated_delta_rule(queries, queries, values, decay, beta)
    assert output.shape == (1, 5, 2, 4) and output.isfinite().all()
