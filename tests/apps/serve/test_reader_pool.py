"""Separate processes find the same suspicious words as the server, whatever happens to a process."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cedd.apps.correct.lexicon import LEXICON_FILE
from cedd.apps.correct.reader import reader_of
from cedd.apps.correct.suspects import WORD_THRESHOLD, Suspect
from cedd.apps.correct.words import tokens_of
from cedd.apps.serve.reader_pool import ReaderPool, ReaderProcess, encode_suspects, exchange
from cedd.apps.serve.registry import ModelRegistry
from cedd.models.locate import packaged
from cedd.spelling.corruption import swap_letters
from cedd.tasks import load
from tests.apps.serve.servers import LOCAL_CLIENT, connected, httpx, served, until

TEXTS = (
    "I beleive that teh wether is nice, and alot of it.",
    "Nothing is wrong here.",
    "",
    "\ud800 <script> \u202eabc\u202c \x00 a wrod\n\nof Emma\u2019s \U0001f600",
)


@pytest.fixture(scope="module")
def lexicon() -> Path:
    return packaged("english") / LEXICON_FILE


@pytest.fixture(scope="module")
def process(lexicon: Path) -> Iterator[ReaderProcess]:
    made = ReaderProcess([lexicon])
    yield made
    made.end()


def local_suspects(file: Path, text: str, ignored: Any = ()) -> list[Suspect]:
    reader, tokens = reader_of(file, file.stat().st_mtime_ns), tokens_of(text)
    return [suspect for suspect, _ in reader.scored(text, tokens, WORD_THRESHOLD, ignored)]


def assert_same(found: list[Suspect], wanted: list[Suspect]) -> None:
    assert [(one.place, one.options) for one in found] == [(one.place, one.options) for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one.features, other.features)


def test_process_finds_same_suspects_as_server(process: ReaderProcess, lexicon: Path):
    for text in TEXTS:
        assert_same(process.suspects(lexicon, text, WORD_THRESHOLD, ()), local_suspects(lexicon, text))
    first = process.suspects(lexicon, TEXTS[0], WORD_THRESHOLD, {"teh", "alot"})
    assert_same(first, local_suspects(lexicon, TEXTS[0], {"teh", "alot"}))
    assert 0 < len(first) < len(local_suspects(lexicon, TEXTS[0]))


def test_killed_process_raises_error_and_is_restarted(process: ReaderProcess, lexicon: Path):
    before = process.start()
    before.kill()
    before.wait()
    with pytest.raises((OSError, EOFError)):
        process.suspects(lexicon, TEXTS[0], WORD_THRESHOLD, ())
    assert_same(process.suspects(lexicon, TEXTS[0], WORD_THRESHOLD, ()), local_suspects(lexicon, TEXTS[0]))
    assert process.start().pid != before.pid


@pytest.mark.slow
def test_abandoned_process_is_killed(process: ReaderProcess, lexicon: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cedd.apps.serve.reader_pool.ABANDONED_SECONDS", 0.1)
    stuck, asked = process.start(), list[float]()
    os.kill(stuck.pid, signal.SIGSTOP)

    def wanted() -> bool:
        asked.append(time.monotonic())
        return len(asked) < 2

    with pytest.raises(TimeoutError):
        process.suspects(lexicon, TEXTS[0], WORD_THRESHOLD, (), wanted)
    assert len(asked) == 2
    assert stuck.poll() is not None
    assert_same(process.suspects(lexicon, TEXTS[0], WORD_THRESHOLD, ()), local_suspects(lexicon, TEXTS[0]))


def test_stopped_process_does_not_block_request_or_answer(
    process: ReaderProcess, lexicon: Path, monkeypatch: pytest.MonkeyPatch
):
    """With a request, or an answer, that is longer than the buffer of a pipe."""
    monkeypatch.setattr("cedd.apps.serve.reader_pool.ABANDONED_SECONDS", 0.1)
    long = "wrod and so on " * 30_000
    stuck = process.start()
    os.kill(stuck.pid, signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        process.suspects(lexicon, long, WORD_THRESHOLD, (), lambda: False)
    (asked, sink), (source, answer) = pipes = os.pipe(), os.pipe()
    os.write(answer, (1000).to_bytes(8) + b"[")  # and no more
    with pytest.raises(TimeoutError):
        exchange(sink, source, b"what?", lambda: False)
    assert os.read(asked, 100) == b"what?"
    for end in (end for pipe in pipes for end in pipe):
        os.close(end)
    assert time.monotonic() - begin < 5
    assert stuck.poll() is not None


@pytest.mark.slow
def test_texts_and_suspects_longer_than_pipe_arrive_complete(process: ReaderProcess, lexicon: Path):
    long = " ".join([TEXTS[0]] * 6) + " " * 70_000
    found = process.suspects(lexicon, long, WORD_THRESHOLD, ())
    assert len(encode_suspects(found)) > 65536 < len(long)
    assert_same(found, local_suspects(lexicon, long))


def test_process_ends_with_its_server(process: ReaderProcess):
    """Also if the server was killed, since its end of the pipe is closed then."""
    begun = process.start()
    assert begun.stdin is not None
    begun.stdin.close()
    assert begun.wait(20) == 0
    process.end()


def test_processes_are_shared_one_text_at_a_time(lexicon: Path):
    readers = ReaderPool(1, [lexicon])
    with readers.free() as first:
        second: list[ReaderProcess] = []

        def wait() -> None:
            with readers.free() as found:
                second.append(found)

        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(0.05)
        assert not second
    waiting.join(5)
    assert second == [first]
    assert ReaderPool(2, []).processes == []  # without a lexicon there is nothing to look up


def test_no_processes_without_poll(lexicon: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr("select.poll")
    assert ReaderPool(2, [lexicon]).processes == []


def test_corrections_with_reader_processes_match_model(lexicon: Path):
    model = load(lexicon.parent, "cpu")
    registry = ModelRegistry({"english-char": model}, lookup_processes=1)
    sentences = [TEXTS[0], TEXTS[1], "We will recieve the leters tomorow."]
    with served(registry) as (address, _):

        def corrected(text: str) -> str:
            return httpx.post(f"{address}correct", json={"text": text}, timeout=60, **LOCAL_CLIENT).json()["text"]

        for text in sentences:
            assert corrected(text) == model.correct(text).text != TEXTS[0]
        (process,) = registry.reader_pool.processes
        os.kill(process.start().pid, signal.SIGKILL)  # as if killed by the system: the server reads this text itself
        assert corrected(sentences[2]) == model.correct(sentences[2]).text
        assert corrected(sentences[0]) == model.correct(sentences[0]).text
        assert process.process is not None
        last = process.process
    until(lambda: last.poll() is not None)


def hard_text() -> str:
    """A text of 16,000 characters with a mistake in every second word."""
    right = "In {} the government decided otherwise, although nobody in the capital had expected such a result. "
    return swap_letters("".join(right.format(1800 + i) for i in range(170))[:16_000], 0.1, 7).text


@pytest.mark.slow
def test_long_text_with_many_errors_meets_deadline_and_delays_no_one(lexicon: Path):
    model = load(lexicon.parent, "cpu")
    registry = ModelRegistry({"english-char": model}, lookup_processes=2)
    with connected(registry, timeout=8.0) as (client, scheduler), ThreadPoolExecutor(1) as pool:
        assert client.post("correct", json={"text": TEXTS[0]}).status_code == 200  # the readers have started

        def ask_long() -> tuple[int, float]:
            begin = time.monotonic()
            return client.post("correct", json={"text": hard_text()}).status_code, time.monotonic() - begin

        long, waits = pool.submit(ask_long), list[float]()
        while not long.done():
            begin = time.monotonic()
            body = {"text": f"In {len(waits)} we will recieve the leters tomorow."}
            assert client.post("correct", json=body).status_code == 200
            waits.append(time.monotonic() - begin)
        status, seconds = long.result()
        assert status in (200, 504)
        assert seconds < 8 + 3
        assert len(waits) > 5
        assert max(waits) < 4
        until(lambda: scheduler.counts == (0, 0))  # no work continues without a client
