"""The prose of a file: text without markup, comments and strings without code.

`mask` replaces everything else by spaces, character by character, so that positions stay the same. What remains is
corrected as plain text. The syntax of a file follows from its suffix (`syntax_of`); plain text has None.

The patterns recognize the usual forms of each syntax. They are not parsers: where a file is ambiguous, text is masked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import PurePath

from cedd.spelling.changes import Change, Corrected
from cedd.spelling.code import code_spans

Span = tuple[int, int]
IGNORE = re.compile(r"\bcedd: ignore\b")
"""A line with this is not changed. If it is alone in a comment on its line, the next line is not changed either."""
MAX_LINE = 2_000
"""Characters of a line of source code; longer lines are generated or minified, and masked."""
_ALONE = re.compile(r"[\W_]*cedd: ignore[\W_]*\Z")
_SYNTAXES = {
    "markdown": "md markdown mkd mdx qmd rmd",
    "rst": "rst",
    "html": "html htm xhtml xml svg vue",
    "tex": "tex sty cls ltx",
    "python": "py pyi pyx pxd",
    "c": "c h cc cpp cxx hh hpp hxx cs java kt kts scala swift dart zig proto m mm glsl cu cuh php",
    "go": "go",
    "rust": "rs",
    "javascript": "js jsx mjs cjs ts tsx mts cts",
    "css": "css scss less",
    "shell": "sh bash zsh fish pl pm rb r jl ex exs nim cmake mk yaml yml toml ini cfg conf dockerfile makefile",
    "dashes": "sql lua hs elm ada adb ads",
    "lisp": "lisp lsp el clj cljs scm rkt asm",
}
_SYNTAX_OF = {suffix: syntax for syntax, suffixes in _SYNTAXES.items() for suffix in suffixes.split()}
PLAIN_SUFFIXES = frozenset(("txt", "text", "adoc", "org"))
"""Suffixes of plain text."""


def syntax_of(name: str) -> str | None:
    """The syntax of a file by its name; None for plain text and unknown suffixes."""
    path = PurePath(name)
    return _SYNTAX_OF.get(path.suffix[1:].lower() or path.name.lower())


def is_prose_file(name: str) -> bool:
    """Whether the name is that of plain text, or of a file whose syntax is known."""
    return syntax_of(name) is not None or PurePath(name).suffix[1:].lower() in PLAIN_SUFFIXES


def mask(text: str, syntax: str | None) -> str:
    """The text with everything except prose replaced by spaces, or by full stops where a sentence ends (a cell of a
    table, an underline); line breaks stay."""
    if syntax is not None and syntax not in _MASKS:
        raise ValueError(f"invalid syntax: {syntax!r} (choose from {', '.join(_MASKS)})")
    return text if syntax is None else _MASKS[syntax](text)


def mask_ignored(masked: str, original: str) -> str:
    """The masked text without the lines that `IGNORE` marks in the original."""
    return _blank(masked, _ignored_lines(original)) if "cedd: ignore" in original else masked


def identifiers(text: str, masked: str) -> frozenset[str]:
    """Words of the code of a text, by its mask and in its inline code: names, which are not misspellings elsewhere.

    Single letters are names too (`h` in "h is returned"), except for a and i.
    """
    hidden = "".join(a if a != b else " " for a, b in zip(text, masked, strict=True))
    code = " ".join([hidden, *(masked[start:stop] for start, stop in code_spans(masked))])
    return frozenset(word.lower() for word in re.findall(r"(?<![^\W\d])(?![aAiI]\b)[A-Za-z]{1,24}(?![^\W\d])", code))


def restored(original: str, corrected: Corrected, syntax: str | None = None) -> Corrected:
    """A correction of a masked text as one of the original, without changes that break the layout of its syntax."""
    parts, end, changes = list[str](), 0, list(corrected.changes)
    if syntax == "rst":
        changes = _without_broken_layout(original, changes)
    for change in changes:
        start, stop = change.span
        assert original[start:stop] == change.before
        parts += [original[end:start], change.after]
        end = stop
    return Corrected("".join([*parts, original[end:]]), original, changes, corrected.suspicious)


def _without_broken_layout(text: str, changes: Sequence[Change]) -> list[Change]:
    """The changes of reStructuredText after which no title is longer than its underline and the columns of tables are
    where they were."""
    tables, kept, room = _matches_whole(_TABLE, text) if changes else [], list[Change](), dict[int, int]()
    for change in changes:
        start, stop = change.span
        growth = len(change.after) - len(change.before)
        if growth and any(first <= start < last for first, last in tables):
            continue
        if (title := _TITLE.match(text, text.rfind("\n", 0, start) + 1)) is not None and stop <= title.end(1):
            left = room.setdefault(title.start(), len(title[2]) - len(title[1]))
            if growth > max(left, 0):
                continue
            room[title.start()] -= growth
        kept.append(change)
    return kept


def _blank(text: str, spans: Iterable[Span], by: str = " ") -> str:
    """The text with these spans replaced, except for line breaks."""
    parts, end = list[str](), 0
    for start, stop in sorted(spans):
        start = max(start, end)
        if stop > start:
            parts += [text[end:start], re.sub(r"[^\r\n]", by, text[start:stop])]
            end = stop
    return "".join([*parts, text[end:]])


def _lines(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and content of each line, without its line break."""
    for match in re.finditer(r"[^\r\n]*(?:\r\n|\r|\n|\Z)", text):
        yield match.start(), match.end(), match[0].rstrip("\r\n")


