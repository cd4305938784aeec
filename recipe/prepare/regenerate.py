"""``python -m recipe regenerate``: let the target answer the prompts itself, so that the drafter learns its own words.

One line of output per input conversation, appended and synced one by one: a killed job goes on where it stopped.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recipe.data.hashing import key_of
from recipe.errors import ConfigError, RunError
from recipe.prepare.answer import Answer, AnswerError, Sampling
from recipe.prepare.conversation import Chat, messages_of
from recipe.prepare.formats import find_inputs, read_records
from recipe.prepare.journal import Journal
from recipe.prepare.progress import Progress
from recipe.prepare.report import Drop
from recipe.prepare.shown import developer_as_system
from recipe.prepare.store import cache_key


@dataclass(frozen=True)
class Prompt:
    """A conversation to answer: every assistant turn is answered anew, or the last one alone where tools took part."""

    id: str
    number: int
    chat: Chat


@dataclass
class Outcome:
    """What `regenerate` did. ``failed`` prompts have no line; running again tries them again."""

    written: int = 0
    resumed: int = 0
    failed: int = 0
    truncated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # and `unused_key: NAME` of prompts that are used
    tokens: int = 0


def read_prompts(inputs: Sequence[str | Path], dropped: Counter[str]) -> Iterator[Prompt]:
    """Prompts of all inputs with ids that are unique and the same on every run. A developer turn becomes a system turn
    where there is none: few templates know the role, and the server's is not known here. ``dropped`` counts the rows
    that are no prompts, and the keys of all others that nobody reads."""
    seen: Counter[str] = Counter()
    for number, record in enumerate(read_records(find_inputs(inputs))):
        unused: set[str] = set()
        try:
            own, chat = messages_of(record.content, unused)
        except Drop as drop:
            dropped[drop.reason] += 1
            continue
        dropped.update(f"unused_key: {key[:60]}" for key in unused)
        chat = Chat(developer_as_system(chat.messages) or chat.messages, chat.tools)
        name = unique = own or f"{os.path.basename(record.source)}:{record.number}"
        while seen[unique]:
            seen[name] += 1
            unique = f"{name}#{seen[name]}"
        seen[unique] = 1
        yield Prompt(unique, number, chat)


def turns_to_answer(chat: Chat) -> list[list[dict[str, Any]]]:
    """The parts of the conversation that the target answers, in order; each follows the answer to the one before."""
    messages = list(chat.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
        return [messages]  # tool results belong to the calls that were made: this history stays
    parts: list[list[dict[str, Any]]] = [[]]
    for message in messages:
        if message["role"] == "assistant":
            if parts[-1]:
                parts.append([])
        else:
            parts[-1].append(message)
    return [part for part in parts if part]


def conversation_line(prompt: Prompt, said: list[dict[str, Any]], answers: list[Answer], model: str) -> dict[str, Any]:
    """The output row: a conversation that `prepare` reads."""
    line: dict[str, Any] = {"id": prompt.id, "messages": said, "model": model}
    if prompt.chat.tools:
        line["tools"] = prompt.chat.tools
    if all(a.token_ids is not None for a in answers):
        line["answer_token_ids"] = [a.token_ids for a in answers]
    return line


def regenerate_served(
    prompts: Iterator[Prompt],
    engine: Any,
    sampling: Sampling,
    journal: Journal,
    concurrency: int,
    bar: Progress,
    total: int,
) -> Outcome:
    """Answer over HTTP with ``concurrency`` requests in flight. A prompt that fails leaves the others alone."""
    out, failures_in_a_row = Outcome(), 0
    waiting = (p for p in prompts if p.id not in journal.done)
    pool = concurrent.futures.ThreadPoolExecutor(concurrency)

    def submit(prompt: Prompt) -> Any:
        return pool.submit(_converse, engine, prompt, sampling)

    try:
        flying = {submit(p) for p in itertools.islice(waiting, 2 * concurrency)}
        while flying:
            ready, flying = concurrent.futures.wait(flying, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in ready:
                try:
                    line, answers = future.result()
                except AnswerError as error:
                    out.failed += 1
                    failures_in_a_row += 1
                    if failures_in_a_row >= max(8, 2 * concurrency):
                        raise RunError(
                            f"{failures_in_a_row} prompts failed one after another; the last: {error}"
                        ) from error
                else:
                    failures_in_a_row = 0
                    _record(journal, line, answers, out)
                flying |= {submit(p) for p in itertools.islice(waiting, 1)}
            _show(bar, out, total)
    except BaseException:
        engine.stop()  # what waits for its next attempt must not keep an interrupted job alive
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
    return out


def _show(bar: Progress, out: Outcome, total: int) -> None:
    """``total``: prompts that had no answer when the job began."""
    finished = out.written + out.failed
    facts = f"{finished}/{total} failed={out.failed} tokens={out.tokens}"
    bar.update(finished / total if total else 0.0, facts, out.tokens)


def _converse(engine: Any, prompt: Prompt, sampling: Sampling) -> tuple[dict[str, Any], list[Answer]]:
    said: list[dict[str, Any]] = []
    answers: list[Answer] = []
    for turn, part in enumerate(turns_to_answer(prompt.chat)):
        said += part
        answer = engine.answer(_as_history(said), prompt.chat.tools, sampling, key_of(prompt.number, turn) % 2**30)
        said.append(_marked(answer))
        answers.append(answer)
    return conversation_line(prompt, said, answers, engine.model), answers


def _marked(answer: Answer) -> dict[str, Any]:
    return {**answer.message, "truncated": True} if answer.truncated else answer.message


def _as_history(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the server renders: no marks of ours, thoughts only under the name that chat templates know
    (`reasoning_content`; whether history shows them is the template's affair, there and in `prepare`)."""
    return [{k: v for k, v in m.items() if k not in ("train", "truncated", "reasoning", "thinking")} for m in messages]


