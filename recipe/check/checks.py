"""``check``: the rules that span several keys, or the config and the world, before any model is loaded.

Each ``_…`` generator yields the mistakes that it finds, so that a user hears of all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from recipe.check.feasibility import DTYPE_BYTES, check_data, check_machine, check_run_folder
from recipe.check.special_tokens import SpecialTokens
from recipe.config.deepspeed_keys import Muon, RunConfig
from recipe.config.load import ConfigErrors
from recipe.config.paths import heldout_prompts
from recipe.config.without_effect import without_effect
from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape, model_folder
from recipe.model_files.weights import Checkpoint

#: safetensors' names; whatever else a checkpoint holds is refused when it is read
STORED = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}


def check(
    config: RunConfig,
    *,
    model: bool = True,
    resume: bool | None = None,
    nodes: int = 1,
    shape: TargetShape | None = None,
) -> list[str]:
    """Cross-checks of a resolved config; returns notes, a line each. Raises ConfigError (several mistakes in one).

    ``model``: False leaves out what only the training machine can answer: data, GPUs, memory and run folder.
    ``resume``: whether an earlier run is continued; None leaves the run folder unchecked. ``nodes``: of the launch.
    ``shape``: of the target, read if not given.
    """
    target = config.dflash.target
    shape = shape or TargetShape.resolve(target.path, target.revision)
    tokens = SpecialTokens.of(target.path, target.revision)
    found = [*_layout(config), *_steps(config, nodes), *_taps(config, shape), *_mask_id(config, shape, tokens)]
    found += [*_lengths(config, shape), *_drafter(config), *without_effect(config), *_ring(config)]
    if found:
        raise ConfigErrors(f"run {config.dflash.run.name!r}", found)
    if not model:
        return ["not checked: data, GPUs, memory and run folder (--no-model)"]
    if resume is not None:
        check_run_folder(config, resume)
    folder = model_folder(target.path, target.revision)
    stored = {}
    if any(folder.glob("*.safetensors*")):  # without any, the ranks say so; a damaged one is named here
        checkpoint = Checkpoint(folder)
        stored = checkpoint.dtypes()
        checkpoint.close()
    sizes = check_data(config, shape, nodes)
    check_machine(config, sizes.ring, nodes)
    return [*sizes.lines(), *_dtypes(stored, target.dtype), *_positions(shape), *_evaluation(config, shape)]


def _dtypes(stored: Mapping[str, int], dtype: str) -> Iterator[str]:
    """What it costs that the run's dtype of the target is not the checkpoint's."""
    bits = SIGNIFICANT_BITS[dtype]
    for name, count in stored.items():
        known = STORED.get(name)
        if known is None or known == dtype:
            continue
        what = f"target: {count} of {sum(stored.values())} tensors are stored as {known} and become {dtype}"
        if SIGNIFICANT_BITS[known] > bits:
            yield (
                f"{what}, rounded from {SIGNIFICANT_BITS[known]} to {bits} significant bits: taps and answers differ "
                f"from those of a server that keeps {known}; serve the target in {dtype}"
                + (", or set dflash.target.dtype to float32" if dtype == "bfloat16" else "")
            )
        else:
            yield f"{what}, which is exact; they take twice the memory, and a server that keeps {known} rounds more"


def _positions(shape: TargetShape) -> list[str]:
    """What the drafter does not take over of the target's rotary embedding."""
    if shape.rope_scaling is None or shape.inherited_scaling is not None:
        return []
    kind = shape.rope_scaling["rope_type"]
    return [f"the target scales its positions ({kind}); the drafter takes only its base, {shape.rope_theta:,.0f}"]


def _evaluation(config: RunConfig, shape: TargetShape) -> list[str]:
    """What evaluation during training asks of the target ranks. Raises ConfigError when there is nothing to decode."""
    ours = config.dflash
    if not ours.evaluation.every:
        return []
    if heldout_prompts(ours.evaluation.prompts, ours.data.path) is None:
        rule = f"dflash.evaluation.every = {ours.evaluation.every} needs prompts, and the rows hold none out"
        fix = "name a JSONL file, prepare the data with --holdout, or set every to 0"
        raise ConfigError("dflash.evaluation.prompts", ours.evaluation.prompts, rule, fix)
    row_bytes = shape.hidden_size * DTYPE_BYTES[ours.target.dtype]
    head = 0 if shape.tie_word_embeddings else shape.vocab_size * row_bytes
    notes = [
        f"evaluation: every {ours.evaluation.every} steps, {ours.evaluation.num_prompts} prompts of at most "
        f"{ours.evaluation.max_new_tokens} new tokens, by target replica 0 of node 0, which produces nothing meanwhile;"
        f" its first rank also holds the drafter and the target's head ({head / 2**30:.2f} GiB)"
    ]
    if not ours.objective.soft_labels:
        deepest = max(ours.target.target_layer_ids or [0])
        notes.append(f"evaluation: that replica loads all {shape.num_layers} layers, the others {deepest + 1}")
    return notes