def _ignored_lines(text: str) -> Iterator[Span]:
    following = False
    for start, stop, line in _lines(text):
        found = IGNORE.search(line) is not None
        if found or following:
            yield start, stop
        following = found and _ALONE.match(line) is not None


def _matches(pattern: re.Pattern[str], text: str) -> Iterator[Span]:
    """The spans of the groups that matched; of the whole match if the pattern has none."""
    for match in pattern.finditer(text):
        if pattern.groups:
            yield from (match.span(group) for group in range(1, pattern.groups + 1) if match[group] is not None)
        else:
            yield match.span()


# ----------------------------------------------------------------------------------------------------------------
# Markup

_FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n.*?^(?:---|\.\.\.)[ \t]*$", re.DOTALL | re.MULTILINE)
_TABLE_BAR = re.compile(r"^[ \t]*\|.*|.*\|[ \t]*$|^[^|\r\n]*[^|\s][ \t]*\|[ \t]*[^|\s].*$", re.MULTILINE)
_URL = re.compile(r"\b[a-z][a-z0-9+.-]{1,9}://[^\s<>)\]]*|\bmailto:\S*|\bwww\.[^\s<>)\]]*", re.IGNORECASE)
_ENTITY = re.compile(r"&#?\w{1,31};")
_TAG = re.compile(r"</?[A-Za-z][\w:.-]*(?:\s(?:[^<>\"']|\"[^\"]*\"|'[^']*')*)?/?>|<[!?][A-Za-z][^<>]*>")
_HTML_CODE = re.compile(r"<(script|style|pre|code|kbd|samp|var|tt|math|svg)\b[^<>]*>.*?</\1\s*>", re.DOTALL | re.I)
_MARKDOWN = re.compile(
    r"""\]\([^()\s]*(?:\([^()\s]*\)[^()\s]*)*(?:[ \t]+["'][^"'\n]*["'])?\)  # ](target "title")
    | ^[ ]{0,3}\[(?!\^)[^\]\n]+\]:[^\n]*  # [label]: target
    | \]\[[^\]\n]*\] | \[\^[^\]\n]+\]:?  # ][label] and [^note]
    | \{[#.:%][^{}\n]*\} | \{[\w-]+\}(?=`)  # {#anchor}, {.class} and the role of {role}`text`
    | ^[ ]*:{3,}[^\n]*  # ::: directive
    | ^[ ]*(?:!!!|\?\?\?\+?|===)[ ]+[\w-]+(?=[ \t]*(?:"|$))  # !!! note "Title"
    | ^[ ]*:[\w-]+:[^\n]* | \$\$.*?\$\$ | \$[^\s$\d](?:[^\n$]*[^\s$\\])?\$(?!\d)
    | \[[ xX]\] | :[a-z0-9_+-]+:(?!\w)
    """,
    re.MULTILINE | re.VERBOSE | re.DOTALL,
)


def _html(text: str) -> str:
    text = _blank(text, (match.span() for match in _HTML_CODE.finditer(text)))
    return _blank(_blank(text, _matches(_TAG, text), "."), [*_matches(_URL, text), *_matches(_ENTITY, text)])


def _markdown(text: str) -> str:
    text = _blank(text, (match.span() for match in _FRONT_MATTER.finditer(text)))
    text = _blank(text, [span for span in code_spans(text) if text[span[0]] != "-"])
    text = _blank(text, _indented_code(text))
    text = _blank(text, (match.span() for match in _MARKDOWN.finditer(text)))
    text = _cells(text)
    return _blank(text, [*_matches(_URL, text), *_matches(_ENTITY, text), *_matches(_TAG, text)])


