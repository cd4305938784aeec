"""`speculators` 0.9.0 loads our exports with its own loader and computes the same; what it saves, we load.

Needs an environment of its own (it wants an older transformers than ours):

    python -m venv /tmp/speculators && /tmp/speculators/bin/pip install torch==2.13.0 && \
        /tmp/speculators/bin/pip install speculators==0.9.0
    SPECULATORS_PYTHON=/tmp/speculators/bin/python python -m pytest -m slow tests/numerics/test_speculators.py
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipe.decode.drafter_cache import IncrementalDrafter
from recipe.drafter.config import FULL, SLIDING, DrafterConfig
from recipe.drafter.init_from import load_drafter
from recipe.errors import ConfigError
from recipe.training.export import export_hf, export_speculators, load_export
from tests.numerics.decode_models import BLOCK, HIDDEN, MASK, TAPS, VOCAB, drafter_parts, tiny_target

PYTHON = os.environ.get("SPECULATORS_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="SPECULATORS_PYTHON names no interpreter with speculators==0.9.0"),
]
LENGTH, ANCHOR = 30, 17
# Windows as wide as the text: speculators places a window's far edge by the anchor, servers and we by the query.
LAYOUTS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding and causal": {"layer_types": [SLIDING] * 3, "window": 64, "causal": [True] * 3},
    "sliding": {"layer_types": [SLIDING, SLIDING, FULL], "window": 64},
}


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One call of the probe for everything: exports of every layout, loaded, run and saved again."""
    folder = tmp_path_factory.mktemp("speculators")
    target = tiny_target("qwen3")
    target.save_pretrained(folder / "target")
    embed, head = target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach()
    torch.manual_seed(0)
    inputs = {
        "taps": torch.randn(LENGTH, len(TAPS) * HIDDEN),
        "input_ids": torch.randint(0, VOCAB - 1, (LENGTH,)),
        "anchor": torch.tensor([ANCHOR]),
    }
    save_file(inputs, folder / "inputs.safetensors")
    parts, folders = {}, {}
    for name, layout in LAYOUTS.items():
        parts[name] = drafter_parts(7, **layout)
        folders[name] = export_speculators(
            parts[name][1], parts[name][0], folder / name.replace(" ", "-"), "float32", str(folder / "target"),
            embed, head, ["Qwen3ForCausalLM"],
        )  # fmt: skip
    folders["z-lab"] = export_hf(parts["full"][1], parts["full"][0], folder / "z-lab", "float32")
    request = {
        "folders": {name: str(path) for name, path in folders.items()},
        "verifier": str(folder / "target"),
        "inputs": str(folder / "inputs.safetensors"),
        "outputs": str(folder / "outputs.safetensors"),
        "save": {name: str(folder / f"saved-{name.replace(' ', '-')}") for name in LAYOUTS},
    }
    (folder / "request.json").write_text(json.dumps(request))
    probe = Path(__file__).with_name("speculators_probe.py")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [PYTHON, str(probe), str(folder / "request.json")], capture_output=True, text=True, timeout=900,
        env={**environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        "account": json.loads(done.stdout.strip().splitlines()[-1]),
        "hidden": load_file(folder / "outputs.safetensors"),
        "saved": {name: Path(path) for name, path in request["save"].items()},
        "folders": folders, "parts": parts, "inputs": inputs, "embed": embed,
    }  # fmt: skip


@pytest.mark.parametrize("name", [*LAYOUTS, "z-lab"])
def test_every_tensor_is_consumed_and_nothing_is_missing(probed: dict[str, Any], name: str) -> None:
    account = probed["account"][name]
    assert account["class"] == "DFlashDraftModel" and account["unexpected_keys"] == account["mismatched_keys"] == []
    verifiers = {"verifier_lm_head.weight", "verifier_norm.weight", "embed_tokens.weight", "lm_head.weight"}
    assert set(account["missing_keys"]) <= verifiers and account["nan"] == [], "those come from the verifier"
    assert (account["block_size"], account["mask"]) == (BLOCK, MASK)
    assert account["taps"] == [tap + 1 for tap in TAPS]
    for key, tensor in probed["parts"].get(name, probed["parts"]["full"])[1].items():
        assert account["parameters"][key] == list(tensor.shape)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_hidden_states(probed: dict[str, Any], name: str) -> None:
    config, weights = probed["parts"][name]
    drafter = IncrementalDrafter(config, weights)
    drafter.begin(LENGTH + BLOCK)
    taps = list(probed["inputs"]["taps"][:ANCHOR].split(HIDDEN, dim=1))
    block = torch.tensor([int(probed["inputs"]["input_ids"][ANCHOR])] + [MASK] * (BLOCK - 1))
    ours = drafter.forward(taps, probed["embed"][block])
    torch.testing.assert_close(probed["hidden"][name], ours, rtol=1e-4, atol=1e-4)
    if name == "sliding and causal":
        assert (ours - probed["hidden"]["full"]).abs().max() > 1e-2, "the direction makes no difference here"


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_speculators_saves_can_be_started_from_and_evaluated(probed: dict[str, Any], name: str) -> None:
    wanted, weights = probed["parts"][name]
    for config, read in (load_drafter(probed["saved"][name], wanted), load_export(probed["saved"][name])):
        assert read.keys() == weights.keys() and all(torch.equal(read[key], weights[key]) for key in weights)
        assert config.target_layer_ids == wanted.target_layer_ids and config.in_block_causal == wanted.in_block_causal


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"block_size": 8}, "block_size"),
        ({"target_layer_ids": (0, 1)}, "target_layer_ids"),
        ({"mask_token_id": 3}, "mask_token_id"),
        ({"intermediate_size": 96}, "intermediate_size"),
    ],
)
def test_what_differs_is_refused_by_name(probed: dict[str, Any], change: dict[str, Any], named: str) -> None:
    wanted: DrafterConfig = probed["parts"]["full"][0]
    other = DrafterConfig(**{**vars(wanted), **change})
    with pytest.raises(ConfigError, match=named):
        load_drafter(probed["saved"]["full"], other)