def _record(journal: Journal, line: dict[str, Any], answers: list[Answer], out: Outcome) -> None:
    journal.append(line)
    out.written += 1
    out.truncated += any(a.truncated for a in answers)
    out.tokens += sum(a.completion_tokens for a in answers)


def regenerate_local(
    prompts: Iterator[Prompt],
    engine: Any,
    sampling: Sampling,
    journal: Journal,
    bar: Progress,
    total: int,
    group: int = 2048,
) -> Outcome:
    """Answer with a `LocalEngine`, turn by turn, in groups that bound memory. Prompts that the template cannot show
    whole are left out and counted. Raises NotFinite, naming the prompt."""
    from recipe.choice import NotFinite  # with torch, which a server's answers do not need

    out = Outcome()
    waiting = (p for p in prompts if p.id not in journal.done)
    while chunk := list(itertools.islice(waiting, group)):
        parts = [turns_to_answer(p.chat) for p in chunk]
        said: list[list[dict[str, Any]]] = [[] for _ in chunk]
        answers: list[list[Answer]] = [[] for _ in chunk]
        for turn in range(max(map(len, parts))):
            here, encoded = [], []
            for i in [i for i in range(len(chunk)) if turn < len(parts[i])]:
                said[i] += parts[i][turn]
                try:
                    encoded.append(engine.encode(said[i], chunk[i].chat.tools, sampling))
                    here.append(i)
                except Drop as drop:
                    out.dropped[drop.reason] += 1
                    parts[i] = []
            for batch in engine.batches(encoded):
                seeds = [key_of(chunk[here[j]].number, turn) % 2**30 for j in batch]
                try:
                    found = engine.generate([encoded[j] for j in batch], sampling, seeds)
                except NotFinite as error:
                    named = chunk[here[batch[int(error.prompt)]]].id
                    raise NotFinite(error.model, error.position, named) from error
                for k, answer in zip(batch, found, strict=True):
                    i = here[k]
                    said[i].append(_marked(answer))
                    answers[i].append(answer)
                    if turn == len(parts[i]) - 1:
                        _record(journal, conversation_line(chunk[i], said[i], answers[i], engine.name), answers[i], out)
                _show(bar, out, total)
    return out


