"""Without a GPU, transformers' own torch functions must serve the Gated DeltaNet, not fla's Triton kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recipe.check import resolve
from recipe.config import load_config
from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape
from recipe.target.verify import verify_target

MODEL = {
    "model_type": "qwen3_5_text", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 100,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 12, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip


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


def test_a_fallback_is_known_with_its_reason(tmp_path: Path) -> None:
    """In processes of their own, with packages named fla that are whole, broken as a wrong triton breaks them, or not
    there; transformers catches whatever the import raises and says nothing before the first forward."""
    hybrid, dense = (
        f"TargetShape.from_config({dict(MODEL, layer_types=[kind] * 4, **DELTA if kind == 'linear_attention' else {})})"
        for kind in ("linear_attention", "full_attention")
    )
    kernels = tmp_path / "fla" / "ops" / "gated_delta_rule.py"
    kernels.parent.mkdir(parents=True)
    for folder in (tmp_path / "fla", kernels.parent):
        (folder / "__init__.py").touch()

    def why(shape: str, device: str, hidden: bool = False) -> str:
        hide = "sys.modules['fla'] = None\n" if hidden else ""
        code = f"import sys\n{hide}from recipe.model_files.shapes import TargetShape\n"
        code += "from recipe.target import cpu_kernels\n"
        code += f"print(cpu_kernels.why_torch_kernels({shape}, {device!r}))"
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    kernels.write_text("def chunk_gated_delta_rule(): ...")
    assert why(hybrid, "cuda") == why(dense, "cpu") == "None"
    assert "need a GPU" in why(hybrid, "cpu")
    kernels.write_text("raise RuntimeError('triton is too old')")
    assert "RuntimeError: triton is too old" in why(hybrid, "cuda")
    assert "cannot be used" in why(hybrid, "cuda", hidden=True) and why(dense, "cuda", hidden=True) == "None"


def test_gpus_without_fla_are_refused_before_a_launch(monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
    config = resolve(load_config(repository / "ds_configs/demo.json", ["dflash.layout.device=cuda"]), gpus=4)
    shape = TargetShape.resolve(config.dflash.target.path)
    monkeypatch.setattr(sys, "path", [])  # nothing is installed
    with pytest.raises(ConfigError, match="flash-linear-attention is not installed") as caught:
        verify_target(config, shape)
    assert caught.value.field == "dflash.target.allow_torch_kernels"
    monkeypatch.undo()
    for setting in ("dflash.layout.device=cpu", "dflash.target.allow_torch_kernels=true"):
        overrides = ["dflash.layout.device=cuda", setting]
        verify_target(resolve(load_config(repository / "ds_configs/demo.json", overrides), gpus=4), shape)
