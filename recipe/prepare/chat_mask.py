"""Token ids and the exact loss mask of one sample, for any chat template, by construction.

Supervised is what the target itself would generate when it is served, up to and including its end-of-turn token: each
answer's prompt and generated text come from `turn`, here they become tokens. No text is searched for in the result, so
what users write cannot become supervised.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recipe.data.tokenizer import special_strings, stop_ids
from recipe.prepare.conversation import Chat, Pair, Sample, Text, Tokens
from recipe.prepare.messages import is_blank
from recipe.prepare.report import Drop
from recipe.prepare.shown import visible
from recipe.prepare.turn import Turn, TurnRenderer, encodable

_OPENINGS, _OPENING_CHARS = 1024, 256  # ids of short texts that are kept: how many, how long


@dataclass
class Sequence:
    """One row of the output: ids int32 [T] and mask bool [T]."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass
class Masked:
    """All sequences of one sample, with what happened to single turns of it; ``losses``: what of a used row is not."""

    sequences: list[Sequence] = field(default_factory=list)
    turns: list[Drop] = field(default_factory=list)
    losses: set[str] = field(default_factory=set)
    notes: Counter[str] = field(default_factory=Counter)


class ChatMask:
    """Masks samples for one tokenizer. ``model_path``: where a generation_config.json may name further stop tokens."""

    def __init__(self, tokenizer: Any, model_path: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.backend = tokenizer.backend_tokenizer
        self.vocabulary = len(tokenizer)
        special = sorted(special_strings(tokenizer), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special))) if special else None
        self._added = set(tokenizer.added_tokens_decoder)
        self._openings: dict[str, list[int]] = {}
        self._declared = stop_ids(tokenizer, model_path)
        texts = {str(tokenizer.convert_ids_to_tokens(i)) for i in self._declared if i < self.vocabulary}
        self.turns = TurnRenderer(tokenizer, self._special, texts)
        self.stops = self._declared | {tokenizer.convert_tokens_to_ids(end) for end in self.turns.stops}

    def mask(self, sample: Sample, max_seq_len: int) -> Masked:
        """Sequences of at most ``max_seq_len`` tokens that each hold an anchor: two consecutive supervised tokens.

        Raises Drop when nothing of the sample can be used; single unusable turns are listed in the result.
        """
        if isinstance(sample, Chat):
            out = self._chat(sample)
        else:
            out = Masked([self._tokens(sample) if isinstance(sample, Tokens) else self._plain(sample)])
        kept = []
        for sequence in out.sequences:
            try:
                kept.append(_fit(sequence, max_seq_len, out.notes))
            except Drop as drop:
                out.turns.append(drop)
        out.sequences = kept
        if not kept:
            raise out.turns[0] if out.turns else Drop("no_answer", "every answer is marked not to be learnt from")
        return out

    # ---- chats

    def _chat(self, chat: Chat) -> Masked:
        if not self.turns.template:
            raise Drop("no_chat_template")
        out, turns = Masked(), []
        chat = self.turns.shown.given(chat, out.notes)
        if chat.tools and not self.turns.shown.tools:
            out.losses.add("unused_key: tools (this chat template shows none)")
        for index, message in enumerate(chat.messages):
            if message["role"] == "assistant":
                try:
                    if _is_learnt(message, out.notes):
                        turns.append(self.turns.turn(chat, index, out.notes))
                except Drop as drop:
                    out.turns.append(drop)
        while turns:  # from the last turn back: one sequence covers every earlier turn that it shows as served
            last = turns[-1]
            try:
                whole = self.turns.shown.check(chat.messages[: last.index], chat.tools, last.prompt)
            except Drop as drop:
                out.turns.append(drop)
                turns.pop()
                continue
            shown = [t for t in turns if last.full.startswith(t.prompt + t.answer)]
            calling = [t for t in shown if chat.messages[t.index].get("tool_calls")]
            if not whole or any(text not in t.answer for t in calling for text in visible(chat.messages[t.index])):
                out.losses.add("turn_not_rendered: role assistant, the text beside a call")
            seen = set(map(id, shown))
            turns = [t for t in turns if id(t) not in seen]
            out.sequences += self._sequences(last, shown, out)
        out.sequences.reverse()
        if len(out.sequences) > 1:
            out.notes["conversations split into one sequence per served turn"] += 1
        return out

    # ---- text to tokens

    def _sequences(self, last: Turn, shown: list[Turn], out: Masked) -> list[Sequence]:
        """The tokens of ``last.full`` with the answers of all ``shown`` turns supervised. A turn whose prompt's tokens
        would merge with its answer gets its own sequence, tokenised as served: first the prompt, then the answer."""
        encoding = self.backend.encode(last.full, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int32)
        starts = np.maximum.accumulate(np.array([start for start, _ in encoding.offsets], dtype=np.int64))
        mask = np.zeros(len(ids), dtype=bool)
        apart = []
        for turn in shown:
            first = int(np.searchsorted(starts, len(turn.prompt)))
            stop = int(np.searchsorted(starts, len(turn.prompt) + len(turn.answer)))
            if self._clean_cut(ids, starts, first, turn.prompt):
                self._supervise(ids, mask, first, stop, out.notes, turn.quotes)
            else:
                apart.append(turn)
        sequences = [Sequence(ids, mask)] if len(apart) < len(shown) else []
        for turn in apart:
            try:
                sequences.append(self._served(turn.prompt, turn.answer, out.notes, quotes=turn.quotes))
            except Drop as drop:
                out.turns.append(drop)
        return sequences[::-1]

    def _clean_cut(self, ids: np.ndarray, starts: np.ndarray, first: int, prompt: str) -> bool:
        """Whether tokenising ``prompt`` alone gives exactly ``ids[:first]``. Added tokens divide the text before any
        merging, so comparing from the last one before the cut is the same as comparing everything."""
        origin = first - 1
        while origin > 0 and int(ids[origin]) not in self._added:
            origin -= 1
        origin = max(origin, 0)
        at = int(starts[origin]) if origin else 0
        return self._opening(prompt[at:]) == ids[origin:first].tolist()

    def _opening(self, text: str) -> list[int]:
        """The ids of a prompt's last part: mostly the same few characters, the opening of an answer."""
        if len(text) > _OPENING_CHARS:
            return list(self.backend.encode(text, add_special_tokens=False).ids)
        if text not in self._openings:
            if len(self._openings) >= _OPENINGS:
                self._openings.clear()
            self._openings[text] = list(self.backend.encode(text, add_special_tokens=False).ids)
        return self._openings[text]

    def _served(
        self, prompt: str, answer: str, notes: Counter[str], open_text: bool = False, quotes: bool = True
    ) -> Sequence:
        """Prompt and answer tokenised apart, as a server does it. ``open_text``: with the tokenizer's own BOS."""
        encoding = self.backend.encode(prompt + answer, add_special_tokens=False)
        whole = list(encoding.ids)
        ids = np.array(whole, dtype=np.int32)
        starts = np.maximum.accumulate(np.array([start for start, _ in encoding.offsets], dtype=np.int64))
        first = int(np.searchsorted(starts, len(prompt)))
        if self._clean_cut(ids, starts, first, prompt):
            opened, added = whole[:first], whole[first:]
        else:
            opened = list(self.backend.encode(prompt, add_special_tokens=False).ids)
            joint = whole[: len(opened)] == opened
            added = whole[len(opened) :] if joint else self._continued(opened, answer, whole)
        if open_text:
            opened = self._with_bos(prompt, opened)
        ids = np.array(opened + added, dtype=np.int32)
        mask = np.zeros(len(ids), dtype=bool)
        self._supervise(ids, mask, len(opened), len(ids), notes, quotes)
        return Sequence(ids, mask)

    def _continued(self, opened: list[int], answer: str, whole: list[int]) -> list[int]:
        """The ids of ``answer`` in the middle of a text: some tokenizers mark the start of a text with a space."""
        wanted = self._decode(whole)
        added = self.backend.encode(answer, add_special_tokens=False).ids
        choices = [added, added[1:]]
        if self._special and (mark := self.tokenizer.eos_token or next(iter(self.tokenizer.all_special_tokens), None)):
            choices.append(self.backend.encode(mark + answer, add_special_tokens=False).ids[1:])
        for choice in choices:
            if choice and self._decode(opened + choice) == wanted:
                return choice
        raise Drop("answer_not_separable")

    def _decode(self, ids: list[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=False)

    def _supervise(
        self, ids: np.ndarray, mask: np.ndarray, first: int, stop: int, notes: Counter[str], quotes: bool
    ) -> None:
        """Supervise ids[first:stop], but nothing after a stop token: generation would have ended there. The token that
        ends a turn may stand inside of one that the template builds (between thought and answer), unless the message
        itself ``quotes`` control tokens."""
        stops = self.stops if quotes else self._declared
        ended = next((at for at, token in enumerate(ids[first : stop - 1].tolist(), first) if token in stops), None)
        if ended is not None:
            stop = ended + 1
            notes["answers that contain a stop token (not supervised after it)"] += 1
        mask[first:stop] = True

    # ---- other kinds

    def _plain(self, sample: Pair | Text) -> Sequence:
        if isinstance(sample, Pair):
            prompt, completion = encodable(sample.prompt), encodable(sample.completion)
            return self._served(prompt, completion, Counter(), open_text=True)
        bare = self.backend.encode(encodable(sample.text), add_special_tokens=False).ids
        ids = np.array(self._with_bos(sample.text, bare), dtype=np.int32)
        mask = np.ones(len(ids), dtype=bool)
        mask[0] = False  # the first token is always given; a BOS is never generated
        return Sequence(ids, mask)

    def _with_bos(self, text: str, bare: list[int]) -> list[int]:
        """``bare`` with the tokenizer's own opening (a BOS), unless the text brings it along. No closing is added."""
        if self.backend.num_special_tokens_to_add(False) == 0:
            return bare
        full = self.backend.encode(text, add_special_tokens=True).ids
        at = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), 0)
        return bare if bare[: at or 1] == full[:at] or not at else full[:at] + bare

    def _tokens(self, sample: Tokens) -> Sequence:
        if min(sample.input_ids) < 0 or max(sample.input_ids) >= self.vocabulary:
            raise Drop("bad_tokens", f"ids must be in 0 … {self.vocabulary - 1}")
        return Sequence(np.array(sample.input_ids, dtype=np.int32), np.array(sample.loss_mask, dtype=bool))


