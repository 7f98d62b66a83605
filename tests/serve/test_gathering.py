"""Runs that ask one network together: one call a step, each with its own answer, as if it were alone."""

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from cedd.models.loaded import SamplingOptions
from cedd.serve.desk import Desk, Job, Jobs
from cedd.serve.gathering import Ended, GatheredNetwork, Gathering, Question, Run
from cedd.serve.limits import Limits, Refused
from cedd.serve.work import Writing
from cedd.tasks import generate, parse_template


class Doubler:
    """A network whose features are its tokens doubled, and which notes what it reads."""

    def __init__(self) -> None:
        self.read: list[tuple[int, ...]] = []

    def features(self, x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        assert len(x_t) == len(sigma)
        self.read.append(tuple(x_t.shape))
        return 2 * x_t[..., None].float()

    def head(self, features: torch.Tensor) -> torch.Tensor:
        return features


def asking(network: Doubler, rows: int, length: int, times: int, answers: list[float]):
    def work(run: Run) -> None:
        for k in range(times):
            x = torch.full((rows, length), rows + k)
            answers.append(float(run.ask(Question(network, x, torch.ones(rows)))[0, 0, 0]))

    return work


def begun(gathering: Gathering, work) -> list[BaseException | None]:
    ended: list[BaseException | None] = []
    gathering.begin(Run(work, ended.append))
    return ended


def test_questions_of_one_length_are_one_call_and_each_has_its_own_answer():
    network, gathering = Doubler(), Gathering()
    answers: dict[int, list[float]] = {rows: [] for rows in (1, 2, 3)}
    ended = [begun(gathering, asking(network, rows, 4, 2, answers[rows])) for rows in answers]
    while gathering.ready:
        gathering.turn()
    assert network.read == [(6, 4), (6, 4)]  # not six calls
    assert answers == {rows: [2.0 * rows, 2.0 * (rows + 1)] for rows in answers}
    assert ended == [[None]] * 3


def test_those_whose_call_could_not_be_made_still_ask_and_can_be_ended():
    def refuse(call):
        raise RuntimeError("no thread")

    gathering = Gathering(make_call=refuse)
    ended = begun(gathering, asking(Doubler(), 1, 4, 1, []))
    with pytest.raises(RuntimeError, match="no thread"):
        gathering.turn()
    assert not gathering.calling  # or a desk would wait for it for ever
    (run,) = gathering.asking
    gathering.end(run, Ended())
    assert isinstance(ended[0], Ended)


def test_other_lengths_and_networks_are_other_calls_in_the_order_of_their_questions():
    networks, gathering = [Doubler(), Doubler()], Gathering()
    for network, length in ((networks[0], 4), (networks[1], 4), (networks[0], 5), (networks[0], 4)):
        begun(gathering, asking(network, 1, length, 1, []))
    order = []
    while gathering.ready:
        before = [len(network.read) for network in networks]
        gathering.turn()
        order.append([len(network.read) - count for network, count in zip(networks, before, strict=True)])
    assert networks[0].read == [(2, 4), (1, 5)]
    assert order == [[1, 0], [0, 1], [1, 0]]


def test_a_call_reads_no_more_than_so_many_tokens_but_one_question_at_least():
    network, gathering = Doubler(), Gathering(most_tokens=8)
    for rows in (3, 1, 1):
        begun(gathering, asking(network, rows, 4, 1, []))
    while gathering.ready:
        gathering.turn()
    assert network.read == [(3, 4), (2, 4)]


def test_a_run_that_joins_later_shares_the_next_call():
    network, gathering = Doubler(), Gathering()
    begun(gathering, asking(network, 1, 4, 3, []))
    gathering.turn()
    begun(gathering, asking(network, 1, 4, 2, []))
    while gathering.ready:
        gathering.turn()
    assert network.read == [(1, 4), (2, 4), (2, 4)]


def test_a_run_that_shall_end_ends_at_its_question_and_its_thread_too():
    network, gathering = Doubler(), Gathering()
    before = threading.active_count()
    ended = begun(gathering, asking(network, 1, 4, 100, []))
    gathering.turn()
    gathering.end(gathering.asking[0], Ended())
    assert isinstance(ended[0], Ended)
    assert not gathering.asking
    assert network.read == [(1, 4)]
    for thread in threading.enumerate():
        if thread.name == "cedd-run":
            thread.join(5)
    assert threading.active_count() <= before


def test_a_network_that_fails_fails_those_who_asked_it():
    class Broken(Doubler):
        def features(self, x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("broken")

    gathering = Gathering()
    ended = [begun(gathering, asking(Broken(), 1, 4, 1, [])) for _ in range(2)]
    sound = begun(gathering, asking(Doubler(), 1, 4, 1, []))
    while gathering.ready:
        gathering.turn()
    assert [str(errors[0]) for errors in ended] == ["broken", "broken"]
    assert sound == [None]


def test_a_run_that_is_outside_leaves_others_their_turns_and_goes_on_when_it_is_back():
    network, woken, open_door = Doubler(), threading.Event(), threading.Event()
    gathering, answers = Gathering(wake=woken.set), list[float]()

    def work(run: Run) -> None:
        answers.append(run.outside(lambda: float(open_door.wait(10))))
        answers.append(float(run.ask(Question(network, torch.ones(1, 4), torch.ones(1)))[0, 0, 0]))

    ended = begun(gathering, work)
    assert not gathering.ready  # it waits elsewhere
    other = begun(gathering, asking(network, 1, 4, 1, []))
    gathering.turn()
    assert (ended, other) == ([], [None])
    woken.clear()
    open_door.set()
    assert woken.wait(10)
    while gathering.ready:
        gathering.turn()
    assert (ended, answers) == ([None], [1.0, 2.0])


def test_an_error_outside_is_the_run_s_own():
    gathering, door = Gathering(), threading.Event()

    def fail() -> None:
        door.wait(10)
        raise OSError("gone")

    ended = begun(gathering, lambda run: run.outside(fail))
    door.set()
    while not gathering.ready:
        time.sleep(0.001)
    gathering.turn()
    assert str(ended[0]) == "gone"


@dataclass(frozen=True)
class Away:
    """Work that is outside until it is let in."""

    door: threading.Event
    key: None = None
    texts: int = 1

    def run(self, run: Run, jobs: Sequence[Job]) -> None:
        run.outside(lambda: self.door.wait(20))
        jobs[0].finish({"text": "late"})


@pytest.mark.parametrize("closing", [0, 1, 2], ids=["deadline", "ending", "at once"])
def test_who_waits_for_a_run_outside_is_answered_in_time(closing: int):
    async def ask() -> tuple[int, float]:
        desk, door = Desk(Limits()), threading.Event()
        jobs = Jobs([Away(door)], 30 if closing else 0.2)
        desk.take(*jobs.all)
        desk.start()
        begin = time.monotonic()
        if closing:
            while desk.counts != (0, 1):
                await asyncio.sleep(0.01)
            if closing == 2:
                threading.Timer(0.2, desk.hurry, [0.0]).start()
            await asyncio.to_thread(desk.close, 0.2 if closing == 1 else 20.0)  # does not wait for the run
        refused = await jobs.answers()
        seconds = time.monotonic() - begin
        door.set()
        await asyncio.to_thread(desk.close, 1)
        assert isinstance(refused, Refused)
        return refused.status, seconds

    status, seconds = asyncio.run(ask())
    assert status == (503 if closing else 504)
    assert 0.1 < seconds < 5


@dataclass(frozen=True)
class Asking:
    """Work that asks a network so often, or takes a while without it."""

    name: str
    times: int
    order: list[str]
    key: None = None
    texts: int = 1

    def run(self, run: Run, jobs: Sequence[Job]) -> None:
        for _ in range(self.times):
            run.ask(Question(Doubler(), torch.zeros(1, 4), torch.ones(1)))
        time.sleep(0 if self.times else 0.01)
        self.order.append(self.name)
        jobs[0].finish({})


def test_a_run_that_asks_is_not_held_up_by_those_that_do_not():
    async def ask() -> list[str]:
        desk, order = Desk(Limits()), list[str]()
        jobs = Jobs([Asking("asks", 4, order), *(Asking("quick", 0, order) for _ in range(80))], 30)
        desk.take(*jobs.all)
        desk.start()
        await jobs.answers()
        desk.close(1)
        return order

    assert asyncio.run(ask()).index("asks") < 60  # four turns, and not after all others


class Slow(Doubler):
    """A network that answers when it is let."""

    def __init__(self, door: threading.Event) -> None:
        super().__init__()
        self.door, self.asked = door, threading.Event()

    def features(self, x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        self.asked.set()
        assert self.door.wait(20)
        return super().features(x_t, sigma)


@dataclass(frozen=True)
class AskingOnce:
    """Work that asks a network once."""

    network: Doubler
    key: None = None
    texts: int = 1

    def run(self, run: Run, jobs: Sequence[Job]) -> None:
        run.ask(Question(self.network, torch.zeros(1, 4), torch.ones(1)))
        jobs[0].finish({})


def test_who_asks_no_network_is_answered_while_one_is_called_and_who_asks_it_is_answered_with_others():
    async def ask() -> None:
        desk, door = Desk(Limits()), threading.Event()
        slow = Slow(door)
        first = Jobs([AskingOnce(slow)], 30)
        desk.take(*first.all)
        desk.start()
        assert await asyncio.to_thread(slow.asked.wait, 10)
        quick, second = Jobs([Asking("quick", 0, [])], 10), Jobs([AskingOnce(slow), AskingOnce(slow)], 30)
        desk.take(*second.all, *quick.all)
        assert await quick.answers() == [{}]
        door.set()
        assert [await jobs.answers() for jobs in (first, second)] == [[{}], [{}, {}]]
        assert slow.read == [(1, 4), (2, 4)]
        await asyncio.to_thread(desk.close, 1)

    asyncio.run(ask())


@dataclass(frozen=True)
class Computing:
    """Work that computes beside its network, at its head, for seconds."""

    ended: threading.Event
    key: None = None
    texts: int = 1

    def run(self, run: Run, jobs: Sequence[Job]) -> None:
        def head(rows: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return rows

        network = GatheredNetwork(cast(Any, SimpleNamespace(head=head)), run)
        try:
            for _ in range(500):
                network.head(torch.zeros(1, 4))
        finally:
            self.ended.set()


@pytest.mark.parametrize("leaving", [False, True], ids=["deadline", "client goes away"])
def test_a_run_that_computes_for_long_leaves_others_their_turns_and_ends_when_nobody_waits(leaving: bool):
    async def ask() -> None:
        desk, ended, network = Desk(Limits()), threading.Event(), Doubler()
        long = Jobs([Computing(ended)], 30 if leaving else 1)
        desk.take(*long.all)
        desk.start()
        for _ in range(3):
            quick = Jobs([AskingOnce(network)], 5)
            desk.take(*quick.all)
            assert await quick.answers() == [{}]
        assert not ended.is_set()
        if leaving:
            long.drop()
        else:
            refused = await long.answers()
            assert isinstance(refused, Refused)
            assert refused.status == 504
        assert await asyncio.to_thread(ended.wait, 1)
        await asyncio.to_thread(desk.close, 1)

    asyncio.run(ask())


def test_an_answer_of_many_texts_leaves_others_a_turn_before_each(shelf, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cedd.serve.gathering.TURN", -1.0)  # every turn has been long
    model, woken, answers, turns = shelf["small"], threading.Event(), list[dict[str, Any]](), 0
    texts, template = ["a long b", "a text b", "a here b"], parse_template("a ____ b", model.tokenizer)
    writing = Writing("small", model, template, [1, 2, 3], SamplingOptions(), lambda texts, tokens: {"texts": texts})
    ids = torch.stack([torch.from_numpy(model.tokenizer.encode(text)) for text in texts])
    gathering = Gathering(wake=woken.set)
    ended = begun(gathering, lambda run: answers.append(writing.answer(run, run.over(model), ids)))
    while not ended:
        assert begun(gathering, lambda run: None) == [None]  # another, which asks for nothing
        assert woken.wait(10)
        woken.clear()
        gathering.turn()
        turns += 1
    assert (ended, answers, turns) == ([None], [{"texts": texts}], 3)


def test_an_error_of_the_desk_itself_is_told_to_all_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch):
    async def ask() -> None:
        desk, ended = Desk(Limits()), threading.Event()
        jobs = Jobs([Computing(ended)], 30)

        def broken() -> None:
            monkeypatch.undo()
            raise RuntimeError("broken")

        desk.take(*jobs.all)
        desk.start()
        while desk.counts != (0, 1):
            await asyncio.sleep(0.01)
        monkeypatch.setattr(desk.gathering, "turn", broken)
        refused = await jobs.answers()
        assert isinstance(refused, Refused)
        assert refused.status == 500
        assert await asyncio.to_thread(ended.wait, 1)
        await asyncio.to_thread(desk.close, 1)

    asyncio.run(ask())


@pytest.mark.parametrize("name", ["small", "masks"])
def test_texts_drawn_together_are_those_drawn_alone(shelf, name: str):
    """Whatever their steps: those of one run are a prefix of another's calls."""
    model, gathering = shelf[name], Gathering()
    wanted, found = {}, {}
    for seed, steps in ((1, 6), (2, 9), (3, 6)):
        options = SamplingOptions(seed=seed, steps=steps)
        wanted[seed] = generate(model, 2, length=20, options=options)

        def work(run: Run, seed: int = seed, options: SamplingOptions = options) -> None:
            found[seed] = generate(run.over(model), 2, length=20, options=options)

        assert begun(gathering, work) == []
    while gathering.ready:
        gathering.turn()
    assert found == wanted
    assert gathering.sequences > gathering.calls * 2  # they were read together
