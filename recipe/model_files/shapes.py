"""The target's shape, read from its ``config.json``: what every size in a run is derived from. Loads no weights.

transformers' config class of the model type does the reading: files leave out what is the class's default, and some
types name or nest things in their own way. Its modelling code is not imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MOST_LAYERS = 4096  # a damaged file must not make lists that fill the memory
MLP_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size")  # by the types that have them
INHERITED = {  # scalings of positions that a drafter takes over, with all keys that they may have
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "beta_fast", "beta_slow", "original_max_position_embeddings"},
}
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

    ``rope_theta`` and ``rope_scaling`` (transformers' keys, None where positions are not scaled) are those of layers
    that see the whole text. ``layer_types``: "full_attention", "linear_attention", "sliding_attention" or another of
    transformers' words for each layer. ``text_config`` is all that transformers' config class makes of the text part,
    class defaults included, and what it builds the model from. ``model_type`` is the text model's, without a trailing
    ``_text`` (so "qwen3_5" for the vision-language and for the text-only checkpoint).
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
    rope_scaling: dict[str, Any] | None = None
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

    @property
    def inherited_scaling(self) -> dict[str, Any] | None:
        """The scaling of positions where a drafter takes it over; None: it takes the base only.

        That is where all readers compute the same, and fast rotations stay as they are: a drafter tells the slots of a
        block apart by nothing else (linear scaling slows all of them).
        """
        scaling = {key: value for key, value in (self.rope_scaling or {}).items() if value is not None}
        keys = INHERITED.get(scaling.get("rope_type", ""), set())
        return scaling if keys and scaling.keys() - {"rope_type"} <= keys else None

    @classmethod
    def resolve(cls, path: str, revision: str | None = None) -> TargetShape:
        """From a folder, a hub id in the local cache, or an id whose shape is bundled in ``known_shapes``.

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
        try:
            text = read_text_config(config)
            return cls(**_positive(_sizes(text)), text_config=text.to_dict())
        except Exception as error:  # transformers' own checks of a damaged file raise types of many libraries
            said = " ".join(str(error).split())[:160]
            rule = f"cannot be read as a decoder-only language model: {type(error).__name__}: {said}"
            raise ConfigError(
                source, config.get("model_type"), rule, "use a causal language model that transformers knows"
            ) from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Only errors are logged by transformers: for steps whose findings are ours to report, and that each rank does."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def read_text_config(config: Mapping[str, Any]) -> PreTrainedConfig:
    """transformers' config object of the language model that a ``config.json`` describes, class defaults filled in."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    inner = config.get("text_config") or {}
    model_type = config.get("model_type")
    if inner and model_type not in CONFIG_MAPPING:  # a wrapper that transformers does not know, around a type it does
        config, inner, model_type = {**config, **inner}, {}, inner.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ValueError(f"transformers knows no model type {model_type!r}")
    layers = {**config, **inner}.get("num_hidden_layers", 1)
    if not isinstance(layers, int) or not 0 < layers <= MOST_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers}")
    kind = CONFIG_MAPPING[model_type]
    with quiet_transformers():  # it remarks on token ids that nobody reads here
        whole = kind.from_dict(kind._decode_special_floats(dict(config)))  # how files spell infinity; copies the rest
    text = whole.get_text_config(decoder=True)
    if getattr(text, "is_heterogeneous", False):  # what most layers have, where some differ
        text.allow_global_per_layer_attribute_access = True
    if text is not whole:
        # A model of text and images obeys the outer key; of some types only the text part is a causal model.
        alone = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "").endswith("ForCausalLM")
        if not alone or ("tie_word_embeddings" in config and "tie_word_embeddings" not in inner):
            text.tie_word_embeddings = getattr(whole, "tie_word_embeddings", False)
    return text


def _positive(sizes: dict[str, Any]) -> dict[str, Any]:
    """The sizes, all of them above 0 and within reason; ValueError names the first that is not."""
    for name, value in sizes.items():
        if not isinstance(value, bool) and isinstance(value, int | float) and not 0 < value < 2**40:
            raise ValueError(f"{name} is {value}")
    return sizes


def _sizes(text: PreTrainedConfig) -> dict[str, Any]:
    hidden, heads = _need(text, "hidden_size"), _need(text, "num_attention_heads")
    layer_types = _layer_types(text)
    rope = full_attention_rope(text)
    sizes: dict[str, Any] = {
        "model_type": text.model_type.removesuffix("_text"),
        "hidden_size": hidden,
        "num_layers": len(layer_types),
        "vocab_size": _need(text, "vocab_size"),
        "intermediate_size": _widest(_first(text, *MLP_WIDTHS)) or 4 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": _key_value_heads(text, heads),
        "head_dim": int(_first(text, "head_dim") or hidden // heads),
        "rms_norm_eps": float(_first(text, "rms_norm_eps") or 1e-6),
        "rope_theta": float(rope.pop("rope_theta", None) or 10_000.0),
        "rope_scaling": rope if rope.get("rope_type", "default") != "default" else None,
        "max_position_embeddings": _need(text, "max_position_embeddings", "max_seq_len"),
        "tie_word_embeddings": bool(_first(text, "tie_word_embeddings")),
        "layer_types": layer_types,
    }
    if hasattr(text, "linear_num_key_heads"):
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"):
            sizes[f"linear_{name}"] = int(getattr(text, f"linear_{name}"))
    experts = _first(text, "num_experts", "num_local_experts")
    if experts and _first(text, "moe_intermediate_size") and _first(text, "num_experts_per_tok"):
        sizes["moe"] = _moe(text, int(experts))
    return sizes


def _first(text: PreTrainedConfig, *names: str) -> Any:
    """The value of the first of these attributes that the config has and that is not None."""
    return next((value for name in names if (value := getattr(text, name, None)) is not None), None)


def _need(text: PreTrainedConfig, *names: str) -> int:
    value = _first(text, *names)
    if value is None:
        raise ValueError(f"this type has no {names[0]}")
    return int(value)


def _widest(width: int | list[int] | None) -> int:
    """Of the MLPs, where each layer has its own width."""
    return max(width, default=0) if isinstance(width, list | tuple) else int(width or 0)


def _key_value_heads(text: PreTrainedConfig, heads: int) -> int:
    if getattr(text, "multi_query", False) and not getattr(
        text, "new_decoder_architecture", False
    ):  # Falcon, StarCoder
        return 1
    return int(_first(text, "num_key_value_heads", "num_kv_heads") or heads)


def full_attention_rope(text: PreTrainedConfig) -> dict[str, Any]:
    """The rotary settings of the layers that see the whole text; {} for a model without a rotary embedding."""
    rope = getattr(text, "rope_parameters", None) or {}
    nested = {kind: value for kind, value in rope.items() if isinstance(value, dict)}
    # DeepSeek-V4's layers that see the whole text see it compressed
    return dict(next((nested[kind] for kind in ("full_attention", "compress", *nested) if kind in nested), rope))


def _moe(text: PreTrainedConfig, experts: int) -> MoeShape:
    step = _first(text, "decoder_sparse_step") or 1
    dense = set(_first(text, "mlp_only_layers") or ())
    return MoeShape(
        experts=experts,
        experts_per_token=int(text.num_experts_per_tok),
        intermediate_size=int(text.moe_intermediate_size),
        shared_intermediate_size=int(_first(text, "shared_expert_intermediate_size") or 0),
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(int(text.num_hidden_layers))),
    )


def _layer_types(text: PreTrainedConfig) -> tuple[str, ...]:
    # LongCat counts the two attentions of each layer
    layers = int(text.num_layers if text.model_type == "longcat_flash" else text.num_hidden_layers)
    given = getattr(text, "layer_types", None)
    if not given:  # Mistral: a window, if there is one, holds for all layers
        sliding = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
        return ("sliding_attention" if sliding else "full_attention",) * layers
    if len(given) < layers:
        raise ValueError(f"layer_types lists {len(given)} of {layers} layers")
    return tuple(given[:layers])
