"""The text of the demo target: the Python 3.11 documentation as running text and as conversations about its entries.

Source: the Debian package ``python3.11-doc`` (reStructuredText sources, PSF licence). A fixed hash of the name decides
what is held out: about 5 % of the files as a whole, and about 5 % of the entries (functions, methods, classes, data)
of the others, whose text is then cut out of the running text too.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.demo_target.rst import block_end, clean_document, clean_inline, indent_of, parse_directive

PACKAGE = "python3.11-doc"
SOURCES = Path("usr/share/doc/python3.11/html/_sources")
HELD_OUT_ONE_IN = 20
MAX_SIGNATURE_CHARS = 90

#: Directive -> what a reader calls it.
KINDS = {
    "function": "function",
    "coroutinefunction": "coroutine function",
    "decorator": "decorator",
    "method": "method",
    "classmethod": "class method",
    "staticmethod": "static method",
    "coroutinemethod": "coroutine method",
    "abstractmethod": "abstract method",
    "class": "class",
    "exception": "exception",
    "data": "constant",
    "attribute": "attribute",
    "c:function": "C function",
    "c:macro": "C macro",
    "c:type": "C type",
    "c:member": "C structure member",
    "c:var": "C variable",
}
QUESTIONS = (
    "What does `{name}` do?",
    "Explain the {kind} `{name}` of {place}.",
    "In Python 3.11, what is `{signature}`?",
    "Tell me about `{name}`.",
    "How is the {kind} `{name}` documented?",
)

C_API = "the Python/C API"
#: The fixed form of an answer. Most of an answer is this form and names, so that a small drafter can guess ahead.
LEAD_END = " as follows: "
CLOSING_START = " You can read more about it on the page "
CLOSING_END = " of the Python 3.11 documentation. What else would you like to know?"


@dataclass(frozen=True)
class Entry:
    """One documented name: ``name`` is qualified by module and class, ``sentences`` is the documentation's own text."""

    name: str
    kind: str
    signature: str
    place: str
    page: str
    sentences: tuple[str, ...]
    span: tuple[int, int]
    held_out: bool

    def question(self, phrasing: int) -> str:
        """The user's question in one of ``len(QUESTIONS)`` phrasings."""
        template = QUESTIONS[phrasing % len(QUESTIONS)]
        return template.format(name=self.name, kind=self.kind, place=self.place, signature=self.signature)

    def answer(self) -> str:
        """The assistant's answer: its fixed form around the documentation's own first sentence."""
        article = "an" if self.kind[0] in "aeiou" else "a"
        body = "Python/C API" if self.place == C_API else "Python standard library"
        opening = f"`{self.name}` is {article} {self.kind} of the {body}."
        lead = f"The Python 3.11 documentation describes this {self.kind}{LEAD_END}"
        return f"{opening} {lead}{self.sentences[0]}{CLOSING_START}{self.page}{CLOSING_END}"


def free_text(answer: str) -> str:
    """What an answer says between the phrases of the fixed form; the whole answer where they are missing."""
    return answer.partition(LEAD_END)[2].rpartition(CLOSING_START)[0] or answer


@dataclass(frozen=True)
class Corpus:
    """Running text per file and the entries, both already split; ``held_out_files`` names whole files kept away."""

    train_texts: dict[str, str]
    held_out_texts: dict[str, str]
    entries: tuple[Entry, ...]


