"""Tensor-parallel linear layers on DeepSpeed's own, for weights that are cut already, and the inference engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, RowParallel
from torch import nn
from torch.nn import functional

from recipe.engine.partial_sums import gather_columns, sum_rounded_once
from recipe.engine.worlds import disable_shm_all_reduce
from recipe.errors import RunError


def adopt_process_group() -> None:
    """Makes DeepSpeed's communication layer adopt the default process group, if it has not; needed before any shard."""
    disable_shm_all_reduce()
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)


class _Cut:
    """A linear layer's local part, as the DeepSpeed constructors want it. ``bias`` may be None."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        self.weight, self.bias = weight, bias


class _AlreadyCut:
    """Switches off what DeepSpeed's layers do to a whole weight: cut it, and describe the cut for training."""

    def _should_materialize_tp_partition(self) -> bool:
        return False

    def _freeze_partition_sizes(self, total_size: int) -> tuple[int, ...]:
        self._partition_sizes = (total_size,)  # of this rank; other ranks may hold more or less
        return self._partition_sizes

    def _mark_uc_metadata(self) -> None:
        """Universal-checkpoint metadata is for training; a frozen target never has any."""


class ColumnShard(_AlreadyCut, LinearLayer):
    """This rank's rows of a linear layer's weight: [local_out, in] and bias [local_out] or None. No communication.

    ``select`` (optional, int64 [m]) regroups the output: it is seen as units of ``unit`` features, and unit
    ``select[i]`` becomes unit i. So a shared key head is computed once and handed to each query head that reads it.
    With ``fused_bias`` the bias is added before the product is rounded, as torch's own linear layer does.
    """

    fused_bias = False

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: dist.ProcessGroup | None,
        select: torch.Tensor | None = None,
        unit: int = 1,
    ) -> None:
        super().__init__(_Cut(weight, bias), group)
        self.unit = unit
        self.register_buffer("select", select, persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = functional.linear(input, self.weight, self.bias) if self.fused_bias else super().forward(input)
        if self.select is None:
            return output
        return output.unflatten(-1, (-1, self.unit)).index_select(-2, self.select).flatten(-2)


class RowShard(_AlreadyCut, LinearAllreduce):
    """This rank's columns of a linear layer's weight: [out, local_in]; all ranks' products are summed over the group.

    ``bias`` [out] is whole on every rank and added once, after the sum. ``local_in`` may be 0: such a rank adds zeros.
    Without ``reduce`` the product stays partial (and there may be no bias): the caller sums it together with others.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: dist.ProcessGroup | None,
        reduce: bool = True,
    ) -> None:
        super().__init__(_Cut(weight, bias), group)
        if bias is not None and not reduce:
            raise RunError("a bias would be added once per rank")
        self.reduce = reduce

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.reduce:
            return super().forward(input)
        return torch.matmul(input, self.weight.transpose(-1, -2))


class GatherShard(_AlreadyCut, LinearLayer):
    """The alternative to RowShard that adds nothing up over ranks: this rank's rows of the weight [local_out, in] and
    of the bias, applied to the whole input. The ranks' inputs are gathered before it and their outputs after it, so
    that every sum is made on one rank, in one product, as one GPU does.

    ``inputs``, ``outputs``: how many features each rank brings, and makes; both may be 0 for some.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: dist.ProcessGroup | None,
        inputs: Sequence[int],
        outputs: Sequence[int],
    ) -> None:
        super().__init__(_Cut(weight, bias), group)
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        whole = gather_columns(input, self.inputs, self.mp_group)
        return gather_columns(functional.linear(whole, self.weight, self.bias), self.outputs, self.mp_group)


class SumOverRanks:
    """Forward hook of a module whose output is this rank's partial sum: replaces it by the sum over the group.

    With ``in_float32`` the parts, rounded each by its module, are added in float32.
    """

    def __init__(self, group: dist.ProcessGroup | None, in_float32: bool = False) -> None:
        self.group, self.in_float32 = group, in_float32

    def __call__(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if self.in_float32:
            return sum_rounded_once(output.float(), self.group, output.dtype)
        return RowParallel.apply(self.group, output, True)


class IdleMixer(nn.Module):
    """Stands for an attention or DeltaNet layer on a rank that holds no head of it: it only takes part in the sum."""

    def __init__(self, row_shard: RowShard | GatherShard, row_shard_name: str, returns_tuple: bool) -> None:
        super().__init__()
        self.returns_tuple, self.row_shard_name = returns_tuple, row_shard_name
        self.add_module(row_shard_name, row_shard)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        nothing = hidden_states.new_zeros(*hidden_states.shape[:-1], 0)
        output = self.get_submodule(self.row_shard_name)(nothing)
        return (output, None) if self.returns_tuple else output


class _NothingToReplace(nn.Module):
    """The class named in the injection policy: no model has it, so DeepSpeed's AutoTP leaves our layers alone."""


class _GroupUnit:
    """The model-parallelism unit that ``init_inference`` asks for its group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.group

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self.group)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.group)


def inference_engine(
    model: nn.Module, dtype: torch.dtype, group: dist.ProcessGroup | None
) -> deepspeed.InferenceEngine:
    """DeepSpeed's inference engine around a sharded, loaded model on its device.

    ``group`` is this replica's tensor-parallel group, None at degree 1. The engine broadcasts random state over the
    *whole* default world, so with a group every rank of that world must call this. It rounds every buffer to ``dtype``:
    rebuild the rotary embedding afterwards.
    """
    disable_shm_all_reduce()
    tp_size = 1 if group is None else dist.get_world_size(group)
    if tp_size == 1:
        return deepspeed.init_inference(model, dtype=dtype, replace_with_kernel_inject=False)
    adopt_process_group()
    return deepspeed.init_inference(
        model,
        dtype=dtype,
        tensor_parallel={"tp_size": tp_size, "mpu": _GroupUnit(group), "tp_group": group},
        replace_with_kernel_inject=False,
        injection_policy={_NothingToReplace: ("embed_tokens",)},  # DeepSpeed wants a name that exists
    )


def stock_inference_engine(
    model: nn.Module, dtype: torch.dtype, group: dist.ProcessGroup | None
) -> deepspeed.InferenceEngine:
    """DeepSpeed's inference engine around a whole transformers decoder, which its AutoTP cuts as it thinks best.

    As ``inference_engine`` otherwise. It guesses from layer names and can be wrong without an error: compare outputs.
    """
    if group is None or dist.get_world_size(group) == 1:
        return inference_engine(model, dtype, None)
    adopt_process_group()
    size = dist.get_world_size(group)
    return deepspeed.init_inference(
        model,
        dtype=dtype,
        tensor_parallel={"tp_size": size, "mpu": _GroupUnit(group), "tp_group": group},
        replace_with_kernel_inject=False,
    )


def gather_over_group(value: float, group: dist.ProcessGroup | None, device: torch.device) -> list[float]:
    """Each rank's ``value``, in rank order, on every rank of the group."""
    if group is None:
        return [value]
    own = torch.tensor([value], dtype=torch.float32, device=device)
    values = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(values, own, group=group)
    return [float(each) for each in values]
