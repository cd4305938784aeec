"""vLLM's, SGLang's and speculators' own functions read our exports, and docs/servers.md says what they read.

Downloads their wheels (some 280 MB, once) into the ignored folder wheels/; installs nothing and needs no GPU. Each
server's modules run in a process of its own, with stand-ins for what cannot be imported here (the probes say which).
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipe.drafter.config import SLIDING
from recipe.drafter.export_layout import tensor_shapes
from recipe.training.export import serve_commands
from tests.servers.drafters import DEPTH, KINDS, MIXED, VOCAB, drafter, export, exports
from tests.servers.table import TARGET, Row, rows
from tests.servers.wheels import sources

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
EXPORTS = exports()
Z_LAB = [kind for kind, layout in EXPORTS if layout == "z-lab"]
SPECULATORS = [kind for kind, layout in EXPORTS if layout == "speculators"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    place = tmp_path_factory.mktemp("exports")
    return {(kind, layout): export(kind, layout, place) for kind, layout in EXPORTS}


def probe(script: str, server: str, request: dict[str, Any], place: Path) -> dict[str, Any]:
    (place / f"{server}.json").write_text(json.dumps({**request, "depth": DEPTH, "vocab": VOCAB}))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), str(sources(server)), str(place / f"{server}.json")],
        capture_output=True, text=True, timeout=500, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


@pytest.fixture(scope="module")
def vllm(folders: dict, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("vllm")
    request = {"folders": {f"{kind}/{layout}": str(folder) for (kind, layout), folder in folders.items()}}
    return probe("vllm_probe.py", "vllm", request, place)


@pytest.fixture(scope="module")
def sglang(folders: dict, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("sglang")
    commands = [
        shlex.split(serve_commands(place, drafter(Z_LAB[0])[0], TARGET, hybrid=hybrid)[1])[3:]
        for hybrid in (False, True)
    ]
    request = {"folders": {kind: str(folders[kind, "z-lab"]) for kind in Z_LAB}, "commands": commands}
    return probe("sglang_probe.py", "sglang", request, place)


@pytest.fixture(scope="module")
def speculators(folders: dict, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("speculators")
    request = {"folders": {kind: str(folders[kind, "speculators"]) for kind in SPECULATORS}}
    return probe("speculators_config_probe.py", "speculators", request, place)


def check_rope(read: list[dict[str, Any]], kind: str) -> None:
    config = drafter(kind)[0]
    assert len(read) == config.num_hidden_layers
    for rope in read:
        assert rope["rope_theta"] == config.rope_theta and rope.get("rope_type", "default") == "default"
        assert rope["head_size"] == rope.get("rotary_dim", config.head_dim) == config.head_dim
        assert rope["neox"] is True and rope["max"] == config.max_position_embeddings
        assert rope.get("partial_rotary_factor", 1.0) == rope.get("partial", 1.0) == 1.0


def check_weights(filled: Path, kind: str, prefix: str) -> None:
    """Every tensor of ours lies where the server computes with it."""
    config, weights = drafter(kind)
    there = {name.removeprefix(prefix): tensor for name, tensor in load_file(filled).items()}
    ours = {name: tensor.to(getattr(torch, config.dtype)).float() for name, tensor in weights.items()}
    for stacked, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        for name in [name for name in ours if f".{parts[0]}." in name]:
            pieces = [ours.pop(name.replace(parts[0], part)) for part in parts]
            ours[name.replace(parts[0], stacked)] = torch.cat(pieces)
    assert len(ours) < len(tensor_shapes(config)) and ours.keys() <= there.keys()
    assert not [name for name, tensor in ours.items() if not torch.equal(there[name].float(), tensor)]


@pytest.mark.parametrize(("kind", "layout"), EXPORTS)
def test_vllm_reads_what_was_trained(vllm: dict, folders: dict, kind: str, layout: str) -> None:
    config, read = drafter(kind)[0], vllm["exports"][f"{kind}/{layout}"]
    assert read["architectures"] == ["DFlashDraftModel"] and read["mask"] == config.mask_token_id
    assert read["taps"] == [tap + 1 for tap in config.target_layer_ids]
    assert read["causal"] == list(config.in_block_causal)
    assert read["needs_non_causal"] == (not all(config.in_block_causal))
    assert read["windows"] == [config.sliding_window if kind == SLIDING else None for kind in config.layer_types]
    assert read["sample_from_anchor"] is False and read["draft_id_map"] is False and read["logit_scale"] == 1.0
    assert read["vocabulary"] == [VOCAB, VOCAB] and set(read["eps"]) == {config.rms_norm_eps}
    check_rope(read["rope"], kind)
    shared = {"model.embed_tokens.weight", "lm_head.weight"}  # vLLM puts the target's there
    assert set(read["unfilled"]) == (shared if layout == "z-lab" else set())
    check_weights(Path(f"{folders[kind, layout]}.vllm.safetensors"), kind, "model.")


@pytest.mark.parametrize("kind", SPECULATORS)
def test_vllm_serves_a_speculators_folder(vllm: dict, folders: dict, kind: str) -> None:
    config, folder = drafter(kind)[0], str(folders[kind, "speculators"])
    speculative = {"method": "dflash", "model": folder, "num_speculative_tokens": config.block_size - 1}
    assert vllm["exports"][f"{kind}/speculators"]["served"] == {"model": TARGET, "speculative": speculative}
    assert "must name a remote model" in vllm["local_verifier"]["refused"], "docs/servers.md says it is refused"


@pytest.mark.parametrize("kind", Z_LAB)
def test_sglang_reads_what_was_trained(sglang: dict, folders: dict, kind: str) -> None:
    config, read = drafter(kind)[0], sglang["exports"][kind]
    assert read["architectures"] == ["DFlashDraftModel"] and read["mask"] == config.mask_token_id
    assert read["block"] == config.block_size and read["num_target_layers"] == DEPTH
    assert read["taps"] == list(config.target_layer_ids)
    assert set(map(tuple, read["captured"].values())) == {tuple(tap + 1 for tap in config.target_layer_ids)}
    assert read["causal"] == list(config.in_block_causal)
    assert read["windows"] == [config.sliding_window - 1 if kind == SLIDING else -1 for kind in config.layer_types]
    assert set(read["eps"]) == {config.rms_norm_eps} and read["unfilled"] == []
    assert read["dtype"] == ("torch.float16" if config.dtype == "float32" else f"torch.{config.dtype}")
    check_rope(read["rope"], kind)
    check_weights(Path(f"{folders[kind, 'z-lab']}.sglang.safetensors"), kind, "")


@pytest.mark.parametrize("kind", SPECULATORS)
def test_speculators_reads_what_was_trained(speculators: dict, kind: str) -> None:
    config, read = drafter(kind)[0], speculators["exports"][kind]
    assert read["class"] == "DFlashSpeculatorConfig" and read["mask"] == config.mask_token_id
    assert (read["block"], read["drafts"]) == (config.block_size, config.block_size - 1)
    assert read["taps"] == [tap + 1 for tap in config.target_layer_ids] and read["sample_from_anchor"] is False
    sliding = [index for index, kind in enumerate(config.layer_types) if kind == SLIDING]
    assert read["sliding"] == sliding and (not sliding or read["window"] == config.sliding_window)
    direction = [index in sliding and not read["non_causal"] for index in range(config.num_hidden_layers)]
    assert direction == list(config.in_block_causal)
    assert read["vocabulary"] == [VOCAB, VOCAB] and read["eps"] == config.rms_norm_eps
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    torch.testing.assert_close(torch.tensor(read["inv_freq"]), 1.0 / config.rope_theta**exponents)
    for name, shape in tensor_shapes(config).items():
        assert read["parameters"][name] == list(shape)


def test_all_kinds_were_tried() -> None:
    assert list(KINDS) == Z_LAB and set(KINDS) - set(SPECULATORS) == {MIXED}


def test_sglang_knows_every_option_of_the_printed_commands(sglang: dict) -> None:
    plain, hybrid = sglang["commands"]
    assert plain["unknown"] == hybrid["unknown"] == []
    assert plain["known"]["speculative_algorithm"] == "DFLASH" and plain["known"]["speculative_num_draft_tokens"] == 8
    assert plain["known"]["model_path"] == TARGET and "speculative_draft_model_path" in plain["known"]
    assert hybrid["known"]["mamba_radix_cache_strategy"] == "extra_buffer"


def test_vllm_knows_every_option_of_the_printed_command(vllm: dict) -> None:
    _, _, target, option, value = shlex.split(serve_commands(Path("/d"), drafter(Z_LAB[0])[0], TARGET)[0])
    assert target == TARGET
    tree = ast.parse((sources("vllm") / "vllm/engine/arg_utils.py").read_text())
    options = {
        text.value for call in ast.walk(tree) if isinstance(call, ast.Call) and "add_argument" in ast.dump(call.func)
        for text in call.args if isinstance(text, ast.Constant)
    }  # fmt: skip
    assert option in options
    fields = {
        node.target.id for node in definition("vllm", "vllm/config/speculative.py", "SpeculativeConfig").body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }  # fmt: skip
    speculative = json.loads(value)
    assert speculative.keys() <= fields and speculative["attention_backend"].upper() in vllm["backends"]


def definition(server: str, file: str, name: str) -> Any:
    """The function or class of that dotted name in a server's source."""
    node: Any = ast.parse((sources(server) / file).read_text())
    for part in name.split("."):
        found = [inner for inner in node.body if getattr(inner, "name", None) == part]
        assert found, f"{file} has no {name}"
        node = found[0]
    return node


@pytest.mark.parametrize("row", rows(), ids=str)
def test_the_list_names_where_each_key_is_read(row: Row) -> None:
    code = ast.unparse(definition(row.server, row.file, row.function))
    assert re.search(rf"\b{row.key.split('.')[-1]}\b", code), f"{row.function} does not read {row.key}"
