"""The drafter's configuration: one frozen value, read from and written to the z-lab ``config.json`` layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from recipe.config.schema import Drafter
from recipe.drafter.switches import one_rope, refuse_switches, with_qwen3_defaults
from recipe.errors import ConfigError

if TYPE_CHECKING:
    from transformers import Qwen3Config

    from recipe.model_files.shapes import TargetShape

FULL, SLIDING = "full_attention", "sliding_attention"
ARCHITECTURE = "DFlashDraftModel"


def default_gamma(block_size: int) -> float:
    """Decay length by block size: 4 up to 8, 5 up to 10, 7 up to 16, 10 above."""
    return next((gamma for limit, gamma in ((8, 4.0), (10, 5.0), (16, 7.0)) if block_size <= limit), 10.0)


@dataclass(frozen=True)
class DrafterConfig:
    """Shape and conventions of one drafter. Every field is explicit: nothing is inherited from the target at run time.

    ``target_layer_ids`` are taps (0-based layer outputs of the target) in the order of ``fc``'s columns;
    ``num_target_layers`` is the target's depth. ``in_block_causal[i]`` says whether layer i looks only backwards
    inside a block. Block rows are rows of the target's table times ``input_embedding_scale``, as its embedding module
    gives them. Rotary embedding is always full and one-dimensional: the target's partial or multimodal rotary
    settings have no field here, so they cannot leak into an export.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    layer_types: tuple[str, ...]
    in_block_causal: tuple[bool, ...]
    sliding_window: int | None = None
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    input_embedding_scale: float = 1.0
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    max_position_embeddings: int = 32_768
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        """Refuse what cannot be trained or served. Raises ConfigError."""
        self._need(self.block_size >= 2, "block_size", "a block holds the anchor and at least one draft", "use >= 2")
        self._need(
            0 <= self.mask_token_id < self.vocab_size,
            "mask_token_id",
            f"the mask id must be a row of the embedding, 0..{self.vocab_size - 1}",
            "choose an unused id inside the vocabulary",
        )
        self._need(
            bool(self.target_layer_ids) and all(0 <= i < self.num_target_layers - 1 for i in self.target_layer_ids),
            "target_layer_ids",
            f"taps are 0-based layer outputs below the last layer, 0..{self.num_target_layers - 2} for this target",
            "leave it null for evenly spaced taps",
        )
        self._need(
            len(set(self.target_layer_ids)) == len(self.target_layer_ids),
            "target_layer_ids",
            "each tap may appear once",
            "remove the repeated layer",
        )
        self._need(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            f"must divide num_attention_heads = {self.num_attention_heads}",
            "choose a divisor",
        )
        self._need(self.head_dim % 2 == 0, "head_dim", "rotary embedding needs an even head size", "use an even number")
        for name in ("layer_types", "in_block_causal"):
            self._need(
                len(getattr(self, name)) == self.num_hidden_layers,
                name,
                f"needs one value for each of the {self.num_hidden_layers} layers",
                "give one a layer",
            )
        self._need(set(self.layer_types) <= {FULL, SLIDING}, "layer_types", f"each is {FULL} or {SLIDING}", "use those")
        sliding = tuple(kind == SLIDING for kind in self.layer_types)
        self._need(
            len(set(self.in_block_causal)) == 1 or self.in_block_causal == sliding,
            "in_block_causal",
            "servers know one direction for all layers, or causal exactly on the sliding ones",
            "use one of the two",
        )
        if SLIDING in self.layer_types:
            # Smaller windows would also have to cut the block itself, and servers disagree on how.
            self._need(
                self.sliding_window is not None and self.sliding_window >= self.block_size,
                "sliding_window",
                f"sliding layers need a window of at least block_size = {self.block_size}",
                "raise sliding_window or set it to null",
            )

    def _need(self, holds: bool, name: str, rule: str, fix: str) -> None:
        if not holds:
            raise ConfigError(f"drafter.{name}", getattr(self, name), rule, fix)

    @property
    def is_causal(self) -> bool | None:
        """The in-block direction of all layers, or None where sliding layers are causal and full ones are not."""
        return self.in_block_causal[0] if len(set(self.in_block_causal)) == 1 else None

    @classmethod
    def build(
        cls,
        section: Drafter,
        shape: TargetShape,
        taps: Sequence[int],
        mask_token_id: int,
        *,
        dtype: str = "bfloat16",
        sliding_is_causal: bool = False,
        input_embedding_scale: float = 1.0,
    ) -> DrafterConfig:
        """The config of a new drafter for a target of this shape. Raises ConfigError.

        ``sliding_is_causal`` sets the in-block direction of sliding layers (full layers are always bidirectional);
        it is written into the config, because servers take different defaults (docs/algorithm.md).
        ``input_embedding_scale``: of the target (`recipe.model_files.whole_model.embedding_scale`).
        """
        heads, kv_heads, head_dim = head_geometry(section, shape)
        layers = section.num_layers
        sliding = section.sliding_window is not None
        layer_types = tuple(SLIDING if sliding and i < layers - 1 else FULL for i in range(layers))
        return cls(
            hidden_size=shape.hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=section.intermediate_size or shape.intermediate_size,
            vocab_size=shape.vocab_size,
            block_size=section.block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=tuple(int(i) for i in taps),
            num_target_layers=shape.num_layers,
            layer_types=layer_types,
            in_block_causal=tuple(sliding_is_causal and kind == SLIDING for kind in layer_types),
            sliding_window=section.sliding_window,
            rope_theta=float(shape.rope_theta),
            rope_scaling=shape.inherited_scaling,
            input_embedding_scale=input_embedding_scale,
            rms_norm_eps=shape.rms_norm_eps,
            max_position_embeddings=shape.max_position_embeddings,
            dtype=dtype,
        )

    def to_dict(self) -> dict[str, Any]:
        """The ``config.json`` that z-lab's client, SGLang and vLLM read; block_size is written in both places."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        taps, mask, causal, scale = (
            plain.pop(k) for k in ("target_layer_ids", "mask_token_id", "in_block_causal", "input_embedding_scale")
        )
        dflash: dict[str, Any] = {
            "block_size": self.block_size,
            "mask_token_id": mask,
            "target_layer_ids": list(taps),
            "in_block_causal": list(causal),
            "input_embedding_scale": scale,
        }
        plain |= {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "layer_types": list(self.layer_types),
            "rope_parameters": self._rope_parameters(),
            "use_sliding_window": SLIDING in self.layer_types,
            "max_window_layers": self.num_hidden_layers,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "dflash_config": dflash,
        }
        if self.is_causal is not None:
            # One switch for all layers is all that servers know; the mixed direction is what they do without it.
            plain["is_causal"] = dflash["causal"] = self.is_causal
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DrafterConfig:
        """Read the z-lab layout, old or new spelling of each key; what a file leaves out is Qwen3's default in
        transformers, by which such files are saved. Raises ConfigError for what is missing or not implemented.
        """
        refuse_switches(data)
        inner: Mapping[str, Any] = data.get("dflash_config") or {}
        written, data = data, with_qwen3_defaults({**data, "rope_parameters": one_rope(data), "rope_scaling": None})

        def first(*names: str, default: Any = None) -> Any:
            for source in (inner, data):
                for name in names:
                    if source.get(name) is not None:
                        return source[name]
            if default is not None:
                return default
            raise ConfigError(f"drafter.{names[0]}", None, "this drafter config lacks the key", "add it to config.json")

        types = tuple(data["layer_types"])
        rope = dict(data["rope_parameters"])
        theta = float(rope.pop("rope_theta"))
        return cls(
            hidden_size=int(data["hidden_size"]),
            num_hidden_layers=int(data["num_hidden_layers"]),
            num_attention_heads=int(data["num_attention_heads"]),
            num_key_value_heads=int(data["num_key_value_heads"]),
            head_dim=int(data["head_dim"]),
            intermediate_size=int(data["intermediate_size"]),
            vocab_size=int(data["vocab_size"]),
            block_size=int(first("block_size")),
            mask_token_id=int(first("mask_token_id")),
            target_layer_ids=tuple(int(i) for i in first("target_layer_ids")),
            num_target_layers=int(first("num_target_layers")),
            layer_types=types,
            in_block_causal=_in_block_direction(data, inner, types),
            sliding_window=data.get("sliding_window") if SLIDING in types else None,
            rope_theta=theta,
            rope_scaling=rope if rope.get("rope_type", "default") != "default" else None,
            input_embedding_scale=float(first("input_embedding_scale", default=1.0)),
            rms_norm_eps=float(data["rms_norm_eps"]),
            hidden_act=str(data["hidden_act"]),
            attention_bias=bool(data["attention_bias"]),
            max_position_embeddings=int(data["max_position_embeddings"]),
            tie_word_embeddings=bool(data["tie_word_embeddings"]),
            dtype=str(first("dtype", default=written.get("torch_dtype") or "bfloat16")).removeprefix("torch."),
        )

    def _rope_parameters(self) -> dict[str, Any]:
        """As transformers 5 spells base and scaling."""
        return {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta}

    def qwen3(self) -> Qwen3Config:
        """The transformers config that its norm, MLP and rotary embedding are built from."""
        from transformers import Qwen3Config

        return Qwen3Config(
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            hidden_act=self.hidden_act,
            rms_norm_eps=self.rms_norm_eps,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=self._rope_parameters(),
        )

    def with_dtype(self, dtype: str) -> DrafterConfig:
        """The same drafter, stored in another dtype."""
        return replace(self, dtype=dtype)


def _in_block_direction(data: Mapping[str, Any], inner: Mapping[str, Any], types: tuple[str, ...]) -> tuple[bool, ...]:
    """Ours if written; else one switch for all; else the servers' default: sliding layers causal, full ones not."""
    if inner.get("in_block_causal") is not None:
        return tuple(bool(value) for value in inner["in_block_causal"])
    switch = data.get("is_causal")
    switch = inner.get("causal") if switch is None else switch
    return tuple(kind == SLIDING if switch is None else bool(switch) for kind in types)


