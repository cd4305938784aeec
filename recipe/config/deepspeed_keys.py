"""DeepSpeed's top-level keys, under DeepSpeed's own names, as far as they make sense for a drafter under ZeRO-2.

DeepSpeed 0.19.8 itself ignores a misspelt top-level key and takes ``"auto"`` for a default; here both are refused.
What is offered is held to a float64 reference, at 1, 2 and 4 ranks and through a resume at another number, by
tests/numerics/test_deepspeed_keys.py; every other key that DeepSpeed knows is refused by name (`refused_keys.py`).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from recipe.config.schema import Amount, DFlash, Fraction, Positive, Section

NonNegativeFloat = Annotated[float, Field(ge=0.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]


class BF16(Section):
    """The drafter's bf16 engine. Masters are fp32 copies of the bf16 weights."""

    enabled: bool = Field(False, description="train the drafter in bf16 with fp32 masters")
    check_grad_overflow: Literal[True] = Field(True, description="must stay true: bad gradients are never applied")


class FP16(Section):
    """Only there so that ``{"enabled": false}`` of a copied file passes."""

    enabled: Literal[False] = Field(False, description="must stay false: use bf16")


class DataTypes(Section):
    """The dtype in which the gradients of one step are accumulated."""

    grad_accum_dtype: Literal["fp32"] = Field("fp32", description="dtype of the accumulated gradients and moments")


class ZeroOptimization(Section):
    """ZeRO of the drafter world. Stage 3 would cut the weights that decoding and export read whole."""

    stage: Annotated[int, Field(ge=1, le=2)] = Field(2, description="1 or 2")
    contiguous_gradients: bool = Field(True, description="copy gradients to one buffer as they come")
    reduce_scatter: bool = Field(True, description="reduce-scatter instead of all-reduce")
    reduce_bucket_size: Amount = Field(500_000_000, description="elements reduced at once")
    allgather_partitions: bool = Field(True, description="all-gather instead of broadcasts after the step")
    allgather_bucket_size: Amount = Field(500_000_000, description="elements gathered at once")
    overlap_comm: bool = Field(False, description="reduce during the backward pass")


class AdamParams(Section):
    """Parameters of Adam and AdamW."""

    lr: PositiveFloat = Field(6e-4, description="highest learning rate")
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = Field([0.9, 0.95], description="Adam's betas")
    eps: PositiveFloat = Field(1e-8, description="Adam's epsilon")
    weight_decay: NonNegativeFloat = Field(0.01, description="decoupled for AdamW")
    torch_adam: Literal[True] = Field(True, description="must stay true: torch's optimizer needs no compiler")


class MuonParams(Section):
    """Parameters of Muon: orthogonalised momentum for the matrices, AdamW for the norms.

    Both rates are highest rates of the schedule. DeepSpeed's ``lr``, which sets both, is not a key here.
    """

    muon_lr: PositiveFloat = Field(0.02, description="of the matrices: an update's spectral norm is about this")
    adam_lr: PositiveFloat = Field(6e-4, description="of the norm weights and biases")
    momentum: Beta = Field(0.95, description="of the matrices (Nesterov)")
    weight_decay: NonNegativeFloat = Field(0.01, description="decoupled, of both")
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = Field([0.9, 0.95], description="AdamW's betas")
    eps: PositiveFloat = Field(1e-8, description="AdamW's epsilon")
    ns_method: Literal["gram", "standard"] = Field("gram", description="Newton-Schulz on the Gram matrix or the matrix")
    torch_adam: Literal[True] = Field(True, description="must stay true: torch's AdamW needs no compiler")


class Adam(Section):
    """The drafter's optimizer."""

    type: Literal["AdamW", "Adam"] = Field("AdamW", description="AdamW, Adam or Muon")
    params: AdamParams = AdamParams()

    @property
    def highest_rates(self) -> list[float]:
        """Of each parameter group, in DeepSpeed's order."""
        return [self.params.lr]


class Muon(Section):
    """The drafter's optimizer: Muon on its matrices."""

    type: Literal["Muon"]
    params: MuonParams = MuonParams()

    @property
    def highest_rates(self) -> list[float]:
        """Of each parameter group, in DeepSpeed's order: matrices, then the rest."""
        return [self.params.muon_lr, self.params.adam_lr]


def _kind(given: Any) -> str:
    """The tag of an ``optimizer`` section; AdamW is the default, and what is unknown is refused by that branch."""
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return "Muon" if kind == "Muon" else "Adam"


Optimizer = Annotated[Annotated[Adam, Tag("Adam")] | Annotated[Muon, Tag("Muon")], Discriminator(_kind)]
OPTIMIZERS = ("AdamW", "Adam", "Muon")


Steps = Positive | Literal["auto"]
WarmupType = Literal["log", "linear"]


class WarmupCosineParams(Section):
    """Learning rate as a share of the optimizer's."""

    total_num_steps: Steps = Field("auto", description="auto: all steps of the run")
    warmup_num_steps: Steps = Field("auto", description="auto: dflash.run.warmup_ratio of all steps")
    warmup_min_ratio: Fraction = Field(0.0, description="share of the rate at the start; the first step is made with 0")
    cos_min_ratio: Fraction = Field(0.0001, description="share of the rate at the end")
    warmup_type: WarmupType = Field("log", description="shape of the rise")


