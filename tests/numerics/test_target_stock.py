"""Model types without a shard plan: DeepSpeed's AutoTP where it is right, a refusal by name where it is not."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from recipe.engine.worlds import disable_shm_all_reduce
from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape
from recipe.model_files.weights import Checkpoint
from recipe.target.capture import TapCapture, layers_of
from recipe.target.cpu_kernels import use_torch_kernels_on_cpu
from recipe.target.logits import refuse_changed_logits
from recipe.target.open import open_target
from recipe.target.stock import check_outputs, check_shares, compare_outputs, load_stock, load_whole
from recipe.target.stock_check import check_without_weights

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="DeepSpeed would move the model to the GPU")
CPU, TAPS = torch.device("cpu"), [0, 1]
SETTINGS: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HYBRID = SETTINGS | {
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
TYPES = {"gpt_neox": SETTINGS, "gpt2": SETTINGS, "olmo2": SETTINGS, "mixtral": SETTINGS, "qwen3_5_text": HYBRID}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    use_torch_kernels_on_cpu()
    root = tmp_path_factory.mktemp("stock")
    for index, (model_type, settings) in enumerate(TYPES.items()):
        torch.manual_seed(index)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).float()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.2 * torch.randn(parameter.shape)
        model.save_pretrained(root / model_type)
    return root


def batch() -> torch.Tensor:
    return torch.randint(0, 61, (3, 40), generator=torch.Generator().manual_seed(1))


def reference(folder: Path) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        output = model(input_ids=batch(), output_hidden_states=True, use_cache=False)
    return [*(output.hidden_states[tap + 1] for tap in TAPS), output.hidden_states[-1]]


@pytest.mark.parametrize("model_type", ["gpt_neox", "gpt2", "olmo2", "mixtral"])
def test_degree_one_is_transformers_itself(saved: Path, model_type: str) -> None:
    folder = saved / model_type
    shape = TargetShape.resolve(str(folder))
    assert (shape.hidden_size, shape.num_layers, shape.num_attention_heads) == (96, 3, 6)
    engine = open_target(str(folder), shape, 1, 0, None, "cpu", torch.float32, TAPS, True)
    states = TapCapture(engine, TAPS, True).capture(batch())
    for found, expected in zip(states, reference(folder), strict=True):
        assert (found - expected).abs().max() <= 5e-6 * expected.abs().max()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    checkpoint = Checkpoint(folder)  # what the drafter reads
    assert torch.equal(checkpoint.embedding(), model.get_input_embeddings().weight)
    assert torch.equal(checkpoint.head(), model.get_output_embeddings().weight)
    trimmed = open_target(str(folder), shape, 1, 0, None, "cpu", torch.float32, [0], False)
    assert len(layers_of(trimmed.module)) == 1
    assert torch.equal(TapCapture(trimmed, [0]).capture(batch())[0], states[0])


def run_rank(rank: int, tp: int, root: Path, store: str) -> None:
    """Loads every type at this degree and stores its taps, or the message with which it was refused."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(tp), LOCAL_RANK=str(rank), LOCAL_SIZE=str(tp))
    disable_shm_all_reduce()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=tp)
    results: dict[str, Any] = {}
    for model_type in TYPES:  # load_stock itself: the hybrid, which has a plan, is one that AutoTP cuts wrongly
        shape = TargetShape.resolve(str(root / model_type))
        arguments = (str(root / model_type), shape, tp, dist.group.WORLD, "cpu", torch.float32, TAPS, True)
        try:
            engine = load_stock(*arguments)
            held = sum(p.nbytes for p in layers_of(engine.module).parameters())
            results[model_type] = (TapCapture(engine, TAPS, True).capture(batch()), held)
        except ConfigError as error:
            results[model_type] = str(error)
        dist.barrier()
    torch.save(results, root / f"result-{rank}")
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_are_exact_or_refused_by_name(saved: Path) -> None:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, 2, saved, str(saved / "store"))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    results = [torch.load(saved / f"result-{rank}", weights_only=False) for rank in range(2)]
    states, held = results[0]["gpt_neox"]
    for found, other, expected in zip(states, results[1]["gpt_neox"][0], reference(saved / "gpt_neox"), strict=True):
        assert (found - expected).abs().max() <= 5e-6 * expected.abs().max()
        assert torch.equal(found, other)
    whole = load_whole(str(saved / "gpt_neox"), TargetShape.resolve(str(saved / "gpt_neox")), torch.float32, TAPS, True)
    assert held < 0.6 * sum(p.nbytes for p in layers_of(whole).parameters())
    for model_type, cause in {
        "olmo2": "does not run",
        "mixtral": "of the layers' weights",
        "gpt2": "cannot cut it",
        "qwen3_5": "qwen3_5",
    }.items():
        for result in results:
            message = result["qwen3_5_text" if model_type == "qwen3_5" else model_type]
            assert isinstance(message, str) and "target_tp = 2" in message, message
            assert f"{model_type} cannot be sharded" in message and cause in message


