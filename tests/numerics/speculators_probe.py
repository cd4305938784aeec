"""Run by the interpreter of an environment that has `speculators`: load drafters with its own loader, run one block.

`python speculators_probe.py REQUEST.json`: {"folders": {name: folder}, "verifier": folder or null, "inputs": file with
taps [S, k·H], input_ids [S] and anchor [1], "outputs": file, "save": {name: folder}}. Prints a JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from transformers import PreTrainedModel


def load(folder: str, verifier: str | None) -> tuple[SpeculatorModel, dict[str, list[str]]]:
    """The model, and transformers' own account of which tensors it missed or did not use."""
    said: dict[str, list[str]] = {}
    original = PreTrainedModel.__dict__["_finalize_model_loading"].__func__

    def recording(model, load_config, loading_info):  # type: ignore[no-untyped-def]
        result = original(model, load_config, loading_info)
        for name in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            said[name] = sorted(str(key) for key in getattr(loading_info, name))
        return result

    PreTrainedModel._finalize_model_loading = staticmethod(recording)
    try:
        options = {}
        if "speculators_model_type" in json.loads((Path(folder) / "config.json").read_text()):
            options["config"] = SpeculatorModelConfig.from_pretrained(folder)
            options["config"].transformer_layer_config._attn_implementation = "eager"
        else:
            options["verifier"] = verifier
        model = SpeculatorModel.from_pretrained(folder, dtype=torch.float32, **options)
    finally:
        PreTrainedModel._finalize_model_loading = staticmethod(original)
    return model.eval(), said


def one_block(model: SpeculatorModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Hidden states [B, H] of the block at ``anchor`` after the taps before it."""
    ids, taps, anchor = inputs["input_ids"], inputs["taps"], int(inputs["anchor"])
    loss_mask = torch.zeros(1, len(ids), dtype=torch.long)
    loss_mask[0, anchor] = 1
    with torch.inference_mode():
        hidden, *_ = model._backbone_forward(
            taps[None], ids[None], loss_mask, torch.zeros(1, len(ids), model.hidden_size),
            torch.zeros(1, len(ids), dtype=torch.long), max_anchors=1,
        )  # fmt: skip
    return hidden[0]


def main(path: str) -> None:
    request = json.loads(Path(path).read_text())
    inputs = load_file(request["inputs"])
    outputs, account = {}, {}
    for name, folder in request["folders"].items():
        model, said = load(folder, request.get("verifier"))
        nan = [key for key, tensor in model.state_dict().items() if tensor.is_floating_point() and tensor.isnan().any()]
        config = model.config
        account[name] = {
            **said, "nan": nan, "class": type(model).__name__, "block_size": config.block_size,
            "taps": config.aux_hidden_state_layer_ids, "mask": config.mask_token_id,
            "parameters": {key: list(value.shape) for key, value in model.state_dict().items()},
        }  # fmt: skip
        if model._attn_impl == "eager":
            outputs[name] = one_block(model, inputs).contiguous()
        if name in request.get("save", {}):
            model.save_pretrained(request["save"][name])
    save_file(outputs, request["outputs"])
    print(json.dumps(account))


if __name__ == "__main__":
    main(sys.argv[1])