def check_layout(config: RunConfig) -> None:
    """The GPU lists alone; a rank needs it before it can know its role. Raises ConfigError."""
    found = list(_layout(config))
    if found:
        raise ConfigErrors(f"run {config.dflash.run.name!r}", found)


def _layout(config: RunConfig) -> Iterator[ConfigError]:
    layout = config.dflash.layout
    for name, gpus in (("target_gpus", layout.target_gpus), ("drafter_gpus", layout.drafter_gpus)):
        if len(set(gpus)) != len(gpus):
            yield ConfigError(f"dflash.layout.{name}", gpus, "a GPU is listed twice", "list each once")
    both = sorted(set(layout.target_gpus) & set(layout.drafter_gpus))
    if both:
        rule = f"GPUs {both} are in target_gpus too; a GPU has one role"
        yield ConfigError("dflash.layout.drafter_gpus", layout.drafter_gpus, rule, "make the two lists disjoint")
    used = set(layout.target_gpus) | set(layout.drafter_gpus)
    missing = sorted(set(range(max(used) + 1)) - used)
    if missing:
        rule = f"GPUs {missing} have no role: the launch starts one rank on each of 0..{max(used)}"
        yield ConfigError("dflash.layout", sorted(used), rule, "number the GPUs 0, 1, 2, … without a gap")
    if len(layout.target_gpus) % layout.target_tp:
        rule = f"must divide the {len(layout.target_gpus)} target GPUs: each replica takes target_tp of them"
        divisors = [n for n in range(1, len(layout.target_gpus) + 1) if len(layout.target_gpus) % n == 0]
        fix = f"use one of {', '.join(map(str, divisors))}, or change target_gpus"
        yield ConfigError("dflash.layout.target_tp", layout.target_tp, rule, fix)


def _steps(config: RunConfig, nodes: int) -> Iterator[ConfigError]:
    given, product = config.train_batch_size, config.global_micro_batches(nodes)
    drafters, accumulation = len(config.dflash.layout.drafter_gpus), config.gradient_accumulation_steps
    if given is not None and given != product:
        rule = (
            f"must be micro-batch x accumulation x drafter ranks = 1 x {accumulation} x {nodes * drafters} = {product} "
            f"({nodes} node(s) with {drafters} drafter GPUs; target ranks do not train)"
        )
        fix = f"set it to {product}, or remove it"
        if given % (nodes * drafters) == 0:
            fix += f", or set gradient_accumulation_steps to {given // (nodes * drafters)}"
        yield ConfigError("train_batch_size", given, rule, fix)
    highest = getattr(config.scheduler.params, "warmup_max_lr", None) if config.scheduler else None
    if highest is not None and any(highest != rate for rate in config.optimizer.highest_rates):
        rates = " and ".join(map(str, config.optimizer.highest_rates))
        rule = f"differs from what optimizer.params sets ({rates}); one value has one owner"
        yield ConfigError("scheduler.params.warmup_max_lr", highest, rule, "remove it")
    if isinstance(config.optimizer, Muon) and config.zero_optimization.stage != 2:
        rule = "Muon needs the whole gradients of a matrix on the ranks that hold it, which stage 2 is made to give"
        yield ConfigError("zero_optimization.stage", config.zero_optimization.stage, rule, "set it to 2")


def _taps(config: RunConfig, shape: TargetShape) -> Iterator[ConfigError]:
    field, taps = "dflash.target.target_layer_ids", config.dflash.target.target_layer_ids or []
    last = shape.num_layers - 1
    if not taps:
        yield ConfigError(field, taps, "at least one tap is needed", "set it to null for five evenly spaced ones")
    for index, tap in enumerate(taps):
        if tap > last:
            rule = f"this target has layers 0..{last}; taps are 0-based decoder-layer outputs"
            yield ConfigError(f"{field}[{index}]", tap, rule, f"use {last - 1} or less")
        elif tap == last:
            rule = "the last layer's output is seen by servers only after the final norm, so it cannot be a tap"
            yield ConfigError(f"{field}[{index}]", tap, rule, f"use {last - 1} or less")
    if len(set(taps)) != len(taps):
        yield ConfigError(field, taps, "a layer is listed twice", "list each once")
    elif sorted(taps) != taps:
        yield ConfigError(field, taps, "must rise: servers concatenate taps in layer order", f"write {sorted(taps)}")


