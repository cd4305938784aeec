"""Train the demo target from scratch: ``python -m tools.demo_target.train_target prepare`` anywhere, then ``train``.

``prepare`` reads the documentation and writes tokenizer and token arrays; ``train`` needs only that folder. Three
minutes on one H200 are enough; the schedule follows the clock: a slower device gives a weaker model, not a longer run.

Where fla refuses to train (0.6.0 does on Hopper with Triton 3.4 to 3.7.0, whose code for it is wrong there), give
``--kernels torch``: slower, same mathematics. The committed target was trained so.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as functional
from safetensors.torch import save_file
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from recipe.target.cpu_kernels import use_torch_kernels_on_cpu
from tools.demo_target.corpus import fetch_sources, read_corpus
from tools.demo_target.token_file import Conversations, TokenFile, build
from tools.demo_target.tokenizer import END_OF_TEXT, MAX_LENGTH, TURN_END

IGNORED = -100


def target_config(vocab_size: int, pad_token_id: int, eos_token_id: int) -> Qwen3_5TextConfig:
    """Eight layers, DeltaNet and gated attention 3:1, head counts that no tensor-parallel degree above 2 divides."""
    return Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=12,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        pad_token_id=pad_token_id,
        eos_token_id=eos_token_id,
        bos_token_id=None,
    )


def text_batches(stream: np.ndarray, rows: int, length: int, generator: np.random.Generator) -> Iterator[torch.Tensor]:
    """Endless batches [rows, length] of windows that start anywhere in the stream."""
    tokens = torch.from_numpy(stream.astype(np.int64))
    window = torch.arange(length)
    while True:
        starts = torch.from_numpy(generator.integers(0, len(tokens) - length, rows))
        yield tokens[starts[:, None] + window]


def chat_batches(chats: Conversations, rows: int, generator: np.random.Generator) -> Iterator[tuple[torch.Tensor, ...]]:
    """Endless (input_ids, labels) of whole conversations, right-padded; only the answer and its end are labelled."""
    while True:
        order = generator.permutation(len(chats.answers))
        for first in range(0, len(order) - rows + 1, rows):
            yield chat_rows(chats, order[first : first + rows])


def chat_rows(chats: Conversations, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The conversations ``rows`` as (input_ids, labels), both [rows, longest, rounded up to 16]."""
    begin, end = chats.starts[rows], chats.starts[rows + 1]
    width = int(-(-(end - begin).max() // 16) * 16)
    position = begin[:, None] + np.arange(width)
    inside = position < end[:, None]
    ids = np.where(inside, chats.tokens[np.minimum(position, len(chats.tokens) - 1)], 0).astype(np.int64)
    # The line break after the end of the turn belongs to the template; the model never has to write it.
    labelled = inside & (position >= chats.answers[rows][:, None]) & (position < end[:, None] - 1)
    return torch.from_numpy(ids), torch.from_numpy(np.where(labelled, ids, IGNORED))


def next_token_loss(model: Qwen3_5ForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the labelled tokens, each predicted from what precedes it."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED)


def learning_rate(progress: float, warmup: float, peak: float) -> float:
    """Linear warm-up, then half a cosine down to 1 % of the peak; ``progress`` in 0…1."""
    if progress < warmup:
        return peak * progress / warmup
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))))


def make_optimizer(model: Qwen3_5ForCausalLM, weight_decay: float) -> torch.optim.AdamW:
    """AdamW; vectors (norms, biases, decay rates) and the short convolutions are not decayed."""
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=next(model.parameters()).is_cuda)


