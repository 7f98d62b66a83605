"""Which parts of a file are prose, by its syntax."""

import re

import pytest

from cedd.apps.correct.prose import identifiers, mask, mask_ignored, restored, syntax_of
from cedd.spelling.changes import Change, Corrected


def left(text, syntax):
    """The words that are not masked."""
    masked = mask(text, syntax)
    assert len(masked) == len(text)
    assert [i for i, c in enumerate(masked) if c == "\n"] == [i for i, c in enumerate(text) if c == "\n"]
    assert all(a in (b, " ", ".") for a, b in zip(masked, text, strict=True))
    return [word.strip("\"'`.:;") for word in masked.split() if word.strip("#-.\"'`:;,()[]!|=*/")]


@pytest.mark.parametrize(
    ("syntax", "text", "prose"),
    [
        ("markdown", "a [label](http://x/code) b", "a [label b"),
        ("markdown", "a [label][code] b\n\n[code]: http://code\n", "a [label b"),
        ("markdown", "a[^code]\n\n[^code]: b\n\n    c\n", "a b c"),
        ("markdown", "---\ncode: code\n---\na\n", "a"),
        ("markdown", "a\n\n    code\n\nb\n", "a b"),
        ("markdown", "- a\n\n    b\n", "a b"),
        ("markdown", "| a | b |\n|---|---|\n| c | d |\n", "a b c d"),
        ("markdown", 'a <p class="code">b</p> <!-- c -->', "a b <!-- c -->"),
        ("markdown", "a `code` and ``code `` code`` b\n```\ncode\n```\nc", "a and b c"),
        ("markdown", "a\n````\n```{.code}\ncode\n```\ncode\n````\nb\n", "a b"),
        ("markdown", "- a\n\n    ```\n    code\n    ```\n\n    b\n```\ncode\n    ```\ncode\n```\nc\n", "a b c"),
        ("rst", "a ``code`` :func:`code` `code <code>`_ b\n", "a b"),
        ("rst", ".. _code:\n\na\n=\n\n.. code-block:: code\n   :code: code\n\n   code\n\nb\n", "a b"),
        ("rst", ".. note:: a\n\n   b\n", "a b"),
        ("rst", ".. image:: code\n   :alt: code\n\na ::\n\n  code\n\nb\n", "a b"),
        ("rst", ">>> code\ncode\n\na\n", "a"),
        ("rst", ":param code: a\n", "a"),
        ("html", '<a href="code">a</a><script>code</script><pre>code</pre> b &amp; c', "a b c"),
        ("tex", "a \\cite{code} $code$ \\begin{equation}code\\end{equation} \\emph{b}", "a b"),
        (
            "tex",
            "\\section[code]{A \\textbf{b \\emph{c}} \\cite{code}} d\\footnote{E.} \\color{f} 5\\% \\LaTeX",
            "A b c d E {f} 5",
        ),
        ("python", 'code = 1  # a b\ndef code(code: str = "code"): """cc dd"""\n', "a b cc dd"),
        ("python", "# code = code(1)\n# for code in code:\n# import code\n# a b  # noqa: code\n", ""),
        ("python", "x = f'aa bb {code} c'\ny = r'code'\n", "aa bb c"),
        ("python", "x = 'aa a bb'\ny = 'code c'\n", "aa a bb"),
        ("python", '"""A b.\n\nArgs\n    code (code): c d.\n\n    >>> code\n"""\n', "A b Args c d"),
        ("javascript", "code(code) // a b\n/** @param {code} code c d */ const code = 'ee ff';", "a b c d ee ff"),
        ("c", "let code = \"a bb cc\"; // it's b\nlet code = 'c'; /* d */", "a bb cc it's b d"),
        (
            "go",
            'code := `aa "bb` + \'"\' // a b\ntype code struct { code int `code:"code" code:"code"` }',
            "aa bb a b",
        ),
        ("rust", "fn code<'a, 'b>(code: &'a code, code: &'b code) {} // a b", "a b"),
        ("rust", "code = '\"'; code = '\\''; code = '\\u{2019}'; code = r#\"aa \"bb\" cc\"#; /// d", '#"aa bb cc"# d'),
        ("shell", "code: code # a b\nurl: http://code#code\n", "a b"),
        ("css", ".code { code: code; } /* a b */", "a b"),
        ("dashes", "select code -- a b\n", "a b"),
    ],
)
def test_everything_except_prose_is_masked(syntax, text, prose):
    assert " ".join(left(text, syntax)) == prose


def test_file_name_determines_syntax():
    names = {
        "a.py": "python",
        "b.RS": "rust",
        "b.go": "go",
        "c.md": "markdown",
        "Makefile": "shell",
        "d.txt": None,
        "e.unknown": None,
    }
    assert {name: syntax_of(name) for name in names} == names


def test_ignore_markers_mask_own_line_or_next_line():
    text = "a b # cedd: ignore\nc\n<!-- cedd: ignore -->\nd\ne\n"
    assert mask_ignored(text, text).split() == ["c", "e"]


def test_words_in_code_are_identifiers():
    """Also single letters, except for a and i."""
    text = "The usefull function `fnction` is x.\n\n    recieve(h, lr, a, buf_size)\n"
    assert identifiers(text, mask(text, "markdown")) == {"fnction", "recieve", "h", "lr"}


@pytest.mark.parametrize(
    ("text", "corrected"),
    [
        ("Occured teh\n===========\n\noccured\n", "Occured the\n===========\n\noccurred\n"),
        ("Occured teh\r\n============\r\n", "Occurred the\r\n============\r\n"),
        ("+-----+\n| teh |\n+-----+\n| occured |\n\noccured", "+-----+\n| the |\n+-----+\n| occured |\n\noccurred"),
        (
            "=== =======\nteh b\n=== =======\nc   occured\n\nc   b\n=== =======\n\noccured\n",
            "=== =======\nthe b\n=== =======\nc   occured\n\nc   b\n=== =======\n\noccurred\n",
        ),
    ],
)
def test_corrections_keep_title_underlines_and_table_columns_valid(text, corrected):
    fixes = {"teh": "the", "occured": "occurred", "Occured": "Occurred"}
    changes = [Change(m.start(), m[0], fixes[m[0]], 1.0, 1.0) for m in re.finditer("teh|[oO]ccured", text)]
    assert restored(text, Corrected("", text, changes), "rst") == corrected


def test_correction_of_masked_text_is_restored_to_original_text():
    text, change = "`x` teh", Change(4, "teh", "the", 1.0, 1.0)
    corrected = restored(text, Corrected("    the", "    teh", [change]))
    assert corrected == "`x` the"
    assert corrected.original == text
    assert corrected.changes[0].span == (4, 7)
