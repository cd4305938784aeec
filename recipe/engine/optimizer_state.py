"""The ZeRO optimizer's state on disk, in a form that any number of ranks can read.

Every rank writes its own part: for each parameter the slice that it owns, as fp32 master weights and as each of the
optimizer's moments, named ``KIND/PARAMETER@START`` (``exp_avg/layers.0.mlp.up_proj.weight@4096``: elements from 4096 on
of the flattened parameter). Muon's momentum, which each rank keeps of every matrix that it has a part of, is written by
its parts as well. A reader takes the slices that it needs from whichever files hold them, so another number
of ranks, ZeRO stage 1 or 2, or another order of the parameters makes no difference, and no bit changes. safetensors
only: nothing that is read here can run code, as DeepSpeed's own (universal) checkpoints could.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from recipe.errors import RunError

MASTER, MOMENTUM = "fp32", "momentum_buffer"


class Shards:
    """The slices in a checkpoint's files, found by what they are instead of by who wrote them."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._open = [safe_open(file, framework="pt") for file in files]
        self._found: dict[str, list[tuple[int, int, Any, str]]] = defaultdict(list)
        for file in self._open:
            for key in file.keys():  # noqa: SIM118 (a safe_open is no mapping)
                name, _, start = key.rpartition("@")
                first = int(start)
                self._found[name].append((first, first + file.get_slice(key).get_shape()[0], file, key))

    def kinds(self, parameters: Iterable[str]) -> list[str]:
        """What is saved of any of them, besides the master weights."""
        wanted, found = set(parameters), (name.partition("/") for name in self._found)
        return sorted({kind for kind, _, parameter in found if parameter in wanted} - {MASTER})

    def read(self, kind: str, parameter: str, start: int, numel: int) -> Tensor:
        """Elements [start, start + numel) of the flattened parameter. Raises RunError when some are in no file."""
        stop, parts, position = start + numel, [], start
        for first, last, file, key in sorted(self._found[f"{kind}/{parameter}"], key=lambda part: part[:2]):
            if last <= position or first >= stop:
                continue
            if first > position:
                break
            until = min(last, stop)
            parts.append(file.get_slice(key)[position - first : until - first])
            position = until
        if position != stop:
            raise RunError(f"the checkpoint holds elements up to {position} of {kind} of {parameter}, not up to {stop}")
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def save_state(engine: Any, file: Path) -> dict[str, Any]:
    """Write this rank's part to ``file``; returns what is the same on every rank, JSON-ready.

    Raises OSError when it cannot be written.
    """
    optimizer = engine.optimizer
    tensors, groups = {}, []
    for index, group in enumerate(optimizer.optimizer.param_groups):
        flat = optimizer.single_partition_of_fp32_groups[index]
        state = optimizer.optimizer.state[flat]
        momentum = _momentum(optimizer, index, state.get(MOMENTUM))
        for name, start, place in _owned(optimizer, index):
            tensors[f"{MASTER}/{name}@{start}"] = flat.detach()[place]
            if momentum:
                tensors[f"{MOMENTUM}/{name}@{start}"] = momentum[name][start : start + place.stop - place.start]
            for kind in _moments(state, flat):
                tensors[f"{kind}/{name}@{start}"] = state[kind].detach()[place]
        steps = [float(holder["step"]) if "step" in holder else None for holder in (state, group)]
        groups.append({"state_step": steps[0], "group_step": steps[1]})
    try:
        save_file({key: value.to("cpu", copy=True).contiguous() for key, value in tensors.items()}, file)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    return {
        "groups": groups,
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "lr_iteration": getattr(engine.lr_scheduler, "last_batch_iteration", None),
    }