def _cells(text: str) -> str:
    """The text with the bars of table rows as full stops, since a cell is a sentence of its own."""
    bars = (at for row in _TABLE_BAR.finditer(text) for at in range(*row.span()) if text[at] == "|")
    return _blank(text, ((at, at + 1) for at in bars), ".")


def _indented_code(text: str) -> Iterator[Span]:
    """Lines indented by four spaces or a tab after a blank line, outside lists."""
    blank, in_list, in_code = True, False, False
    for start, stop, line in _lines(text):
        indented = line.startswith(("    ", "\t"))
        if not line.strip():
            blank = True
            continue
        if not indented:
            in_list = re.match(r" {0,3}(?:[-*+]|\d+[.)])\s", line) is not None or (in_list and line.startswith(" "))
            in_list = in_list or re.match(r"!!!|\?\?\?|===|\[\^", line) is not None
        in_code = indented and not in_list and (blank or in_code)
        if in_code:
            yield start, stop
        blank = False


_PROSE_DIRECTIVES = frozenset(
    re.findall(
        r"\S+",
        """admonition attention caution danger deprecated error hint important note seealso tip todo topic versionadded
        versionchanged versionremoved warning sidebar epigraph pull-quote container glossary centered rubric figure
        list-table table change changelog""",
    )
)
"""reStructuredText directives whose content is prose; that of others is masked."""
_DIRECTIVE = re.compile(r"(\s*)\.\.\s+(?:\|[^|]+\|\s+)?([\w:.+-]+?)::(.*)")
_NAMED = re.compile(r"(?:note|warning|tip|admonition|topic|sidebar|rubric|hint|important|seealso|centered)\Z")
_RST = re.compile(
    r"""``[^\n]*?(?:\n[^\n]*?)?``  # ``code``
    | :[\w:+.-]+:`[^`]*` | `[^`]*`:[\w:+.-]+:  # :role:`target`
    | `[^`]*`__? | `[^`\n]*`  # `text <target>`_
    | ^[ \t]*\.\.[ \t]+(?:_[^\n]*|\[[^\]\n]+\]|\|[^|\n]+\|[^\n]*)  # .. _target:
    | ^[ \t]*:[\w*\\\[\]., -]+:(?=\s|$)  # :param name:
    | \|[^|\s](?:[^|\n]*[^|\s])?\|_{0,2} | (?<!\w)[\w.-]+__?(?!\w) | \[[\w#*.-]+\]_
    | ^[ \t]*__[ ]+[^\n]*
    """,
    re.MULTILINE | re.VERBOSE,
)
_UNDERLINE = re.compile(r"^[ \t]*([=\-~^\"'`#*+.:_<>!$%&(),/;?@\[\\\]{|}])\1{2,}[ \t]*$", re.MULTILINE)
_TITLE = re.compile(r"([^\r\n]*[^\s])[ \t]*\r?\n(([=\-~^\"'`#*+.:_])\3{2,})[ \t]*\r?$", re.MULTILINE)
"""A title and its underline."""
_TABLE = re.compile(
    r"^[ \t]*\|[^\r\n]*\|[ \t]*\r?$|"  # a row of a grid table
    r"^[ \t]*=+(?:[ ]+=+)+[ \t]*\r?$(?:\n[^\n]*)*?\n[ \t]*=+(?:[ ]+=+)+[ \t]*\r?$(?=\s*?(?:\n[ \t]*\r?$|\Z))",
    re.MULTILINE,
)
"""A row of a grid table, or a simple table."""
_TABLE_LINE = re.compile(r"^[ \t]*(?:\+(?:[-=]+\+)+|[=-]{2,}(?:[ ]+[=-]{2,})+)[ \t]*$", re.MULTILINE)


def _rst(text: str) -> str:
    text = _blank(text, _rst_blocks(text))
    text = _blank(text, _matches_whole(_TABLE_LINE, text), ".")
    text = _blank(text, _matches_whole(_UNDERLINE, text), ".")
    return _blank(_cells(_blank(text, _matches_whole(_RST, text))), _matches(_URL, text))


def _matches_whole(pattern: re.Pattern[str], text: str) -> list[Span]:
    return [match.span() for match in pattern.finditer(text)]


