"""Where requests wait, the one thread that works on them, and the one in which it has networks called."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from cedd.serve.gathering import Ended, Gathering, Run
from cedd.serve.limits import Limits, Refused, busy

LOG = logging.getLogger("cedd.serve")
TOGETHER = 0.003
"""Seconds that an idle server waits after a request for others that come with it."""
BEGINNING = 0.05
"""Seconds after which no further runs are begun before a network is called."""
OUTSIDE = 0.1
"""Seconds after which deadlines are looked at while all runs are outside."""
MOST_STACKED = 64
"""Texts of one run."""
LATE = "the request took longer than its deadline of {:g} s; ask for fewer tokens, steps or texts"
ENDING = "the server is ending; try again when it is back"


class Work(Protocol):
    """What a request asks for."""

    @property
    def key(self) -> Hashable | None:
        """Requests of the same key can be one run; None: of none."""
        ...

    @property
    def texts(self) -> int:
        """How many it makes."""
        ...

    def run(self, run: Run, jobs: Sequence[Job]) -> None:
        """Do the work of all these jobs, which have its key, and finish each."""
        ...


Arrived = asyncio.Queue["tuple[Job, dict[str, Any] | Refused]"]
"""Records, and whose each is."""


class Job:
    """Work under way for a request: what is sent of it arrives in the event loop that made it.

    Args:
        work: what is asked for.
        seconds: how long it may take.
        streams: whether steps are sent.
        arrived: where records arrive; by default in a place of its own.
    """

    def __init__(self, work: Work, seconds: float, streams: bool = False, arrived: Arrived | None = None) -> None:
        self.work, self.streams, self.seconds = work, streams, seconds
        self.deadline = time.monotonic() + seconds
        self.gone = self.done = False
        """Whether nobody waits for it any more; whether it has its answer."""
        self._loop = asyncio.get_running_loop()
        self.arrived: Arrived = arrived or asyncio.Queue()

    def send(self, step: dict[str, Any]) -> None:
        """A step, to whom it may interest."""
        if self.streams and not self.gone:
            self._put(step)

    def finish(self, result: dict[str, Any] | Refused) -> None:
        """The answer, which is the last that is sent."""
        if not self.done:
            self.done = True
            self._put(result)

    def _put(self, record: dict[str, Any] | Refused) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever waited
            self._loop.call_soon_threadsafe(self.arrived.put_nowait, (self, record))


class Jobs:
    """The jobs of one request, whose records arrive in one place.

    Args:
        works: what is asked for.
        seconds: how long all may take.
        streams: whether steps are sent.
    """

    def __init__(self, works: Sequence[Work], seconds: float, streams: bool = False) -> None:
        self._arrived: Arrived = asyncio.Queue()
        self.all = [Job(work, seconds, streams, self._arrived) for work in works]

    async def records(self) -> AsyncIterator[tuple[int, dict[str, Any] | Refused]]:
        """Steps and answers as they arrive, with the number of their job; each has one answer, and no step after it.
        A refusal is the last."""
        left = len(self.all)
        while left:
            job, record = await self._arrived.get()
            left = 0 if isinstance(record, Refused) else left - ("step" not in record)
            yield self.all.index(job), record

    async def answers(self) -> list[dict[str, Any]] | Refused:
        """The answers alone, or a refusal."""
        found: dict[int, dict[str, Any]] = {}
        async for number, record in self.records():
            if isinstance(record, Refused):
                return record
            found[number] = record
        return [found[number] for number in range(len(self.all))]

    def drop(self) -> None:
        """Nobody waits for them any more."""
        for job in self.all:
            job.gone = True


class Desk:
    """Takes jobs, up to a limit, and works on all of them at once.

    Args:
        limits: how many, and for how long.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._network = ThreadPoolExecutor(1, "cedd-network", torch.set_num_threads, (torch.get_num_threads(),))
        self.gathering = Gathering(wake=self._wake, make_call=self._network.submit, unwanted=self._unwanted)
        self.answered = 0
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._running: dict[Run, Sequence[Job]] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._work, daemon=True, name="cedd-desk")

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    @property
    def counts(self) -> tuple[int, int]:
        """How many jobs wait, and how many are under way."""
        return len(self._waiting), len(self._under_way)

    def take(self, *jobs: Job) -> None:
        """Take all of these, or refuse them."""
        with self._changed:
            if self._closing:
                raise busy(ENDING, 5)
            if sum(self.counts) + len(jobs) > self.limits.queue:
                full = "a request is" if self.limits.queue == 1 else f"{self.limits.queue} requests are"
                raise busy(f"{full} waiting or under way, and no more are taken; try again in a few seconds")
            self._waiting += jobs
            self._changed.notify()

    def close(self, grace: float) -> None:
        """Take no more, let those under way go on for so many seconds, and wait for that."""
        self.hurry(grace)
        if self._thread.is_alive():
            self._thread.join(grace + 30.0)

    def hurry(self, grace: float) -> None:
        """Take no more, and let those under way go on for so many seconds at most."""
        with self._changed:
            self._closing = True
            for job in self._waiting:
                job.finish(busy(ENDING, 5))
            self._waiting.clear()
            for job in self._under_way:
                job.deadline = min(job.deadline, time.monotonic() + grace)
            self._changed.notify()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    # In the desk's own thread

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._over:
                    self._network.shutdown(wait=False)
                    return
                if not (self._waiting or self._running or self.gathering.ready):
                    self._changed.wait()
                    self._changed.wait_for(lambda: self._closing, TOGETHER)
                elif not self.gathering.ready and not self._room:  # all are outside, or wait for these
                    self._changed.wait(OUTSIDE)
            try:
                self._end_late()
                self._begin()
                self.gathering.turn()
            except Exception:
                LOG.exception("the desk failed")
                self._fail_all()

    @property
    def _over(self) -> bool:
        """Whether it is closing, and nobody waits for an answer: runs that are outside then are left there."""
        left = self._waiting or self.gathering.asking or self.gathering.calling
        return self._closing and not left and all(job.done or job.gone for job in self._under_way)

    @property
    def _under_way(self) -> list[Job]:
        return [job for jobs in list(self._running.values()) for job in jobs]

    def _unwanted(self, run: Run) -> bool:
        """Whether nobody waits for a run."""
        return all(job.gone for job in self._running.get(run, ()))

    @property
    def _room(self) -> bool:
        """Whether a run can begin."""
        return bool(self._waiting) and len(self._running) < self.limits.together

    def _end_late(self) -> None:
        """End what is late, and what nobody waits for."""
        now = time.monotonic()
        with self._changed:
            for job in (*self._waiting, *self._under_way):
                if not job.done and now > job.deadline:
                    job.finish(busy(ENDING, 5) if self._closing else Refused(504, LATE.format(job.seconds)))
                    job.gone = True
            self._waiting = [job for job in self._waiting if not job.gone]
        for run in [run for run in self.gathering.asking if self._unwanted(run)]:
            self.gathering.end(run, Ended())

    def _begin(self) -> None:
        """Begin as many runs as there may be, those with the same key as one, but soon go on with those that ask: a
        run may end without a question, and others come in its place."""
        end = time.monotonic() + BEGINNING
        while time.monotonic() < end and (run := self._next()):
            self.gathering.begin(run)

    def _next(self) -> Run | None:
        """A run of the oldest job that waits, and of others with its key: they are under way from here on."""
        with self._changed:
            if not self._room:
                return None
            first, texts, jobs = self._waiting[0], 0, list[Job]()
            for job in [first] if first.work.key is None else self._waiting:
                if (job is first or job.work.key == first.work.key) and texts + job.work.texts <= MOST_STACKED:
                    jobs.append(job)
                    texts += job.work.texts
            self._waiting = [job for job in self._waiting if job not in jobs]

            def ended(error: BaseException | None) -> None:
                for job in jobs:
                    job.finish(refusal(error))
                self._running.pop(run, None)
                self.answered += len(jobs)

            run = Run(lambda run: first.work.run(run, jobs), ended)
            self._running[run] = jobs
            return run

    def _fail_all(self) -> None:
        """Say so to all who wait; their runs end at their next turns, since nobody does any more."""
        for job in self._under_way:
            job.finish(refusal(RuntimeError()))
        self._running.clear()


def refusal(error: BaseException | None) -> Refused:
    """What is said of an error: of one that the request made, its sentence; of one of ours, that it was one."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, ValueError):
        return Refused(422, str(error))
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return busy("there is not enough memory for this now; ask for fewer texts or tokens")
    if error is not None and not isinstance(error, Ended):
        LOG.error("a request failed", exc_info=error)
    return Refused(500, "the server made a mistake; its log says more")
