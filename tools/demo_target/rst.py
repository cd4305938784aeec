"""From reStructuredText to plain text: roles, links and directives of the documentation become readable prose."""

from __future__ import annotations

import re
from collections.abc import Iterable

# :func:`~shutil.copy` and :ref:`title <target>`; a leading "!" or "~" belongs to Sphinx, not to the reader.
_ROLE = re.compile(r":(?P<role>[a-z0-9:+-]+):`(?P<body>[^`]+)`")
_TITLED = re.compile(r"^(?P<title>.+?)\s*<[^<>]*>$", re.S)
_LINK = re.compile(r"`(?P<title>[^`<>]+?)\s*<[^<>`]+>`__?")
_LITERAL = re.compile(r"``([^`]+)``")
_EMPHASIS = re.compile(r"(?<![\w*`])\*{1,2}(?=\S)([^*\n`]+?)(?<=\S)\*{1,2}(?![\w*`])")
_SUBSTITUTION = re.compile(r"\|(release|version)\|")
_DIRECTIVE = re.compile(r"^(?P<indent>\s*)\.\. (?P<name>[A-Za-z0-9:+_-]+)::(?P<rest>.*)$")
_RULE = re.compile(r"^\s*([=\-~^\"'*#+.`_])\1{3,}\s*$")

#: Roles whose text is code: it keeps its back-ticks.
_CODE_ROLES = {
    *("class", "func", "meth", "mod", "exc", "attr", "const", "data", "keyword", "file", "envvar", "option", "source"),
    *("program", "opcode", "command", "mimetype", "code", "pdbcmd", "token", "kbd", "samp"),
}
#: Directives whose block says nothing to a reader of plain text.
_DROPPED = {
    *("index", "sectionauthor", "moduleauthor", "highlight", "toctree", "tabularcolumns", "currentmodule", "include"),
    *("audit-event", "image", "figure", "raw", "only", "testsetup", "testcleanup", "productionlist", "contents"),
    *("literalinclude", "module", "cssclass", "c:namespace", "impl-detail-table", "audit-event-table"),
    *("availability-table", "platform"),
}
#: Directives that become a lead-in of the paragraph that follows.
_LEAD = {
    "note": "Note:",
    "warning": "Warning:",
    "seealso": "See also:",
    "impl-detail": "CPython implementation detail:",
    "tip": "Tip:",
    "versionadded": "New in version {}.",
    "versionchanged": "Changed in version {}:",
    "deprecated": "Deprecated since version {}:",
    "deprecated-removed": "Deprecated since version {}:",
    "availability": "Availability: {}",
    "rubric": "{}",
}


def clean_inline(text: str) -> str:
    """Plain text of one piece of reStructuredText: roles, links, emphasis and escapes resolved; newlines kept."""
    text = _ROLE.sub(_role, text)
    text = _LINK.sub(lambda match: match["title"], text)
    text = _LITERAL.sub(r"`\1`", text)
    text = _EMPHASIS.sub(r"\1", text)
    text = _SUBSTITUTION.sub("3.11", text)
    return re.sub(r"\\([*`\\| ])", lambda match: match[1].strip(), text)


def _role(match: re.Match[str]) -> str:
    """The readable text of one role."""
    role, body = match["role"].split(":")[-1], match["body"].strip()
    titled = _TITLED.match(body)
    if titled:
        body = titled["title"]
    elif body.startswith("~"):
        body = body[1:].rsplit(".", 1)[-1]
    body = body.lstrip("!~")
    if role in ("pep", "rfc", "issue", "gh"):
        return {"pep": "PEP ", "rfc": "RFC ", "issue": "issue ", "gh": "issue "}[role] + body
    if role in ("func", "meth") and not body.endswith(")"):
        body += "()"
    return f"`{body}`" if role in _CODE_ROLES or ":" in match["role"] else body


def indent_of(line: str) -> int:
    """Number of leading spaces of a line (tabs count as eight)."""
    line = line.expandtabs()
    return len(line) - len(line.lstrip(" "))


def block_end(lines: list[str], start: int) -> int:
    """Index after the last line of the block that the directive at ``lines[start]`` opens."""
    depth, end = indent_of(lines[start]), start + 1
    for index in range(start + 1, len(lines)):
        if lines[index].strip():
            if indent_of(lines[index]) <= depth:
                break
            end = index + 1
    return end


def parse_directive(line: str) -> tuple[str, str] | None:
    """``(name, argument)`` of a directive line, or None."""
    match = _DIRECTIVE.match(line)
    return (match["name"], match["rest"].strip()) if match else None


def clean_document(text: str, removed: Iterable[tuple[int, int]] = ()) -> str:
    """Plain text of a whole document without the line ranges ``removed`` (start, end); code blocks stay as they are."""
    lines = text.expandtabs().splitlines()
    gone = {index for start, end in removed for index in range(start, end)}
    out: list[str] = []
    index = 0
    while index < len(lines):
        line = lines[index]
        if index in gone:
            index += 1
        elif line.lstrip().startswith(".. "):
            index = _clean_directive(lines, index, out)
        elif _RULE.match(line) or re.match(r"^\s+:[\w -]+:( |$)", line):
            index += 1
        else:
            out.append(re.sub(r"::$", ":", line.rstrip()))
            index += 1
    return re.sub(r"\n{3,}", "\n\n", clean_inline("\n".join(out))).strip() + "\n"


def _clean_directive(lines: list[str], index: int, out: list[str]) -> int:
    """Append what is worth reading of the directive at ``index``; return the index to go on with."""
    parsed = parse_directive(lines[index])
    if parsed is None:  # a comment, a link target or a substitution
        return block_end(lines, index)
    name, argument = parsed
    if name in _DROPPED:
        return block_end(lines, index)
    pad = " " * indent_of(lines[index])
    if name in _LEAD:
        version, _, rest = argument.partition(" ") if "version" in _LEAD[name] else (argument, "", "")
        out.append(f"{pad}{_LEAD[name].format(version)} {rest}".rstrip())
    elif argument and name not in ("doctest", "code-block", "sourcecode", "testcode", "parsed-literal", "code", "math"):
        out.append(f"{pad}{name.split(':')[-1]} {argument}")
    return index + 1
