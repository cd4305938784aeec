"""The same drafter in the layout of the `speculators` package, which vLLM loads, too.

Differences from the z-lab layout: taps are counted after the embedding (our L is its L + 1), the drafter's shape sits
in ``transformer_layer_config``, and the target's embedding and head travel with the drafter. There are no maps between
draft and target vocabulary (t2d, d2t): the drafter speaks the whole one, and for such a drafter the loader knows none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from recipe.drafter.config import SLIDING, DrafterConfig
from recipe.drafter.export_layout import (
    DTYPES,
    VERSIONS,
    Tensors,
    check_tensors,
    read_config,
    read_tensors,
    refuse_shifted,
    write_folder,
)
from recipe.drafter.switches import one_rope, refuse_switches, with_qwen3_defaults
from recipe.errors import ConfigError, RunError

OWN = {"architectures", "dflash_config", "block_size", "mask_token_id", "num_target_layers"}
EXTRA = ("embed_tokens.weight", "lm_head.weight", "t2d", "d2t", "verifier_norm.weight", "verifier_lm_head.weight")
KNOWN = {
    "speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config",
    "draft_vocab_size", "aux_hidden_state_layer_ids", "sliding_window_non_causal",
    # of the projector "domino", which is refused, and of training
    "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim", "lambda_base_start", "lambda_base_decay_ratio", "auf",
}  # fmt: skip


def export_speculators(
    state_dict: Mapping[str, torch.Tensor],
    config: DrafterConfig,
    out_dir: Path,
    dtype: str,
    target: str,
    embed: torch.Tensor,
    head: torch.Tensor,
    target_architectures: list[str],
) -> Path:
    """Write the speculators layout; read back before it gets its name.

    ``embed`` and ``head`` [V, H] are the target's, ``target`` its path or hub id. ConfigError for what does not fit.
    """
    check_tensors(config, state_dict, "export")
    if config.is_causal is None or (config.is_causal and set(config.layer_types) != {SLIDING}):
        rule = (
            f"of this layout vLLM {VERSIONS['vllm']} reads one in-block direction for all layers, and speculators lets "
            "full layers look both ways: tau would be lost without a word"
        )
        fix = "use --format hf, which vLLM and SGLang serve as trained"
        raise ConfigError("drafter.in_block_causal", config.in_block_causal, rule, fix)
    shape = (config.vocab_size, config.hidden_size)
    for name, tensor in (("embedding", embed), ("head", head)):
        if tuple(tensor.shape) != shape:
            raise ConfigError("--target", target, f"its {name} is {tuple(tensor.shape)}, not {shape}",
                              "name the target that the drafter was trained for")  # fmt: skip
    stored = DTYPES[dtype]
    tensors: Tensors = {name: tensor.detach().to("cpu", stored) for name, tensor in state_dict.items()}
    # Readers of this layout take its table as it is: scaled as the target's embedding module does.
    tensors["embed_tokens.weight"] = (embed.detach().to("cpu", stored) * config.input_embedding_scale).to(stored)
    tensors["lm_head.weight"] = head.detach().to("cpu", stored, copy=True)  # a copy: shared storage is refused
    written = _config(config.with_dtype(dtype), target, target_architectures)

    def verify(folder: Path) -> None:
        read = read_tensors(folder)
        for name, tensor in tensors.items():
            if read[name].dtype != tensor.dtype or not torch.equal(read[name], tensor):
                raise RunError(f"the exported tensor {name} does not read back equal")
        back, _ = from_speculators(read_config(folder), read)
        if back != config.with_dtype(dtype):
            raise RunError(f"the exported config does not read back: {back} instead of {config}")

    return write_folder(Path(out_dir), written, tensors, verify)


def _config(config: DrafterConfig, target: str, architectures: list[str]) -> dict[str, Any]:
    layers = {key: value for key, value in config.to_dict().items() if key not in OWN}
    method = {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": VERSIONS["speculators"],
        "transformer_layer_config": layers,
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        # vLLM takes it for all layers, sliding or not, unless it finds (and knows) is_causal in the layers' config.
        "sliding_window_non_causal": not config.is_causal,
        "sample_from_anchor": False,
        "num_target_layers": config.num_target_layers,
        "input_embedding_scale": config.input_embedding_scale,  # of the target's table; embed_tokens has it already
        "dtype": config.dtype,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target, "architectures": architectures},
        },
    }


def from_speculators(data: Mapping[str, Any], tensors: Tensors) -> tuple[DrafterConfig, Tensors]:
    """Config and the drafter's own tensors of a speculators export. ConfigError names what is missing."""
    refuse_switches(data, KNOWN)
    for key in ("transformer_layer_config", "aux_hidden_state_layer_ids", "mask_token_id"):
        if data.get(key) is None:
            raise ConfigError(
                key, None, "the speculators export lacks the key", "add the trainer's value to config.json"
            )
    refuse_shifted(data.get("sample_from_anchor"))
    written = data["transformer_layer_config"]
    refuse_switches(written, where="transformer_layer_config.")
    layers = with_qwen3_defaults({**written, "rope_parameters": one_rope(written), "rope_scaling": None})
    if data.get("draft_vocab_size", layers.get("vocab_size")) != layers.get("vocab_size"):
        rule = f"a reduced draft vocabulary (of {layers.get('vocab_size')}) is not decoded here"
        raise ConfigError("draft_vocab_size", data["draft_vocab_size"], rule, "use a full-vocabulary drafter")
    taps = [index - 1 for index in data["aux_hidden_state_layer_ids"]]
    types = layers.get("layer_types") or ["full_attention"] * int(layers.get("num_hidden_layers", 0))
    causal = not data.get("sliding_window_non_causal", False)
    inner = {
        "block_size": data.get("block_size", 8),  # its class's default
        "mask_token_id": data["mask_token_id"],
        "target_layer_ids": taps,
        # Its own exports do not hold the target's depth; a depth that admits the taps keeps every check but one.
        "num_target_layers": data.get("num_target_layers") or max(taps) + 2,
        "in_block_causal": [causal and kind == SLIDING for kind in types],
        "input_embedding_scale": data.get("input_embedding_scale", 1.0),
        "dtype": data.get("dtype") or layers.get("dtype") or "bfloat16",
    }
    config = DrafterConfig.from_dict({**written, "dflash_config": inner})
    return config, {name: tensor for name, tensor in tensors.items() if name not in EXTRA}
