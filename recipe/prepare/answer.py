"""What an engine is asked and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sampling:
    """``temperature`` 0 is greedy; ``thinking`` None leaves the template's default."""

    max_tokens: int = 1024
    temperature: float = 0.0
    thinking: bool | None = None
    seed: int = 0

    def template_arguments(self) -> dict[str, Any]:
        return {} if self.thinking is None else {"enable_thinking": self.thinking}


@dataclass
class Answer:
    """One assistant message. ``truncated``: it ended at ``max_tokens``, so the target did not end the turn itself."""

    message: dict[str, Any]
    truncated: bool
    token_ids: list[int] | None = None
    completion_tokens: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


class AnswerError(Exception):
    """The engine could not answer this prompt (after all retries); other prompts are unaffected."""
