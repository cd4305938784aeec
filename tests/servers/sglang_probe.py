"""What SGLang's own functions make of an export. `python sglang_probe.py SOURCES REQUEST.json`, prints a JSON object.

Real: the draft config, causality and windows, rope, the mask id's check, the whole drafter module with its weight loader,
and the options of its command line. Stand-ins: layers, kernels, distribution, and `msgspec`, in which options are written.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.servers import layers
from tests.servers.stand_ins import Finder, blank

SRT, FIELDS = "sglang.srt", "sglang.srt.arg_groups.fields"
OPTIONS = ("model", "spec", "exec_")
REAL = [
    f"{SRT}.speculative.dflash_utils", f"{SRT}.models.dflash", f"{SRT}.utils.hf_transformers.common",
    f"{SRT}.speculative.dflash_worker_v2", f"{SRT}.configs.laguna", f"{SRT}.arg_groups.arg_utils",
    f"{SRT}.arg_groups.choices", *(f"{FIELDS}.{name}" for name in OPTIONS),
]  # fmt: skip
ropes: list[dict[str, Any]] = []


def get_rope(head_size: int, rotary_dim: int, max_position: int, base: float, rope_scaling: Any, **more: Any) -> Any:
    scaling = dict(rope_scaling or {})
    ropes.append({**scaling, "head_size": head_size, "rotary_dim": rotary_dim, "max": max_position,
                  "rope_theta": base, "neox": more["is_neox_style"], "partial": more["partial_rotary_factor"]})  # fmt: skip
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
    sys.modules[f"{SRT}.utils.hf_transformers_utils"] = common  # which only hands its names on
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
    worker = SimpleNamespace(
        tokenizer=None, model_runner=SimpleNamespace(model_config=SimpleNamespace(vocab_size=vocab))
    )
    check = found.load(f"{SRT}.speculative.dflash_worker_v2").DFlashWorkerV2._resolve_mask_token_id
    return {
        "architectures": config.architectures,
        "block": read.resolve_block_size(), "model_block": model.block_size,
        "mask": check(SimpleNamespace(target_worker=worker), mask_token=read.mask_token, mask_token_id=read.mask_token_id),
        "taps": read.resolve_target_layer_ids(target_num_layers=depth), "num_target_layers": read.num_target_layers,
        "attention": [layer.self_attn.attn_type for layer in model.layers],
        "windows": [layer.self_attn.sliding_window_size for layer in model.layers],
        "rope": list(ropes),
        "eps": [model.rms_norm_eps, model.layers[0].self_attn.q_norm.variance_epsilon],
        "switches": [read.output_multiplier, read.final_logit_softcapping, read.projector_type, read.conv_kernel_size,
                     read.selector_rank, read.attention_sink_bias, read.attention_value_scale],
        "unfilled": layers.unfilled(model),
    }  # fmt: skip


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
    assert get_type_hints
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
