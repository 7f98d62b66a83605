"""The parts of a text that are code: Markdown's fences and backticks, tags, lines after a prompt. Code consists of
names, not words.

Each pattern looks ahead by a few hundred characters at most, so that the time is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

CODE_INDENT = 4
"""Spaces by which code is indented: a fence that is indented by this many more than the block's first fence is code."""
_FENCE = re.compile(r"^([ \t]{0,80})(?:> ?)?(`{3,}|~{3,})[ \t]*([^`\r\n]*)\r?$", re.MULTILINE)
_INLINE = re.compile(
    r"""(?<!`)(?P<ticks>`{1,8})(?![`\s])[^\r\n]{0,300}?(?<![`\s])(?P=ticks)(?![`\w])  # `git add`, not `so' and `so'
    | </?[A-Za-z][\w:-]{0,40}(?:\s[^<>]{0,500})?/?>  # <a href="...">
    | \{\{[^{}\r\n]{0,300}\}\} | \{%[^\r\n]{0,300}?%\} | <%[^\r\n]{0,300}?%>  # templates
    | ^[ \t]{0,80}\$[ ][^\r\n]*  # $ make all
    | (?<!\S)--[A-Za-z][\w-]*  # --in-place
    """,
    re.MULTILINE | re.VERBOSE,
)


def _blocks(text: str) -> Iterator[tuple[int, int | None, str]]:
    """Start, end and fence (with its indentation) of each fenced block; the end is None for a block that continues
    after the text."""
    begin: tuple[int, str, str] | None = None
    for fence in _FENCE.finditer(text):
        indent, marks, name = fence.groups()
        if begin is None:
            begin = fence.start(), indent, marks
        elif marks.startswith(begin[2]) and len(indent) < len(begin[1]) + CODE_INDENT:
            if name.strip():  # only a block's beginning has a name, so what came before was an end
                begin = fence.start(), indent, marks
            else:
                yield begin[0], fence.end(), begin[1] + begin[2]
                begin = None
    if begin is not None:
        yield begin[0], None, begin[1] + begin[2]


def code_spans(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of each part of a text that is code."""
    for start, stop, _ in _blocks(text):
        yield start, len(text) if stop is None else stop
    for match in _INLINE.finditer(text):
        yield match.span()


def open_block(text: str) -> tuple[int, str] | None:
    """Start and fence of a block that continues after the text."""
    return next(((start, fence) for start, stop, fence in _blocks(text) if stop is None), None)