def regenerate(
    inputs: Sequence[str | Path],
    output: str | Path,
    make_engine: Callable[[], Any],
    settings: dict[str, Any],
    sampling: Sampling,
    *,
    concurrency: int = 32,
    overwrite: bool = False,
    limit: int | None = None,
    quiet: bool = False,
) -> Outcome:
    """Write answers for all prompts of ``inputs`` to ``output`` (JSONL). ``make_engine`` is called once there is work.

    Raises ConfigError when ``output`` was begun with other settings, RunError when a server fails throughout.
    """
    dropped: Counter[str] = Counter()
    paths = find_inputs(inputs)
    if Path(output).exists() and any(path.samefile(output) for path in paths):
        raise ConfigError("--output", str(output), "is one of the --input files", "give another file")
    # Ids of rows without a name of their own are their places, so the answers belong to these very files.
    begun = {**settings, **asdict(sampling), "input": cache_key(paths, {})[:16]}
    with Journal(Path(output), begun, overwrite) as journal, Progress("regenerate", quiet) as bar:
        resumed = len(journal.done)
        ids = (p.id for p in itertools.islice(read_prompts(inputs, dropped), limit))
        total = sum(name not in journal.done for name in ids)
        if not total:
            return Outcome(resumed=resumed, dropped=dropped)
        prompts = itertools.islice(read_prompts(inputs, Counter()), limit)
        engine = make_engine()
        if hasattr(engine, "generate"):
            out = regenerate_local(prompts, engine, sampling, journal, bar, total)
        else:
            out = regenerate_served(prompts, engine, sampling, journal, concurrency, bar, total)
    out.resumed, out.dropped = resumed, dropped + out.dropped
    return out


# ---- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m recipe regenerate``."""
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="conversations or prompts")
    parser.add_argument(
        "--output", required=True, metavar="FILE", help="JSONL to write; an unfinished one is continued"
    )
    parser.add_argument("--model", required=True, help="name on the server; with --engine local the target's folder")
    parser.add_argument("--engine", choices=["server", "local"], default="server", help="default: %(default)s")
    parser.add_argument("--base-url", metavar="URL", help="OpenAI-compatible server, such as http://localhost:8000/v1")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of one answer (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (%(default)s)")
    parser.add_argument("--thinking", choices=["on", "off"], help="the template's enable_thinking; default: its own")
    parser.add_argument("--concurrency", type=int, default=32, help="requests in flight (%(default)s)")
    parser.add_argument("--retries", type=int, default=6, help="of a failed request, with back-off (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="prompts at once with --engine local (%(default)s)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    parser.add_argument("--seed", type=int, default=0, help="with a temperature (%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="begin again instead of continuing")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when every prompt has its answer, 1 when some failed (run it again), ConfigError (2) for mistakes."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in ("max_tokens", "concurrency", "batch_size", "limit"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError("--" + name.replace("_", "-"), getattr(args, name), "must be ≥ 1", "raise it")
    for name in ("retries", "temperature"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigError("--" + name, value, "must be a number ≥ 0", "leave it out for the default")
    if args.engine == "server" and not args.base_url:
        raise ConfigError("--base-url", None, "is missing", "give http://HOST:PORT/v1, or use --engine local")
    thinking = {"on": True, "off": False, None: None}[args.thinking]
    sampling = Sampling(args.max_tokens, args.temperature, thinking, args.seed)
    out = regenerate(
        args.input,
        args.output,
        lambda: _engine(args),
        {"engine": args.engine, "model": args.model},
        sampling,
        concurrency=args.concurrency,
        overwrite=args.overwrite,
        limit=args.limit,
    )
    counts = out.dropped.items()
    dropped = {name: count for name, count in counts if ":" not in name}
    facts = f" dropped={dropped}" if dropped else ""
    print(f"written={out.written} resumed={out.resumed} failed={out.failed} truncated={out.truncated}{facts}")
    for name, count in counts:
        if name not in dropped:
            print(f"  not used, {count} × {name}")
    if out.written + out.resumed == 0:
        named = ", ".join(args.input)
        why = ", ".join(f"{reason} × {count}" for reason, count in out.dropped.items())
        why = why or (f"{out.failed} failed" if out.failed else "no row in it")
        raise ConfigError("--input", named, f"gave no answer: {why}", "mend the rows, or name a file with prompts")
    if out.failed:
        print(f"{out.failed} prompts failed; the same command tries them again")
    return 1 if out.failed else 0


def _engine(args: argparse.Namespace) -> Any:
    if args.engine == "local":
        from recipe.prepare.local_engine import LocalEngine

        return LocalEngine(args.model, batch_size=args.batch_size)
    from recipe.prepare.served import ServerEngine

    engine = ServerEngine(args.base_url, args.model, args.retries)
    engine.check()
    return engine
