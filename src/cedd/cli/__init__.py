"""The command line, `cedd COMMAND ...`, with one module per command.

The arguments of a command are a dataclass in `arguments`. The command's module has `run(arguments)`, which returns the
exit code. It is imported only when the command runs, so that --help and errors in the command line do not wait for
torch.
"""

from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from cedd.names import nearest_path, printable, suggestion

COMMANDS: Mapping[str, str] = {
    "quickstart": "train, evaluate, sample and infill in minutes, and write a report",
    "train": "train a network on text, with any method on any noise process",
    "adapt": "continue training an autoregressive model as a diffusion model",
    "evaluate": "compute an upper bound on a model's perplexity on a text, or compare models",
    "sample": "generate texts with a trained model",
    "infill": "fill the blanks of a text",
    "correct": "correct the spelling of a text",
    "spelling": "measure how many spelling errors a model fixes and how many letters it breaks",
    "genppl": "score a model's samples with another language model (generative perplexity)",
    "import": "convert a published network: SEDD, MDLM, BD3-LM, DUO, UDLM, GIDD, LLaDA, Dream, Llama, Qwen",
    "export": "write a run as a model folder to share, with a model card",
    "report": "write a report on a run, or a comparison of several",
    "serve": "serve a web page and an HTTP API for generation, infilling and correction",
    "bench": "time training steps or sampling, compared with a textbook implementation",
    "theory": "check every theorem, proposition and erratum of the paper by enumerating small spaces",
    "completion": "print a completion script for bash or zsh",
}


MODELS = """A MODEL is a folder (a run, or the output of cedd export or cedd import), the name english or
english-char, or owner/name of an exported model on the Hugging Face hub."""


