"""The sharded target against plain transformers: tiny random models with the real head ratios, fp32 over gloo.

The ranks are forked after the imports; one set of processes per tensor-parallel degree runs every model, because
starting processes costs more than running them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from recipe.engine.worlds import disable_shm_all_reduce
from recipe.model_files.shapes import TargetShape
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
SMALL = DENSE | {
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 72,
    "tie_word_embeddings": True,
}
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
    "qwen3_moe": (
        "qwen3_moe",
        DENSE
        | {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 100, "mlp_only_layers": [1]}
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 72, "norm_topk_prob": True},
        5e-6,
    ),
    "qwen3_5_moe, fused experts, vision-language": (
        "qwen3_5_moe_text",
        HYBRID
        | {"num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 4}
        | {"linear_num_key_heads": 4, "linear_num_value_heads": 12}
        | {"num_experts": 6, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 24},
        1e-4,
    ),
    "qwen3_moe, experts cut finer than 16 bytes": (
        "qwen3_moe",
        DENSE
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        5e-6,
    ),
    "mistral": ("mistral", SMALL | {"sliding_window": 16}, 5e-6),
    "granite": ("granite", SMALL | {"residual_multiplier": 0.5, "embedding_multiplier": 3.0}, 5e-6),
    "smollm3": ("smollm3", SMALL | {"no_rope_layers": [1, 0], "pad_token_id": 0}, 5e-6),
    "gemma2": ("gemma2", SMALL | {"sliding_window": 16, "query_pre_attn_scalar": 16}, 5e-6),
    "gemma3": ("gemma3_text", SMALL | {"sliding_window": 16, "query_pre_attn_scalar": 16}, 5e-6),
}
DEGREES = (1, 2, 3, 4, 5, 8)
LENGTHS = (70, 33, 1)  # 70 crosses the delta rule's chunk of 64
SHARDED = ("qwen3_5_text", "qwen3_moe")  # model types that are saved in several files
TRIMMED = (0, 2)  # models that are loaded once more without the layers after the deepest tap
SKIP_IF_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="DeepSpeed would move the model to the GPU")


def indices_at(tp: int) -> list[int]:
    """The models that are run at this degree: types that merely share the dense rules at three of them."""
    return [
        i
        for i, (_, settings, _) in enumerate(MODELS.values())
        if tp in (1, 2, 5) or not settings.items() >= SMALL.items()
    ]


EXACT_DEGREES = (2, 5)  # with exact_sums too


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
        shard_size = "1GB" if model_type not in SHARDED else "200KB"
        model.save_pretrained(root / str(index), max_shard_size=shard_size)
        if model_type == "qwen3_5_moe_text":
            model.save_pretrained(root / f"{index}.plain")
            make_vision_language(model, root / str(index))
        reference = []
        for row, length in zip(batch(), LENGTHS, strict=True):
            with torch.no_grad():
                output = model.model(input_ids=row[None, :length], output_hidden_states=True, use_cache=False)
            states = [output.hidden_states[tap + 1][0] for tap in taps_of(settings["num_hidden_layers"])]
            reference.append([*states, output.last_hidden_state[0]])
        whole = sum(p.nbytes for p in model.model.parameters())
        torch.save((reference, whole), root / f"{index}.reference")
    return root


def make_vision_language(model: torch.nn.Module, folder: Path) -> None:
    """Rewrites the checkpoint as published ones are: fused experts, a vision tower, multi-token prediction beside."""
    tensors = {f"model.language_model.{name}": value for name, value in model.model.state_dict().items()}
    assert any(name.endswith("layers.0.mlp.experts.gate_up_proj") for name in tensors)
    tensors |= {"lm_head.weight": model.lm_head.weight.data, "mtp.fc.weight": torch.ones(3, 3)}
    save_file(tensors | {"model.visual.patch_embed.weight": torch.ones(3, 3)}, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": text}))


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
    results = {}
    for index in indices_at(tp):
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
        exact = exact_sums(rank, tp, root, index, group) if tp in EXACT_DEGREES else []
        results[index] = (padded, solo, trimmed_taps, held, seen[-1].layers_done, exact)
    torch.save(results, root / f"result-{tp}-{rank}")
    if group is not None:
        dist.barrier()
        dist.destroy_process_group()


def exact_sums(rank: int, tp: int, root: Path, index: int, group: Any) -> list[torch.Tensor]:
    """The padded batch once more, with no sum split over ranks."""
    shape = TargetShape.resolve(str(root / str(index)))
    plan, taps = ShardPlan.build(shape, tp, exact_sums=True), taps_of(shape.num_layers)
    engine = load_target(root / str(index), shape, plan, rank, group, "cpu", torch.float32, taps, True)
    held = sum(p.nbytes for p in engine.module.parameters())
    assert held == rank_parameters(shape, plan, rank, shape.num_layers, final_norm=True) * 4, "the exact plan's bytes"
    kinds = {type(module).__name__ for module in engine.module.modules()}
    assert "GatherShard" in kinds and ("RowShard" not in kinds or shape.moe is not None)
    return TapCapture(engine, taps, need_last_hidden=True).capture(batch())


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
    for index in indices_at(tp):
        name, (_, settings, bound) = list(MODELS.items())[index]
        reference, whole = torch.load(saved / f"{index}.reference")
        padded, solo, trimmed, _, layers_done, exact = ranks[0][index]
        assert layers_done == settings["num_hidden_layers"]
        worst = 0.0
        for row, length in enumerate(LENGTHS):
            for state, expected in enumerate(reference[row]):
                worst = max(worst, relative_error(padded[state][row, :length], expected))
                worst = max(worst, relative_error(solo[row][state][0], expected))
                if tp in EXACT_DEGREES:
                    worst = max(worst, relative_error(exact[state][row, :length], expected))
        print(f"tp={tp} {name}: max relative error {worst:.1e}")
        assert worst <= bound, f"{name}: {worst}"
        if index in TRIMMED:
            assert all(torch.equal(a, b) for a, b in zip(trimmed, padded[:-1], strict=True)), "trimming changed a tap"
        for other in ranks[1:]:
            assert all(torch.equal(a, b) for a, b in zip(other[index][0], padded, strict=True)), "ranks disagree"
            assert all(torch.equal(a, b) for a, b in zip(other[index][5], exact, strict=True)), "ranks disagree"
        if tp > 1:  # a sharded target, not the whole of it on every rank
            assert max(rank[index][3] for rank in ranks) < whole


def aligned(model: torch.nn.Module) -> torch.nn.Module:
    """transformers leaves weights where the file maps them; the last bits of a product depend on that alignment."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def plain_folder(root: Path, index: int) -> Path:
    """The checkpoint as transformers' text model reads it."""
    plain = root / f"{index}.plain"
    return plain if plain.is_dir() else root / str(index)