def head_geometry(section: Drafter, shape: TargetShape) -> tuple[int, int, int]:
    """(query heads, key/value heads, head size) of a new drafter; values set in the config win.

    A dense target lends its own geometry. A hybrid's attention heads are few and wide (256), which suits a small
    dense drafter badly: it gets the 32/8/128 of the published drafters, or, below hidden size 2048, as many
    heads of at most 128 as fit the hidden size, with a quarter of them (where that divides) for keys and values.
    """
    hybrid = any(kind == "linear_attention" for kind in shape.layer_types)
    if not hybrid:
        heads, kv_heads, head_dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    elif shape.hidden_size >= 2048:
        heads, kv_heads, head_dim = 32, 8, 128
    else:
        head_dim = min(128, shape.head_dim)
        heads = max(1, shape.hidden_size // head_dim)
        kv_heads = _divisor(heads, max(1, heads // 4))
    head_dim = section.head_dim or head_dim
    if section.head_dim and not section.num_attention_heads:
        heads = max(1, shape.hidden_size // head_dim)
        kv_heads = _divisor(heads, min(kv_heads, heads))
    heads = section.num_attention_heads or heads
    return heads, section.num_key_value_heads or _divisor(heads, min(kv_heads, heads)), head_dim


def _divisor(number: int, most: int) -> int:
    return next(d for d in range(most, 0, -1) if number % d == 0)
