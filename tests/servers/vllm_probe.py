"""What vLLM's own functions make of an export. `python vllm_probe.py SOURCES REQUEST.json`, prints a JSON object.

Real: the reading of both layouts' configs, the rope patch, taps, mask id, causality, windows, the whole drafter module
with its weight loader, and the detection of speculators folders. Stand-ins: layers, kernels, distribution.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig

from tests.servers import layers
from tests.servers.stand_ins import Finder

MODELS, SPEC, CONFIGS = "vllm.model_executor.models", "vllm.v1.worker.gpu.spec_decode", "vllm.transformers_utils"
REAL = [
    f"{CONFIGS}.config", f"{CONFIGS}.utils", f"{CONFIGS}.configs.eagle", f"{CONFIGS}.configs.speculators",
    f"{CONFIGS}.configs.speculators.base", f"{CONFIGS}.configs.speculators.algos", "vllm.config.utils",
    f"{MODELS}.qwen3_dflash", f"{MODELS}.qwen2", f"{MODELS}.utils", f"{SPEC}.utils", f"{SPEC}.eagle.eagle3_utils",
    "vllm.v1.attention.backends.registry",
]  # fmt: skip
LAYERS = "vllm.model_executor.layers"
ropes: list[dict[str, Any]] = []


def get_rope(head_size: int, max_position: int, is_neox_style: bool = True, rope_parameters: Any = None) -> Any:
    ropes.append({"head_size": head_size, "neox": is_neox_style, "max": max_position, **rope_parameters})
    return SimpleNamespace(head_size=head_size)


def finder(sources: Path) -> Finder:
    linear = {
        "QKVParallelLinear": layers.QKVParallelLinear, "RowParallelLinear": layers.PlainLinear,
        "ReplicatedLinear": layers.PlainLinear, "MergedColumnParallelLinear": layers.MergedColumnParallelLinear,
    }  # fmt: skip
    given: dict[str, dict[str, Any]] = {
        f"{LAYERS}.linear": linear,
        f"{LAYERS}.layernorm": {"RMSNorm": layers.RMSNorm},
        f"{LAYERS}.attention": {"Attention": layers.Nothing},
        f"{LAYERS}.logits_processor": {"LogitsProcessor": layers.Nothing},
        f"{LAYERS}.activation": {"SiluAndMul": layers.Nothing},
        f"{LAYERS}.vocab_parallel_embedding": {"VocabParallelEmbedding": layers.Table, "ParallelLMHead": layers.Table},
        f"{LAYERS}.rotary_embedding": {"get_rope": get_rope},
        "vllm.distributed": {"get_tensor_model_parallel_world_size": lambda: 1},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_rocm=lambda: False, is_cpu=lambda: True)},
        "vllm.model_executor.model_loader.weight_utils": {"default_weight_loader": layers.copy_in},
        f"{CONFIGS}.repo_utils": {"get_hf_file_bytes": lambda *_: None},
        f"{MODELS}.qwen3": {"Qwen3ForCausalLM": nn.Module},
        f"{MODELS}.interfaces": {"supports_any_eagle": lambda _: True},
    }
    return Finder(sources, "vllm", REAL, absent=("triton",), given=given).install()


def read_config(found: Finder, folder: str) -> Any:
    """As `get_config` and the set-up of the "dflash" method do, for either layout."""
    config = found.load(f"{CONFIGS}.config")
    if "speculators_config" in json.loads((Path(folder) / "config.json").read_text()):
        read = found.load(f"{CONFIGS}.configs.speculators").SpeculatorsConfig.from_pretrained(folder)
        config.patch_rope_parameters(read)
        return read
    read = AutoConfig.from_pretrained(folder)
    config.patch_rope_parameters(read)
    return found.load(f"{CONFIGS}.configs.eagle").EAGLEConfig(read, method="dflash", model_type="eagle")


def account(found: Finder, folder: str, outputs: str, depth: int, vocab: int) -> dict[str, Any]:
    module = found.load(f"{MODELS}.qwen3_dflash")
    config = read_config(found, folder)
    spec = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config, model=folder, revision=None))
    target = SimpleNamespace(
        dtype=torch.float32, get_total_num_hidden_layers=lambda: depth, get_vocab_size=lambda: vocab
    )
    vllm_config = SimpleNamespace(speculative_config=spec, model_config=target, cache_config=None)
    module.get_current_vllm_config = lambda: vllm_config
    module.get_draft_quant_config = lambda _: None
    ropes.clear()
    model = module.DFlashQwen3ForCausalLM(vllm_config=vllm_config)
    tensors = load_file(Path(folder) / "model.safetensors")
    model.load_weights(tensors.items())
    save_file({name: param.data for name, param in model.named_parameters()}, outputs)
    first = model.model.layers[0]
    return {
        "architectures": config.architectures,
        "mask": found.load(f"{SPEC}.utils").get_parallel_drafting_token_id(config),
        "taps": found.load(f"{SPEC}.eagle.eagle3_utils").get_eagle3_aux_layers_from_config(spec),
        "causal": model.get_draft_attn_causal(),
        "needs_non_causal": module.dflash_has_any_non_causal(config),
        "windows": [layer.self_attn.sliding_window for layer in model.model.layers],
        "sample_from_anchor": bool((config.dflash_config or {}).get("sample_from_anchor", False)),
        "rope": list(ropes),
        "eps": [first.input_layernorm.variance_epsilon, model.model.hidden_norm.variance_epsilon],
        "vocabulary": [config.vocab_size, config.draft_vocab_size],
        "draft_id_map": model.draft_id_to_target_id is not None,
        "logit_scale": model.logits_processor.made_with["scale"],
        "unfilled": layers.unfilled(model),
    }


def served(found: Finder, folder: str) -> dict[str, Any]:
    """What `vllm serve FOLDER` becomes, or what it is refused with."""
    override = found.load(f"{CONFIGS}.config").maybe_override_with_speculators
    algorithms = sys.modules[f"{SPEC}.speculator_config"]
    algorithms.get_custom_speculator_config_class = lambda _: None  # type: ignore[attr-defined]
    try:
        model, _, speculative = override(folder, None, False)
    except ValueError as error:
        return {"refused": str(error)}
    return {"model": model, "speculative": speculative}


def main(sources: str, request_file: str) -> None:
    request = json.loads(Path(request_file).read_text())
    found = finder(Path(sources))
    __import__(f"{SPEC}.speculator_config")
    said = {
        name: {**account(found, folder, f"{folder}.vllm.safetensors", request["depth"], request["vocab"]),
               "served": served(found, folder)}
        for name, folder in request["folders"].items()
    }  # fmt: skip
    folder = Path(next(folder for folder in request["folders"].values() if folder.endswith("speculators")))
    data = json.loads((folder / "config.json").read_text())
    data["speculators_config"]["verifier"]["name_or_path"] = str(folder)
    (local := Path(request_file).parent / "local").mkdir()
    (local / "config.json").write_text(json.dumps(data))
    backends = found.load("vllm.v1.attention.backends.registry").AttentionBackendEnum
    print(
        json.dumps(
            {"exports": said, "backends": list(backends.__members__), "local_verifier": served(found, str(local))}
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
