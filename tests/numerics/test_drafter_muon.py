"""Muon under ZeRO-2, on real ranks over gloo, against a float64 reference; saved and resumed on other numbers of ranks.

The reference is the published algorithm (Keller Jordan, 2024): Nesterov momentum, five quintic Newton-Schulz steps, the
square root of the aspect ratio, decoupled decay; gradients clipped before the momentum. What it guards: DeepSpeed cuts
matrices across ranks, so momentum and orthogonalisation must see whole ones; its momentum is not laid out as the
weights are; and left alone it clips the update and adds up in bf16.
"""

from __future__ import annotations

import json
import math
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipe.config.load import load_config_text
from recipe.roles.engine import build_engine, gradient_norm, learning_rate, step_was_skipped
from recipe.roles.optimizer_state import Shards, load_state, save_state

SHAPES = {"fc": (16, 40), "layers.0.up_proj": (24, 16), "layers.0.down_proj": (16, 24), "layers.1.o_proj": (7, 5)}
NORMS = {"norm": 16, "layers.0.k_norm": 5}
STEPS, ACCUMULATION, TOTAL = 4, 2, 8
RATES = {"muon_lr": 0.05, "adam_lr": 0.01, "weight_decay": 0.1}
CLIP, FIRST = 5.0, 30.0  # the first step's gradients are 30 times the later ones', as those of a fresh drafter are