def _rst_blocks(text: str) -> Iterator[Span]:
    """Directives without prose, their options, literal blocks, doctests and comments."""
    hidden: int | None = None  # lines indented by more than this are masked
    literal, doctest, options, previous_indent = False, False, False, 0
    for start, stop, line in _lines(text):
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            doctest = options = False
            continue
        if hidden is not None and indent > hidden:
            yield start, stop
            continue
        hidden = None
        if literal and (previous_indent < indent or line.lstrip()[:1] == ">"):
            yield start, stop
            hidden = previous_indent
            literal = False
            continue
        literal = False
        if doctest or line.lstrip().startswith(">>>"):
            doctest = True
            yield start, stop
            continue
        if options and re.match(r"\s+:[\w-]+:", line):
            yield start, stop
            continue
        options = False
        if (directive := _DIRECTIVE.match(line)) is not None:
            name = directive[2].rpartition(":")[2]
            options = name in _PROSE_DIRECTIVES
            titled = _NAMED.match(name) is not None
            yield start, stop if not titled else start + directive.start(3)
            if not options:
                hidden = indent
        elif re.match(r"\s*\.\.(?:\s+(?!_|\[|\|)|$)", line):  # a comment
            yield start, stop
            hidden = indent
        elif line.rstrip().endswith("::"):
            literal = True
        previous_indent = indent


_TEX = re.compile(
    r"""\\(?:begin|end)\{(?:[^{}]*)\}(?:\[[^\]]*\])?
    | \\(?:label|ref|eqref|autoref|cref|Cref|pageref|cite\w*|url|href|input|include|includegraphics|usepackage
        |documentclass|bibliography\w*|newcommand|renewcommand|def|lstinline|verb|texttt|mathrm|operatorname)
        \*?(?:\[[^\]]*\])?(?:\{[^{}]*\}|\\\w+)?
    | (?<!\\)\$\$.*?\$\$ | (?<!\\)\$[^$]*\$ | \\\(.*?\\\) | \\\[.*?\\\] | \\[^A-Za-z@]
    """,
    re.VERBOSE | re.DOTALL,
)
_TEX_COMMAND = re.compile(r"\\[A-Za-z@]+\*?")
_TEX_TEXT = re.compile(
    r"(\\(?:(?:sub)*section|(?:sub)?paragraph|chapter|part|title|caption|emph|text(?:bf|it|md|rm|sc|sf|sl|up)|underline|"
    r"footnote)\*?(?:\[[^\]]*\])?\{)[^{}]*(\})"
)
"""A command whose argument is prose; the argument has no braces."""
_TEX_BLOCK = re.compile(
    r"\\begin\{(equation|align|gather|multline|eqnarray|math|displaymath|verbatim|lstlisting|minted|tikzpicture|"
    r"algorithmic?)(\*?)\}.*?\\end\{\1\2\}",
    re.DOTALL,
)


def _tex(text: str) -> str:
    text = _blank(text, _matches_whole(_TEX_BLOCK, text))
    text = _blank(text, _matches_whole(_TEX, text))
    while found := list(_TEX_TEXT.finditer(text)):  # the innermost first
        text = _blank(text, [match.span(part) for match in found for part in (1, 2)])
    return _blank(text, _matches_whole(_TEX_COMMAND, text))


# ----------------------------------------------------------------------------------------------------------------
# Source code

