"""The target's shape, read from its ``config.json``: what every size in a run is derived from. Loads no weights."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe.errors import ConfigError

NAMED_ALIKE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)  # by most model types; the others are asked of transformers
MOST_LAYERS = 4096  # a damaged file must not make lists that fill the memory
KNOWN_SHAPES = Path(__file__).parent / "known_shapes"


def cached_file(repo_id: str, filename: str, revision: str | None = None) -> Path | None:
    """A file of a hub repository in the local cache, or None. Never touches the network."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repo_id, filename, revision=revision or "main")
    except HFValidationError:  # not a repository id at all, e.g. an absolute path
        return None
    return Path(found) if isinstance(found, str) else None


def model_folder(path: str, revision: str | None = None) -> Path:
    """The folder of a model given as a folder or as a hub id in the local cache; ConfigError when it is neither."""
    folder = Path(os.path.expanduser(path))
    if (folder / "config.json").is_file():
        return folder
    if folder.is_dir():
        raise ConfigError("dflash.target.path", path, "this folder has no config.json", "give a Hugging Face folder")
    cached = cached_file(path, "config.json", revision)
    if cached is None:
        rule = "neither a folder nor a model in the local Hugging Face cache"
        raise ConfigError("dflash.target.path", path, rule, f"fetch it first: hf download {path}")
    return cached.parent


