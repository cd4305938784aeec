"""``prepare --show N``: rows as text, the supervised part coloured, so that a person can look."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from recipe.data.rows import Rows
from recipe.data.tokenizer import load_tokenizer
from recipe.errors import ConfigError

#: Control characters as their pictures: a row must not steer the terminal.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}


def show_rows(folder: str | Path, tokenizer: str | Path | None, count: int) -> None:
    """Print up to ``count`` rows spread over the split. On a terminal supervised text is green, else in ⟦…⟧."""
    from rich.console import Console
    from rich.text import Text

    rows = Rows.open(folder)
    path = tokenizer or rows.meta.get("tokenizer")
    if not path:
        raise ConfigError("--tokenizer", None, "is missing; meta.json names none", "give the target's folder")
    decoder = load_tokenizer(path)
    console = Console(highlight=False, soft_wrap=True)
    for index in np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(int)).tolist():
        ids, mask = rows[index]
        console.rule(f"row {index}: {len(ids)} tokens, {int(mask.sum())} supervised")
        line = Text()
        edges = [0, *(np.diff(mask.astype(int)).nonzero()[0] + 1).tolist(), len(ids)]
        for start, stop in itertools.pairwise(edges):
            text = decoder.backend_tokenizer.decode(ids[start:stop].tolist(), skip_special_tokens=False)
            text = text.translate(_VISIBLE)
            if not mask[start]:
                line.append(text, style="dim")
            elif console.is_terminal:
                line.append(text, style="bold green")
            else:
                line.append(f"⟦{text}⟧")
        console.print(line)
