"""The scheduler: a queue of jobs, the thread that runs them, and the thread that makes their forward passes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from cedd.apps.serve.batcher import Batcher, Cancelled, Fiber
from cedd.apps.serve.limits import Limits, RequestError, server_busy
from cedd.storage import JSONObject

LOG = logging.getLogger("cedd.apps.serve")
GATHER_SECONDS = 0.003
"""Seconds that an idle server waits after a request, so that requests sent at the same time share a batch."""
START_SECONDS = 0.05
"""Seconds of starting fibers before the next forward pass."""
POLL_SECONDS = 0.1
"""Seconds between checks of the deadlines while every fiber is in `Fiber.blocking`."""
MAX_BATCHED_TEXTS = 64
"""Texts per fiber."""
TIMED_OUT = "the request timed out after {:g} s; ask for fewer tokens, steps or texts"
SHUTTING_DOWN = "the server is shutting down; try again later"


class Task(Protocol):
    """The work of a request."""

    @property
    def key(self) -> Hashable | None:
        """Tasks with the same key can run as one batch, in one fiber. None: this task runs alone."""
        ...

    @property
    def texts(self) -> int:
        """Number of texts it produces."""
        ...

    def run(self, fiber: Fiber, jobs: Sequence[Job]) -> None:
        """Run the tasks of these jobs, which all have this key, and finish each job."""
        ...


Outbox = asyncio.Queue["tuple[Job, JSONObject | RequestError]"]
"""Records with the job that each belongs to."""


class Job:
    """A task in progress. Its records are delivered in the event loop that created the job.

    Args:
        task: the work.
        timeout: seconds until the job is ended.
        streams: whether steps are sent.
        outbox: queue of the records; by default a new one.
    """

    def __init__(self, task: Task, timeout: float, streams: bool = False, outbox: Outbox | None = None) -> None:
        self.task, self.streams, self.timeout = task, streams, timeout
        self.deadline = time.monotonic() + timeout
        self.abandoned = self.done = False
        """Whether nobody waits for it any more; whether it has its result."""
        self._loop = asyncio.get_running_loop()
        self.outbox: Outbox = outbox or asyncio.Queue()

    def send(self, step: JSONObject) -> None:
        """Send a step if the client asked for steps."""
        if self.streams and not self.abandoned:
            self._put(step)

    def finish(self, result: JSONObject | RequestError) -> None:
        """Send the result, the last record of the job."""
        if not self.done:
            self.done = True
            self._put(result)

    def _put(self, record: JSONObject | RequestError) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self.outbox.put_nowait, (self, record))


class JobGroup:
    """The jobs of one request, with one queue of records.

    Args:
        tasks: the work.
        timeout: seconds until all jobs are ended.
        streams: whether steps are sent.
    """

    def __init__(self, tasks: Sequence[Task], timeout: float, streams: bool = False) -> None:
        self._outbox: Outbox = asyncio.Queue()
        self.jobs = [Job(task, timeout, streams, self._outbox) for task in tasks]

    async def records(self) -> AsyncIterator[tuple[int, JSONObject | RequestError]]:
        """Steps and results as they arrive, with the index of the job. A result is the last record of its job; an error
        is the last record of all."""
        left = len(self.jobs)
        while left:
            job, record = await self._outbox.get()
            left = 0 if isinstance(record, RequestError) else left - ("step" not in record)
            yield self.jobs.index(job), record

    async def answers(self) -> list[JSONObject] | RequestError:
        """The results alone, or the first error."""
        found: dict[int, JSONObject] = {}
        async for number, record in self.records():
            if isinstance(record, RequestError):
                return record
            found[number] = record
        return [found[number] for number in range(len(self.jobs))]

    def abandon(self) -> None:
        """Mark all jobs as abandoned, because the client has gone."""
        for job in self.jobs:
            job.abandoned = True


class Scheduler:
    """Accepts jobs up to a limit and runs them concurrently.

    Args:
        limits: numbers of jobs and their timeout.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._network = ThreadPoolExecutor(1, "cedd-network", torch.set_num_threads, (torch.get_num_threads(),))
        self.batcher = Batcher(wake=self._wake, submit=self._network.submit, is_abandoned=self._is_abandoned)
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._running: dict[Fiber, Sequence[Job]] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._work, daemon=True, name="cedd-scheduler")

    def start(self) -> None:
        """Start the scheduler's thread."""
        self._thread.start()

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of waiting and of running jobs."""
        return len(self._waiting), len(self._running_jobs)

    def submit(self, *jobs: Job) -> None:
        """Queue jobs, all or none."""
        with self._changed:
            if self._closing:
                raise server_busy(SHUTTING_DOWN, 5)
            if sum(self.counts) + len(jobs) > self.limits.max_queue:
                full = "1 request is" if self.limits.max_queue == 1 else f"{self.limits.max_queue} requests are"
                raise server_busy(f"the queue is full ({full} waiting or running); try again in a few seconds")
            self._waiting += jobs
            self._changed.notify()

    def close(self, grace: float) -> None:
        """Accept no more jobs, give the running ones `grace` seconds, and wait for them."""
        self.shorten_deadlines(grace)
        if self._thread.is_alive():
            self._thread.join(grace + 30.0)

    def shorten_deadlines(self, grace: float) -> None:
        """Accept no more jobs, and give the running ones at most `grace` seconds."""
        with self._changed:
            self._closing = True
            for job in self._waiting:
                job.finish(server_busy(SHUTTING_DOWN, 5))
            self._waiting.clear()
            for job in self._running_jobs:
                job.deadline = min(job.deadline, time.monotonic() + grace)
            self._changed.notify()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    # In the scheduler's thread

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._is_finished:
                    self._network.shutdown(wait=False)
                    return
                if not (self._waiting or self._running or self.batcher.ready):
                    self._changed.wait()
                    self._changed.wait_for(lambda: self._closing, GATHER_SECONDS)
                elif not self.batcher.ready and not self._can_start:  # all fibers are blocking or in the forward pass
                    self._changed.wait(POLL_SECONDS)
            try:
                self._end_expired()
                self._start_waiting()
                self.batcher.step()
            except Exception:
                LOG.exception("the scheduler failed")
                self._fail_all()

    @property
    def _is_finished(self) -> bool:
        """Whether the server is closing and no client waits. Fibers in `blocking` are left to end with the process."""
        left = self._waiting or self.batcher.pending or self.batcher.in_call
        return self._closing and not left and all(job.done or job.abandoned for job in self._running_jobs)

    @property
    def _running_jobs(self) -> list[Job]:
        return [job for jobs in list(self._running.values()) for job in jobs]

    def _is_abandoned(self, fiber: Fiber) -> bool:
        """Whether nobody waits for a fiber's results."""
        return all(job.abandoned for job in self._running.get(fiber, ()))

    @property
    def _can_start(self) -> bool:
        """Whether another fiber may start."""
        return bool(self._waiting) and len(self._running) < self.limits.max_concurrent

    def _end_expired(self) -> None:
        """End jobs past their deadline and cancel abandoned fibers."""
        now = time.monotonic()
        with self._changed:
            for job in (*self._waiting, *self._running_jobs):
                if not job.done and now > job.deadline:
                    late = RequestError(504, TIMED_OUT.format(job.timeout))
                    job.finish(server_busy(SHUTTING_DOWN, 5) if self._closing else late)
                    job.abandoned = True
            self._waiting = [job for job in self._waiting if not job.abandoned]
        for fiber in [fiber for fiber in self.batcher.pending if self._is_abandoned(fiber)]:
            self.batcher.abort(fiber, Cancelled())

    def _start_waiting(self) -> None:
        """Start as many fibers as allowed, but not for long while others wait for a forward pass: a fiber can end
        without one, and the next starts in its place."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and (fiber := self._next_fiber()):
            self.batcher.start(fiber)

    def _next_fiber(self) -> Fiber | None:
        """A fiber for the oldest waiting job and others with its key, which count as running from here on."""
        with self._changed:
            if not self._can_start:
                return None
            first, texts, jobs = self._waiting[0], 0, list[Job]()
            for job in [first] if first.task.key is None else self._waiting:
                if (job is first or job.task.key == first.task.key) and texts + job.task.texts <= MAX_BATCHED_TEXTS:
                    jobs.append(job)
                    texts += job.task.texts
            self._waiting = [job for job in self._waiting if job not in jobs]

            def ended(error: BaseException | None) -> None:
                for job in jobs:
                    job.finish(error_for(error))
                self._running.pop(fiber, None)

            fiber = Fiber(lambda fiber: first.task.run(fiber, jobs), ended)
            self._running[fiber] = jobs
            return fiber

    def _fail_all(self) -> None:
        """Report an error to all clients. The fibers are abandoned and cancelled at their next turn."""
        for job in self._running_jobs:
            job.finish(error_for(RuntimeError()))
        self._running.clear()


def error_for(error: BaseException | None) -> RequestError:
    """The response to an error: its message if the request caused it, otherwise a general one."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ValueError):
        return RequestError(422, str(error))
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return server_busy("out of memory; ask for fewer texts or tokens")
    if error is not None and not isinstance(error, Cancelled):
        LOG.error("a request failed", exc_info=error)
    return RequestError(500, "internal server error; see the server's log")
