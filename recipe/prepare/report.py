"""What became of every row: counts, named reasons, examples. Rows in = rows out + rows dropped, always."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

REASONS = {
    "broken_json": "the line is not JSON",
    "bad_encoding": "the bytes are not UTF-8",
    "damaged_file": "the file ends early or cannot be read further",
    "duplicate_keys": "the same key occurs twice in one JSON object",
    "not_an_object": "the row is not a JSON object",
    "unknown_schema": "needs messages, conversations, prompt and completion, text, or input_ids and loss_mask",
    "ambiguous_schema": "messages and conversations disagree",
    "empty_conversation": "there is no message",
    "missing_role": "a message has no role",
    "unknown_role": "a message has a role that no chat template knows",
    "missing_content": "a message has no content",
    "bad_content": "a message's content is neither text nor text parts",
    "empty_turn": "a user message is empty",
    "empty_answer": "an assistant message is empty",
    "bad_tools": "tools is not a list of objects",
    "bad_tool_call": "a tool call has no name, or arguments that are not a JSON object",
    "bad_reasoning": "the reasoning is not text, or not the whole thought (a summary, or encrypted)",
    "bad_weight": "an answer has a weight other than 0 and 1, which cannot be given to it",
    "label_false": "the row is marked as a bad answer",
    "not_text": "the row comes with images, video or sound",
    "lone_surrogate": "the text has half of a UTF-16 pair, which no tokenizer can encode",
    "assistant_first": "the first turn is the assistant's: nothing prompts it",
    "no_answer": "there is no assistant turn",
    "no_chat_template": "the tokenizer has no chat template",
    "template_refused": "the chat template refuses this conversation",
    "template_contradicts_prompt": "the rendered answer does not continue the template's own generation prompt",
    "not_rendered": "the chat template renders nothing of this answer (it knows no tool calls)",
    "turn_not_rendered": "the chat template prints nothing of a turn before the answer, or of its text",
    "unfinished_thought": "the answer opens a thought and never closes it, which this chat template cannot show",
    "answer_not_separable": "the answer's tokens cannot be told from the prompt's",
    "bad_tokens": "input_ids and loss_mask are not two equally long lists of valid numbers",
    "too_few_supervised": "fewer than two supervised tokens in a row: no block has an anchor and a label",
    "answer_after_max_seq_len": "the answer begins after max_seq_len: nothing supervised is left",
    "internal_error": "our own fault: please report it",
}
_MOST_LOSSES = 200  # names of keys come from the input


class Drop(Exception):
    """A row, or one turn of it, that cannot be used. ``reason`` is a key of REASONS."""

    def __init__(self, reason: str, detail: str = "") -> None:
        assert reason in REASONS, reason
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail or REASONS[reason]}")

    def __reduce__(self) -> tuple[type[Drop], tuple[str, str]]:  # travels to worker processes
        return Drop, (self.reason, self.detail)


@dataclass
class Report:
    """The content of DIR/report.json. A row is one record of the input; a sequence one row of the output (a
    conversation whose history the template rewrites becomes several). ``losses``: what rows that are used hold and
    their sequences do not (`unused_key: NAME`, …), with the number of such rows."""

    rows_in: int = 0
    rows_out: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, dict[str, Any]] = field(default_factory=dict)
    dropped_turns: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    sources: dict[str, dict[str, int]] = field(default_factory=dict)
    sequences: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    heldout_rows: int = 0
    heldout_sequences: int = 0
    heldout_short: str = ""  # why fewer are held out than were asked for
    duplicates: int = 0
    seconds: float = 0.0
    up_to_date: bool = False

    def drop(self, source: str, where: int, error: Drop, excerpt: str, answers: int = 0) -> None:
        """Count one dropped row, of so many ``answers``, and keep the first of its kind as the example."""
        self.dropped[error.reason] += 1
        self._source(source)["dropped"] += 1
        if answers:
            self.notes["answers in dropped rows"] += answers
        self._example(source, where, error.reason, REASONS[error.reason], error.detail, excerpt)

    def drop_turn(self, source: str, where: int, error: Drop, excerpt: str) -> None:
        """Count one turn that is not supervised in a row that is kept."""
        self.dropped_turns[error.reason] += 1
        self._example(source, where, error.reason, REASONS[error.reason], error.detail, excerpt)

    def lose(self, source: str, where: int, what: str, excerpt: str) -> None:
        """Count one used row of which something is not used; ``what``: `unused_key: NAME` or another name."""
        if what not in self.losses and len(self.losses) >= _MOST_LOSSES:
            what = "unused_key: others"
        self.losses[what] += 1
        self._example(source, where, what, "used without it", "", excerpt)

    def _example(self, source: str, where: int, name: str, meaning: str, detail: str, excerpt: str) -> None:
        example = {"file": source, "row": where, "meaning": meaning, "detail": detail, "excerpt": excerpt}
        self.examples.setdefault(name, example)

    def keep(self, source: str) -> None:
        self.rows_out += 1
        self._source(source)["kept"] += 1

    def _source(self, name: str) -> dict[str, int]:
        return self.sources.setdefault(name, {"kept": 0, "dropped": 0})

    def merge(self, other: Report) -> None:
        """Add the counts of another part of the same input."""
        for name in ("rows_in", "rows_out", "sequences", "tokens", "supervised_tokens", "heldout_rows"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in (
            (self.dropped, other.dropped),
            (self.dropped_turns, other.dropped_turns),
            (self.losses, other.losses),
            (self.notes, other.notes),
        ):
            mine.update(theirs)
        for reason, example in other.examples.items():
            self.examples.setdefault(reason, example)
        for name, counts in other.sources.items():
            for key, value in counts.items():
                self._source(name)[key] += value

    def to_json(self) -> dict[str, Any]:
        out = {k: dict(v) if isinstance(v, Counter) else v for k, v in vars(self).items() if k != "up_to_date"}
        out["mask_share"] = self.supervised_tokens / self.tokens if self.tokens else 0.0
        return out

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Report:
        known = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
        for name in ("dropped", "dropped_turns", "losses", "notes"):
            known[name] = Counter(known.get(name, {}))
        return cls(**known)

    def text(self) -> str:
        """The report for a person, one fact a line."""
        share = 100 * self.supervised_tokens / self.tokens if self.tokens else 0.0
        lines = [
            f"rows in={self.rows_in} out={self.rows_out} dropped={self.rows_in - self.rows_out}"
            f" heldout={self.heldout_rows}",
            f"sequences={self.sequences} tokens={self.tokens} supervised={self.supervised_tokens} ({share:.1f} %)",
        ]
        if self.heldout_short:
            lines.append(f"  held out {self.heldout_rows} rows, {self.heldout_short}")
        for reason, count in self.dropped.most_common():
            lines.append(f"  dropped {count} {reason}: {REASONS[reason]}{self._where(reason)}")
        for reason, count in self.dropped_turns.most_common():
            lines.append(f"  turn not supervised, {count} × {reason}{self._where(reason)}")
        lines += [f"  not used, {count} × {what}{self._where(what)}" for what, count in self.losses.most_common()]
        lines += [f"  note, {count} × {what}" for what, count in self.notes.most_common()]
        empty = [name for name, counts in self.sources.items() if not any(counts.values())]
        lines += [f"  note, no row was read from {name}" for name in empty]
        if self.duplicates:
            lines.append(
                f"  note, {self.duplicates} sequences occur more than once (kept, never on both sides of the split)"
            )
        return "\n".join(lines)

    def _where(self, name: str) -> str:
        example = self.examples.get(name, {})
        detail = f": {example['detail']}" if example.get("detail") else ""
        return f" (e.g. {example.get('file')}:{example.get('row')}{detail})"
