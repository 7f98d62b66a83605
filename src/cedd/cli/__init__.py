"""The command line: `cedd COMMAND ...`, one module a command.

What a command takes is a dataclass in `arguments`. Its module has `run(arguments)`, which returns the exit code, and is
imported only when there is something to run: helps, and mistakes in a command line, wait for no torch.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cedd.names import nearest_path, suggestion

COMMANDS: Mapping[str, str] = {
    "quickstart": "train, measure, sample, infill and correct in minutes, and write a page about it",
    "train": "train a network on text, any method on any process",
    "evaluate": "bound a model's perplexity on text, with an interval, or compare two models",
    "sample": "draw texts from a trained model, and watch them being denoised",
    "infill": "fill the blanks of a text",
    "correct": "correct the spelling of a text",
    "spelling": "measure how many mistakes a model fixes in a book, and how much it breaks",
    "genppl": "judge a model's samples by another language model",
    "export": "write a run as a model to give away: small, described, with its figures",
    "report": "write a run as one page, or a comparison of several",
    "bench": "time training steps or sampling against a textbook implementation",
    "theory": "check every theorem, proposition and erratum on small chains, and print the table",
    "completion": "print a script with which your shell completes all of this",
}

RENAMED: Mapping[str, Mapping[str, str]] = {"correct": {"--strange": "--max-surprise"}}
"""Options by earlier names, which commands still take."""


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says of a disk that takes no more: the machine's fault, not the input's."""


class UserError(Exception):
    """Bad input: its message is the one line that the user sees."""


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n\n".join(
        [
            "example: cedd quickstart --fast",
            "usage: cedd COMMAND [OPTIONS]      (cedd COMMAND --help tells more)",
            "Discrete diffusion language models: train, bound, sample, infill, correct.",
            "\n".join(lines),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Bad input ends in one line on stderr and exit code 2, a full disk in 1; an interrupt in 130."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"cedd {version('cedd')}")
        return 0
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # that the hub is tried again is not the user's business
    if "OMP_WAIT_POLICY" not in os.environ:
        # Before torch is imported and its threads are made: threads that wait for others soon sleep. They would spin
        # for a millisecond or more; where other programs are busy, on the very core that the thread they wait for
        # needs: a network of 75 ms then took 1.6 s. (GNU's library of threads; others have settings of their own.)
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        print(f"cedd: no command {name!r}{suggestion(name, COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return _run(name, rest)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _line(error: Exception) -> str | None:
    """The one line about an error that is the input's or the machine's; None for one that is ours."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's own, a RuntimeError
        return "there is not enough memory for this; take a smaller batch, model or length"
    if isinstance(error, RuntimeError):
        return None
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        near = nearest_path(Path(error.filename))
        return f"there is no file or folder {error.filename}" + ("" if near is None else f"; did you mean {near}?")
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def _renamed(name: str, words: list[str]) -> list[str]:
    """The words of a command line with options as they are called now; one line says so."""
    end = words.index("--") if "--" in words else len(words)
    for place, word in enumerate(words[:end]):
        option, equals, value = word.partition("=")
        if (now := RENAMED.get(name, {}).get(option)) is not None:
            print(f"cedd {name}: {option} is now called {now}", file=sys.stderr)
            words = [*words[:place], now + equals + value, *words[place + 1 :]]
    return words


def _run(name: str, words: list[str]) -> int:
    try:
        arguments = importlib.import_module("cedd.cli.arguments").parse(name, _renamed(name, words))
        seed = getattr(arguments, "seed", None)
        if seed is not None and not 0 <= seed < 2**63:  # every generator of random numbers takes these, not all others
            raise UserError(f"--seed must be a whole number from 0 up, below 2^63; got {seed}")
        return int(importlib.import_module(f"cedd.cli.{name}").run(arguments) or 0)
    except BrokenPipeError:
        raise
    except (UserError, ValueError, OSError, MemoryError, RuntimeError) as error:
        if os.environ.get("CEDD_TRACEBACK") or (line := _line(error)) is None:
            raise
        print(f"cedd {name}: {line}", file=sys.stderr)
        return 1 if isinstance(error, OSError) and error.errno in FULL else 2
    except KeyboardInterrupt:
        print(f"cedd {name}: interrupted", file=sys.stderr)
        return 130
