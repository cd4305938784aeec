"""The schema of one run: every key, its range and its only default. ``None`` means "derived" (see derive.py)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

INT32_MAX = 2**31 - 1  # row lengths and ids are int32: a larger bound than this could only overflow
Positive = Annotated[int, Field(ge=1, le=INT32_MAX)]
NonNegative = Annotated[int, Field(ge=0, le=INT32_MAX)]
Amount = Annotated[int, Field(ge=1, le=2**62)]  # bytes and elements, which int32 could not count
Width = Annotated[int, Field(ge=1, le=2**20)]  # no model is wider; a slip of a few zeros would ask for terabytes
LocalRank = Annotated[int, Field(ge=0, le=1023)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Strict: unknown keys are refused, values are not coerced from strings, and a built section is immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=(), allow_inf_nan=False)


class Run(Section):
    name: str = Field(
        "dflash", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100, description="folder under output_dir"
    )
    output_dir: str = Field("runs", min_length=1, description="where run folders are made")
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = Field(
        42, description="seed of order, anchors, noise and initial weights"
    )
    epochs: Annotated[int, Field(ge=1, le=100_000)] = Field(
        6, description="passes of the target over the data; each is delivered ring.reuse times"
    )
    max_steps: Positive | None = Field(None, description="stop after this many optimizer steps; null: all epochs")
    warmup_ratio: Fraction = Field(0.04, description="share of the steps in which the learning rate rises")
    log_every: Positive = Field(10, description="optimizer steps between log lines")
    save_every: Positive = Field(1000, description="optimizer steps between checkpoints")
    keep: Positive = Field(3, description="checkpoints kept")
    profile_interval: NonNegative = Field(
        60, description="seconds between profile lines that say which side waits; 0: off"
    )
    max_skipped_steps: NonNegative = Field(
        5,
        description="skipped (non-finite) steps among the last 100 that a run survives; of fewer, as large a share",
    )


class Data(Section):
    path: str = Field("data/tokenized", min_length=1, description="folder made by `prepare`")
    conversations: str | None = Field(
        None, min_length=1, description="file that path is prepared from when it is missing"
    )
    token_budget: Positive = Field(
        49152, description="tokens of one target batch (padded) and of one drafter micro-batch"
    )
    max_seq_len: Positive = Field(8192, description="longest row used; longer ones are truncated when prepared")
    max_batch_size: Positive = Field(64, description="sequences in one target batch")


class Layout(Section):
    target_gpus: Annotated[list[LocalRank], Field(min_length=1)] = Field(
        [0, 1, 2, 3, 4], description="local ranks that hold the target"
    )
    drafter_gpus: Annotated[list[LocalRank], Field(min_length=1)] = Field(
        [5, 6, 7], description="local ranks that train the drafter"
    )
    target_tp: Positive = Field(5, description="tensor-parallel degree of one target replica; divides the target GPUs")
    share_gpus: bool = Field(
        False,
        description="for fewer GPUs than ranks: rank r uses GPU r mod GPUs, so a target and a drafter can share one",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there are GPUs")


class Target(Section):
    path: str = Field("Qwen/Qwen3.6-27B", min_length=1, description="folder, or hub id in the local cache")
    revision: str | None = Field(None, min_length=1, description="hub revision")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="dtype of the target and of the taps")
    exact_sums: bool = Field(
        False,
        description="tensor parallel: gather inputs and make every sum on one rank, as one GPU does, instead of adding"
        " the ranks' rounded parts; more bytes to send",
    )
    allow_torch_kernels: bool = Field(
        False, description="on GPUs: run a hybrid target without flash-linear-attention, several times slower"
    )
    target_layer_ids: list[NonNegative] | None = Field(
        None, description="taps: 0-based decoder layers; null: five, evenly spaced"
    )


class Ring(Section):
    min_ready: Positive = Field(30, description="batches of token_budget that must be ready before drafters start")
    max_depth: Positive = Field(90, description="batches of token_budget that the ring may hold")
    max_bytes: Amount | None = Field(None, description="upper bound of the ring's bytes; null: max_depth alone")
    reuse: Annotated[int, Field(ge=1, le=1024)] = Field(
        1, description="how often each entry is delivered, with fresh anchors and noise"
    )
    timeout_s: Positive = Field(600, description="longest wait on the other side before the run is ended")
    page_tokens: Positive | None = Field(None, description="tokens of one ring page; null: derived from max_seq_len")


class Drafter(Section):
    num_layers: Annotated[int, Field(ge=1, le=1024)] = Field(5, description="decoder layers of the drafter")
    block_size: Annotated[int, Field(ge=2)] = Field(32, description="tokens of a block, anchor included")
    max_anchors: Width = Field(1024, description="blocks in one micro-batch")
    mask_token_id: NonNegative | None = Field(
        None, description="id that fills the unknown slots; null: the tokenizer's mask token"
    )
    sliding_window: Positive | None = Field(
        None, description="context window of all layers but the last; null: full attention"
    )
    init_from: str | None = Field(None, min_length=1, description="drafter folder to start from")
    num_attention_heads: Width | None = Field(None, description="null: hidden_size / head_dim of the target's shape")
    num_key_value_heads: Width | None = Field(None, description="null: derived from the target")
    head_dim: Width | None = Field(None, description="null: derived from the target")
    intermediate_size: Width | None = Field(None, description="null: the target's")
    attention: Literal["auto", "flex", "eager"] = Field("auto", description="auto: flex on GPU, eager on CPU")


class Noise(Section):
    type: Literal["uniform", "gaussian", "none"] = Field("uniform", description="distribution added to the taps")
    start: Annotated[float, Field(ge=0.0)] = Field(0.05, description="half-width or deviation at step 0")
    end: Annotated[float, Field(ge=0.0)] = Field(0.01, description="the same at the last step (linear between)")


class Objective(Section):
    loss: Literal["dflash", "dpace"] = Field(
        "dflash", description="dflash: decay by position; dpace: decay by confidence"
    )
    soft_labels: bool = Field(True, description="learn the target's distribution instead of the data token")
    soft_weight: Fraction = Field(1.0, description="with soft_labels: share of the KL term, the rest is cross-entropy")
    temperature: Annotated[float, Field(gt=0.0)] = Field(1.0, description="temperature of the soft labels")
    gamma: Annotated[float, Field(gt=0.0)] | None = Field(
        None,
        description="decay length in tokens; null: 4, 5, 7, 10 for blocks to 8, 10, 16, more; dpace does without",
    )
    dpace_alpha: Fraction = Field(0.5, description="confidence smoothing of dpace")
    acceptance_weight: Annotated[float, Field(ge=0.0)] = Field(
        0.0, description="weight of the differentiable acceptance-length term"
    )
    noise: Noise = Noise()


class Evaluation(Section):
    every: NonNegative = Field(
        0, description="optimizer steps between evaluations by real decoding on the target ranks; 0: none"
    )
    prompts: str | None = Field(
        None, min_length=1, description="JSONL of held-out conversations; null: the held-out split of data.path"
    )
    num_prompts: Positive = Field(64, description="prompts decoded by an evaluation, in training and by `evaluate RUN`")
    max_new_tokens: Positive = Field(128, description="tokens generated for each")


class Wandb(Section):
    mode: Literal["auto", "online", "offline", "disabled"] = Field("auto", description="auto: online only with a key")
    project: str = Field("dflash", min_length=1, description="W&B project")


class Telemetry(Section):
    wandb: Wandb = Wandb()
    gpu: bool = Field(True, description="sample NVML; a missing package is an error on GPU machines")
    interval_s: Positive = Field(10, description="seconds between samples")


class DFlash(Section):
    run: Run = Run()
    data: Data = Data()
    layout: Layout = Layout()
    target: Target = Target()
    ring: Ring = Ring()
    drafter: Drafter = Drafter()
    objective: Objective = Objective()
    evaluation: Evaluation = Evaluation()
    telemetry: Telemetry = Telemetry()