def is_held_out(name: str) -> bool:
    """A fixed, evenly spread one in ``HELD_OUT_ONE_IN`` of all names."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def fetch_sources() -> Path:
    """Download and unpack the Debian package; returns the folder of ``*.rst.txt``. Raises CalledProcessError."""
    folder = Path(tempfile.mkdtemp(prefix="python-doc-"))
    subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, check=True)
    archive = next(folder.glob(f"{PACKAGE}_*.deb"))
    subprocess.run(["dpkg-deb", "-x", str(archive), str(folder / "unpacked")], check=True)
    return folder / "unpacked" / SOURCES


def read_corpus(sources: Path) -> Corpus:
    """Read every ``*.rst.txt`` below ``sources``. Raises FileNotFoundError when there is none."""
    paths = sorted(sources.rglob("*.rst.txt"))
    if not paths:
        raise FileNotFoundError(f"no *.rst.txt below {sources}")
    train: dict[str, str] = {}
    held_out: dict[str, str] = {}
    entries: list[Entry] = []
    for path in paths:
        page = path.relative_to(sources).as_posix().removesuffix(".rst.txt")
        source = path.read_text(encoding="utf-8")
        found = list(entries_of(source, page))
        entries += found
        if is_held_out(page):
            held_out[page] = clean_document(source)
        else:
            train[page] = clean_document(source, [entry.span for entry in found if entry.held_out])
    return Corpus(train, held_out, _unique(entries))


def _unique(entries: list[Entry]) -> tuple[Entry, ...]:
    """Drop repeated names, and held-out entries whose text a train entry shares (the model would have seen them)."""
    seen = {entry.sentences[0] for entry in entries if not entry.held_out}
    names: set[str] = set()
    kept: list[Entry] = []
    for entry in entries:
        if entry.name in names or (entry.held_out and entry.sentences[0] in seen):
            continue
        names.add(entry.name)
        kept.append(entry)
    return tuple(kept)


def entries_of(source: str, page: str) -> Iterator[Entry]:
    """Every documented name of one file that has at least one sentence of text."""
    lines = source.expandtabs().splitlines()
    module = ""
    classes: list[tuple[int, str]] = []
    for index, line in enumerate(lines):
        parsed = parse_directive(line)
        if parsed is None or not parsed[1]:
            continue
        directive, argument = parsed
        if directive in ("module", "currentmodule"):
            module = argument
        if directive not in KINDS:
            continue
        depth = indent_of(line)
        classes = [(at, name) for at, name in classes if at < depth]
        signature = _signature(argument, directive)
        owner = ".".join(name for _, name in classes)
        name, shown = _qualify(signature, directive, module, owner)
        if directive in ("class", "exception"):
            classes.append((depth, signature.split("(")[0]))
        body_start, end = _body(lines, index)
        sentences = _sentences(lines[body_start:end])
        if sentences and re.fullmatch(r"[\w.]+", name) and ("." in name or directive != "c:member"):
            place = C_API if directive.startswith("c:") else f"the module `{module or 'builtins'}`"
            held_out = is_held_out(page) or is_held_out(name)
            yield Entry(name, KINDS[directive], shown, place, page, sentences, (index, end), held_out)


def _signature(argument: str, directive: str) -> str:
    """The signature in plain text; over-long argument lists become ``(...)``."""
    signature = re.sub(r"\\(.)", r"\1", clean_inline(argument).rstrip("\\ ")).replace("`", "")
    signature = re.sub(r"^(class|async|abstractmethod) ", "", signature)
    if len(signature) > MAX_SIGNATURE_CHARS and "(" in signature:
        signature = signature.split("(")[0] + "(...)"
    return signature


def _qualify(signature: str, directive: str, module: str, owner: str) -> tuple[str, str]:
    """``(qualified name, signature with that name)``; C names stay as they are."""
    head, bracket, rest = signature.partition("(")
    if directive.startswith("c:"):
        return head.split()[-1].lstrip("*") if head.split() else head, signature
    name = head.strip()
    if owner and not name.startswith(owner.split(".")[-1] + "."):
        name = f"{owner}.{name}"
    if module and module != "builtins" and not name.startswith(module + "."):
        name = f"{module}.{name}"
    return name, f"{name}{bracket}{rest}"


def _body(lines: list[str], index: int) -> tuple[int, int]:
    """Line range of the entry's own text: after its signatures, up to the first nested entry or the block's end."""
    end, depth = block_end(lines, index), indent_of(lines[index])
    start = index + 1
    while start < end and lines[start].strip() and indent_of(lines[start]) > depth:
        start += 1  # further signatures and options follow without an empty line
    for nested in range(start, end):
        parsed = parse_directive(lines[nested])
        if parsed and parsed[0] in KINDS:
            return start, nested
    return start, end


def _sentences(body: list[str]) -> tuple[str, ...]:
    """Sentences of the first two paragraphs of prose in an entry's body."""
    paragraphs: list[str] = []
    for block in re.split(r"\n\s*\n", "\n".join(body)):
        first = block.strip().split("\n")[0]
        if not first:
            continue
        if first.startswith((".. ", ">>>", "* ", "- ", "+-", "==", ":", "#", "|")):
            if paragraphs:
                break
            continue
        if paragraphs and indent_of(block.lstrip("\n")) > indent_of(body[0] if body[0].strip() else body[-1]) + 3:
            break
        paragraphs.append(" ".join(clean_inline(block).split()))
        if len(paragraphs) == 2 or block.rstrip().endswith("::"):
            break
    text = " ".join(paragraphs)
    parts = re.split(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!cf\.)(?<!\beg\.)\s+(?=[A-Z`(])", text)
    return tuple(part for part in (p.strip() for p in parts) if len(part) > 8 and part[-1] in ".!?)`")
