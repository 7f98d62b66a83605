"""The command line: `cedd COMMAND ...`, one module a command.

A command's module has `Arguments`, a dataclass whose docstring and fields are its --help, and `run(arguments)`, which
returns the exit code; one with a parser of its own has `parse(words)` in place of `Arguments`. Modules are imported
only when their command is called, so that `cedd --help` is instant.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

COMMANDS: Mapping[str, str] = {
    "quickstart": "train, measure, sample, infill and correct in minutes, and write a page about it",
    "train": "train a network on text, any method on any process",
    "evaluate": "bound a model's perplexity on text, with an interval, or compare two models",
    "sample": "draw texts from a trained model, and watch them being denoised",
    "infill": "fill the blanks of a text",
    "correct": "put a text's mistakes right",
    "spelling": "count the mistakes a model puts right in a book, and what it breaks",
    "genppl": "judge a model's samples by another language model",
    "report": "write a run as one page, or a comparison of several",
    "bench": "time training steps or sampling against a textbook implementation",
    "theory": "check every theorem, proposition and erratum on small chains, and print the table",
}

EXAMPLE = "cedd theory"


class UserError(Exception):
    """Bad input: its message is the one line that the user sees."""


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            f"example: {EXAMPLE}",
            "",
            "usage: cedd COMMAND [OPTIONS]      (cedd COMMAND --help tells more)",
            "",
            "Discrete diffusion language models: train, bound, sample, infill, correct.",
            "",
            *lines,
        ]
    )


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; commands: {', '.join(COMMANDS)}"
    return f"cedd: no command {name!r}{hint}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Bad input ends in one line on stderr and exit code 2; an interrupt in 130."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"cedd {version('cedd')}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        print(_unknown(name), file=sys.stderr)
        return 2
    try:
        return _run(name, rest)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parse(module: ModuleType, name: str, words: list[str]) -> Any:
    """The command's arguments, by its own parser if it has one."""
    import tyro

    boxed = io.StringIO()
    try:
        with contextlib.redirect_stderr(boxed):
            if hasattr(module, "parse"):
                return module.parse(words)
            return tyro.cli(module.Arguments, prog=f"cedd {name}", description=module.Arguments.__doc__, args=words)
    except SystemExit as end:
        if not end.code:  # --help
            raise
        raise UserError(f"{_unboxed(boxed.getvalue())} (cedd {name} --help tells more)") from None


def _unboxed(message: str) -> str:
    """The parser's complaint, which it frames and explains over many lines, as one: what it says before the first
    rule, and the first of the options that it says were perhaps meant."""
    parts: list[list[str]] = [[]]
    for line in message.splitlines()[1:]:  # the first is a title
        text = line.strip("│╭╮╰╯ ")
        if text.strip("─-"):
            parts[-1].append(text)
        elif parts[-1]:  # a rule ends a part
            parts.append([])
    near = [part[1].split()[0] for part in parts if part[:1] == ["Perhaps you meant:"] and len(part) > 1]
    return " ".join(parts[0]).rstrip(".") + "".join(f"; did you mean {name}?" for name in near[:1])


def _run(name: str, words: list[str]) -> int:
    module = importlib.import_module(f"cedd.cli.{name}")
    try:
        return int(module.run(_parse(module, name, words)) or 0)
    except (UserError, ValueError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
        if os.environ.get("CEDD_TRACEBACK"):
            raise
        print(f"cedd {name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"cedd {name}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
