"""Targets of a model type that has no shard plan: transformers' own model, cut by DeepSpeed's AutoTP, then checked.

AutoTP guesses from the names of layers, and cuts some models wrongly without an error. So every rank runs a small
random batch through the whole model on the CPU before the cut and through the cut model after it, and compares the
outputs of the first layer, of the taps and of the last layer kept. At degree 1 nothing is cut and nothing compared.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recipe.engine.tensor_parallel import gather_over_group, stock_inference_engine
from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape, model_folder
from recipe.model_files.whole_model import load_whole_model
from recipe.target.architectures import ARCHITECTURES
from recipe.target.capture import TapCapture, layers_of
from recipe.target.cpu_kernels import use_torch_kernels_on_cpu

if TYPE_CHECKING:
    from deepspeed import InferenceEngine
    from torch.distributed import ProcessGroup

# Relative error of a layer's output that rounding explains (SmolLM2 in bf16: 0.025); a wrong cut gives 0.3 and more.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.08, torch.float16: 0.02}
# It is taken from the positions, not from the tensor, whose norm may be that of one position's massive activation; and
# a quarter of them may be worse, since rounding sends some tokens of a mixture to other experts.
QUANTILE = 0.75
CHECK_ROWS, CHECK_TOKENS = 2, 24
MOST_HELD, LEAST_HELD = 1.5, 0.25  # times the even share of the layers' weights; outside, AutoTP has not shared them


def load_stock(
    path: str,
    shape: TargetShape,
    tp: int,
    group: ProcessGroup | None,
    device: str | torch.device,
    dtype: torch.dtype,
    taps: Sequence[int],
    need_last_hidden: bool,
    revision: str | None = None,
) -> InferenceEngine:
    """The target ready for TapCapture, like ``load_target`` but with the whole model in every rank's host memory first.

    Raises ConfigError naming model type, degree, layer and error when AutoTP cannot cut this model or cuts it wrongly.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        use_torch_kernels_on_cpu()
    decoder = load_whole(path, shape, dtype, taps, need_last_hidden, revision)
    return cut_decoder(
        decoder, shape, shape.vocab_size, tp, group, device, dtype, {0, *taps, len(layers_of(decoder)) - 1}
    )


def cut_decoder(
    decoder: Any,
    shape: TargetShape,
    vocabulary: int,
    tp: int,
    group: ProcessGroup | None,
    device: torch.device,
    dtype: torch.dtype,
    compared: Collection[int],
) -> InferenceEngine:
    """AutoTP's cut of a whole decoder on the CPU, checked on the outputs of the layers ``compared``.

    ``vocabulary``: ids below it make the batch. Raises ConfigError as `load_stock` does.
    """
    buffers = {name: buffer.clone() for name, buffer in decoder.named_buffers()}
    cpu = torch.device("cpu")
    expected = check_outputs(decoder, vocabulary, sorted(compared), cpu) if tp > 1 else {}
    whole = _layer_bytes(decoder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # AutoTP prints what it guessed
            engine = stock_inference_engine(decoder, dtype, group)
    except (AssertionError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise refusal(shape, tp, f"DeepSpeed's AutoTP cannot cut it ({_first_line(error)})") from error
    for name, buffer in buffers.items():  # the engine has rounded them to dtype
        owner, _, attribute = name.rpartition(".")
        engine.module.get_submodule(owner)._buffers[attribute] = buffer.to(device)
    if tp > 1:
        check_shares(shape, tp, gather_over_group(_layer_bytes(engine.module) / whole, group, device))
        compare_outputs(engine.module, shape, tp, expected, device, dtype, vocabulary)
    return engine


def load_whole(
    path: str,
    shape: TargetShape,
    dtype: torch.dtype,
    taps: Sequence[int],
    need_last_hidden: bool,
    revision: str | None = None,
) -> Any:
    """transformers' decoder in host memory, without the layers after the deepest tap unless they are needed."""
    beyond = [tap for tap in taps if not 0 <= tap < shape.num_layers]
    if beyond or not (taps or need_last_hidden):
        rule = f"name layers from 0 to {shape.num_layers - 1}"
        raise ConfigError("dflash.target.target_layer_ids", list(taps), rule, "name at least one layer of the target")
    folder = model_folder(path, revision)
    model = load_whole_model(folder, dtype, "dflash.target.path")
    head = model.get_output_embeddings()
    if need_last_hidden and getattr(head, "bias", None) is not None:
        rule = f"the head of {shape.model_type} has a bias, which soft labels do not support"
        raise ConfigError("dflash.objective.soft_labels", True, rule, "set it to false")
    decoder = model.get_decoder().eval().requires_grad_(False)
    if not need_last_hidden:
        del layers_of(decoder)[max(taps) + 1 :]
    return decoder


def check_outputs(
    decoder: nn.Module, vocabulary: int, layers: Sequence[int], device: torch.device
) -> dict[int, torch.Tensor]:
    """Layer -> its output [2, 24, H] in fp32 on the CPU, for a random batch that is the same everywhere."""
    generator = torch.Generator().manual_seed(20)
    ids = torch.randint(0, vocabulary, (CHECK_ROWS, CHECK_TOKENS), generator=generator)
    capture = TapCapture(decoder, layers)
    try:
        outputs = capture.capture(ids.to(device))
    finally:
        capture.close()
    return {layer: output.float().cpu() for layer, output in zip(layers, outputs, strict=True)}


def compare_outputs(
    decoder: nn.Module,
    shape: TargetShape,
    tp: int,
    expected: dict[int, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    vocabulary: int,
) -> None:
    """Runs the cut model over the batch of ``check_outputs``; ConfigError names the first layer that differs."""
    try:
        found = check_outputs(decoder, vocabulary, list(expected), device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError, AttributeError) as error:
        rule = f"the model does not run after AutoTP's cut ({_first_line(error)})"
        raise refusal(shape, tp, rule) from error
    for layer, reference in expected.items():
        errors = (found[layer] - reference).norm(dim=-1) / reference.norm(dim=-1)
        difference = float(errors.flatten().quantile(QUANTILE))
        if not difference <= TOLERANCE[dtype]:  # NaN too
            limit = f"relative error {difference:.1e}, limit {TOLERANCE[dtype]}"
            rule = f"after AutoTP's cut the output of layer {layer} is another one ({limit})"
            raise refusal(shape, tp, rule)


def check_shares(shape: TargetShape, tp: int, shares: Sequence[float]) -> None:
    """ConfigError unless each rank holds about its share of the layers' weights. ``shares``: the part that each holds.

    AutoTP cuts by whole key/value heads (with fewer of them than ranks, some ranks get nothing) and no experts.
    """
    if max(shares) > MOST_HELD / tp or min(shares) < LEAST_HELD / tp:
        held = ", ".join(f"{share:.0%}" for share in shares)
        raise refusal(shape, tp, f"AutoTP does not share it out (ranks would hold {held} of the layers' weights)")


def refusal(shape: TargetShape, tp: int, what: str) -> ConfigError:
    """What the user reads when a model cannot be sharded."""
    rule = f"{shape.model_type} cannot be sharded at this degree: {what}"
    planned = ", ".join(sorted(ARCHITECTURES))
    return ConfigError("dflash.layout.target_tp", tp, rule, f"use 1 or another degree, or a target of: {planned}")


def _layer_bytes(decoder: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in layers_of(decoder).parameters())


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
