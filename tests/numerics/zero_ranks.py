"""Real ZeRO ranks over gloo that step a few weights, and the same steps in float64 on one device.

The reference of Muon is the published algorithm (Keller Jordan, 2024): Nesterov momentum, five quintic Newton-Schulz
steps, the square root of the aspect ratio, decoupled decay; that of Adam and AdamW the textbook's. Gradients are
clipped by their one global norm before any moment.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from queue import Empty
from typing import Any

import torch
from torch import Tensor, nn

from recipe.config.load import load_config_text
from recipe.engine.engine import build_engine, gradient_norm, learning_rate, step_was_skipped
from recipe.engine.optimizer_state import Shards, load_state, save_state, unlike

SHAPES = {"fc": (16, 40), "layers.0.up_proj": (24, 16), "layers.0.down_proj": (16, 24), "layers.1.o_proj": (7, 5)}
NORMS = {"norm": 16, "layers.0.k_norm": 5}
STEPS, ACCUMULATION, TOTAL = 4, 2, 8
LIMIT_S = 120
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


def mean_gradients(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """``dtype``: of the weights, in which each share's gradients come."""
    shares = zip(*(gradients(step, share) for share in range(TOTAL)), strict=True)
    return [torch.stack(share).to(dtype).double().mean(0) for share in shares]


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


@dataclass(frozen=True)
class Optimizer:
    """Of a config, and what it does by the book. ``rate(step, highest)``: what the schedule makes of a highest rate."""

    kind: str = "Muon"
    muon_lr: float = 0.05
    lr: float = 0.01
    weight_decay: float = 0.1
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = CLIP
    rate: Callable[[int, float], float] = lambda step, highest: highest

    def settings(self) -> list[str]:
        params = {"weight_decay": self.weight_decay, "betas": self.betas, "eps": self.eps}
        muon = {"muon_lr": self.muon_lr, "adam_lr": self.lr, "momentum": self.momentum}
        params |= muon if self.kind == "Muon" else {"lr": self.lr}
        return ["optimizer=" + json.dumps({"type": self.kind, "params": params}), f"gradient_clipping={self.clip}"]

    def highest(self) -> float:
        """The rate of the first parameter group."""
        return self.muon_lr if self.kind == "Muon" else self.lr


def reference(
    steps: int,
    optimizer: Optimizer = Optimizer(),
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Masters after ``steps``, in float64 and on one device; ``dtype``: of the weights that training began with."""
    weights = [p.detach().to(dtype).double() for p in Weights().parameters()]
    first, second = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    (beta1, beta2), decay = optimizer.betas, optimizer.weight_decay
    for step in range(steps):
        grads = mean_gradients(step, dtype)
        factor = min(1.0, optimizer.clip / norm_of(grads)) if optimizer.clip else 1.0
        for index, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
            grad *= factor
            if optimizer.kind == "Muon" and weight.ndim == 2:
                first[index].lerp_(grad, 1 - optimizer.momentum)
                update = orthogonalised(grad.lerp(first[index], optimizer.momentum))
                rate = optimizer.rate(step, optimizer.muon_lr)
            else:
                grad += decay * weight if optimizer.kind == "Adam" else 0.0
                first[index].lerp_(grad, 1 - beta1)
                second[index].lerp_(grad.square(), 1 - beta2)
                one, two = first[index] / (1 - beta1 ** (step + 1)), second[index] / (1 - beta2 ** (step + 1))
                update, rate = one / (two.sqrt() + optimizer.eps), optimizer.rate(step, optimizer.lr)
            weight.mul_(1.0 if optimizer.kind == "Adam" else 1 - rate * decay).sub_(rate * update)
    return weights


def train(world: int, first: int, last: int, load: list[Path], save: Path | None, queue: Any, poison: int,
          bad: float, bf16: bool, settings: tuple[str, ...], unoffered: dict[str, Any] | None) -> None:  # fmt: skip
    """One rank: steps [first, last) of a real engine; puts (weights, facts) of rank 0."""
    import deepspeed
    import torch.distributed as dist

    from recipe.engine.worlds import disable_shm_all_reduce

    rank = int(os.environ["RANK"])
    disable_shm_all_reduce()
    dist.init_process_group("gloo", store=dist.FileStore(os.environ["MEETING"], world), rank=rank, world_size=world)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, rank=rank, world_size=world)
    accumulation = TOTAL // world
    config = load_config_text("{}", [
        *Optimizer().settings(),
        f"gradient_accumulation_steps={accumulation}", "dflash.layout.device=cpu",
        f"dflash.layout.drafter_gpus={list(range(1, world + 1))}", f"bf16.enabled={str(bf16).lower()}",
        *settings,
    ]).deepspeed_dict(100, 1)  # fmt: skip
    config["zero_optimization"] |= unoffered or {}
    module = Weights().bfloat16() if bf16 else Weights()
    engine = build_engine(module, config)
    facts = None
    if load:
        facts = torch.load(load[0].parent / "facts.pt")
        load_state(engine, load, facts)
        different = unlike(engine, torch.load(load[0].parent / "weights.pt"))
        assert not different, different
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
            torch.save(engine.module.state_dict(), save.parent / "weights.pt")
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


def rank_main(rank: int, meeting: str, world: int, exact: bool, queue: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MEETING": meeting,
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "DS_ACCELERATOR": "cpu"}  # fmt: skip
    try:
        first, last, load, save, *rest = args
        call = (world, first, last, load, save, queue, *rest)
        exactly(train, *call) if exact else train(*call)
    except BaseException:
        queue.put(traceback.format_exc())
        raise


def first_answer(queue: Any, ranks: list[Any]) -> Any:
    """What the first rank says. One that is killed says nothing; one that hangs is asked for its stack (SIGABRT)."""
    end = time.monotonic() + LIMIT_S
    while True:
        gone = [process for process in ranks if process.exitcode not in (0, None)]
        try:
            return queue.get(timeout=1)
        except Empty:
            assert not gone, f"gone without a word: {gone}"
        if time.monotonic() > end:
            for process in ranks:
                os.kill(process.pid, signal.SIGABRT)
            raise AssertionError(f"no answer after {LIMIT_S} s")


def steps(world: int, first: int = 0, last: int = STEPS, load: list[Path] | None = None, save: Path | None = None,
          exact: bool = True, poison: int = -1, bad: float = math.nan, bf16: bool = False,
          settings: tuple[str, ...] = (), unoffered: dict[str, Any] | None = None) -> Any:  # fmt: skip
    """(weights, skipped, norm, rate) after the steps on ``world`` forked ranks."""
    import deepspeed  # noqa: F401  before the fork: once instead of in every rank
    from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401

    context = get_context("fork")
    queue = context.Queue()
    args = (first, last, load or [], save, poison, bad, bf16, settings, unoffered)
    meeting = tempfile.mkdtemp()  # not a port, which another process may take
    ranks = [
        context.Process(target=rank_main, args=(rank, f"{meeting}/store", world, exact, queue, args))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        result = first_answer(queue, ranks)
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
        shutil.rmtree(meeting)


def error(weights: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((w.double() - x).norm() / x.norm()) for w, x in zip(weights, wanted, strict=True))


def masters(folder: Path) -> list[Tensor]:
    """fp32 weights from what all ranks have saved in ``folder``."""
    parts = Shards(sorted(folder.glob("part_*")))
    return [parts.read("fp32", name, 0, p.numel()).view(p.shape) for name, p in Weights().named_parameters()]
