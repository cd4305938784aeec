"""Muon under ZeRO-2, on real ranks over gloo, against a float64 reference; saved and resumed on other numbers of ranks.

The reference is the published algorithm (Keller Jordan, 2024): Nesterov momentum, five quintic Newton-Schulz steps, the
square root of the aspect ratio, decoupled decay. What it guards: DeepSpeed cuts matrices across ranks, so momentum and
orthogonalisation must see whole ones; and its momentum is not laid out as the weights are.
"""

from __future__ import annotations

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
from recipe.roles.optimizer_state import load_state, save_state

SHAPES = {"fc": (16, 40), "layers.0.up_proj": (24, 16), "layers.0.down_proj": (16, 24), "layers.1.o_proj": (7, 5)}
NORMS = {"norm": 16, "layers.0.k_norm": 5}
STEPS, ACCUMULATION, TOTAL = 4, 2, 8
RATES = {"muon_lr": 0.05, "adam_lr": 0.01, "weight_decay": 0.1}


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
    return [torch.randn(p.shape, generator=generator) + 0.3 for p in Weights().parameters()]


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
        grads = [torch.stack(g).double().mean(0) for g in zip(*(gradients(step, s) for s in range(TOTAL)), strict=True)]
        for index, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
            if weight.ndim == 2:
                first[index].lerp_(grad, 0.05)
                update, rate = orthogonalised(grad.lerp(first[index], 0.95)), RATES["muon_lr"]
            else:
                first[index].lerp_(grad, 0.1)
                second[index].lerp_(grad.square(), 0.05)
                one, two = first[index] / (1 - 0.9 ** (step + 1)), second[index] / (1 - 0.95 ** (step + 1))
                update, rate = one / (two.sqrt() + 1e-8), RATES["adam_lr"]
            weight.mul_(1 - rate * RATES["weight_decay"]).sub_(rate * update)
    return weights


def train(world: int, first: int, last: int, load: list[Path], save: Path | None, queue: Any, poison: int) -> None:
    """One rank: steps [first, last) of a real engine; puts (weights, facts) of rank 0."""
    import deepspeed
    import torch.distributed as dist

    from recipe.roles.worlds import disable_shm_all_reduce

    rank = int(os.environ["RANK"])
    disable_shm_all_reduce()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, rank=rank, world_size=world)
    accumulation = TOTAL // world
    config = load_config_text("{}", [
        'optimizer={"type": "Muon", "params": %s}' % str(RATES).replace("'", '"'), "gradient_clipping=0",
        f"gradient_accumulation_steps={accumulation}", "dflash.layout.device=cpu",
        f"dflash.layout.drafter_gpus={list(range(1, world + 1))}",
    ])  # fmt: skip
    engine = build_engine(Weights(), config.deepspeed_dict(100, 1))
    facts = None
    if load:
        facts = torch.load(load[0].parent / "facts.pt")
        load_state(engine, load, facts)
    skipped = []
    for step in range(first, last):
        for micro in range(accumulation):
            given = gradients(step, rank * accumulation + micro)
            if step == poison and rank == world - 1:
                given[1][0, 0] = float("nan")
            engine.backward(engine(given))
            engine.step()
        skipped.append(step_was_skipped(engine))
    if save is not None:
        facts = save_state(engine, save.with_name(f"part_{rank}_of_{world}.safetensors"))
        if rank == 0:
            torch.save(facts, save.parent / "facts.pt")
    dist.barrier()
    if rank == 0:
        weights = [p.detach().numpy() for p in engine.module.parameters()]
        queue.put((weights, skipped, gradient_norm(engine), learning_rate(engine)))
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
        first, last, load, save, poison = args
        call = (world, first, last, load, save, queue, poison)
        exactly(train, *call) if exact else train(*call)
    except BaseException:
        queue.put(traceback.format_exc())
        raise


def steps(world: int, first: int = 0, last: int = STEPS, load: list[Path] | None = None, save: Path | None = None,
          exact: bool = True, poison: int = -1) -> Any:  # fmt: skip
    """(weights, skipped, norm, rate) after the steps on ``world`` forked ranks."""
    import deepspeed  # noqa: F401  before the fork: once instead of in every rank
    from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("fork")
    queue = context.Queue()
    args = (first, last, load or [], save, poison)
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
    weights, skipped, _, _ = steps(world)
    assert not any(skipped)
    assert error(weights, reference(STEPS)) < 2e-6


@pytest.mark.parametrize(("before", "after"), [(2, 2), (1, 4), (4, 2)])
def test_a_resumed_run_goes_on_as_if_nothing_had_been(tmp_path: Path, before: int, after: int) -> None:
    """Saved after two steps by some ranks and read by others: bit for bit with as many, else but for the order of sums."""
    whole = steps(after)[0]
    steps(before, 0, 2, save=tmp_path / "part")
    parts = sorted(tmp_path.glob("part_*"))
    assert len(parts) == before
    resumed = steps(after, 2, STEPS, load=parts)[0]
    if before == after:
        assert all(torch.equal(a, b) for a, b in zip(resumed, whole, strict=True))
    assert error(resumed, reference(STEPS)) < 2e-6


def test_a_step_with_a_bad_gradient_changes_nothing(tmp_path: Path) -> None:
    """One NaN on one rank, in a matrix that two ranks share: all skip, and the momentum never sees it."""
    steps(2, 0, 1, save=tmp_path / "part")
    parts = sorted(tmp_path.glob("part_*"))
    clean, skipped = steps(2, 2, 4, load=parts)[:2]
    assert skipped == [False, False]
    poisoned, skipped, _, _ = steps(2, 1, 4, load=parts, poison=1)
    assert skipped == [True, False, False]
    assert all(torch.equal(a, b) for a, b in zip(poisoned, clean, strict=True))


def test_half_precision_is_near_and_the_norm_is_the_updates(tmp_path: Path) -> None:
    """As it runs: five steps of Newton-Schulz in half precision. Each update's norm is known whatever the gradients."""
    weights, _, norm, rate = steps(1, exact=False)
    assert error(weights, reference(STEPS)) < 2e-3
    assert rate == pytest.approx(RATES["muon_lr"])
    largest = sum(min(shape) * max(1.0, shape[0] / shape[1]) for shape in SHAPES.values()) ** 0.5
    assert 0.7 * largest < norm < 1.4 * largest