def default_target_layer_ids(num_layers: int, taps: int = 5) -> tuple[int, ...]:
    """Evenly spaced taps from layer 1 to layer ``num_layers - 3`` (0-based); one tap sits in the middle."""
    if taps == 1:
        return (num_layers // 2,)
    if num_layers - 3 < taps:  # 1 … num_layers-3 must hold that many different layers
        rule = f"{taps} evenly spaced taps need a target of at least {taps + 3} layers"
        raise ConfigError(
            "dflash.target.target_layer_ids",
            None,
            f"{rule}, it has {num_layers}",
            "list the taps in dflash.target.target_layer_ids",
        )
    return tuple(round(1 + i * (num_layers - 4) / (taps - 1)) for i in range(taps))


@dataclass(frozen=True)
class MoeShape:
    """Mixture of experts: ``experts`` of ``intermediate_size`` columns, ``experts_per_token`` of them active, and (0 if
    there is none) the columns of the expert that every token passes. ``layers``: whether each layer is such a mixture;
    the others have a dense MLP.
    """

    experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    layers: tuple[bool, ...]


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a decoder-only language model. The ``linear_*`` fields are None unless it has DeltaNet layers,
    ``moe`` is None unless it has mixtures of experts.

    ``layer_types`` has one of "full_attention", "linear_attention", "sliding_attention" per layer. ``text_config`` is
    the text part of ``config.json``, from which transformers builds the model. ``model_type`` is the text model's,
    without a trailing ``_text`` (so "qwen3_5" for the vision-language and for the text-only checkpoint).
    """

    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int | None = None
    moe: MoeShape | None = None
    text_config: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def hybrid(self) -> bool:
        return "linear_attention" in self.layer_types

    @classmethod
    def resolve(cls, path: str, revision: str | None = None) -> TargetShape:
        """From a folder, a hub id in the local cache, or an id whose shape is bundled in ``recipe/known_shapes``.

        Raises ConfigError when there is no such model or its config.json cannot be used.
        """
        bundled = KNOWN_SHAPES / f"{path.strip('/').replace('/', '--')}.json"
        try:
            config_file = model_folder(path, revision) / "config.json"
        except ConfigError:
            if not bundled.is_file():
                raise
            config_file = bundled
        try:
            config = json.loads(config_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(str(config_file), path, f"not readable as JSON: {error}", "fetch it again") from error
        return cls.from_config(config, source=str(config_file))

    @classmethod
    def from_config(cls, config: dict[str, Any], source: str = "config.json") -> TargetShape:
        """From the content of a ``config.json`` (of a text model, or of a vision-language one with ``text_config``)."""
        inner = config.get("text_config") if isinstance(config, dict) else config
        if not isinstance(inner or config, dict):
            rule = "must be a JSON object" + (", text_config too" if isinstance(config, dict) else "")
            raise ConfigError(source, type(inner or config).__name__, rule, "fetch config.json again")
        text = dict(inner or config)
        text.setdefault("model_type", config.get("model_type"))
        if "tie_word_embeddings" not in text:  # vision-language checkpoints keep it outside
            text["tie_word_embeddings"] = bool(config.get("tie_word_embeddings", False))
        try:
            if any(text.get(key) is None for key in NAMED_ALIKE):
                text = _with_defaults(text)
            return cls(**_positive(_sizes(text)), text_config=text)
        except Exception as error:  # transformers' own checks of a damaged file raise types of many libraries
            said = " ".join(str(error).split())[:160]
            rule = f"cannot be read as a decoder-only language model: {type(error).__name__}: {said}"
            raise ConfigError(
                source, text.get("model_type"), rule, "use a causal language model that transformers knows"
            ) from error


def _positive(sizes: dict[str, Any]) -> dict[str, Any]:
    """The sizes, all of them above 0 and within reason; ValueError names the first that is not."""
    for name, value in sizes.items():
        if not isinstance(value, bool) and isinstance(value, int | float) and not 0 < value < 2**40:
            raise ValueError(f"{name} is {value}")
    return sizes


def _with_defaults(text: dict[str, Any]) -> dict[str, Any]:
    """The sizes that config.json leaves to transformers or names otherwise (GPT-2's n_embd) added under their names."""
    from transformers import AutoConfig

    settings = {key: value for key, value in text.items() if key != "model_type"}
    config = AutoConfig.for_model(text["model_type"], **settings)
    found: dict[str, Any] = {
        key: getattr(config, key, None) for key in (*NAMED_ALIKE, "intermediate_size", "num_key_value_heads")
    }
    if not found["intermediate_size"]:
        found["intermediate_size"] = 4 * int(found["hidden_size"])
    return {key: value for key, value in found.items() if value is not None} | text


def _sizes(text: dict[str, Any]) -> dict[str, Any]:
    heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
    rope = text.get("rope_parameters") or {}
    layer_types = _layer_types(text)
    sizes: dict[str, Any] = {
        "model_type": str(text["model_type"]).removesuffix("_text"),
        "hidden_size": hidden,
        "num_layers": int(text["num_hidden_layers"]),
        "vocab_size": int(text["vocab_size"]),
        "intermediate_size": int(text.get("intermediate_size") or text["moe_intermediate_size"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(text.get("num_key_value_heads") or heads),
        "head_dim": int(text.get("head_dim") or hidden // heads),
        "rms_norm_eps": float(text.get("rms_norm_eps", 1e-6)),
        "rope_theta": float(rope.get("rope_theta") or text.get("rope_theta") or 10000.0),
        "max_position_embeddings": int(text["max_position_embeddings"]),
        "tie_word_embeddings": bool(text["tie_word_embeddings"]),
        "layer_types": layer_types,
    }
    if "linear_attention" in layer_types:
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"):
            sizes[f"linear_{name}"] = int(text[f"linear_{name}"])
    experts = text.get("num_experts") or text.get("num_local_experts")  # transformers writes the latter
    if experts and text.get("moe_intermediate_size"):
        sizes["moe"] = _moe(text, int(experts))
    return sizes


def _moe(text: dict[str, Any], experts: int) -> MoeShape:
    layers, step = int(text["num_hidden_layers"]), int(text.get("decoder_sparse_step") or 1)
    dense = set(text.get("mlp_only_layers") or ())
    return MoeShape(
        experts=experts,
        experts_per_token=int(text["num_experts_per_tok"]),
        intermediate_size=int(text["moe_intermediate_size"]),
        shared_intermediate_size=int(text.get("shared_expert_intermediate_size") or 0),
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    )


def _layer_types(text: dict[str, Any]) -> tuple[str, ...]:
    layers = int(text["num_hidden_layers"])
    if not 0 < layers <= MOST_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers}")
    given = text.get("layer_types")
    if given:
        if len(given) < layers:
            raise ValueError(f"layer_types lists {len(given)} of {layers} layers")
        return tuple(given[:layers])
    if str(text["model_type"]).startswith(("qwen3_5", "qwen3_next")):
        every = int(text.get("full_attention_interval", 4))
        return tuple("full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers))
    if text.get("use_sliding_window") and text.get("sliding_window"):
        first = int(text.get("max_window_layers", 0))
        return tuple("full_attention" if i < first else "sliding_attention" for i in range(layers))
    return ("full_attention",) * layers