def test_self_check_names_the_layer_that_is_wrong(saved: Path) -> None:
    shape = TargetShape.resolve(str(saved / "gpt_neox"))
    decoder = load_whole(str(saved / "gpt_neox"), shape, torch.float32, TAPS, True)
    expected = check_outputs(decoder, shape.vocab_size, [0, 1, 2], CPU)
    compare_outputs(decoder, shape, 2, expected, CPU, torch.float32, shape.vocab_size)  # as it is, it passes
    columns = layers_of(decoder)[1].attention.dense.weight
    columns.data = columns.data.roll(16, dims=1)  # each head's output is taken for its neighbour's
    with pytest.raises(ConfigError, match=r"target_tp.*gpt_neox.*layer 1 .*relative error"):
        compare_outputs(decoder, shape, 2, expected, CPU, torch.float32, shape.vocab_size)
    with pytest.raises(ConfigError, match=r"layer 1 "):  # far above rounding in bf16 too
        compare_outputs(decoder, shape, 2, expected, CPU, torch.bfloat16, shape.vocab_size)


def test_ranks_without_work_are_refused(saved: Path) -> None:
    shape = TargetShape.resolve(str(saved / "gpt_neox"))
    check_shares(shape, 5, [0.26, 0.22, 0.21, 0.2, 0.13])
    for tp, shares in ((5, [0.5, 0.5, 0.0, 0.0, 0.0]), (3, [0.5, 0.5, 0.0]), (2, [0.96, 0.96])):  # AutoTP's own doing
        with pytest.raises(ConfigError, match=rf"target_tp = {tp}.*gpt_neox.*does not share it out.*{shares[0]:.0%}"):
            check_shares(shape, tp, shares)


def test_soft_labels_are_refused_where_the_head_is_not_all(saved: Path, tmp_path: Path) -> None:
    granite = AutoConfig.for_model("granite", **SETTINGS | {"logits_scaling": 8.0})
    AutoModelForCausalLM.from_config(granite).save_pretrained(tmp_path / "granite")
    phi = AutoConfig.for_model("phi", **SETTINGS)  # its head has a bias
    AutoModelForCausalLM.from_config(phi).save_pretrained(tmp_path / "phi")
    gemma = TargetShape.from_config({"model_type": "gemma2", **SETTINGS})
    with pytest.raises(ConfigError, match=r"final_logit_softcapping = 30\.0"):  # a default, not in config.json
        refuse_changed_logits(gemma)
    for folder, cause in ((tmp_path / "granite", "logits_scaling = 8.0"), (tmp_path / "phi", "bias")):
        shape = TargetShape.resolve(str(folder))
        with pytest.raises(ConfigError, match=rf"soft_labels.*{cause}"):
            open_target(str(folder), shape, 1, 0, None, "cpu", torch.float32, TAPS, True)
        open_target(str(folder), shape, 1, 0, None, "cpu", torch.float32, TAPS, False)


def test_autotp_is_tried_before_the_launch_without_weights() -> None:
    refused = TargetShape.from_config({"model_type": "olmo2", **SETTINGS})
    with pytest.raises(ConfigError, match=r"target_tp = 2.*olmo2 cannot be sharded.*does not run"):
        check_without_weights(refused, 2, "float32")


@pytest.mark.slow
def test_the_trial_without_weights_agrees_with_the_check_at_the_start() -> None:
    for model_type, cause in {"gpt_neox": None, "gpt2": "cannot cut it", "mixtral": "of the layers' weights"}.items():
        shape = TargetShape.from_config({"model_type": model_type, **SETTINGS})
        if cause is None:
            assert check_without_weights(shape, 2, "float32") is None
            continue
        with pytest.raises(ConfigError, match=rf"target_tp = 2.*{model_type} cannot be sharded.*{cause}"):
            check_without_weights(shape, 2, "float32")


def test_exact_sums_are_refused_where_autotp_adds(saved: Path) -> None:
    shape = TargetShape.resolve(str(saved / "gpt_neox"))
    with pytest.raises(ConfigError, match=r"exact_sums.*gpt_neox"):
        open_target(
            str(saved / "gpt_neox"), shape, 2, 0, None, "cpu", torch.float32, TAPS, True, None, None, exact_sums=True
        )
