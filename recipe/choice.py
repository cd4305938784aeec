"""The most likely token of each row of logits, and what happens where logits are not finite.

argmax of NaN is a token like any other, and a drafter and a target that are both broken agree on it: tau would be
perfect. So a row that holds NaN or inf anywhere gives `NO_TOKEN`, on the device, and whoever reads the tokens, which is
a transfer anyway, refuses it. The check costs no wait of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recipe.errors import RunError

NO_TOKEN = -1
TARGET, DRAFTER = "target", "drafter"


class NotFinite(RunError):
    """Logits of ``model`` (TARGET or DRAFTER) with NaN or inf. ``prompt``: its number among those decoded together, or
    its name; ``position``: of the token that cannot be chosen, counted from the prompt's first one."""

    def __init__(self, model: str, position: int, prompt: int | str = 0) -> None:
        super().__init__(
            f"prompt {prompt}, position {position}: the {model}'s logits are not finite (NaN or inf), so no token can "
            "be chosen and nothing measured"
        )
        self.model, self.position, self.prompt = model, position, prompt


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """int64 [...] for ``logits`` [..., V]; NO_TOKEN for a row that is not finite throughout."""
    return torch.where(torch.isfinite(logits).all(-1), logits.argmax(-1), NO_TOKEN)


def refuse_no_token(tokens: Sequence[int], model: str, position: int, prompt: int | str = 0) -> None:
    """Raises NotFinite when one of ``tokens``, of which the first stands at ``position``, could not be chosen."""
    if NO_TOKEN in tokens:
        raise NotFinite(model, position + tokens.index(NO_TOKEN), prompt)