def _mask_id(config: RunConfig, shape: TargetShape, tokens: SpecialTokens) -> Iterator[ConfigError]:
    field, mask = "dflash.drafter.mask_token_id", config.dflash.drafter.mask_token_id
    if mask is None:
        yield ConfigError(field, None, "is not resolved", "set it to an id that the vocabulary reserves")
    elif mask >= shape.vocab_size:
        rule = f"must lie inside the target's vocabulary of {shape.vocab_size} ids"
        yield ConfigError(field, mask, rule, f"use an id of at most {shape.vocab_size - 1} that text never uses")
    elif mask in tokens.reserved:
        rule = f"is the target's {tokens.reserved[mask]} token, which text contains"
        yield ConfigError(field, mask, rule, "use an id that the vocabulary reserves and text never uses")


def _lengths(config: RunConfig, shape: TargetShape) -> Iterator[ConfigError]:
    data, block = config.dflash.data, config.dflash.drafter.block_size
    if block > data.max_seq_len:
        rule = f"a block must fit into a row of max_seq_len = {data.max_seq_len} tokens"
        yield ConfigError("dflash.drafter.block_size", block, rule, f"use {data.max_seq_len} or less")
    if data.max_seq_len > data.token_budget:
        rule = f"a row must fit into one batch of token_budget = {data.token_budget} tokens"
        yield ConfigError("dflash.data.max_seq_len", data.max_seq_len, rule, "lower it, or raise token_budget")
    if data.max_seq_len > shape.max_position_embeddings:
        rule = f"the target knows positions up to {shape.max_position_embeddings} only"
        yield ConfigError("dflash.data.max_seq_len", data.max_seq_len, rule, f"use {shape.max_position_embeddings}")


def _drafter(config: RunConfig) -> Iterator[ConfigError]:
    drafter = config.dflash.drafter
    heads, kv_heads = drafter.num_attention_heads, drafter.num_key_value_heads
    if heads and kv_heads and heads % kv_heads:
        rule = f"must divide num_attention_heads = {heads}"
        yield ConfigError("dflash.drafter.num_key_value_heads", kv_heads, rule, "choose a divisor")
    if drafter.head_dim and drafter.head_dim % 2:
        yield ConfigError(
            "dflash.drafter.head_dim", drafter.head_dim, "rotary embedding needs an even size", "use an even one"
        )
    if drafter.sliding_window and drafter.sliding_window < drafter.block_size:
        rule = f"must be at least block_size = {drafter.block_size}"
        yield ConfigError("dflash.drafter.sliding_window", drafter.sliding_window, rule, "raise it, or set it to null")
    if drafter.attention == "flex" and config.dflash.layout.device == "cpu":
        rule = "torch's FlexAttention has no backward pass on a CPU"
        yield ConfigError("dflash.drafter.attention", "flex", rule, 'set it to "auto", or remove it')
    if drafter.init_from and not (Path(drafter.init_from) / "config.json").is_file():
        rule = "is no drafter folder (it has no config.json)"
        yield ConfigError("dflash.drafter.init_from", drafter.init_from, rule, "give an exported drafter, or null")
    prompts = config.dflash.evaluation.prompts
    if prompts and not Path(prompts).is_file():
        yield ConfigError(
            "dflash.evaluation.prompts", prompts, "no such file", "give a JSONL file of conversations, or null"
        )


def _ring(config: RunConfig) -> Iterator[ConfigError]:
    ring, data = config.dflash.ring, config.dflash.data
    if ring.min_ready > ring.max_depth:
        rule = f"must not exceed max_depth = {ring.max_depth}: the ring would be full before training starts"
        yield ConfigError("dflash.ring.min_ready", ring.min_ready, rule, "lower min_ready, or raise max_depth")
    if ring.page_tokens and ring.page_tokens > data.token_budget:
        rule = f"must not exceed token_budget = {data.token_budget}"
        yield ConfigError("dflash.ring.page_tokens", ring.page_tokens, rule, "set it to null")
