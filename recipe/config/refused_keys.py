"""Keys that DeepSpeed 0.19.8 knows and a run does not take, each with the reason that the user is told.

A key is offered (`deepspeed_keys.py`) only where tests/numerics/test_deepspeed_keys.py proves it; all others are here.
tests/unit/config/test_config_refused.py asks DeepSpeed itself which keys it reads. A value that changes nothing passes.
"""

from __future__ import annotations

from typing import Any

_CHECKPOINTS = "checkpoints are this project's own (dflash.run.save_every, dflash.run.keep)"
_METRICS = "metrics go to metrics.jsonl, the report and dflash.telemetry.wandb"
_DATA = "the order of the data is a pure function of dflash.run.seed"
_PLAIN = "the drafter is trained uncompressed"
_STAGE_3 = "it belongs to stage 3, and the drafter is trained under stage 2"
_OFFLOAD = "optimizer off-load needs a compiled CPU kernel, and the drafter's state fits beside it"
_QUANTIZED = "gradients and weights are exchanged as they are"
_FP16 = "fp16 is not used; bf16 needs no loss scaling"
_FP32_STATE = "masters, moments and accumulated gradients are kept in fp32"
_UNTESTED = "no test of this recipe covers it"

REFUSED: dict[str, str] = {
    "activation_checkpointing": "the drafter has a few layers, whose activations fit",
    "aio": "nothing is off-loaded to NVMe",
    "amp": "NVIDIA apex AMP is not used; bf16 keeps fp32 masters",
    "autotuning": "the launcher's autotuner would start other runs; `bench` measures this one",
    "bfloat16": "it is an old name of bf16",
    "checkpoint": _CHECKPOINTS,
    "comet": _METRICS,
    "comms_logger": _UNTESTED,
    "compile": "compilation belongs to the drafter itself",
    "compression_training": _PLAIN,
    "csv_monitor": _METRICS,
    "curriculum_learning": _DATA,
    "data_efficiency": _DATA,
    "dataloader_drop_last": "there is no DeepSpeed data loader; rows come through the ring",
    "datastates_ckpt": _CHECKPOINTS,
    "disable_allgather": "every rank needs the whole weights after a step",
    "disable_python_gc": _UNTESTED,
    "dump_state": "the run's own config.json and provenance.json say what it runs with",
    "eigenvalue": _PLAIN,
    "elasticity": "the layout is fixed by dflash.layout; resume on another number of nodes instead",
    "expert_parallel": "the drafter has no experts",
    "flops_profiler": "`bench` measures a run",
    "gradient_allreduce_op": "the loss is normalised once for a mean over the drafter ranks; a sum would scale it",
    "gradient_predivide_factor": "with another value than 1 DeepSpeed's ZeRO ends in an AssertionError",
    "graph_harvesting": _UNTESTED,
    "hybrid_engine": "target and drafter are separate worlds",
    "log_level": "DeepSpeed's own messages stay at its default",
    "managed_gradient_accumulation": "the trainer decides when a step ends",
    "memory_breakdown": "memory is in the log line and in metrics.jsonl",
    "nebula": _CHECKPOINTS,
    "pipeline": "the drafter is not pipelined",
    "prescale_gradients": "DeepSpeed's ZeRO ends in an AssertionError with it",
    "progressive_layer_drop": "it changes the drafter's forward pass",
    "quantize_training": _PLAIN,
    "seq_parallel_communication_data_type": "micro-batches are whole sequences",
    "sequence_parallel_size": "micro-batches are whole sequences",
    "sparse_attention": "the drafter has its own attention mask",
    "sparse_gradients": "the embedding is the target's and frozen",
    "tensor_parallel": "the drafter is data-parallel; the target's degree is dflash.layout.target_tp",
    "tensorboard": _METRICS,
    "timers": _UNTESTED,
    "torch_autocast": "bf16 is set by the bf16 section",
    "use_data_before_expert_parallelism": "the drafter has no experts",
    "vocabulary_size": "the embedding is the target's and frozen",
    "wandb": "Weights & Biases is set in dflash.telemetry.wandb",
    "weight_quantization": _PLAIN,
    "zenflow": _OFFLOAD,
    "zero_allow_untested_optimizer": "AdamW, Adam and Muon are all tested",
    "zero_force_ds_cpu_optimizer": _OFFLOAD,
    "bf16.bf16_master_weights_and_grads": _FP32_STATE,
    "bf16.bf16_optimizer_states": _FP32_STATE,
    "bf16.immediate_grad_update": "DeepSpeed reads it without ZeRO only",
    **dict.fromkeys(
        (f"fp16.{key}" for key in (
            "auto_cast", "consecutive_hysteresis", "fp16_master_weights_and_grads", "hysteresis",
            "initial_scale_power", "loss_scale", "loss_scale_window", "min_loss_scale",
        )), _FP16,
    ),
    "data_types.buffer_dtype": "the drafter has no buffers that are trained",
    "data_types.keep_in_fp32_modules": _UNTESTED,
    "data_types.param_dtype": "bf16.enabled says it",
    "optimizer.legacy_fusion": "it belongs to fp16 without ZeRO",
    "optimizer.params.adam_w_mode": "optimizer.type says it: AdamW decouples the decay, Adam adds it to the gradient",
    "optimizer.params.amsgrad": _UNTESTED,
    "optimizer.params.bias_correction": "torch's AdamW always corrects",
    "optimizer.params.capturable": _UNTESTED,
    "optimizer.params.differentiable": _UNTESTED,
    "optimizer.params.foreach": "a rank's weights are one flat tensor",
    "optimizer.params.fp32_optimizer_states": _FP32_STATE,
    "optimizer.params.fused": _UNTESTED,
    "optimizer.params.max_grad_norm": "gradient_clipping says it",
    "optimizer.params.maximize": "a loss is minimised",
    "scheduler.params.last_batch_iteration": "a resume goes on from the checkpoint's step by itself",
    **dict.fromkeys(
        (f"zero_optimization.{key}" for key in (
            "leaf_module", "log_trace_cache_warnings", "memory_efficient_linear", "override_module_apply",
            "pipeline_loading_checkpoint", "sub_group_size", "zero_hpz_partition_size",
            *(f"stage3_{key}" for key in (
                "allgather_sequential", "gather_16bit_weights_on_model_save", "gather_fp16_weights_on_model_save",
                "max_live_parameters", "max_reuse_distance", "model_persistence_threshold",
                "module_granularity_threshold", "param_persistence_threshold", "prefetch_bucket_size",
                "use_all_reduce_for_fetch_params",
            )),
        )), _STAGE_3,
    ),
    **dict.fromkeys(
        (f"zero_optimization.{key}" for key in (
            "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "offload_optimizer", "offload_param",
            "zenflow",
        )), _OFFLOAD,
    ),
    **dict.fromkeys(
        (f"zero_optimization.zero_quantized_{key}" for key in ("gradients", "nontrainable_weights", "weights")),
        _QUANTIZED,
    ),
    "zero_optimization.compute_grad_norm": "the log and the search for bad numbers need the norm",
    "zero_optimization.elastic_checkpoint": _CHECKPOINTS,
    "zero_optimization.enable_sanity_checks": _UNTESTED,
    "zero_optimization.ignore_unused_parameters": "every parameter of the drafter is used",
    "zero_optimization.legacy_stage1": _UNTESTED,
    "zero_optimization.load_from_fp32_weights": _CHECKPOINTS,
    "zero_optimization.parameter_alignment": _UNTESTED,
    "zero_optimization.round_robin_gradients": "it cuts parameters in another order than its own maps of them say, so "
    "that a resume on other ranks would load them shuffled",
    "zero_optimization.save_muon_momentum_buffer_in_memory": _STAGE_3,
    "zero_optimization.use_multi_rank_bucket_allreduce": _UNTESTED,
}  # fmt: skip

#: Values, besides null, that change nothing where they are not false (or, of a section, ``"enabled": false``).
NEUTRAL: dict[str, bool | float] = {
    "gradient_predivide_factor": 1.0,
    **dict.fromkeys(
        (f"zero_optimization.{key}" for key in (
            "compute_grad_norm", "ignore_unused_parameters", "load_from_fp32_weights", "memory_efficient_linear",
            "override_module_apply", "use_multi_rank_bucket_allreduce",
        )), True,
    ),
    "optimizer.params.bias_correction": True,
}  # fmt: skip


def drop_neutral(raw: dict[str, Any]) -> None:
    """Take the refused keys out of ``raw`` that change nothing there, as files copied from elsewhere have them."""
    for path in REFUSED:
        *parents, leaf = path.split(".")
        node: Any = raw
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if isinstance(node, dict) and leaf in node and _is_neutral(path, node[leaf]):
            del node[leaf]


def _is_neutral(path: str, value: Any) -> bool:
    if isinstance(value, dict) and "enabled" in value:
        value = value["enabled"]
    neutral = NEUTRAL.get(path, False)
    return value is None or (isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral))
