"""Decoding with a target that is cut over ranks: the tokens of the whole model, states restored on every rank.

gloo, fp32, forked ranks; one set of processes for each degree. 24 over 5 is not the only uneven cut: at degree 3 the
hybrid has value heads 4, 4, 4 and query heads 2, 2, 2 over 2 shared ones, and the small one leaves ranks without heads.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from recipe.decode.batch import generate_batch, plain_batch
from recipe.decode.plain import plain_generate
from recipe.decode.sharded import Call, ShardedTarget, follow
from recipe.decode.speculative import SpeculativeDecoder
from recipe.engine.worlds import share_from_first
from recipe.errors import RunError
from recipe.model_files.shapes import TargetShape
from recipe.model_files.weights import Checkpoint
from recipe.target.capture import decoder_of
from recipe.target.cpu_kernels import use_torch_kernels_on_cpu
from recipe.target.loader import load_target
from recipe.target.shard_plan import ShardPlan

BLOCK, TAPS, VOCAB, NEW = 6, [1, 3], 97, 16
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "head_dim": 16, "max_position_embeddings": 256,
    "initializer_range": 0.12, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid": (
        "qwen3_5_text",
        COMMON
        | LINEAR
        | {"num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True}
        | {"linear_num_key_heads": 4, "linear_num_value_heads": 12},
    ),
    "fewer heads than ranks": (
        "qwen3_5_text",
        COMMON
        | LINEAR
        | {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
        | {"linear_num_key_heads": 1, "linear_num_value_heads": 2},
    ),
    "llama": (
        "llama",
        COMMON
        | {"num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": False},
    ),
}  # fmt: skip
PROMPTS = [[5, 9, 33, 71, 2], [44]]


class Unreliable:
    """Drafts the target's own answer to the prompt of that length, and spoils every third token on average."""

    block_size, target_layer_ids = BLOCK, TAPS

    def __init__(self, answers: list[list[int]]) -> None:
        self.answers = {len(prompt): answer for prompt, answer in zip(PROMPTS, answers, strict=True)}

    def begin(self, prompt_ids: torch.Tensor, max_length: int) -> None:
        self.at, self.prompt, self.draw = 0, len(prompt_ids), random.Random(len(prompt_ids))
        self.answer = self.answers[self.prompt]

    def propose(self, taps: list[torch.Tensor], anchor: int, count: int) -> torch.Tensor:
        self.at += len(taps[0])
        begin = self.at - self.prompt + 1
        drafts = self.answer[begin : begin + count]
        return torch.tensor([(t + 1) % VOCAB if self.draw.random() < 0.35 else t for t in drafts])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[list[int]]]]:
    """Folder of each model, and the whole model's plain greedy answers by transformers' own loop, without a cache."""
    use_torch_kernels_on_cpu()
    found = {}
    for name, (kind, settings) in MODELS.items():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), dtype=torch.float32).eval()
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        answers = []
        for prompt in PROMPTS:
            text = list(prompt)
            with torch.inference_mode():
                for _ in range(NEW + BLOCK):
                    text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
            answers.append(text[len(prompt) :])
        found[name] = (folder, answers)
    return found


def rank_main(rank: int, tp: int, models: dict[str, tuple[Path, list[list[int]]]], out: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(tp), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=tp)
    cpu = torch.device("cpu")
    found: dict[str, Any] = {}
    for name, (folder, answers) in models.items():
        shape = TargetShape.resolve(str(folder))
        plan = ShardPlan.build(shape, tp)
        engine = load_target(folder, shape, plan, rank, dist.group.WORLD, cpu, torch.float32, TAPS, True)
        decoder = decoder_of(engine)
        if rank:
            follow(decoder, cpu, share_from_first)
            continue
        target = ShardedTarget(decoder, Checkpoint(str(folder)).head(), cpu, share_from_first)
        decoder_of_all, ids = SpeculativeDecoder(target, Unreliable(answers)), [torch.tensor(p) for p in PROMPTS]
        plains = [plain_generate(target, one, NEW).tokens for one in ids]
        results = [decoder_of_all.generate(one, NEW) for one in ids]
        plains += [one.tokens for one in plain_batch(target, ids, NEW, 0.0, (), [0, 1])]
        results += generate_batch(decoder_of_all, ids, NEW, 0.0, (), [0, 1])
        found[name] = [[p, r.tokens, r.accepted, r.state_replays] for p, r in zip(plains, results, strict=True)]
        target.leave()
    if rank == 0:
        (out / "found.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # DeepSpeed's exit handlers have nothing to do here


@pytest.mark.skipif(torch.cuda.is_available(), reason="DeepSpeed would move the model to the GPU")
@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)])
def test_the_tokens_of_the_whole_model(models: dict, tmp_path: Path, tp: int) -> None:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(rank, tp, models, tmp_path)) for rank in range(tp)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in ranks] == [0] * tp
    found = json.loads((tmp_path / "found.json").read_text())
    for name, (_, answers) in models.items():
        alone, together = found[name][: len(PROMPTS)], found[name][len(PROMPTS) :]
        assert alone == together, f"{name}: a batch"
        for answer, (plain, tokens, accepted, replays) in zip(answers, alone, strict=True):
            assert plain == answer[:NEW], f"{name}: plain decoding"
            assert tokens == answer[:NEW], f"{name}: speculative decoding"
            assert max(accepted) > 1 and min(accepted) < BLOCK, "drafts were accepted and refused"
            assert (replays > 0) == ("llama" not in name)


def test_a_word_that_is_no_call_ends_the_run_instead_of_hanging_it() -> None:
    def share(values: torch.Tensor) -> None:
        values.copy_(torch.tensor([Call.EXTEND, 3]))

    with pytest.raises(RunError, match="no call"):
        follow(torch.nn.Identity(), torch.device("cpu"), share)
