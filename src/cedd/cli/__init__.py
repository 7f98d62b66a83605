"""The command line: `cedd COMMAND ...`, one module a command.

What a command takes is a dataclass in `arguments`. Its module has `run(arguments)`, which returns the exit code, and is
imported only when there is something to run: helps, and mistakes in a command line, wait for no torch.
"""

from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NoReturn

from cedd.names import nearest_path, printable, suggestion

COMMANDS: Mapping[str, str] = {
    "quickstart": "train, measure, sample and infill in minutes, and write a page about it",
    "train": "train a network on text, any method on any process",
    "evaluate": "bound a model's perplexity on text, with an interval, or compare several",
    "sample": "draw texts from a trained model, and watch them being denoised",
    "infill": "fill the blanks of a text",
    "correct": "correct the spelling of a text",
    "spelling": "measure how many mistakes a model fixes in a book, and how much it breaks",
    "genppl": "judge a model's samples by another language model",
    "import": "take over a network that others have published: SEDD, MDLM, DUO, UDLM, GIDD",
    "export": "write a run as a model to give away: small, described, with its figures",
    "report": "write a run as one page, or a comparison of several",
    "serve": "a page to see texts being denoised, filled and corrected, and the same over HTTP",
    "bench": "time training steps or sampling against a textbook implementation",
    "theory": "check every theorem, proposition and erratum on small chains, and print the table",
    "completion": "print a script with which your shell completes all of this",
}

RENAMED: Mapping[str, Mapping[str, str]] = {"correct": {"--strange": "--max-surprise"}}
"""Options by earlier names, which commands still take."""


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
    """Run one command; its exit code, as `run_command` has them."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return run_command(" ".join(["cedd", *words[:1]]), lambda: _run(words, alone=arguments is None))
    finally:
        if arguments is None:  # the process ends
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def run_command(name: str, run: Callable[[], int | None]) -> int:
    """What a command, or a script that ends as they do, has returned: 0, or 2 for bad input and 1 for what the machine
    could not do, with one line on stderr that says what; 130 after an interrupt, 141 if nobody reads the output any
    more. A mistake of ours shows its traceback; with CEDD_TRACEBACK in the environment, any error does."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a sign that it has not is no reason to fail
    try:
        code = int(run() or 0)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return _said(f"{name}: interrupted", 130)
    except Exception as error:
        if os.environ.get("CEDD_TRACEBACK") or (found := _explained(error)) is None:
            raise
        line, code = found
        return _said(f"{name}: {line}", code)


def _open_closed_streams() -> None:
    """Standard streams that are closed (>&-) lead nowhere: else a file that we open would take the place of one, and be
    written what libraries say there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # has the lowest number that is free, the closed stream's
            setattr(sys, name, os.fdopen(nowhere, "w" if number else "r", encoding="utf-8", closefd=False))


def _run(words: list[str], *, alone: bool) -> int:
    """alone: the process is this command's."""
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"cedd {version('cedd')}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        return _said(f"cedd: no command {name!r}{suggestion(name, COMMANDS)}", 2)
    _prepare()
    with _ending_at_once(name), _uncollected() if alone else nullcontext():
        arguments = importlib.import_module("cedd.cli.arguments").parse(name, _renamed(name, rest))
        seed = getattr(arguments, "seed", None)
        if seed is not None and not 0 <= seed < 2**63:  # every generator of random numbers takes these
            raise UserError(f"--seed must be a whole number from 0 up, below 2^63; got {seed}")
        module = importlib.import_module(f"cedd.cli.{name}")
    return int(module.run(arguments) or 0)


def _prepare() -> None:
    """Settings of libraries that are not imported yet."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # that the hub is tried again is not the user's business
    if "OMP_WAIT_POLICY" not in os.environ:
        # Before torch is imported and its threads are made: threads that wait for others soon sleep. They would spin
        # for a millisecond or more; where other programs are busy, on the very core that the thread they wait for
        # needs: a network of 75 ms then took 1.6 s. (GNU's library of threads; others have settings of their own.)
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # numpy's products are of a few rows: on a busy machine a text took 4.7 to 5.6 s by two threads that wait for each
    # other, and 2.4 to 3.6 s by one.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _said(line: str, code: int) -> int:
    print(printable(" ".join(line.split())), file=sys.stderr)
    return code


@contextmanager
def _ending_at_once(name: str) -> Iterator[None]:
    """While modules are imported an interrupt ends the process: nothing is lost, and raised inside an import it would
    come out as another error, or not at all."""

    def end(number: int, frame: object) -> NoReturn:
        os._exit(_said(f"cedd {name}: interrupted", 130))

    alone = threading.current_thread() is threading.main_thread()  # no other is interrupted
    if not alone or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Modules stay until the process ends: what is made while they are imported is not searched for garbage, neither
    meanwhile nor at the end. With torch that would take a good part of a command's start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


NOT_INPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EROFS)
"""What the system says of a machine that cannot do what was asked, however it is asked."""


def _explained(error: Exception) -> tuple[str, int] | None:
    """One line about an error that is the input's, and exit code 2, or the machine's, and 1; None for one that is
    ours."""
    no_memory = "can't allocate memory" in str(error) or "not enough memory" in str(error)  # torch's on a CPU
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or no_memory:
        return "there is not enough memory for this; take a smaller batch, model or length", 1
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        near = nearest_path(Path(os.fsdecode(error.filename)))
        hint = "" if near is None else f"; did you mean {near}?"
        return f"there is no file or folder {error.filename}{hint}", 2
    if isinstance(error, FileNotFoundError) and _is_nowhere():
        return "the folder that this was started in is gone; go to one that is there", 2
    if isinstance(error, OSError):
        said = error.strerror or str(error)
        return said if error.filename is None else f"{error.filename}: {said}", 1 if error.errno in NOT_INPUT else 2
    return (str(error), 2) if isinstance(error, UserError | ValueError) else None


def _is_nowhere() -> bool:
    """Whether the folder that we are in has been removed."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _renamed(name: str, words: list[str]) -> list[str]:
    """The words of a command line with options as they are called now; one line says so."""
    end = words.index("--") if "--" in words else len(words)
    for place, word in enumerate(words[:end]):
        option, equals, value = word.partition("=")
        if (now := RENAMED.get(name, {}).get(option)) is not None:
            print(f"cedd {name}: {option} is now called {now}", file=sys.stderr)
            words = [*words[:place], now + equals + value, *words[place + 1 :]]
    return words
