"""The help text of commands."""

import contextlib
import io
import os

from cedd.cli import main


def help_text(*words: str) -> str:
    """The output of `cedd WORDS --help`, with long lines."""
    printed, before = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "400"
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*words, "--help"])
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    return printed.getvalue()
