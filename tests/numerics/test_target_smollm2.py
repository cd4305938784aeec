"""Real bf16 weights (SmolLM2-135M-Instruct, `./run.sh fetch-smollm2`) against plain transformers at tp 1 and 2.

At tp 1, and at tp 2 with `target.exact_sums`, the taps are transformers' own bits. Without it ranks add rounded parts
in another order, and bf16 rounds every layer's output: transformers' own bf16 taps are off the fp32 truth by 1.5 % on
average and by 10 % at single positions (cosine 0.995), and two bf16 runs differ by as much from each other, however
right both are (docs/decisions.md). What can be asked of that is: on average the taps point where transformers' do, the
argmax is the same wherever rounding does not decide it, and no statistic is farther from the truth than transformers'
own.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.engine.worlds import disable_shm_all_reduce
from recipe.model_files.shapes import TargetShape, default_target_layer_ids
from recipe.model_files.weights import Checkpoint
from recipe.target.capture import TapCapture
from recipe.target.loader import load_target
from recipe.target.shard_plan import ShardPlan

FOLDER = Path(__file__).parents[2] / "data" / "smollm2-135m-instruct"
TEXT = Path(__file__).parents[2] / "LICENSE"  # a text that does not change
ROWS, TOKENS = 4, 128
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (FOLDER / "model.safetensors").is_file(), reason="needs ./run.sh fetch-smollm2"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="DeepSpeed would move the model to the GPU"),
]


def prompts() -> torch.Tensor:
    """[ROWS, TOKENS] tokens of real text."""
    ids = AutoTokenizer.from_pretrained(FOLDER)(TEXT.read_text(encoding="utf-8"))["input_ids"]
    return torch.tensor(ids[: ROWS * TOKENS]).reshape(ROWS, TOKENS)


def transformers_taps(dtype: torch.dtype, taps: Sequence[int]) -> list[torch.Tensor]:
    """transformers' taps and last hidden state, in fp32, when it computes in ``dtype``."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype).eval()
    with torch.no_grad():
        output = model.model(input_ids=prompts(), output_hidden_states=True, use_cache=False)
    return [*(output.hidden_states[tap + 1].float() for tap in taps), output.last_hidden_state.float()]


def errors(found: torch.Tensor, truth: torch.Tensor) -> list[float]:
    """Relative error of a position's vector: mean over the positions, 99th percentile, largest."""
    relative = ((found - truth).norm(dim=-1) / truth.norm(dim=-1)).flatten()
    return [round(float(value), 5) for value in (relative.mean(), relative.quantile(0.99), relative.max())]


def run_rank(rank: int, tp: int, exact: bool, store: str, out: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(tp), LOCAL_RANK=str(rank), LOCAL_SIZE=str(tp))
    disable_shm_all_reduce()
    group = None
    if tp > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=tp)
        group = dist.group.WORLD
    shape = TargetShape.resolve(str(FOLDER))
    taps = default_target_layer_ids(shape.num_layers)
    plan = ShardPlan.build(shape, tp, exact)
    engine = load_target(FOLDER, shape, plan, rank, group, "cpu", torch.bfloat16, taps, need_last_hidden=True)
    states = TapCapture(engine, taps, need_last_hidden=True).capture(prompts())
    torch.save(states, f"{out}-{rank}")
    if group is not None:
        dist.destroy_process_group()


def launch(tmp_path: Path, tp: int, exact: bool) -> list[torch.Tensor]:
    """Rank 0's taps and last hidden state."""
    context = multiprocessing.get_context("fork")
    arguments = [(rank, tp, exact, str(tmp_path / "store"), str(tmp_path / "out")) for rank in range(tp)]
    ranks = [context.Process(target=run_rank, args=row) for row in arguments]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
    assert [process.exitcode for process in ranks] == [0] * tp
    return torch.load(tmp_path / "out-0")


@pytest.mark.parametrize(("tp", "exact"), [(1, False), (2, True)])
def test_whole_sums_are_what_issue_3_asks_for(tmp_path: Path, tp: int, exact: bool) -> None:
    """Cosine of every tap at every position >= 0.999, same argmax on >= 99 % of positions; in fact the same bits."""
    states = launch(tmp_path, tp, exact)
    plain = transformers_taps(torch.bfloat16, default_target_layer_ids(30))
    for state, expected in zip(states, plain, strict=True):
        assert torch.cosine_similarity(state.float(), expected, dim=-1).min() >= 0.999
    head = Checkpoint(FOLDER).head().float()
    ours, theirs = (last.float() @ head.T for last in (states[-1], plain[-1]))
    assert share(ours.argmax(-1) == theirs.argmax(-1)) >= 0.99
    assert all(torch.equal(a.float(), b) for a, b in zip(states, plain, strict=True))


def test_added_bf16_parts_agree_with_transformers_as_far_as_bf16_goes(tmp_path: Path) -> None:
    tp = 2
    states = launch(tmp_path, tp, exact=False)
    taps = default_target_layer_ids(TargetShape.resolve(str(FOLDER)).num_layers)
    plain, truth = transformers_taps(torch.bfloat16, taps), transformers_taps(torch.float32, taps)
    for name, state, expected, exact in zip([*taps, "last"], states, plain, truth, strict=True):
        cosine = torch.cosine_similarity(state.float(), expected, dim=-1).mean()
        ours, theirs = errors(state.float(), exact), errors(expected, exact)
        print(f"tp={tp} tap {name}: mean cosine {cosine:.6f}; error mean, p99, max {ours} against {theirs}")
        assert cosine >= 0.999
        for value, own, slack in zip(ours, theirs, (1.15, 1.3, 1.5), strict=True):
            assert value <= slack * own
    head = Checkpoint(FOLDER).head().float()
    ours, theirs, exact = (last.float() @ head.T for last in (states[-1], plain[-1], truth[-1]))
    best = exact.topk(2, dim=-1).values
    decided = best[..., 0] - best[..., 1] > 2 * (theirs - exact).std()  # elsewhere rounding decides, in any bf16 run
    same = ours.argmax(-1) == theirs.argmax(-1)
    right, right_theirs = (share(logits.argmax(-1) == exact.argmax(-1)) for logits in (ours, theirs))
    print(
        f"tp={tp}: same argmax on {share(same):.2%} of all positions, "
        f"{share(same[decided]):.2%} of the {share(decided):.0%} that are decided"
    )
    print(f"tp={tp}: argmax of fp32 on {right:.2%}, transformers in bf16 on {right_theirs:.2%}")
    assert share(same[decided]) >= 0.99 and share(decided) > 0.5
    assert right >= right_theirs - 0.015


def share(mask: torch.Tensor) -> float:
    return mask.float().mean().item()
