"""The sharded target against plain transformers: tiny random models with the real head ratios, fp32 over gloo.

The ranks are forked after the imports; one set of processes per tensor-parallel degree runs every model, because
starting processes costs more than running them.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from recipe.roles.worlds import disable_shm_all_reduce
from recipe.shapes import TargetShape
from recipe.target.capture import TapCapture
from recipe.target.cpu_kernels import use_torch_kernels_on_cpu
from recipe.target.loader import LoadProgress, load_target
from recipe.target.plan_cost import rank_parameters
from recipe.target.shard_plan import ShardPlan

COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.04,
}
HYBRID = COMMON | {"num_hidden_layers": 5, "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
DENSE = COMMON | {"num_hidden_layers": 3, "head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any], float]] = {
    # name: (model type, config, bound on the relative error)
    "qwen3.6-27b ratios": (
        "qwen3_5_text",
        HYBRID
        | {"num_attention_heads": 24, "num_key_value_heads": 4, "intermediate_size": 272}
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 48},
        1e-4,
    ),
    "demo ratios, wide values": (
        "qwen3_5_text",
        HYBRID
        | {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 192, "linear_value_head_dim": 24}
        | {"linear_num_key_heads": 4, "linear_num_value_heads": 12, "attention_bias": True},
        1e-4,
    ),
    "fewer heads than ranks": (
        "qwen3_5_text",
        HYBRID
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48, "num_hidden_layers": 4}
        | {"linear_num_key_heads": 1, "linear_num_value_heads": 3},
        1e-4,
    ),
    "smollm2 ratios, tied, biases": (
        "llama",
        DENSE
        | {
            "hidden_size": 144,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 256,
            "tie_word_embeddings": True,
        }
        | {"attention_bias": True, "mlp_bias": True},
        5e-6,
    ),
    "qwen3": ("qwen3", DENSE | {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 320}, 5e-6),
    "qwen2": ("qwen2", DENSE | {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 100}, 5e-6),
}
DEGREES = (1, 2, 3, 4, 5, 8)
LENGTHS = (70, 33, 1)  # 70 crosses the delta rule's chunk of 64
TRIMMED = (0, 2)  # models that are loaded once more without the layers after the deepest tap
SKIP_IF_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="DeepSpeed would move the model to the GPU")


def taps_of(layers: int) -> list[int]:
    return [0, layers - 2]


def randomise(model: torch.nn.Module) -> None:
    """No parameter may stay at a value (0 or 1) that hides a wrong cut: biases, norms, A_log, dt_bias, conv."""
    generator = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or "conv1d" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)


def batch() -> torch.Tensor:
    """Right-padded batch [3, 70] of random tokens; row i has LENGTHS[i] of them, padding is arbitrary."""
    return torch.randint(
        0, COMMON["vocab_size"], (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(5)
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with one checkpoint per model and its reference: hidden states of each sequence run alone."""
    use_torch_kernels_on_cpu()
    root = tmp_path_factory.mktemp("models")
    for index, (model_type, settings, _) in enumerate(MODELS.values()):
        torch.manual_seed(index)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).float().eval()
        randomise(model)
        shard_size = "200KB" if index == 0 else "1GB"  # the first one in several files
        model.save_pretrained(root / str(index), max_shard_size=shard_size)
        reference = []
        for row, length in zip(batch(), LENGTHS, strict=True):
            with torch.no_grad():
                output = model.model(input_ids=row[None, :length], output_hidden_states=True, use_cache=False)
            states = [output.hidden_states[tap + 1][0] for tap in taps_of(settings["num_hidden_layers"])]
            reference.append([*states, output.last_hidden_state[0]])
        torch.save(reference, root / f"{index}.reference")
    return root


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def run_rank(rank: int, tp: int, root: Path, store: str) -> None:
    """One rank: loads every model at this degree and stores its captures for the parent to compare."""
    torch.set_num_threads(1)  # a forked child must not use its parent's OpenMP threads
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(tp), LOCAL_RANK=str(rank), LOCAL_SIZE=str(tp))
    disable_shm_all_reduce()
    group = None
    if tp > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=tp)
        group = dist.group.WORLD
    results = []
    for index in range(len(MODELS)):
        shape = TargetShape.resolve(str(root / str(index)))
        plan, taps, seen = ShardPlan.build(shape, tp), taps_of(shape.num_layers), list[LoadProgress]()
        arguments = (root / str(index), shape, plan, rank, group, "cpu", torch.float32, taps)
        engine = load_target(*arguments, True, progress=seen.append)
        capture = TapCapture(engine, taps, need_last_hidden=True)
        padded = capture.capture(batch())
        solo = [capture.capture(row[None, :length]) for row, length in zip(batch(), LENGTHS, strict=True)]
        trimmed_taps = []
        if index in TRIMMED:
            trimmed = load_target(*arguments, False)
            assert len(trimmed.module.layers) == max(taps) + 1 and not list(trimmed.module.norm.parameters())
            trimmed_taps = TapCapture(trimmed, taps).capture(batch())
        held = sum(p.nbytes for p in engine.module.parameters())
        assert held == rank_parameters(shape, plan, rank, shape.num_layers, final_norm=True) * 4, "the plan's bytes"
        results.append((padded, solo, trimmed_taps, held, seen[-1].layers_done))
    torch.save(results, root / f"result-{tp}-{rank}")
    if group is not None:
        dist.barrier()
        dist.destroy_process_group()


