"""Readers of words in processes of their own: what a correction does without a network takes other cores.

Shapes: O options of a doubt, F features.

A correction first finds the doubtful words of a text and what may have been meant (`cedd.spelling.rewrite.Reader`):
Python, of which one process does one thing at a time. A process here has a lexicon and no network, and is ready in a
second. It is sent a line of JSON, a text, and answers with a number of bytes and these: a line, the doubts, and their
features. One that ends before its answer is begun anew by the next request; one that stops cannot block who asked it.
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

from cedd.spelling.rewrite import FEATURES, WORD_THRESHOLD, Doubt, Judged, Option, Reader, reader_of
from cedd.spelling.words import Token, tokens_of

MOST_BY_DEFAULT = 4
PATIENCE, LOOK = 2.0, 0.25
"""Seconds that a process may work for nobody, since to begin one takes half of that; how often this is looked at."""
WARMING = "It was teh first wrod of them."
"""A text that makes a reader compute the tables that it keeps."""
Find = Callable[[str, float, Collection[str]], list[Doubt]]
"""The doubts of a text at a threshold, some words of which are ignored."""


def default_readers() -> int:
    """A process for each core, up to a few."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_BY_DEFAULT)


class RemoteReader(Reader):
    """A reader whose doubts are found elsewhere.

    Args:
        own: the same reader, here.
        find: finds the doubts.
    """

    def __init__(self, own: Reader, find: Find) -> None:
        self.lexicon, self.neighbours = own.lexicon, own.neighbours
        self.alone, self.informed = own.alone, own.informed
        self._find = find

    def judged(
        self, text: str, tokens: Sequence[Token], threshold: float, ignored: Collection[str] = ()
    ) -> list[Judged]:
        del tokens
        return [(doubt, doubt.probabilities(self.alone)) for doubt in self._find(text, threshold, ignored)]


def found_by(reader: Reader, text: str, threshold: float, ignored: Collection[str]) -> list[Doubt]:
    """The doubts that a reader finds here."""
    return [doubt for doubt, _ in reader.judged(text, tokens_of(text), threshold, ignored)]


# ----------------------------------------------------------------------------------------------------------------
# What is sent


HEAD = 8
"""Bytes of an answer that say how many follow."""


def doubts_as_bytes(doubts: Sequence[Doubt]) -> bytes:
    """A line with the options of each doubt, and the features [O, F] of all; how many bytes these are stands before."""
    line = [
        (doubt.place, [(option.first, option.last, option.words, option.text) for option in doubt.options])
        for doubt in doubts
    ]
    features = (np.ascontiguousarray(doubt.features, np.float64).tobytes() for doubt in doubts)
    body = b"".join([json.dumps(line).encode(), b"\n", *features])
    return len(body).to_bytes(HEAD) + body


def doubts_of_bytes(body: bytes) -> list[Doubt]:
    """What `doubts_as_bytes` made, without its head."""
    source, found = io.BytesIO(body), list[Doubt]()
    for place, rows in json.loads(source.readline()):
        options = tuple(Option(first, last, tuple(words), text) for first, last, words, text in rows)
        features = np.frombuffer(source.read(8 * len(options) * len(FEATURES)), np.float64)
        found.append(Doubt(place, options, features.reshape(len(options), len(FEATURES))))
    return found


def exchanged(sink: int, source: int, message: bytes, wanted: Callable[[], bool]) -> bytes:
    """The answer that comes from one pipe to a message written to the other. What has not come after a while ends in a
    TimeoutError once it is not wanted any more, and a pipe that closes in an EOFError or OSError."""
    doors, patience = select.poll(), time.monotonic() + PATIENCE
    doors.register(source, select.POLLIN)
    doors.register(sink, select.POLLOUT)
    os.set_blocking(sink, False)  # or it would take as much as is given, however long that takes
    left, got = memoryview(message), bytearray()
    while len(got) < HEAD or len(got) < HEAD + int.from_bytes(got[:HEAD]):
        for door, _ in doors.poll(1000 * LOOK):
            if door == source:
                if not (part := os.read(source, 1 << 16)):
                    raise EOFError("the process has ended")
                got += part
            elif not (left := left[os.write(sink, left) :]):
                doors.unregister(sink)
        if time.monotonic() > patience and not wanted():
            raise TimeoutError("nobody waits for the answer")
    return bytes(got[HEAD:])


# ----------------------------------------------------------------------------------------------------------------
# The processes


class ReaderProcess:
    """A process that finds doubts; it is begun when it is needed, and again when it has ended.

    Args:
        files: of lexicons that it shall have at hand.
    """

    def __init__(self, files: Collection[Path]) -> None:
        self._files = files
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self) -> subprocess.Popen[bytes]:
        """The process."""
        if self.process is None:
            surroundings = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cedd.serve.readers", *map(str, self._files)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **surroundings},
                start_new_session=True,  # Ctrl-C is for the server, which ends it after the requests under way
            )
        return self.process

    def doubts(
        self,
        file: Path,
        text: str,
        threshold: float,
        ignored: Collection[str],
        wanted: Callable[[], bool] = lambda: True,
    ) -> list[Doubt]:
        """The doubts of a text by the lexicon of a file; an OSError, EOFError or ValueError where it ended instead.

        One that takes long is ended when its answer is not wanted any more.
        """
        process = self.begin()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            request = (str(file), file.stat().st_mtime_ns, text, threshold, sorted(ignored))
            message, pipes = json.dumps(request).encode() + b"\n", (process.stdin.fileno(), process.stdout.fileno())
            return doubts_of_bytes(exchanged(*pipes, message, wanted))
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End it."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()
            process.wait()


class Readers:
    """So many processes, each asked one text at a time.

    Args:
        count: how many; none: texts are read by who corrects them. So they are where pipes cannot be waited for
            (Windows).
        files: of lexicons.
    """

    def __init__(self, count: int, files: Collection[Path]) -> None:
        able = bool(files) and hasattr(select, "poll")
        self.processes = [ReaderProcess(files) for _ in range(count if able else 0)]
        self._free: queue.SimpleQueue[ReaderProcess] = queue.SimpleQueue()
        for process in self.processes:
            self._free.put(process)

    def begin(self) -> None:
        """Begin all, so that the first request need not wait for one."""
        for process in self.processes:
            process.begin()

    @contextlib.contextmanager
    def free(self) -> Iterator[ReaderProcess]:
        """One of them for a while; waits for it."""
        process = self._free.get()
        try:
            yield process
        finally:
            self._free.put(process)

    def end(self) -> None:
        """End all."""
        for process in self.processes:
            process.end()


def main(files: Sequence[str]) -> None:
    """Answer requests until there are no more."""
    for file in files:
        found_by(reader_of(Path(file), Path(file).stat().st_mtime_ns), WARMING, WORD_THRESHOLD, ())
    for line in sys.stdin.buffer:
        file, changed, text, threshold, ignored = json.loads(line)
        sys.stdout.buffer.write(doubts_as_bytes(found_by(reader_of(Path(file), changed), text, threshold, ignored)))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
