"""What SGLang's own functions make of an export. `python sglang_probe.py SOURCES REQUEST.json`, prints a JSON object.

Real: the draft config, causality and windows, rope, dtype, the mask id's check, the whole drafter module with its
weight loader, taps in two target models, and the options of its command line. Stand-ins: layers, kernels,
distribution, and `msgspec`, in which options are written.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.servers import layers
from tests.servers.stand_ins import Finder, blank

SRT, FIELDS = "sglang.srt", "sglang.srt.arg_groups.fields"
OPTIONS = ("model", "spec", "exec_")
TARGETS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
REAL = [
    f"{SRT}.speculative.dflash_utils", f"{SRT}.models.dflash", f"{SRT}.utils.hf_transformers.common",
    f"{SRT}.speculative.dflash_worker_v2", f"{SRT}.configs.laguna", f"{SRT}.arg_groups.arg_utils",
    f"{SRT}.arg_groups.choices",
    f"{SRT}.configs.model_config",
    *(f"{SRT}.models.{name}" for name in TARGETS), *(f"{FIELDS}.{name}" for name in OPTIONS),
]  # fmt: skip
ropes: list[dict[str, Any]] = []


def get_rope(head_size: int, rotary_dim: int, max_position: int, base: float, rope_scaling: Any, **more: Any) -> Any:
    neox, partial = more["is_neox_style"], more["partial_rotary_factor"]
    shape = {"head_size": head_size, "rotary_dim": rotary_dim, "max": max_position, "neox": neox, "partial": partial}
    ropes.append({**(rope_scaling or {}), **shape, "rope_theta": base})
    return SimpleNamespace()


class Struct:
    """Of `msgspec.Struct`: keyword arguments and defaults."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Options such as ``frozen`` change nothing here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vars(self).update(zip(self.__annotations__, args, strict=False))
        vars(self).update(kwargs)


def finder(sources: Path) -> Finder:
    given: dict[str, dict[str, Any]] = {
        f"{SRT}.layers.linear": {
            "QKVParallelLinear": layers.QKVParallelLinear, "RowParallelLinear": layers.PlainLinear,
            "ReplicatedLinear": layers.PlainLinear, "MergedColumnParallelLinear": layers.MergedColumnParallelLinear,
        },
        f"{SRT}.layers.layernorm": {"RMSNorm": layers.RMSNorm, "GemmaRMSNorm": layers.RMSNorm},
        f"{SRT}.layers.activation": {"SiluAndMul": layers.Nothing},
        f"{SRT}.layers.radix_attention": {
            "RadixAttention": layers.Nothing,
            "AttentionType": SimpleNamespace(DECODER="decoder", ENCODER_ONLY="encoder_only"),
        },
        f"{SRT}.layers.rotary_embedding": {"get_rope": get_rope},
        f"{SRT}.runtime_context": {
            "get_parallel": lambda: SimpleNamespace(tp_size=1, tp_rank=0), "get_spec": lambda: SimpleNamespace()
        },
        f"{SRT}.utils.common": {"get_compiler_backend": lambda: "eager"},
        f"{SRT}.model_loader.weight_utils": {"default_weight_loader": layers.copy_in},
        "msgspec": {"Struct": Struct, "field": blank("field")},
    }  # fmt: skip
    found = Finder(sources, "sglang", REAL, absent=("triton", "msgspec", "flashinfer"), given=given).install()
    common = found.load(f"{SRT}.utils.hf_transformers.common")
    handed_on = importlib.import_module(f"{SRT}.utils.hf_transformers_utils")
    handed_on.get_rope_config = common.get_rope_config  # type: ignore[attr-defined]
    return found


def account(found: Finder, folder: str, outputs: str, depth: int, vocab: int) -> dict[str, Any]:
    utils, module = found.load(f"{SRT}.speculative.dflash_utils"), found.load(f"{SRT}.models.dflash")
    config = AutoConfig.from_pretrained(folder)
    read = utils.parse_dflash_draft_config(draft_hf_config=config)
    ropes.clear()
    model = getattr(module, config.architectures[0])(config)
    for param in model.parameters():
        param.data.fill_(float("nan"))  # `fc` is torch's own layer, which draws values
    model.load_weights(load_file(Path(folder) / "model.safetensors").items())
    save_file({name: param.data for name, param in model.named_parameters()}, outputs)
    taps = read.resolve_target_layer_ids(target_num_layers=depth)
    return {
        "architectures": config.architectures,
        "block": read.resolve_block_size(),
        "mask": mask(found, read, vocab),
        "taps": taps,
        "captured": {name: captured(found, name, taps) for name in TARGETS},
        "num_target_layers": read.num_target_layers,
        "causal": [layer.self_attn.attn_type == "decoder" for layer in model.layers],
        "windows": [layer.self_attn.sliding_window_size for layer in model.layers],
        "rope": list(ropes),
        "eps": [model.rms_norm_eps, model.layers[0].self_attn.q_norm.variance_epsilon],
        "dtype": str(found.load(f"{SRT}.configs.model_config")._get_and_verify_dtype(config, "auto")),
        "unfilled": layers.unfilled(model),
    }


def mask(found: Finder, read: Any, vocab: int) -> int:
    """The id that the worker takes for a target of ``vocab`` tokens, by its own check."""
    runner = SimpleNamespace(model_config=SimpleNamespace(vocab_size=vocab))
    worker = SimpleNamespace(target_worker=SimpleNamespace(tokenizer=None, model_runner=runner))
    resolve = found.load(f"{SRT}.speculative.dflash_worker_v2").DFlashWorkerV2._resolve_mask_token_id
    return int(resolve(worker, mask_token=read.mask_token, mask_token_id=read.mask_token_id))


def captured(found: Finder, name: str, taps: list[int]) -> list[int]:
    """Before which layers a target's model takes the hidden state for these taps."""
    inner = SimpleNamespace()
    model = SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=True), model=inner, capture_aux_hidden_states=False)
    getattr(found.load(f"{SRT}.models.{name}"), TARGETS[name]).set_dflash_layers_to_capture(model, taps)
    return list(inner.layers_to_capture)


def options(found: Finder) -> argparse.ArgumentParser:
    """The part of SGLang's own command line that is declared in ``OPTIONS``, built by its own function."""
    arguments = found.load(f"{SRT}.arg_groups.arg_utils")
    parser = argparse.ArgumentParser(exit_on_error=False)
    arguments.record_fields = lambda record: [SimpleNamespace(name=name) for name in record.__annotations__]
    arguments._field_default = lambda _: None
    for name in OPTIONS:
        for record in vars(found.load(f"{FIELDS}.{name}")).values():
            if isinstance(record, type) and issubclass(record, Struct) and "_NS_PATH" in vars(record):
                arguments.add_cli_args_from_dataclass(parser, record)
    return parser


def main(sources: str, request_file: str) -> None:
    request = json.loads(Path(request_file).read_text())
    found = finder(Path(sources))
    said = {
        name: account(found, folder, f"{folder}.sglang.safetensors", request["depth"], request["vocab"])
        for name, folder in request["folders"].items()
    }
    parser = options(found)
    parsed = []
    for command in request.get("commands", []):
        known, unknown = parser.parse_known_args(command)
        parsed.append(
            {"unknown": unknown, "known": {key: value for key, value in vars(known).items() if value is not None}}
        )
    print(json.dumps({"exports": said, "commands": parsed}, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