def launch(tp: int, root: Path) -> list[Any]:
    """Forks ``tp`` ranks and returns their stored results; fails when one of them fails or hangs."""
    store = root / f"store-{tp}"
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, tp, root, str(store))) for rank in range(tp)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 240
    try:
        while any(p.is_alive() for p in ranks) and time.monotonic() < deadline:
            assert all(p.exitcode in (None, 0) for p in ranks), "a rank failed; see its traceback above"
            time.sleep(0.05)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
    assert [p.exitcode for p in ranks] == [0] * tp
    return [torch.load(root / f"result-{tp}-{rank}", weights_only=False) for rank in range(tp)]


@SKIP_IF_CUDA
@pytest.mark.parametrize("tp", DEGREES)
def test_every_degree_equals_plain_transformers(saved: Path, tp: int) -> None:
    ranks = launch(tp, saved)
    for index, (name, (_, settings, bound)) in enumerate(MODELS.items()):
        reference = torch.load(saved / f"{index}.reference")
        padded, solo, trimmed, _, layers_done = ranks[0][index]
        assert layers_done == settings["num_hidden_layers"]
        worst = 0.0
        for row, length in enumerate(LENGTHS):
            for state, expected in enumerate(reference[row]):
                worst = max(worst, relative_error(padded[state][row, :length], expected))
                worst = max(worst, relative_error(solo[row][state][0], expected))
        print(f"tp={tp} {name}: max relative error {worst:.1e}")
        assert worst <= bound, f"{name}: {worst}"
        if index in TRIMMED:
            assert all(torch.equal(a, b) for a, b in zip(trimmed, padded[:-1], strict=True)), "trimming changed a tap"
        for other in ranks[1:]:
            assert all(torch.equal(a, b) for a, b in zip(other[index][0], padded, strict=True)), "ranks disagree"
        if tp > 1:  # a sharded target, not the whole of it on every rank
            assert max(rank[index][3] for rank in ranks) < ranks_whole(saved, index)


def ranks_whole(root: Path, index: int) -> int:
    """Bytes of the whole bare decoder in fp32."""
    model = AutoModel.from_pretrained(root / str(index), dtype=torch.float32)
    return sum(p.nbytes for p in model.parameters())


@SKIP_IF_CUDA
def test_capture_is_bit_equal_to_output_hidden_states(saved: Path) -> None:
    for index, (_, settings, _) in enumerate(MODELS.values()):
        taps = taps_of(settings["num_hidden_layers"])
        model = AutoModelForCausalLM.from_pretrained(saved / str(index), dtype=torch.float32).eval()
        with torch.no_grad():
            output = model.model(input_ids=batch(), output_hidden_states=True, use_cache=False)
        shape = TargetShape.resolve(str(saved / str(index)))
        engine = load_target(
            saved / str(index), shape, ShardPlan.build(shape, 1), 0, None, "cpu", torch.float32, taps, True
        )
        for capture in (TapCapture(model, taps, True), TapCapture(engine, taps, True)):
            states = capture.capture(batch())
            assert all(torch.equal(s, output.hidden_states[tap + 1]) for s, tap in zip(states, taps, strict=False))
            assert torch.equal(states[-1], output.last_hidden_state)
            assert not capture._caught, "captured tensors are kept alive"
            capture.close()


@SKIP_IF_CUDA
def test_bf16_load_keeps_fp32_inv_freq_and_equals_from_pretrained(saved: Path) -> None:
    for index in range(len(MODELS)):
        shape = TargetShape.resolve(str(saved / str(index)))
        plan = ShardPlan.build(shape, 1)
        engine = load_target(saved / str(index), shape, plan, 0, None, "cpu", torch.bfloat16, [0], True)
        plain = AutoModel.from_pretrained(saved / str(index), dtype=torch.bfloat16).eval()
        assert engine.module.rotary_emb.inv_freq.dtype == torch.float32
        assert torch.equal(engine.module.rotary_emb.inv_freq, plain.rotary_emb.inv_freq)
        with torch.no_grad():
            expected = plain(input_ids=batch(), use_cache=False).last_hidden_state
        assert torch.equal(TapCapture(engine, [0], True).capture(batch())[-1], expected)
