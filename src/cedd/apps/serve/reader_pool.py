"""Processes that find the suspicious words of texts, so that corrections use several cores.

Shapes: O options of a suspicious word, F features.

A correction first finds suspicious words and candidates for them (`cedd.apps.correct.reader.Reader`), in pure Python,
which runs on one core per process. A process of this pool has a lexicon but no network and starts in a second. It gets
one line of JSON per text and replies with a byte count and that many bytes: a line of JSON, then the features. A
process that has ended is restarted at the next request. A process that has stopped cannot block its caller.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import select
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from cedd.apps.correct.reader import Reader, reader_of
from cedd.apps.correct.suspects import FEATURES, WORD_THRESHOLD, Option, ScoredSuspect, Suspect
from cedd.apps.correct.words import Token, tokens_of

MAX_DEFAULT_PROCESSES = 4
ABANDONED_SECONDS, POLL_SECONDS = 2.0, 0.25
"""Seconds after which a process that works on an abandoned request is ended (starting one takes half of that); seconds
between checks."""
WARM_UP = "It was teh first wrod of them."
"""A text that makes a reader compute its tables."""
Find = Callable[[str, float, Collection[str]], list[Suspect]]
"""Finds the suspicious words of a text at a threshold, except for ignored words."""


def default_processes() -> int:
    """One process per core, up to `MAX_DEFAULT_PROCESSES`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_DEFAULT_PROCESSES)


class RemoteReader(Reader):
    """A reader that finds suspicious words in another process.

    Args:
        own: the same reader in this process.
        find: finds suspicious words in the other process.
    """

    def __init__(self, own: Reader, find: Find) -> None:
        self.lexicon, self.neighbours = own.lexicon, own.neighbours
        self.alone, self.informed = own.alone, own.informed
        self._find = find

    def scored(
        self, text: str, tokens: Sequence[Token], threshold: float, ignored: Collection[str] = ()
    ) -> list[ScoredSuspect]:
        del tokens
        return [(suspect, suspect.probabilities(self.alone)) for suspect in self._find(text, threshold, ignored)]


def found_by(reader: Reader, text: str, threshold: float, ignored: Collection[str]) -> list[Suspect]:
    """The suspicious words that a reader finds in this process."""
    return [suspect for suspect, _ in reader.scored(text, tokens_of(text), threshold, ignored)]


# ----------------------------------------------------------------------------------------------------------------
# Messages


HEAD = 8
"""Bytes of the byte count at the beginning of a reply."""


def encode_suspects(suspects: Sequence[Suspect]) -> bytes:
    """A reply: its byte count, a line with the options of each word, and the features [O, F] of all."""
    line = [
        (suspect.place, [(option.first, option.last, option.words, option.text) for option in suspect.options])
        for suspect in suspects
    ]
    features = (np.ascontiguousarray(suspect.features, np.float64).tobytes() for suspect in suspects)
    body = b"".join([json.dumps(line).encode(), b"\n", *features])
    return len(body).to_bytes(HEAD) + body


def decode_suspects(body: bytes) -> list[Suspect]:
    """The inverse of `encode_suspects`, for a reply without its byte count."""
    source, found = io.BytesIO(body), list[Suspect]()
    for place, rows in json.loads(source.readline()):
        options = tuple(Option(first, last, tuple(words), text) for first, last, words, text in rows)
        features = np.frombuffer(source.read(8 * len(options) * len(FEATURES)), np.float64)
        found.append(Suspect(place, options, features.reshape(len(options), len(FEATURES))))
    return found


def exchange(sink: int, source: int, message: bytes, wanted: Callable[[], bool]) -> bytes:
    """Write a message to one pipe and return the reply from the other.

    A TimeoutError if the reply is late and no longer wanted; an EOFError or OSError if a pipe closes.
    """
    pipes, patience = select.poll(), time.monotonic() + ABANDONED_SECONDS
    pipes.register(source, select.POLLIN)
    pipes.register(sink, select.POLLOUT)
    os.set_blocking(sink, False)  # a blocking write would wait until the other side has read all of it
    left, got = memoryview(message), bytearray()
    while len(got) < HEAD or len(got) < HEAD + int.from_bytes(got[:HEAD]):
        for pipe, _ in pipes.poll(1000 * POLL_SECONDS):
            if pipe == source:
                if not (part := os.read(source, 1 << 16)):
                    raise EOFError("the process has ended")
                got += part
            elif not (left := left[os.write(sink, left) :]):
                pipes.unregister(sink)
        if time.monotonic() > patience and not wanted():
            raise TimeoutError("the request was abandoned")
    return bytes(got[HEAD:])


# ----------------------------------------------------------------------------------------------------------------
# The processes


class ReaderProcess:
    """A process that finds suspicious words; it starts when it is needed, and restarts if it has ended.

    Args:
        files: lexicons to load at the start.
    """

    def __init__(self, files: Collection[Path]) -> None:
        self._files = files
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process if it is not running, and return it."""
        if self.process is None:
            variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cedd.apps.serve.reader_pool", *map(str, self._files)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **variables},
                start_new_session=True,  # Ctrl-C goes to the server only, which ends this process last
            )
        return self.process

    def suspects(
        self,
        file: Path,
        text: str,
        threshold: float,
        ignored: Collection[str],
        wanted: Callable[[], bool] = lambda: True,
    ) -> list[Suspect]:
        """The suspicious words of a text by the lexicon in a file.

        An OSError, EOFError or ValueError if the process ends instead. It is ended if it takes long and its reply is no
        longer wanted.
        """
        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            request = (str(file), file.stat().st_mtime_ns, text, threshold, sorted(ignored))
            message, pipes = json.dumps(request).encode() + b"\n", (process.stdin.fileno(), process.stdout.fileno())
            return decode_suspects(exchange(*pipes, message, wanted))
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()
            process.wait()


class ReaderPool:
    """Several processes, each with one text at a time.

    Args:
        count: number of processes. With 0, and on Windows (where pipes cannot be polled), there are none, and texts are
            read in the server's process.
        files: lexicons.
    """

    def __init__(self, count: int, files: Collection[Path]) -> None:
        able = bool(files) and hasattr(select, "poll")
        self.processes = [ReaderProcess(files) for _ in range(count if able else 0)]
        self._free: queue.SimpleQueue[ReaderProcess] = queue.SimpleQueue()
        for process in self.processes:
            self._free.put(process)

    def start(self) -> None:
        """Start all processes, so that the first request need not wait."""
        for process in self.processes:
            process.start()

    @contextlib.contextmanager
    def free(self) -> Iterator[ReaderProcess]:
        """A free process; waits until there is one."""
        process = self._free.get()
        try:
            yield process
        finally:
            self._free.put(process)

    def end(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.end()


def main(files: Sequence[str]) -> None:
    """Answer requests until the input ends."""
    for file in files:
        found_by(reader_of(Path(file), Path(file).stat().st_mtime_ns), WARM_UP, WORD_THRESHOLD, ())
    for line in sys.stdin.buffer:
        file, changed, text, threshold, ignored = json.loads(line)
        sys.stdout.buffer.write(encode_suspects(found_by(reader_of(Path(file), changed), text, threshold, ignored)))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
