"""Real bf16 weights (SmolLM2-135M-Instruct, `./run.sh fetch-smollm2`) against plain transformers at tp 1 and 2."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.roles.worlds import disable_shm_all_reduce
from recipe.shapes import TargetShape, default_target_layer_ids
from recipe.target.capture import TapCapture
from recipe.target.loader import load_target
from recipe.target.shard_plan import ShardPlan
from recipe.weights import Checkpoint

FOLDER = Path(__file__).parents[2] / "data" / "smollm2-135m-instruct"
TEXT = (Path(__file__).parents[2] / "LICENSE", Path(__file__))  # prose and code
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (FOLDER / "model.safetensors").is_file(), reason="needs ./run.sh fetch-smollm2"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="DeepSpeed would move the model to the GPU"),
]


def prompts() -> torch.Tensor:
    """[2, 128] tokens of real text."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    texts = [path.read_text(encoding="utf-8") for path in TEXT if path.is_file()]
    ids = [tokenizer(text)["input_ids"][:128] for text in texts]
    return torch.tensor([row for row in ids if len(row) == 128])


def run_rank(rank: int, tp: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(tp), LOCAL_RANK=str(rank), LOCAL_SIZE=str(tp))
    disable_shm_all_reduce()
    group = None
    if tp > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=tp)
        group = dist.group.WORLD
    shape = TargetShape.resolve(str(FOLDER))
    taps = default_target_layer_ids(shape.num_layers)
    engine = load_target(
        FOLDER, shape, ShardPlan.build(shape, tp), rank, group, "cpu", torch.bfloat16, taps, need_last_hidden=True
    )
    states = TapCapture(engine, taps, need_last_hidden=True).capture(prompts())
    torch.save(states, f"{out}-{rank}")
    if group is not None:
        dist.destroy_process_group()


@pytest.mark.parametrize("tp", [1, 2])
def test_bf16_taps_and_argmax_agree_with_transformers(tmp_path: Path, tp: int) -> None:
    context = multiprocessing.get_context("fork")
    arguments = [(rank, tp, str(tmp_path / "store"), str(tmp_path / "out")) for rank in range(tp)]
    ranks = [context.Process(target=run_rank, args=row) for row in arguments]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
    assert [process.exitcode for process in ranks] == [0] * tp
    states = torch.load(tmp_path / "out-0")
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        output = model(input_ids=prompts(), output_hidden_states=True, use_cache=False)
    taps = default_target_layer_ids(model.config.num_hidden_layers)
    for state, tap in zip(states, taps, strict=False):
        expected = output.hidden_states[tap + 1].float()
        cosine = torch.cosine_similarity(state.float(), expected, dim=-1)
        print(f"tp={tp} tap {tap}: least cosine {cosine.min():.5f}, mean {cosine.mean():.6f}")
        assert cosine.min() >= 0.999
    logits = states[-1] @ Checkpoint(FOLDER).head().to(torch.bfloat16).T  # in bf16, as transformers does
    same = (logits.argmax(-1) == output.logits.argmax(-1)).float().mean().item()
    print(f"tp={tp}: same argmax on {same:.2%} of {logits.shape[0] * logits.shape[1]} positions")
    assert same >= 0.99
