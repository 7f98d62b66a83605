"""Runs that share the calls of one network: one call per step, with the results of separate calls."""

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from cedd.apps.serve.batcher import BatchedNetwork, Batcher, Cancelled, Fiber, ForwardRequest
from cedd.apps.serve.generation import GenerationTask
from cedd.apps.serve.limits import Limits, RequestError
from cedd.apps.serve.scheduler import Job, JobGroup, Scheduler
from cedd.network import Capabilities
from cedd.samplers import SamplingOptions
from cedd.tasks import generate, parse_template


class Doubler:
    """A network whose features are its tokens doubled, and which records its inputs."""

    capabilities = Capabilities(features=True)

    def __init__(self) -> None:
        self.read: list[tuple[int, ...]] = []

    def features(self, x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        assert len(x_t) == len(sigma)
        self.read.append(tuple(x_t.shape))
        return 2 * x_t[..., None].float()

    def head(self, features: torch.Tensor) -> torch.Tensor:
        return features


def forward_repeatedly(network: Doubler, rows: int, length: int, times: int, answers: list[float]):
    def work(fiber: Fiber) -> None:
        for k in range(times):
            x = torch.full((rows, length), rows + k)
            answers.append(float(fiber.forward(ForwardRequest(network, x, torch.ones(rows)))[0, 0, 0]))

    return work


def start_fiber(batcher: Batcher, work) -> list[BaseException | None]:
    ended: list[BaseException | None] = []
    batcher.start(Fiber(work, ended.append))
    return ended


def test_requests_of_equal_length_share_calls():
    network, batcher = Doubler(), Batcher()
    answers: dict[int, list[float]] = {rows: [] for rows in (1, 2, 3)}
    ended = [start_fiber(batcher, forward_repeatedly(network, rows, 4, 2, answers[rows])) for rows in answers]
    while batcher.ready:
        batcher.step()
    assert network.read == [(6, 4), (6, 4)]  # not six calls
    assert answers == {rows: [2.0 * rows, 2.0 * (rows + 1)] for rows in answers}
    assert ended == [[None]] * 3


def test_requests_stay_pending_and_abortable_after_failed_submit():
    def refuse(call):
        raise RuntimeError("no thread")

    batcher = Batcher(submit=refuse)
    ended = start_fiber(batcher, forward_repeatedly(Doubler(), 1, 4, 1, []))
    with pytest.raises(RuntimeError, match="no thread"):
        batcher.step()
    assert not batcher.in_call  # otherwise a scheduler would wait forever
    (run,) = batcher.pending
    batcher.abort(run, Cancelled())
    assert isinstance(ended[0], Cancelled)


def test_other_lengths_and_networks_get_separate_calls_in_order():
    networks, batcher = [Doubler(), Doubler()], Batcher()
    for network, length in ((networks[0], 4), (networks[1], 4), (networks[0], 5), (networks[0], 4)):
        start_fiber(batcher, forward_repeatedly(network, 1, length, 1, []))
    order = []
    while batcher.ready:
        before = [len(network.read) for network in networks]
        batcher.step()
        order.append([len(network.read) - count for network, count in zip(networks, before, strict=True)])
    assert networks[0].read == [(2, 4), (1, 5)]
    assert order == [[1, 0], [0, 1], [1, 0]]


def test_call_respects_max_tokens_but_has_at_least_one_request():
    network, batcher = Doubler(), Batcher(max_tokens_per_call=8)
    for rows in (3, 1, 1):
        start_fiber(batcher, forward_repeatedly(network, rows, 4, 1, []))
    while batcher.ready:
        batcher.step()
    assert network.read == [(3, 4), (2, 4)]


def test_run_that_joins_later_shares_next_call():
    network, batcher = Doubler(), Batcher()
    start_fiber(batcher, forward_repeatedly(network, 1, 4, 3, []))
    batcher.step()
    start_fiber(batcher, forward_repeatedly(network, 1, 4, 2, []))
    while batcher.ready:
        batcher.step()
    assert network.read == [(1, 4), (2, 4), (2, 4)]


def test_aborted_run_ends_with_its_thread():
    network, batcher = Doubler(), Batcher()
    before = threading.active_count()
    ended = start_fiber(batcher, forward_repeatedly(network, 1, 4, 100, []))
    batcher.step()
    batcher.abort(batcher.pending[0], Cancelled())
    assert isinstance(ended[0], Cancelled)
    assert not batcher.pending
    assert network.read == [(1, 4)]
    for thread in threading.enumerate():
        if thread.name == "cedd-fiber":
            thread.join(5)
    assert threading.active_count() <= before


def test_failing_network_fails_only_its_own_requests():
    class Broken(Doubler):
        def features(self, x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("broken")

    batcher = Batcher()
    ended = [start_fiber(batcher, forward_repeatedly(Broken(), 1, 4, 1, [])) for _ in range(2)]
    sound = start_fiber(batcher, forward_repeatedly(Doubler(), 1, 4, 1, []))
    while batcher.ready:
        batcher.step()
    assert [str(errors[0]) for errors in ended] == ["broken", "broken"]
    assert sound == [None]


def test_blocking_run_does_not_delay_others_and_resumes():
    network, woken, open_door = Doubler(), threading.Event(), threading.Event()
    batcher, answers = Batcher(wake=woken.set), list[float]()

    def work(fiber: Fiber) -> None:
        answers.append(fiber.blocking(lambda: float(open_door.wait(10))))
        answers.append(float(fiber.forward(ForwardRequest(network, torch.ones(1, 4), torch.ones(1)))[0, 0, 0]))

    ended = start_fiber(batcher, work)
    assert not batcher.ready  # it waits outside the batcher
    other = start_fiber(batcher, forward_repeatedly(network, 1, 4, 1, []))
    batcher.step()
    assert (ended, other) == ([], [None])
    woken.clear()
    open_door.set()
    assert woken.wait(10)
    while batcher.ready:
        batcher.step()
    assert (ended, answers) == ([None], [1.0, 2.0])


def test_error_in_blocking_call_fails_its_own_run():
    batcher, door = Batcher(), threading.Event()

    def fail() -> None:
        door.wait(10)
        raise OSError("gone")

    ended = start_fiber(batcher, lambda fiber: fiber.blocking(fail))
    door.set()
    while not batcher.ready:
        time.sleep(0.001)
    batcher.step()
    assert str(ended[0]) == "gone"


@dataclass(frozen=True)
class BlockedTask:
    """Task that blocks outside the batcher until its door is opened."""

    door: threading.Event
    key: None = None
    texts: int = 1

    def run(self, fiber: Fiber, jobs: Sequence[Job]) -> None:
        fiber.blocking(lambda: self.door.wait(20))
        jobs[0].finish({"text": "late"})


@pytest.mark.parametrize("closing", [0, 1, 2], ids=["deadline", "ending", "at once"])
def test_client_of_blocked_run_is_answered_in_time(closing: int):
    async def ask() -> tuple[int, float]:
        scheduler, door = Scheduler(Limits()), threading.Event()
        jobs = JobGroup([BlockedTask(door)], 30 if closing else 0.2)
        scheduler.submit(*jobs.jobs)
        scheduler.start()
        begin = time.monotonic()
        if closing:
            while scheduler.counts != (0, 1):
                await asyncio.sleep(0.01)
            if closing == 2:
                threading.Timer(0.2, scheduler.shorten_deadlines, [0.0]).start()
            await asyncio.to_thread(scheduler.close, 0.2 if closing == 1 else 20.0)  # does not wait for the run
        refused = await jobs.answers()
        seconds = time.monotonic() - begin
        door.set()
        await asyncio.to_thread(scheduler.close, 1)
        assert isinstance(refused, RequestError)
        return refused.status, seconds

    status, seconds = asyncio.run(ask())
    assert status == (503 if closing else 504)
    assert 0.1 < seconds < 5


@dataclass(frozen=True)
class SomeCalls:
    """Task that calls a network `times` times, or takes a while without it."""

    name: str
    times: int
    order: list[str]
    key: None = None
    texts: int = 1

    def run(self, fiber: Fiber, jobs: Sequence[Job]) -> None:
        for _ in range(self.times):
            fiber.forward(ForwardRequest(Doubler(), torch.zeros(1, 4), torch.ones(1)))
        time.sleep(0 if self.times else 0.01)
        self.order.append(self.name)
        jobs[0].finish({})


def test_run_with_network_calls_is_not_delayed_by_others():
    async def ask() -> list[str]:
        scheduler, order = Scheduler(Limits()), list[str]()
        jobs = JobGroup([SomeCalls("asks", 4, order), *(SomeCalls("quick", 0, order) for _ in range(80))], 30)
        scheduler.submit(*jobs.jobs)
        scheduler.start()
        await jobs.answers()
        scheduler.close(1)
        return order

    assert asyncio.run(ask()).index("asks") < 60  # four turns, and not after all others


class Slow(Doubler):
    """A network that answers once its door is opened."""

    def __init__(self, door: threading.Event) -> None:
        super().__init__()
        self.door, self.asked = door, threading.Event()

    def features(self, x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        self.asked.set()
        assert self.door.wait(20)
        return super().features(x_t, sigma)


@dataclass(frozen=True)
class OneCall:
    """Task that calls a network once."""

    network: Doubler
    key: None = None
    texts: int = 1

    def run(self, fiber: Fiber, jobs: Sequence[Job]) -> None:
        fiber.forward(ForwardRequest(self.network, torch.zeros(1, 4), torch.ones(1)))
        jobs[0].finish({})


def test_network_call_does_not_block_other_tasks_and_later_calls_are_batched():
    async def ask() -> None:
        scheduler, door = Scheduler(Limits()), threading.Event()
        slow = Slow(door)
        first = JobGroup([OneCall(slow)], 30)
        scheduler.submit(*first.jobs)
        scheduler.start()
        assert await asyncio.to_thread(slow.asked.wait, 10)
        quick, second = JobGroup([SomeCalls("quick", 0, [])], 10), JobGroup([OneCall(slow), OneCall(slow)], 30)
        scheduler.submit(*second.jobs, *quick.jobs)
        assert await quick.answers() == [{}]
        door.set()
        assert [await jobs.answers() for jobs in (first, second)] == [[{}], [{}, {}]]
        assert slow.read == [(1, 4), (2, 4)]
        await asyncio.to_thread(scheduler.close, 1)

    asyncio.run(ask())


@dataclass(frozen=True)
class LongComputation:
    """Task that computes for seconds in its head, outside of network calls."""

    ended: threading.Event
    key: None = None
    texts: int = 1

    def run(self, fiber: Fiber, jobs: Sequence[Job]) -> None:
        def head(rows: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return rows

        network = BatchedNetwork(cast(Any, SimpleNamespace(head=head)), fiber)
        try:
            for _ in range(500):
                network.head(torch.zeros(1, 4))
        finally:
            self.ended.set()


@pytest.mark.parametrize("leaving", [False, True], ids=["deadline", "client goes away"])
def test_long_computation_yields_to_others_and_ends_when_abandoned(leaving: bool):
    async def ask() -> None:
        scheduler, ended, network = Scheduler(Limits()), threading.Event(), Doubler()
        long = JobGroup([LongComputation(ended)], 30 if leaving else 1)
        scheduler.submit(*long.jobs)
        scheduler.start()
        for _ in range(3):
            quick = JobGroup([OneCall(network)], 5)
            scheduler.submit(*quick.jobs)
            assert await quick.answers() == [{}]
        assert not ended.is_set()
        if leaving:
            long.abandon()
        else:
            refused = await long.answers()
            assert isinstance(refused, RequestError)
            assert refused.status == 504
        assert await asyncio.to_thread(ended.wait, 1)
        await asyncio.to_thread(scheduler.close, 1)

    asyncio.run(ask())


def test_response_with_several_texts_yields_before_each(registry, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cedd.apps.serve.batcher.TURN_SECONDS", -1.0)  # every turn counts as long
    model, woken, answers, turns = registry["small"], threading.Event(), list[dict[str, Any]](), 0
    texts, template = ["a long b", "a text b", "a here b"], parse_template("a ____ b", model.tokenizer)
    writing = GenerationTask(
        "small", model, template, [1, 2, 3], SamplingOptions(), lambda texts, tokens: {"texts": texts}
    )
    ids = torch.stack([torch.from_numpy(model.tokenizer.encode(text)) for text in texts])
    batcher = Batcher(wake=woken.set)
    ended = start_fiber(batcher, lambda fiber: answers.append(writing.response(fiber, fiber.batched(model), ids)))
    while not ended:
        assert start_fiber(batcher, lambda fiber: None) == [None]  # another run, without network calls
        assert woken.wait(10)
        woken.clear()
        batcher.step()
        turns += 1
    assert (ended, answers, turns) == ([None], [{"texts": texts}], 3)


def test_scheduler_error_is_reported_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch):
    async def ask() -> None:
        scheduler, ended = Scheduler(Limits()), threading.Event()
        jobs = JobGroup([LongComputation(ended)], 30)

        def broken() -> None:
            monkeypatch.undo()
            raise RuntimeError("broken")

        scheduler.submit(*jobs.jobs)
        scheduler.start()
        while scheduler.counts != (0, 1):
            await asyncio.sleep(0.01)
        monkeypatch.setattr(scheduler.batcher, "step", broken)
        refused = await jobs.answers()
        assert isinstance(refused, RequestError)
        assert refused.status == 500
        assert await asyncio.to_thread(ended.wait, 1)
        await asyncio.to_thread(scheduler.close, 1)

    asyncio.run(ask())


@pytest.mark.parametrize("name", ["small", "masks"])
def test_batched_texts_match_separate_texts(registry, name: str):
    """For different numbers of steps: the runs share calls as long as each has steps left."""
    model, batcher = registry[name], Batcher()
    wanted, found = {}, {}
    for seed, steps in ((1, 6), (2, 9), (3, 6)):
        options = SamplingOptions(seed=seed, steps=steps)
        wanted[seed] = generate(model, 2, length=20, options=options)

        def work(fiber: Fiber, seed: int = seed, options: SamplingOptions = options) -> None:
            found[seed] = generate(fiber.batched(model), 2, length=20, options=options)

        assert start_fiber(batcher, work) == []
    while batcher.ready:
        batcher.step()
    assert found == wanted
    assert batcher.sequences > batcher.calls * 2  # they shared calls