class UserError(Exception):
    """Invalid input. Its message is the one line that the user sees."""


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n\n".join(
        [
            "usage: cedd COMMAND [OPTIONS]      (cedd COMMAND --help lists the options)",
            "example: cedd quickstart --fast",
            "Discrete diffusion language models: train, evaluate, sample, infill, correct.",
            "\n".join(lines),
            MODELS,
            "cedd --version prints the version. The documentation is in the docs folder of the source.",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, as defined by `run_command`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return run_command("cedd", lambda: _run(words, alone=arguments is None))
    finally:
        if arguments is None:  # the process ends
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def run_command(name: str, run: Callable[[], int | None]) -> int:
    """Run a command, or a script that ends like one, and return its exit code.

    The code is 0 on success; 2 for invalid input and 1 if the machine failed, with one line on standard error; 130
    after an interrupt; 141 if standard output was closed. Other exceptions are bugs and propagate with their traceback,
    as do all with CEDD_TRACEBACK in the environment.
    """
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # like stderr: a character it lacks is no reason to fail
    try:
        try:
            code = int(run() or 0)
        except SystemExit:  # after a help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output has closed it
        _discard_output()
        return 141
    except KeyboardInterrupt:
        return _report(f"{name}: interrupted", 130)
    except Exception as error:
        if os.environ.get("CEDD_TRACEBACK") or (found := _user_message(error)) is None:
            raise
        line, code = found
        if getattr(error, "errno", None) == errno.EBADF:  # otherwise Python writes it again at exit
            _discard_output()
        return _report(f"{name}: error: {line}", code)


def _discard_output() -> None:
    """Redirect the rest of standard output to nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_closed_streams() -> None:
    """Give closed standard streams (>&-) a descriptor, so that no file opened later takes their place.

    Reading standard input gives nothing, standard error is discarded, and writing to standard output fails.
    """
    for number, (name, flags) in enumerate((("stdin", os.O_RDWR), ("stdout", os.O_RDONLY), ("stderr", os.O_RDWR))):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, flags)  # gets the lowest free descriptor, which is the closed stream's
            setattr(sys, name, os.fdopen(opened, "w" if number else "r", encoding="utf-8", closefd=False))


def _run(words: list[str], *, alone: bool) -> int:
    """Run a command. `alone`: this process runs nothing else."""
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"cedd {version('cedd')}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        raise UserError(f"invalid choice: {name!r}{suggestion(name, COMMANDS)}")
    _prepare()
    try:
        with _exit_on_interrupt(name), _without_garbage_collection() if alone else nullcontext():
            arguments = importlib.import_module("cedd.cli.arguments").parse(name, rest)
            seed = getattr(arguments, "seed", None)
            if seed is not None and not 0 <= seed < 2**63:  # the range that every random number generator accepts
                raise UserError(f"--seed must be between 0 and 2^63 - 1 (got {seed})")
            _import_architecture(name, rest)
            module = importlib.import_module(f"cedd.cli.{name}")
        return int(module.run(arguments) or 0)
    except ValueError as error:
        if (message := _naming_the_option(str(error), name)) is None:
            raise
        raise UserError(message) from error


def _naming_the_option(message: str, command: str) -> str | None:
    """An error about an argument in Python, as one about the option.

    "--top-p must ..." for "top_p must ...", and "use --sampler analytic" for "use sampler='analytic'".
    """
    from cedd.cli.arguments import ARGUMENTS
    from cedd.cli.parser import options_of

    options = {one.name for one in options_of(ARGUMENTS[command])}
    argument, _, rest = message.partition(" ")
    option = f"--{argument.removesuffix(':').replace('_', '-')}"
    named = message
    if rest.startswith(("must ", "needs ", "invalid choice: ")) and option in options:
        named = f"{option}{':' if argument.endswith(':') else ''} {rest}"
    for other in ("bound", "sampler"):
        if f"--{other}" in options:
            named = re.sub(f"use {other}='(.+?)'", rf"use --{other} \1", named)
    return None if named == message else named


def _import_architecture(command: str, words: Sequence[str]) -> None:
    """Import the network that the command line names, package:Class, also from the current folder.

    Architectures named by the folder of `train --from` are not imported: the user has not asked for them.
    """
    options = words[: words.index("--")] if "--" in words else words
    split = [part for word in options for part in word.split("=", 1)] if options else []
    named = next((value for option, value in pairwise(split) if option == "--architecture"), "")
    if with_current_folder(named):
        importlib.import_module("cedd.models.architectures").import_architecture(named)
    elif named and command not in ("train", "adapt", "bench"):
        raise UserError(f"--architecture must be package:Class of your own network (got {named!r})")


def with_current_folder(name: str) -> bool:
    """Whether a name of the command line is package:NAME; then packages in the current folder can be imported."""
    if ":" in name and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    return ":" in name


def _prepare() -> None:
    """Set environment variables for libraries that are not imported yet, and filter a warning of theirs."""
    # The only float32 products of compiled networks are in the embedding of the noise level. They are small, and TF32
    # would be imprecise.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # no messages about retries
    if "OMP_WAIT_POLICY" not in os.environ:
        # Set before torch starts its threads: waiting threads soon sleep. By default they spin for a millisecond or
        # more, and on a busy machine on the core that the thread they wait for needs, which made a forward pass of
        # 75 ms take 1.6 s. (This is the variable of GNU's OpenMP; others have their own.)
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # NumPy multiplies matrices of few rows here. On a busy machine one thread takes 2.4 to 3.6 s per text, and two
    # threads, which wait for each other, 4.7 to 5.6 s.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _report(line: str, code: int) -> int:
    print(printable(" ".join(line.split())), file=sys.stderr)
    return code


@contextmanager
def _exit_on_interrupt(name: str) -> Iterator[None]:
    """Let an interrupt end the process while modules are imported: raised inside an import, it could be turned into
    another exception or be lost."""

    def end(number: int, frame: object) -> NoReturn:
        os._exit(_report("cedd: interrupted", 130))

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
def _without_garbage_collection() -> Iterator[None]:
    """Import modules without garbage collection, and exclude them from it: they live as long as the process, and
    searching them would take a good part of a command's start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


MACHINE_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EROFS,
)
"""Errors of the machine, as opposed to invalid input."""


def _user_message(error: Exception) -> tuple[str, int] | None:
    """A one-line message for an error of the input (with exit code 2) or the machine (1); None for a bug."""
    no_memory = "can't allocate memory" in str(error) or "not enough memory" in str(error)  # torch's on a CPU
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or no_memory:
        return "out of memory; use a smaller batch, model or length", 1
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        near = nearest_path(Path(os.fsdecode(error.filename)))
        hint = "" if near is None else f"; did you mean {near}?"
        return f"file not found: {error.filename}{hint}", 2
    if isinstance(error, FileNotFoundError) and _current_folder_is_gone():
        return "the current folder does not exist any more; change to another one", 2
    if isinstance(error, OSError) and error.errno == errno.EBADF:
        return "standard output is closed", 1
    if isinstance(error, OSError):
        said = error.strerror or str(error)
        return (
            said if error.filename is None else f"{error.filename}: {said}",
            1 if error.errno in MACHINE_ERRORS else 2,
        )
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return "this needs torch; install it with pip install torch (without it, cedd correct works on a CPU)", 1
    return (str(error), 2) if isinstance(error, UserError | ValueError) else None


def _current_folder_is_gone() -> bool:
    """Whether the current folder has been removed."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False