def _is_learnt(message: dict[str, Any], notes: Counter[str]) -> bool:
    """Whether an answer is to be learnt from. Raises Drop when it cannot be: blank, or of an odd weight."""
    if is_blank(message):
        raise Drop("empty_answer")
    mark = message.get("train", True)
    if mark is False:
        notes["answers marked not to be learnt from"] += 1
    elif mark is not True:
        raise Drop("bad_weight", repr(mark)[:80])
    return mark is True


def has_anchor(mask: np.ndarray) -> bool:
    """Whether two consecutive tokens are supervised: the first can be an anchor, the second its label."""
    return bool((mask[1:] & mask[:-1]).any())


def _fit(sequence: Sequence, max_seq_len: int, notes: Counter[str]) -> Sequence:
    if not has_anchor(sequence.loss_mask):
        raise Drop("too_few_supervised", f"{int(sequence.loss_mask.sum())} supervised tokens")
    if len(sequence.input_ids) <= max_seq_len:
        return sequence
    first = int(sequence.loss_mask.argmax())
    cut = Sequence(sequence.input_ids[:max_seq_len], sequence.loss_mask[:max_seq_len])
    if not has_anchor(cut.loss_mask):
        raise Drop("answer_after_max_seq_len", f"the answer begins at token {first} of {len(sequence.input_ids)}")
    notes["sequences truncated at max_seq_len"] += 1
    return cut
