"""What speculators' own config classes and drafter make of an export: `python … SOURCES REQUEST.json`, prints JSON.

The package runs as it stands in the wheel; what it needs and is not installed here (logging, clients) is blank.
tests/numerics/test_speculators.py compares what it computes, in an environment of its own.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from tests.servers.stand_ins import Finder

NEEDED = ("loguru", "openai", "hs_connectors", "aiohttp", "httpx", "datasets", "rich", "typer", "pydantic_settings",
          "psutil", "click", "torchvision")  # fmt: skip


def account(folder: str) -> dict[str, Any]:
    import speculators

    config = speculators.SpeculatorModelConfig.from_pretrained(folder)
    layers = config.transformer_layer_config
    layers._attn_implementation = "eager"
    model = speculators.DFlashDraftModel(config)
    return {
        "class": type(config).__name__, "architectures": config.architectures, "block": config.block_size,
        "taps": config.aux_hidden_state_layer_ids, "mask": config.mask_token_id,
        "non_causal": model.sliding_window_non_causal, "sliding": model.sliding_window_indices,
        "window": model.sliding_window, "sample_from_anchor": config.sample_from_anchor,
        "vocabulary": [layers.vocab_size, config.draft_vocab_size], "eps": model.hidden_norm.variance_epsilon,
        "rope": layers.rope_parameters, "inv_freq": model.rotary_emb.inv_freq.tolist(),
        "drafts": config.speculators_config.proposal_methods[0].speculative_tokens,
        "parameters": {name: list(tensor.shape) for name, tensor in model.state_dict().items()},
    }  # fmt: skip


def main(sources: str, request_file: str) -> None:
    sys.path.insert(0, sources)
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    Finder(Path(sources), "none_of_it", [], absent=absent).install()
    request = json.loads(Path(request_file).read_text())
    print(json.dumps({"exports": {name: account(folder) for name, folder in request["folders"].items()}}))


if __name__ == "__main__":
    main(*sys.argv[1:])