def train(model: Qwen3_5ForCausalLM, data: TokenFile, args: argparse.Namespace) -> dict[str, object]:
    """Train until ``args.seconds`` or ``args.steps`` is reached; returns what the target card records of it."""
    device = next(model.parameters()).device
    generator = np.random.default_rng(args.seed)
    texts = text_batches(data.text, args.text_rows, args.text_length, generator)
    chats = chat_batches(data.chats, args.chat_rows, generator)
    optimizer = make_optimizer(model, args.weight_decay)
    model.train()
    # One unused pass of each kind: the kernels' compilation must not eat up the schedule, which follows the clock.
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        for ids, labels in ((next(texts),) * 2, next(chats)):
            next_token_loss(model, ids.to(device), labels.to(device)).backward()
    model.zero_grad(set_to_none=True)
    started, step, tokens, last_log = time.monotonic(), 0, 0, 0.0
    while (elapsed := time.monotonic() - started) < args.seconds and step < args.steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(max(elapsed / args.seconds, step / args.steps), 0.04, args.lr)
        text = next(texts).to(device, non_blocking=True)
        ids, labels = (part.to(device, non_blocking=True) for part in next(chats))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            text_loss, chat_loss = next_token_loss(model, text, text), next_token_loss(model, ids, labels)
        (text_loss + args.chat_weight * chat_loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + text.numel() + ids.numel()
        if step <= 3 or elapsed - last_log > 10:
            last_log = elapsed
            print(
                f"step={step} s={elapsed:.0f} text={text_loss.item():.3f} chat={chat_loss.item():.3f} "
                f"gnorm={norm.item():.2f} tokens={tokens / 1e6:.1f}M",
                flush=True,
            )
    return {
        "steps": step,
        "tokens_seen": tokens,
        "train_seconds": round(time.monotonic() - started, 1),
        "final_train_loss": {"text": round(text_loss.item(), 4), "chat": round(chat_loss.item(), 4)},
        "hardware": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
    }


def save_model(model: Qwen3_5ForCausalLM, folder: Path) -> None:
    """Write the weights in bf16 with config.json and generation_config.json; the tied head is not written twice."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.dtype = torch.bfloat16
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def run_prepare(args: argparse.Namespace) -> None:
    """Documentation -> ``args.build``."""
    corpus = read_corpus(args.docs if args.docs else fetch_sources())
    build(corpus, args.build)
    data = TokenFile.load(args.build)
    print(f"text {len(data.text):,} tokens ({len(data.held_out_text):,} held out), {len(data.chats.answers):,} chats")


def run_train(args: argparse.Namespace) -> None:
    """``args.build`` -> the model folder ``args.out``."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    use_torch_kernels_on_cpu(force=args.kernels == "torch")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = AutoTokenizer.from_pretrained(args.build)
    end_of_text, turn_end = (tokenizer.convert_tokens_to_ids(token) for token in (END_OF_TEXT, TURN_END))
    model = Qwen3_5ForCausalLM(target_config(len(tokenizer), end_of_text, turn_end)).to(device)
    model.generation_config.update(do_sample=False, eos_token_id=[turn_end, end_of_text], pad_token_id=end_of_text)
    print(f"parameters {sum(p.numel() for p in model.parameters()):,} on {device}", flush=True)
    record = train(model, TokenFile.load(args.build), args)
    save_model(model, args.out)
    tokenizer.save_pretrained(args.out, save_jinja_files=False)
    settings = {k: v for k, v in vars(args).items() if isinstance(v, int | float) or k == "kernels"}
    record |= {"settings": settings, "parameters": sum(p.numel() for p in model.parameters())}
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record), flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m tools.demo_target.train_target", description=__doc__)
    verbs = top.add_subparsers(required=True)
    prepare = verbs.add_parser("prepare", help="documentation -> tokenizer and token arrays")
    prepare.add_argument("--docs", type=Path, help="folder of *.rst.txt; default: apt-get download python3.11-doc")
    prepare.add_argument("--build", type=Path, default=Path("data/demo_build"))
    prepare.set_defaults(call=run_prepare)
    trainer = verbs.add_parser("train", help="token arrays -> model folder")
    trainer.add_argument("--build", type=Path, default=Path("data/demo_build"))
    trainer.add_argument("--out", type=Path, required=True)
    trainer.add_argument("--seconds", type=float, default=165.0, help="length of the schedule on the clock")
    trainer.add_argument("--steps", type=int, default=10**6, help="or its length in steps, whichever ends first")
    trainer.add_argument("--lr", type=float, default=3e-3)
    trainer.add_argument("--weight-decay", type=float, default=0.1)
    trainer.add_argument("--text-rows", type=int, default=64)
    trainer.add_argument("--text-length", type=int, default=512)
    trainer.add_argument("--chat-rows", type=int, default=320)
    trainer.add_argument("--chat-weight", type=float, default=1.0)
    trainer.add_argument("--seed", type=int, default=0)
    trainer.add_argument("--kernels", choices=("auto", "torch"), default="auto")
    trainer.set_defaults(call=run_train)
    return top


if __name__ == "__main__":
    arguments = parser().parse_args()
    arguments.call(arguments)
