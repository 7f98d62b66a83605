"""Child processes that train, and that die at a chosen point.

A fork server imports everything once, so starting a child takes milliseconds. Nothing else runs in that server, so
children inherit no threads or locks.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch imports it on first use of its random numbers, in every child anew
from rich.console import Console

import cedd.models.weights
import cedd.training.checkpoints
import cedd.training.loop
from cedd.cli import main
from cedd.training.config import TrainConfig, from_json, to_json
from cedd.training.loop import run_training
from tests.training.runs import listen

SERVER = multiprocessing.get_context("forkserver")
PATIENCE = 120  # seconds that a child may take on a busy machine


def start_server() -> None:
    """Start the server, with this process's import path and one thread per child."""
    SERVER.set_forkserver_preload(["tests.training.processes"])
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        wait(start(print))
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def start(target: Callable[..., Any], *arguments: Any) -> BaseProcess:
    process = SERVER.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def wait(process: BaseProcess) -> int:
    """The child's exit code; a signal's number is negative."""
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"the child took longer than {PATIENCE} s")
    return process.exitcode


def start_training(config: TrainConfig, die: str | None = None, at_save: int = 1) -> BaseProcess:
    """Train in a child, which kills itself at the point `die` of its save number `at_save`, from 1."""
    return start(_train, to_json(config), die, at_save)


def _train(values: dict[str, Any], die: str | None, at_save: int) -> None:
    torch.set_num_threads(1)
    if die is not None:
        POINTS[die](at_save)
    run_training(from_json(TrainConfig, values), Console(quiet=True))


def command(words: list[str], output: Path) -> BaseProcess:
    """Run the command line in a child; its output goes to output/stdout and output/stderr."""
    output.mkdir(exist_ok=True)
    return start(_command, words, output)


def _command(words: list[str], output: Path) -> None:
    torch.set_num_threads(1)
    listen()
    with _printed_to(output):
        code = main(words)
    sys.exit(code)


def command_on_terminal(words: list[str], terminal: str) -> BaseProcess:
    """Run the command line in a child with this terminal: closing the other end sends the child SIGHUP."""
    return start(_command_on_terminal, words, terminal)


def _command_on_terminal(words: list[str], terminal: str) -> None:
    torch.set_num_threads(1)
    listen()
    os.setsid()
    descriptor = os.open(terminal, os.O_RDWR)  # in a new session, this becomes the controlling terminal
    for standard in (0, 1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - not a named file
    sys.exit(main(words))


@contextlib.contextmanager
def _printed_to(output: Path) -> Iterator[None]:
    with (
        (output / "stdout").open("w", buffering=1) as out,
        (output / "stderr").open("w", buffering=1) as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        yield


# Points at which to die: each replaces a function of the writer in the child with one that kills the process.


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _replace_and_die(owner: Any, name: str, at_call: int, last_actions: Callable[..., None]) -> None:
    """At call number `at_call` of owner.name, run the last actions with its arguments, then die."""
    whole = getattr(owner, name)
    calls = iter(range(1, 10**6))

    def replacement(*arguments: Any, **options: Any) -> Any:
        if next(calls) == at_call:
            last_actions(whole, *arguments, **options)
            _die()
        return whole(*arguments, **options)

    setattr(owner, name, replacement)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _all(whole: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    whole(*arguments, **options)


def _half_the_shards(whole: Callable[..., Any], *arguments: Any, storage_writer: Any, **options: Any) -> None:
    whole(*arguments, storage_writer=storage_writer, **options)
    for file in Path(storage_writer.path).iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _half_the_content(_: Callable[..., Any], path: Path, content: bytes) -> None:
    path.write_bytes(content[: len(content) // 2])


def _half_the_weights(whole: Callable[..., Any], tensors: Any, path: Path, **options: Any) -> None:
    whole(tensors, path, **options)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _at_rename(publishing: bool, last_actions: Callable[..., None]) -> Callable[[int], None]:
    """A checkpoint is renamed from a hidden name when it is published, and to one when it is deleted."""

    def install(at_save: int) -> None:
        whole = Path.rename
        calls = iter(range(1, 10**6))

        def rename(path: Path, target: Path) -> Path:
            if path.name.startswith(".") == publishing and "step-" in path.name and next(calls) == at_save:
                last_actions(whole, path, target)
                _die()
            return whole(path, target)

        Path.rename = rename  # type: ignore[method-assign]

    return install


POINTS: dict[str, Callable[[int], None]] = {
    "before the shards": lambda n: _replace_and_die(cedd.training.checkpoints, "save_sharded", n, _nothing),
    "within the shards": lambda n: _replace_and_die(cedd.training.checkpoints, "save_sharded", n, _half_the_shards),
    "after the shards": lambda n: _replace_and_die(cedd.training.checkpoints, "save_sharded", n, _all),
    "within state.json": lambda n: _replace_and_die(cedd.training.checkpoints, "write_durably", n, _half_the_content),
    "after state.json": lambda n: _replace_and_die(cedd.training.checkpoints, "write_durably", n, _all),
    "before it is published": _at_rename(True, _nothing),
    "after it is published": _at_rename(True, _all),
    "before an old one is dropped": _at_rename(False, _nothing),
    "while an old one is dropped": _at_rename(False, _all),
    "before the model's file": lambda n: _replace_and_die(cedd.training.loop, "save_weights", n, _nothing),
    "within the model's file": lambda n: _replace_and_die(cedd.models.weights, "save_file", n, _half_the_weights),
}