class WarmupParams(Section):
    """Absolute learning rates. The highest is the optimizer's and is not given twice."""

    warmup_num_steps: Steps = Field("auto", description="auto: dflash.run.warmup_ratio of all steps")
    warmup_min_lr: NonNegativeFloat = Field(0.0, description="rate at the start")
    warmup_max_lr: PositiveFloat | None = Field(None, description="null: the optimizer's rate; must equal it if given")
    warmup_type: WarmupType = Field("log", description="shape of the rise")


class WarmupDecayParams(WarmupParams):
    """As ``WarmupParams``, then a straight line back to ``warmup_min_lr``."""

    total_num_steps: Steps = Field("auto", description="auto: all steps of the run")


class WarmupStableDecayParams(WarmupParams):
    """As ``WarmupParams``, then down to 0 over the last ``decay_ratio`` of all steps."""

    total_num_steps: Steps = Field("auto", description="auto: all steps of the run")
    decay_ratio: Share = Field(0.4, description="share of all steps in which the rate falls")
    decay_type: Literal["linear", "1-sqrt"] = Field("linear", description="shape of the fall")


class WarmupCosineLR(Section):
    """Rise, then half a cosine."""

    type: Literal["WarmupCosineLR"]
    params: WarmupCosineParams = WarmupCosineParams()


class WarmupLR(Section):
    """Rise, then constant."""

    type: Literal["WarmupLR"]
    params: WarmupParams = WarmupParams()


class WarmupDecayLR(Section):
    """Rise, then linear decay."""

    type: Literal["WarmupDecayLR"]
    params: WarmupDecayParams = WarmupDecayParams()


class WarmupStableDecayLR(Section):
    """Rise, then constant, then decay: ours (`recipe/engine/lr_schedule.py`), which DeepSpeed does not have."""

    type: Literal["WarmupStableDecayLR"]
    params: WarmupStableDecayParams = WarmupStableDecayParams()


Scheduler = Annotated[WarmupCosineLR | WarmupLR | WarmupDecayLR | WarmupStableDecayLR, Field(discriminator="type")]
SCHEDULERS = ("WarmupCosineLR", "WarmupLR", "WarmupDecayLR", "WarmupStableDecayLR")


class RunConfig(Section):
    """One JSON file: DeepSpeed's keys at top level, ours in ``dflash``."""

    train_micro_batch_size_per_gpu: Annotated[int, Field(ge=1, le=1)] = Field(
        1, description="one packed row is one DeepSpeed sample; its size is dflash.data.token_budget"
    )
    gradient_accumulation_steps: Positive = Field(1, description="micro-batches of one step on each drafter rank")
    train_batch_size: Positive | None = Field(None, description="null: derived; checked against the drafter ranks")
    gradient_clipping: NonNegativeFloat = Field(1.0, description="largest gradient norm; 0: off")
    bf16: BF16 = BF16()
    fp16: FP16 = FP16()
    data_types: DataTypes = DataTypes()
    zero_optimization: ZeroOptimization = ZeroOptimization()
    optimizer: Optimizer = Adam()
    scheduler: Scheduler | None = Field(None, description="null: constant learning rate")
    communication_data_type: Literal["fp32"] | None = Field(None, description="null: the weights' dtype")
    steps_per_print: Positive | None = Field(None, description="null: DeepSpeed prints no step lines")
    wall_clock_breakdown: bool = Field(False, description="DeepSpeed's timers in its log")
    dflash: DFlash = DFlash()

    def global_micro_batches(self, nodes: int = 1) -> int:
        """Micro-batches of one optimizer step over all drafter ranks of ``nodes`` nodes."""
        ranks = nodes * len(self.dflash.layout.drafter_gpus)
        return ranks * self.gradient_accumulation_steps * self.train_micro_batch_size_per_gpu

    def deepspeed_dict(self, total_steps: int, warmup_steps: int) -> dict[str, Any]:
        """What ``build_engine`` gives to ``deepspeed.initialize``: no ``dflash``, no ``"auto"``, no ``null``.

        ``total_steps`` and ``warmup_steps`` are optimizer steps of the whole run (see ``warmup_steps``); they replace
        the scheduler's ``"auto"``. DeepSpeed refuses a warm-up of 0 and rises over at least two steps, so 0 becomes 1
        here and 2 there.
        """
        ours = self.model_dump(exclude={"dflash", "fp16", "train_batch_size"}, exclude_none=True)
        if self.optimizer.type == "Adam":
            ours["optimizer"]["params"]["adam_w_mode"] = False  # DeepSpeed takes Adam for AdamW otherwise
        if self.scheduler is not None:
            schedule = ours["scheduler"]["params"]
            if schedule.get("total_num_steps") == "auto":
                schedule["total_num_steps"] = max(1, total_steps)
            if schedule["warmup_num_steps"] == "auto":
                schedule["warmup_num_steps"] = max(1, warmup_steps)
            if self.scheduler.type != "WarmupCosineLR":
                schedule["warmup_max_lr"] = self.optimizer.highest_rates
        return ours

    def warmup_steps(self, total_steps: int) -> int:
        """Optimizer steps in which the rate rises: ``warmup_ratio`` of ``total_steps``, rounded up."""
        return math.ceil(self.dflash.run.warmup_ratio * total_steps)

    def to_json(self) -> str:
        """The whole config, every default written out; ``load_config`` reads it back to an equal object."""
        return self.model_dump_json(indent=2) + "\n"
