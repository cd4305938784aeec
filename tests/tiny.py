"""A tiny random target, its tokenizer and rows on disk: what a real launch needs, made in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

VOCAB, MASK = 199, 198


def make_target(folder: Path, kind: str = "qwen3_5_text", seed: int = 0) -> Path:
    """A random model with uneven head counts: a hybrid (Gated DeltaNet + gated attention) or a Llama."""
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 8,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }  # fmt: skip
    if kind == "qwen3_5_text":
        common |= {
            "linear_num_key_heads": 4, "linear_num_value_heads": 12, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        }  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **common), dtype=torch.float32)
    model.save_pretrained(folder)
    return make_tokenizer(folder)


def make_tokenizer(folder: Path) -> Path:
    """A word-level tokenizer with chat markers, a mask token and a ChatML-like template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<|im_start|>", "<|im_end|>", "user", "assistant", "\n"]
    vocab = {
        word: index for index, word in enumerate([*words, *(f"w{i}" for i in range(len(words), MASK)), "<|mask|>"])
    }
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<|im_end|>", mask_token="<|mask|>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
        "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


def make_rows(folder: Path, count: int = 64, seed: int = 0, longest: int = 60) -> Path:
    """Rows of ragged length: a prompt, then a supervised answer that counts upwards (learnable)."""
    import datasets

    draw = np.random.default_rng(seed)
    ids, masks = [], []
    for _ in range(count):
        prompt, answer = int(draw.integers(3, 12)), int(draw.integers(8, longest - 12))
        start = int(draw.integers(6, 150))
        ids.append([*draw.integers(6, MASK, prompt).tolist(), *((start + i) % 180 + 6 for i in range(answer))])
        masks.append([0] * prompt + [1] * answer)
    features = datasets.Features(
        {
            "input_ids": datasets.Sequence(datasets.Value("int32")),
            "loss_mask": datasets.Sequence(datasets.Value("uint8")),
        }
    )
    table = datasets.Dataset.from_dict({"input_ids": ids, "loss_mask": masks}, features=features)
    table.save_to_disk(str(folder / "train"))
    (folder / "meta.json").write_text(json.dumps({"vocab_bound": MASK, "rows": count}))
    return folder


def make_config(folder: Path, **changes: object) -> Path:
    """A run's JSON for the tiny target: 2 target ranks (tp 2) and 2 drafter ranks on CPU in fp32."""
    config = {
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95]}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
        "bf16": {"enabled": False},
        "dflash": {
            "run": {"name": "tiny", "output_dir": str(folder / "runs"), "epochs": 2, "log_every": 2, "save_every": 100},
            "data": {"path": str(folder / "rows"), "token_budget": 256, "max_seq_len": 64, "max_batch_size": 8},
            "layout": {"target_gpus": [0, 1], "drafter_gpus": [2, 3], "target_tp": 2, "device": "cpu"},
            "target": {"path": str(folder / "target"), "dtype": "float32"},
            "ring": {"min_ready": 2, "max_depth": 8, "reuse": 2, "timeout_s": 60},
            "drafter": {"num_layers": 2, "block_size": 8, "max_anchors": 32, "num_attention_heads": 4,
                        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96},
            "objective": {"loss": "dflash", "soft_labels": True,
                          "noise": {"type": "uniform", "start": 0.01, "end": 0.0}},
            "telemetry": {"wandb": {"mode": "disabled"}},
        },
    }  # fmt: skip
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path