class Weights(nn.Module):
    """Matrices and norms; the loss is their inner product with given gradients."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {**SHAPES, **NORMS}.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.zeros(shape)))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.parameters(), gradients, strict=True)]).sum()


def gradients(step: int, share: int) -> list[Tensor]:
    """Of one of the ``TOTAL`` equal shares of a step; ranks and accumulation divide them among themselves."""
    generator = torch.Generator().manual_seed(1000 * step + share)
    scale = 1.0 if step else FIRST
    return [scale * (torch.randn(p.shape, generator=generator) + 0.3) for p in Weights().parameters()]


def mean_gradients(step: int) -> list[Tensor]:
    shares = zip(*(gradients(step, share) for share in range(TOTAL)), strict=True)
    return [torch.stack(share).double().mean(0) for share in shares]


def norm_of(tensors: list[Tensor]) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors]).norm())


def orthogonalised(x: Tensor) -> Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    rows, columns = x.shape
    x = (x.mT if rows > columns else x) / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if rows > columns else x) * max(1.0, rows / columns) ** 0.5


def reference(steps: int) -> list[Tensor]:
    """Weights after ``steps``, in float64 and on one device."""
    weights = [p.detach().double() for p in Weights().parameters()]
    first, second = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    for step in range(steps):
        grads = mean_gradients(step)
        factor = min(1.0, CLIP / norm_of([grad for grad in grads if grad.ndim == 2]))
        for index, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
            if weight.ndim == 2:
                grad *= factor
                first[index].lerp_(grad, 0.05)
                update, rate = orthogonalised(grad.lerp(first[index], 0.95)), RATES["muon_lr"]
            else:
                first[index].lerp_(grad, 0.1)
                second[index].lerp_(grad.square(), 0.05)
                one, two = first[index] / (1 - 0.9 ** (step + 1)), second[index] / (1 - 0.95 ** (step + 1))
                update, rate = one / (two.sqrt() + 1e-8), RATES["adam_lr"]
            weight.mul_(1 - rate * RATES["weight_decay"]).sub_(rate * update)
    return weights


def train(world: int, first: int, last: int, load: list[Path], save: Path | None, queue: Any, poison: int,
          bad: float, bf16: bool, settings: tuple[str, ...]) -> None:  # fmt: skip
    """One rank: steps [first, last) of a real engine; puts (weights, facts) of rank 0."""
    import deepspeed
    import torch.distributed as dist

    from recipe.roles.worlds import disable_shm_all_reduce

    rank = int(os.environ["RANK"])
    disable_shm_all_reduce()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, rank=rank, world_size=world)
    accumulation = TOTAL // world
    config = load_config_text("{}", [
        "optimizer=" + json.dumps({"type": "Muon", "params": RATES}), f"gradient_clipping={CLIP}",
        f"gradient_accumulation_steps={accumulation}", "dflash.layout.device=cpu",
        f"dflash.layout.drafter_gpus={list(range(1, world + 1))}", f"bf16.enabled={str(bf16).lower()}",
        *settings,
    ])  # fmt: skip
    module = Weights().bfloat16() if bf16 else Weights()
    engine = build_engine(module, config.deepspeed_dict(100, 1))
    facts = None
    if load:
        facts = torch.load(load[0].parent / "facts.pt")
        load_state(engine, load, facts)
    skipped = []
    for step in range(first, last):
        for micro in range(accumulation):
            given = gradients(step, rank * accumulation + micro)
            if step == poison and rank == world - 1:
                given[1][0, 0] = bad
            engine.backward(engine([g.to(p.dtype) for g, p in zip(given, module.parameters(), strict=True)]))
            engine.step()
        skipped.append(step_was_skipped(engine))
    if save is not None:
        facts = save_state(engine, save.with_name(f"part_{rank}_of_{world}.safetensors"))
        if rank == 0:
            torch.save(facts, save.parent / "facts.pt")
    norm = gradient_norm(engine)
    if rank == 0:
        weights = [p.detach().float().numpy() for p in engine.module.parameters()]
        queue.put((weights, skipped, norm, learning_rate(engine)))
    dist.barrier()
    dist.destroy_process_group()


def exactly(run: Callable[..., None], *args: Any) -> None:
    """In float32 instead of half precision: what is tried is who orthogonalises what, not the rounding."""
    from deepspeed.runtime.zero.muon import original_muon

    original_muon.ns_compute_dtype = lambda method="gram": torch.float32
    run(*args)


def rank_main(rank: int, port: int, world: int, exact: bool, queue: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}  # fmt: skip
    try:
        first, last, load, save, *rest = args
        call = (world, first, last, load, save, queue, *rest)
        exactly(train, *call) if exact else train(*call)
    except BaseException:
        queue.put(traceback.format_exc())
        raise


def steps(world: int, first: int = 0, last: int = STEPS, load: list[Path] | None = None, save: Path | None = None,
          exact: bool = True, poison: int = -1, bad: float = math.nan, bf16: bool = False,
          settings: tuple[str, ...] = ()) -> Any:  # fmt: skip
    """(weights, skipped, norm, rate) after the steps on ``world`` forked ranks."""
    import deepspeed  # noqa: F401  before the fork: once instead of in every rank
    from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("fork")
    queue = context.Queue()
    args = (first, last, load or [], save, poison, bad, bf16, settings)
    ranks = [context.Process(target=rank_main, args=(r, port, world, exact, queue, args)) for r in range(world)]
    for process in ranks:
        process.start()
    try:
        result = queue.get(timeout=240)
        assert not isinstance(result, str), result
        for process in ranks:
            process.join(60)
            assert process.exitcode == 0
        weights, *rest = result
        return [torch.from_numpy(w) for w in weights], *rest
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()


def error(weights: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((w.double() - x).norm() / x.norm()) for w, x in zip(weights, wanted, strict=True))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_weights_are_the_references(world: int) -> None:
    weights, skipped, norm, rate = steps(world)
    assert not any(skipped) and rate == pytest.approx(RATES["muon_lr"])
    assert error(weights, reference(STEPS)) < 2e-6
    assert norm == pytest.approx(norm_of(mean_gradients(STEPS - 1)), rel=1e-5) and norm > CLIP


@pytest.mark.parametrize(
    "setting",
    [
        "reduce_scatter=false", "contiguous_gradients=false", "overlap_comm=true",
        "reduce_bucket_size=500", "allgather_partitions=false",
    ],
)  # fmt: skip
def test_every_way_of_zero_to_reduce_is_right(setting: str) -> None:
    weights, _, norm, _ = steps(2, settings=(f"zero_optimization.{setting}",))
    assert error(weights, reference(STEPS)) < 2e-6
    assert norm == pytest.approx(norm_of(mean_gradients(STEPS - 1)), rel=1e-5)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (1, 4), (4, 2)])
def test_a_resumed_run_goes_on_as_if_nothing_had_been(tmp_path: Path, before: int, after: int) -> None:
    """Saved after two steps and read by as many ranks: bit for bit. By others: but for the order of sums."""
    whole = steps(after)[0]
    steps(before, 0, 2, save=tmp_path / "part")
    parts = sorted(tmp_path.glob("part_*"))
    assert len(parts) == before
    resumed = steps(after, 2, STEPS, load=parts)[0]
    if before == after:
        assert all(torch.equal(a, b) for a, b in zip(resumed, whole, strict=True))
    assert error(resumed, reference(STEPS)) < 2e-6


def test_a_schedule_of_ours_is_resumed_in_its_place_and_follows_a_new_total(tmp_path: Path) -> None:
    def schedule(total: int) -> tuple[str]:
        params = {"total_num_steps": total, "warmup_num_steps": 1, "decay_ratio": 0.5}
        return ("scheduler=" + json.dumps({"type": "WarmupStableDecayLR", "params": params}),)

    whole, _, _, rate = steps(2, settings=schedule(STEPS))
    assert rate == pytest.approx(RATES["muon_lr"] * 0.5)  # of the step that comes next, one before the last
    steps(2, 0, 2, save=tmp_path / "part", settings=schedule(STEPS))
    parts = sorted(tmp_path.glob("part_*"))
    resumed, _, _, again = steps(2, 2, STEPS, load=parts, settings=schedule(STEPS))
    assert again == rate and all(torch.equal(a, b) for a, b in zip(resumed, whole, strict=True))
    assert steps(2, 2, STEPS, load=parts, settings=schedule(2 * STEPS))[3] == pytest.approx(RATES["muon_lr"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_step_with_a_bad_gradient_changes_nothing(tmp_path: Path, bad: float) -> None:
    """One on one rank, in a matrix that two ranks share: all skip, and the momentum never sees it. 1e30 squared is
    infinite: a norm that cannot be told is not clipped to nothing."""
    steps(2, 0, 1, save=tmp_path / "part")
    parts = sorted(tmp_path.glob("part_*"))
    clean, skipped = steps(2, 2, 4, load=parts)[:2]
    assert skipped == [False, False]
    poisoned, skipped, _, _ = steps(2, 1, 4, load=parts, poison=1, bad=bad)
    assert skipped == [True, False, False]
    assert math.isnan(steps(2, 1, 2, load=parts, poison=1, bad=bad)[2])
    assert all(torch.equal(a, b) for a, b in zip(poisoned, clean, strict=True))


def test_half_precision_is_near() -> None:
    """As it runs: five steps of Newton-Schulz in half precision."""
    assert error(steps(1, exact=False)[0], reference(STEPS)) < 2e-3


@pytest.mark.parametrize(("world", "exactness"), [(1, 1e-6), (2, 1e-2)])
def test_bf16_gradients_are_added_up_in_fp32(tmp_path: Path, world: int, exactness: float) -> None:
    """Micro-batches of bf16 gradients: their sum and the momentum lose nothing to eight bits, but in the reduction."""
    _, _, norm, _ = steps(world, 1, 2, save=tmp_path / "part", bf16=True)
    rounded = [[g.bfloat16().double() for g in gradients(1, share)] for share in range(TOTAL)]
    mean = [torch.stack(share).mean(0) for share in zip(*rounded, strict=True)]
    assert norm == pytest.approx(norm_of(mean), rel=10 * exactness)
    parts = Shards(sorted(tmp_path.glob("part_*")))
    factor = min(1.0, CLIP / norm_of([grad for grad in mean if grad.ndim == 2]))
    for name, wanted in zip([*SHAPES, *NORMS], mean, strict=True):  # left alone DeepSpeed drops the gradient of `norm`
        kind, share = ("momentum_buffer", 0.05 * factor) if name in SHAPES else ("exp_avg", 0.1)
        moment = parts.read(kind, name.replace(".", "_"), 0, wanted.numel())
        assert moment.dtype == torch.float32
        assert error([moment], [share * wanted.flatten()]) < exactness