@SKIP_IF_CUDA
def test_capture_is_bit_equal_to_output_hidden_states(saved: Path) -> None:
    for index, (name, (_, settings, _)) in enumerate(MODELS.items()):
        taps = taps_of(settings["num_hidden_layers"])
        model = aligned(AutoModelForCausalLM.from_pretrained(plain_folder(saved, index), dtype=torch.float32).eval())
        with torch.no_grad():
            output = model.model(input_ids=batch(), output_hidden_states=True, use_cache=False)
        shape = TargetShape.resolve(str(saved / str(index)))
        engine = load_target(
            saved / str(index), shape, ShardPlan.build(shape, 1), 0, None, "cpu", torch.float32, taps, True
        )
        for capture in (TapCapture(model, taps, True), TapCapture(engine, taps, True)):
            states = capture.capture(batch())
            for state, tap in zip(states, taps, strict=False):
                assert torch.equal(state, output.hidden_states[tap + 1]), f"{name}, tap {tap}"
            assert torch.equal(states[-1], output.last_hidden_state)
            assert not capture._caught, "captured tensors are kept alive"
            capture.close()


@SKIP_IF_CUDA
def test_bf16_load_keeps_fp32_inv_freq_and_equals_from_pretrained(saved: Path) -> None:
    for index in range(len(MODELS)):
        shape = TargetShape.resolve(str(saved / str(index)))
        plan = ShardPlan.build(shape, 1)
        engine = load_target(saved / str(index), shape, plan, 0, None, "cpu", torch.bfloat16, [0], True)
        plain = aligned(AutoModel.from_pretrained(plain_folder(saved, index), dtype=torch.bfloat16).eval())
        buffers = dict(plain.rotary_emb.named_buffers())
        assert any(name.endswith("inv_freq") for name in buffers)
        for name, buffer in engine.module.rotary_emb.named_buffers():
            assert buffer.dtype == torch.float32 and torch.equal(buffer, buffers[name]), name
        with torch.no_grad():
            expected = plain(input_ids=batch(), use_cache=False).last_hidden_state
        assert torch.equal(TapCapture(engine, [0], True).capture(batch())[-1], expected)
