"""Before a launch: whether DeepSpeed's AutoTP can cut a target without a shard plan, tried without its weights.

Two layers of the model's real widths with random weights go through what the ranks will do at their start
(`stock.cut_decoder`), in as many processes on this machine's CPU as there will be ranks. What it cannot tell: a layer
of another kind further up, and weights that bring out a difference that random ones do not. So the ranks check again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from recipe.errors import ConfigError
from recipe.model_files.shapes import TargetShape

LAYERS, VOCABULARY = 2, 512
PATIENCE_S = 300.0


def check_without_weights(shape: TargetShape, tp: int, dtype: str) -> str | None:
    """None when the cut is right; ConfigError when AutoTP cannot cut this model at ``tp``, or cuts it wrongly.

    Else why it could not be told here, one line. ``dtype``: "bfloat16" or "float32". Takes about as long as ``tp``
    processes need to import DeepSpeed.
    """
    with tempfile.TemporaryDirectory(prefix="dflash-stock-") as folder:
        meeting = Path(folder)
        root = str(Path(__file__).resolve().parents[2])
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // tp)),
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        }
        (meeting / "config.json").write_text(json.dumps(shape.text_config))
        ranks = []
        for rank in range(tp):
            with (meeting / f"rank{rank}.log").open("wb") as log:
                command = [sys.executable, "-m", __name__, folder, str(rank), str(tp), dtype]
                ranks.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        try:
            return _outcome(ranks, meeting)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()


def _outcome(ranks: list[subprocess.Popen[bytes]], meeting: Path) -> str | None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            time.sleep(1.0)  # the others are about to find the same
            break
        time.sleep(0.05)
    for refused in sorted(meeting.glob("refused*.json")):
        raise ConfigError(*json.loads(refused.read_text()))
    failed = [rank for rank, process in enumerate(ranks) if process.poll()]
    if failed:
        said = (meeting / f"rank{failed[0]}.log").read_text(errors="replace").strip().splitlines()[-1:]
        return f"the trial ended with {said[0][:200] if said else 'nothing said'}"
    return None if all(rank.poll() == 0 for rank in ranks) else f"the trial took more than {PATIENCE_S:.0f} s"


def random_decoder(settings: dict[str, Any], dtype: Any) -> Any:
    """transformers' decoder of this config, two layers deep, with weights that are the same in every process."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    inner = {name: value for name, value in settings.items() if name != "model_type"}
    config = AutoConfig.for_model(settings["model_type"], **inner)
    config.num_hidden_layers = min(LAYERS, config.num_hidden_layers)
    config.vocab_size = min(VOCABULARY, config.vocab_size)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, 0)
    torch.manual_seed(20)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases start at zero, where adding one twice would not show
            parameter.data += 0.1 * torch.randn(parameter.shape).to(dtype)
    return model.get_decoder().eval().requires_grad_(False)


def main(folder: str, rank: str, tp: str, dtype: str) -> int:
    """One rank of the trial; 2 and a file with the mistake when AutoTP is refused."""
    import torch

    from recipe.engine.local_world import join_local_world
    from recipe.engine.worlds import leave_world, world_group
    from recipe.process import die_with_parent
    from recipe.target.capture import layers_of
    from recipe.target.stock import cut_decoder

    die_with_parent()
    cpu, kind = torch.device("cpu"), getattr(torch, dtype)
    join_local_world(Path(folder), int(rank), int(tp), cpu)
    settings = json.loads((Path(folder) / "config.json").read_text())
    shape = TargetShape.from_config(settings)
    decoder, words = random_decoder(settings, kind), min(VOCABULARY, shape.vocab_size)
    try:
        cut_decoder(decoder, shape, words, int(tp), world_group(), cpu, kind, range(len(layers_of(decoder))))
    except ConfigError as error:
        facts = [error.field, int(tp), error.rule, error.fix]
        part = Path(folder) / f"part{rank}"
        part.write_text(json.dumps(facts))
        part.rename(Path(folder) / f"refused{rank}.json")
        return 2
    leave_world()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