_STRING = r'"(?:[^"\\\n]|\\.)*"' + "|" + r"'(?:[^'\\\n]|\\.)*'"
_C_COMMENT = r"//[^\n]*|/\*.*?\*/"
_HASH_COMMENT = r"(?:(?<=\s)|(?<![^\n]))\#[^\n]*"
_CHARACTER = r"'(?:[^'\\\n]|\\[^\n]{1,10}?)'"
_LEXERS = {
    "python": (
        rf'(?P<comment>\#[^\n]*)|(?P<string>(?:\b[A-Za-z]{{1,2}})?(?:"""(?:[^\\]|\\.)*?"""'
        rf"|'''(?:[^\\]|\\.)*?'''|{_STRING}))"
    ),
    "c": rf"(?P<comment>{_C_COMMENT})|(?P<string>{_STRING})",
    "go": rf"(?P<comment>{_C_COMMENT})|(?P<code>{_CHARACTER}|`\w+:\"[^`]*`)|(?P<string>\"(?:[^\"\\\n]|\\.)*\"|`[^`]*`)",
    "rust": rf"(?P<comment>{_C_COMMENT})|(?P<code>b?{_CHARACTER}|'\w+)|"
    r'(?P<string>\b(?:b|c)?r(?P<hashes>\#*)".*?"(?P=hashes)|"(?:[^"\\]|\\.)*")',
    "javascript": rf"(?P<comment>{_C_COMMENT})|(?P<string>{_STRING}|`(?:[^`\\]|\\.)*`)",
    "css": r"(?P<comment>/\*.*?\*/)|(?P<string>)(?!)",
    "shell": rf"(?P<comment>{_HASH_COMMENT})|(?P<code>{_STRING})|(?P<string>)(?!)",
    "dashes": rf"(?P<comment>--[^\n]*|/\*.*?\*/)|(?P<code>{_STRING})|(?P<string>)(?!)",
    "lisp": r'(?P<comment>;[^\n]*)|(?P<string>"(?:[^"\\]|\\.)*")',
}
_PLACEHOLDER = re.compile(
    r"""\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|\r?\n|.) | \$?\{[^{}\n]*\} | %(?:\(\w*\))?[-+#0-9.*]*[a-zA-Z](?![A-Za-z])
    | ^[ \t]*(?:>>>|\.\.\.)[ \t][^\n]*  # a doctest
    | (?<![^\W\d_])[:\\]\w+
    | @param[ \t]+(?:\{[^}\n]*\}[ \t]+)?[\w.$\[\]=]+ | :(?:param|type|raises)[ ][^\n:]*:  # names of parameters
    | @\w+[ \t]*(?:\{[^}\n]*\})?
    """,
    re.VERBOSE | re.MULTILINE,
)
_MARKERS = re.compile(r"^[ \t]*(?:\#+!?:?|//[/!]*|/?\*+/?|;+|--+)", re.MULTILINE)
_GOOGLE_ARGUMENT = re.compile(r"^[ \t]+([\w*]+(?:[ ]\([^)\n]*\))?):(?=\s)", re.MULTILINE)
_COMMENTED_CODE = re.compile(
    r"\b(?:noqa|nosec|nolint|pragma|eslint|prettier|ts-ignore|fmt:|clang-format)|type: ignore|pylint:|"
    r"[;{}]\s*$|^\s*(?:for\s+\w+\s+in\b.*:\s*$|from\s+[\w.]+\s+import\b|import\s+[\w.]+\s*$)|"
    r"^\s*[\w.\[\]]+\s*(?:=|\+=|:=|\()|[=!<>]=|=>|->|&&|\|\||::|\w\(|^\s*<"
)
_TWO_WORDS = re.compile(r"[^\W\d_]{2,}(?:\W+[aAI])?\W+[^\W\d_]{2,}")


@lru_cache
def _lexer(syntax: str) -> re.Pattern[str]:
    return re.compile(_LEXERS[syntax], re.DOTALL | (re.MULTILINE if syntax == "shell" else 0))


def _source(syntax: str, text: str) -> str:
    """Comments, and strings of several words; format placeholders, escapes and commented code are masked."""
    kept, hidden = list[Span](), list[Span]()
    for match in _lexer(syntax).finditer(text):
        start, stop = match.span()
        comment = match["comment"] is not None
        if not comment and match["string"] is None:
            continue
        content = match[0]
        if comment:
            kept.append((start, stop))
            for first, last, line in _lines(content):
                if _COMMENTED_CODE.search(_MARKERS.sub("", line)) or line.startswith("#!"):
                    hidden.append((start + first, start + last))
            hidden += [(start + a, start + b) for a, b in _matches_whole(_MARKERS, content)]
        elif _TWO_WORDS.search(content) and " " in content:
            if content.lstrip("rRbBfFuU")[:3] in ('"""', "'''"):  # a docstring is markup
                hidden += [(start + a, start + b) for a, b in _matches(_GOOGLE_ARGUMENT, content)]
                markup = _rst(content)
                hidden += ((start + i, start + i + 1) for i, c in enumerate(markup) if c != content[i])
            kept.append((start, stop))
            prefix = len(content) - len(content.lstrip("rRbBfFuU"))
            hidden.append((start, start + prefix))
        hidden += [(start + a, start + b) for a, b in _matches_whole(_PLACEHOLDER, content)]
    code, end = list[Span](), 0
    for start, stop in kept:
        code.append((end, start))
        end = stop
    long = ((a, b) for a, b, line in _lines(text) if len(line) > MAX_LINE)
    masked = _blank(text, [*code, (end, len(text))])
    masked = _blank(masked, hidden)
    return _blank(_blank(masked, long), _matches(_URL, masked))


_MASKS: dict[str, Callable[[str], str]] = {
    "markdown": _markdown,
    "rst": _rst,
    "html": _html,
    "tex": _tex,
    **{syntax: (lambda text, syntax=syntax: _source(syntax, text)) for syntax in _LEXERS},
}