def load_state(engine: Any, files: Sequence[Path], facts: dict[str, Any], lr_shift: int = 0) -> None:
    """Restore masters, moments, counters and learning rate from the parts of all ranks that saved.

    ``lr_shift``: added to the schedule's place. Settings (rate, betas, decay, clipping) stay those of the config.
    Every rank must call it: the working weights are gathered from the masters at its end.
    """
    optimizer, shards = engine.optimizer, Shards(files)
    for index, group in enumerate(optimizer.optimizer.param_groups):
        flat = optimizer.single_partition_of_fp32_groups[index]
        state = optimizer.optimizer.state[flat]
        moments = shards.kinds(optimizer.param_names[parameter] for parameter in optimizer.bit16_groups[index])
        if MOMENTUM in moments:
            moments.remove(MOMENTUM)
            _load_momentum(optimizer, index, shards)
        for kind in moments:
            state[kind] = torch.zeros_like(flat)  # padding at the end of a partition is zero, as at the start of a run
        for name, start, place in _owned(optimizer, index):
            numel = place.stop - place.start
            flat.data[place].copy_(shards.read(MASTER, name, start, numel))
            for kind in moments:
                state[kind][place].copy_(shards.read(kind, name, start, numel))
        saved = facts["groups"][index]
        if saved["state_step"] is not None:
            state["step"] = torch.tensor(saved["state_step"], dtype=torch.float32)
        if saved["group_step"] is not None:
            group["step"] = int(saved["group_step"])
    optimizer._hp_optimizer_states_linked = False  # DeepSpeed keeps views of the moments; they are made anew
    engine.global_steps, engine.skipped_steps = int(facts["global_steps"]), int(facts["skipped_steps"])
    if engine.lr_scheduler is not None and facts["lr_iteration"] is not None:
        iteration = max(-1, int(facts["lr_iteration"]) + lr_shift)
        if iteration >= 0:
            engine.lr_scheduler.step(iteration)  # also sets the rate of the next step
    optimizer.update_lp_params()


def unlike(engine: Any, weights: Mapping[str, Tensor]) -> list[str]:
    """What does not equal ``weights`` (whole, as they were saved) on this rank, bit for bit: this rank's part of the
    masters, rounded as the weights are, and all of the weights that it works with."""
    optimizer, found = engine.optimizer, []
    for index in range(len(optimizer.bit16_groups)):
        flat = optimizer.single_partition_of_fp32_groups[index].detach()
        for name, start, place in _owned(optimizer, index):
            part = weights[name].flatten()[start : start + place.stop - place.start].to(flat.device)
            if not torch.equal(flat[place].to(part.dtype), part):
                found.append(f"the master of {name}")
    for name, weight in engine.module.state_dict().items():
        if not torch.equal(weight.detach().cpu(), weights[name].to(weight.dtype)):
            found.append(name)
    return found


def masters_unlike(files: Sequence[Path], weights: Mapping[str, Tensor]) -> list[str]:
    """Names of the ``weights`` that the masters in ``files``, rounded as the weights are, do not equal bit for bit."""
    shards = Shards(files)
    masters = {name: shards.read(MASTER, name, 0, weight.numel()) for name, weight in weights.items()}
    return [
        name for name, one in masters.items() if not torch.equal(one.to(weights[name].dtype), weights[name].flatten())
    ]


def _owned(optimizer: Any, group: int) -> Iterator[tuple[str, int, slice]]:
    """(parameter, first element within it, place in this rank's flat partition) of everything this rank owns."""
    for parameter in optimizer.bit16_groups[group]:
        mapping = parameter._hp_mapping
        if mapping is not None:
            place = mapping.hp_fragment_address
            yield (
                optimizer.param_names[parameter],
                int(mapping.lp_fragment_address.start),
                slice(int(place.start), int(place.start + place.numel)),
            )


def _momentum(optimizer: Any, group: int, buffer: Tensor | None) -> dict[str, Tensor]:
    """Muon's flattened momentum of each matrix of which this rank owns a part. Views of DeepSpeed's one buffer, which
    holds whole matrices one after the other, since a matrix is made orthogonal as a whole. Empty without a buffer."""
    if buffer is None:
        return {}
    matrices = optimizer.params_in_partition[group]
    views = buffer.split([matrix.numel() for matrix in matrices])
    return {optimizer.param_names[matrix]: view for matrix, view in zip(matrices, views, strict=True)}


def _load_momentum(optimizer: Any, group: int, shards: Shards) -> None:
    matrices = optimizer.params_in_partition[group]
    if matrices:
        parts = [shards.read(MOMENTUM, optimizer.param_names[matrix], 0, matrix.numel()) for matrix in matrices]
        flat = optimizer.single_partition_of_fp32_groups[group]
        optimizer.optimizer.state[flat][MOMENTUM] = torch.cat(parts).to(flat.device)


def _moments(state: dict[str, Any], flat: Tensor) -> list[str]:
    """Names of the state's tensors that have an element for each weight."""
    tensors = {key: value for key, value in state.items() if torch.is_tensor(value) and key != MOMENTUM}
    return [key for key, value in tensors.items() if value.shape == flat.shape]
