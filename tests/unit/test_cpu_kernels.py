"""Without a GPU, transformers' own torch functions must serve the Gated DeltaNet, not fla's Triton kernels."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU machine the kernels stay")
def test_torch_versions_are_put_back_and_run() -> None:
    code = (
        "import torch\n"
        "from transformers.models.qwen3_5 import modeling_qwen3_5 as module\n"
        "from recipe.target.cpu_kernels import FUNCTIONS, use_torch_kernels_on_cpu\n"
        "assert use_torch_kernels_on_cpu(), 'fla was not there: nothing is tested'\n"
        "assert use_torch_kernels_on_cpu() == [], 'a second call finds something to do'\n"
        "for name in FUNCTIONS:\n"
        "    function = getattr(module, name)\n"
        "    assert function.__module__ == module.__name__ and not hasattr(function, '__wrapped__')\n"
        "queries, values = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 4)\n"
        "decay, beta = -torch.rand(1, 5, 2), torch.rand(1, 5, 2)\n"
        "output, _ = module.torch_chunk_gated_delta_rule(queries, queries, values, decay, beta)\n"
        "assert output.shape == (1, 5, 2, 4) and output.isfinite().all()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU machine the kernels stay")
def test_called_first_it_keeps_fla_out_of_the_process() -> None:
    code = (
        "import sys, torch\n"
        "from recipe.target.cpu_kernels import use_torch_kernels_on_cpu\n"
        "use_torch_kernels_on_cpu()\n"
        "from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule as rule\n"
        "q = torch.randn(1, 5, 2, 4)\n"
        "out, _ = rule(q, q, q, -torch.rand(1, 5, 2), torch.rand(1, 5, 2))\n"
        "assert out.isfinite().all() and sys.modules['fla'] is None\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
