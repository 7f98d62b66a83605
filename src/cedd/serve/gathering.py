"""Many runs over one network: what they ask of it at the same time is one call.

Shapes: B sequences, L positions, D width.

A sampler, or a corrector, is a plain function that calls its network many times. Each runs in a thread of its own, but
only one at a time: a `Run` goes on until it asks its network, `features(x_t [B, L], sigma [B])`, and waits there. The
driver (`Gathering.turn`) takes the oldest question, puts all questions of the same network and length behind it, calls
the network once, and lets each run go on with its own rows. So runs may begin at any time and have different steps,
temperatures and tasks; a run that nobody waits for any more ends at its next question. A run that waits for something
else, another process, does so `outside`: others have their turns meanwhile, and it goes on in the next one; so does a
run that computes for long beside its network, whenever it comes to the vocabulary head (`Run.rest`). Where calls are
made in a thread of their own, runs that wait for no network go on beside them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from cedd.models.arrays import Floats, Passage, ReadsPassages, States
from cedd.models.loaded import LoadedModel
from cedd.network import AnyModel, HasHead, has_head
from cedd.samplers import GraphedNetwork
from cedd.samplers.memory import Memory

Result = TypeVar("Result")
MOST_TOKENS = 1024
"""Tokens of one call: more at once are not faster on a CPU, and others would wait longer for their turn."""

TURN = 0.05
"""Seconds after which a run leaves others a turn where it can."""


class Ended(BaseException):
    """Raised inside a run that shall end. Nothing that a run does on the way takes it for an error of its own."""


@dataclass(frozen=True)
class Question:
    """What a run asks of a network: x_t [B, L] and sigma [B]."""

    network: HasHead
    x_t: Tensor
    sigma: Tensor


class Run:
    """A function in a thread that goes on only in its turn.

    Args:
        work: is called with this run, through which it asks.
        ended: called with whatever the work raised, or None, in the thread of the work.
    """

    def __init__(self, work: Callable[[Run], None], ended: Callable[[BaseException | None], None]) -> None:
        self.question: Question | None = None
        self._answer: Tensor | BaseException | None = None
        self._since = 0.0
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._work, self._ended = work, ended
        self.returning: Callable[[Run], None] | None = None
        """Told when it comes back from outside."""
        threading.Thread(target=self._run, daemon=True, name="cedd-run").start()

    def resume(self, answer: Tensor | BaseException | None = None) -> None:
        """Go on with an answer, up to the next question or the end; an exception is raised in its place."""
        self.question, self._answer, self._since = None, answer, time.monotonic()
        self._go.release()
        self._back.acquire()

    def ask(self, question: Question) -> Tensor:
        """The features [B, L, D]; called by the work."""
        self.question = question
        self._back.release()
        self._go.acquire()
        answer = self._heard()
        assert answer is not None
        return answer

    def outside(self, wait: Callable[[], Result]) -> Result:
        """What a function that waits for others returns, while it is not this run's turn; called by the work."""
        assert self.returning is not None
        self._back.release()
        try:
            return wait()
        finally:
            self.returning(self)
            self._go.acquire()
            self._heard()

    def rest(self) -> None:
        """Leave others a turn if this one has been long; called by the work."""
        if time.monotonic() - self._since > TURN:
            self.outside(lambda: None)

    def _heard(self) -> Tensor | None:
        answer, self._answer = self._answer, None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _run(self) -> None:
        self._go.acquire()
        torch.set_num_threads(1)  # of this thread: what a run computes beside its network is small
        error: BaseException | None = None
        try:
            self._heard()
            self._work(self)
        except BaseException as raised:  # noqa: BLE001 - it is handed on
            error = raised
        try:
            self._ended(error)
        finally:
            self._back.release()

    def over(self, loaded: LoadedModel, memory: Memory | None = None) -> AskingModel:
        """The same model, which asks through this run what is not in the memory."""
        return AskingModel(loaded, self, memory)


@dataclass
class Read:
    """What a network has read last: x_t [B, L], and the outputs [R, V] at some of its rows."""

    x_t: Tensor
    features: Tensor
    head: Callable[[Tensor], Tensor]

    def outputs(self, sequence: Tensor, places: Tensor) -> Tensor | None:
        """The outputs at some places of one sequence [L]; None where it was not read."""
        found = (self.x_t == sequence.to(self.x_t.device)).all(-1).nonzero()
        if not len(found):
            return None
        return self.head(self.features[int(found[0, 0])].index_select(0, places.to(self.x_t.device))).cpu()


class RestingHead:
    """A vocabulary head, to which a run comes for some rows at a time: where it may leave others a turn.

    Args:
        head: the head itself.
        run: whose.
    """

    def __init__(self, head: Callable[[Tensor], Tensor], run: Run) -> None:
        self._head, self._run = head, run
        self.weight = getattr(head, "weight", None)

    def __call__(self, rows: Tensor) -> Tensor:
        self._run.rest()
        return self._head(rows)


class GatheredNetwork:
    """A network in two halves, the first of which is run together with others'.

    Args:
        network: the network itself.
        run: who asks.
        memory: of what need not be asked again.
        reading: told what it has read.
    """

    def __init__(
        self,
        network: HasHead,
        run: Run,
        memory: Memory | None = None,
        reading: Callable[[Read], None] | None = None,
    ) -> None:
        self._network, self._run, self._memory, self._reading = network, run, memory, reading
        self.head = RestingHead(network.head, run)

    def features(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        """[B, L, D]"""
        if self._memory is not None:
            return self._memory.read(self._network, x_t, sigma, self._ask)
        features = self._ask(x_t, sigma)
        if self._reading is not None:
            self._reading(Read(x_t, features, self.head))
        return features

    def _ask(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        return self._run.ask(Question(self._network, x_t, sigma))


class AskingModel(LoadedModel):
    """A model whose networks are asked through a run.

    Args:
        loaded: the model itself.
        run: who asks.
        memory: of what need not be asked again.
    """

    def __init__(self, loaded: LoadedModel, run: Run, memory: Memory | None = None) -> None:
        asking = cast(Any, GatheredNetwork(loaded.model, run, memory))
        super().__init__(replace(loaded.folder, model=asking), loaded.device)
        self._loaded, self._run, self._memory = loaded, run, memory
        self.last_read: Read | None = None
        """By the network that is sampled from."""

    def network(self, batch: int, length: int) -> AnyModel:
        del batch
        return GatheredNetwork(shared_network(self._loaded, length), self._run, reading=self._note)

    def on_arrays(self, t: float) -> ReadsPassages:
        return ReadOutside(self._loaded.on_arrays(t), self._run)

    @property
    def known(self) -> MutableMapping[Hashable, float] | None:
        return None if self._memory is None else self._memory.numbers[self._loaded]

    def _note(self, read: Read) -> None:
        self.last_read = read


class ReadOutside:
    """A network in numpy that a run asks while others have their turns.

    Args:
        network: the network itself.
        run: who asks.
    """

    def __init__(self, network: ReadsPassages, run: Run) -> None:
        self._network, self._run = network, run

    def read(self, passages: Sequence[Passage]) -> list[tuple[Floats, States]]:
        """As the network does."""
        return self._run.outside(lambda: self._network.read(passages))


@lru_cache(maxsize=256)
def shared_network(loaded: LoadedModel, length: int) -> HasHead:
    """The network that reads texts of this length, the same for all who ask; one that is recorded for a batch is not
    taken, since batches here are of any size."""
    made = loaded.network(1, length)
    return loaded.model if isinstance(made, GraphedNetwork) or not has_head(made) else made


class Gathering:
    """The runs that wait for their networks, in the order of their questions, and those that can go on.

    Args:
        most_tokens: of one call.
        wake: told that a run can go on, in the thread where that came about.
        make_call: makes a call of a network, at once or elsewhere.
        unwanted: says whether nobody waits for a run any more; it then ends instead of going on.
    """

    def __init__(
        self,
        most_tokens: int = MOST_TOKENS,
        wake: Callable[[], None] = lambda: None,
        make_call: Callable[[Callable[[], None]], object] = lambda call: call(),
        unwanted: Callable[[Run], bool] = lambda run: False,
    ) -> None:
        self.asking: list[Run] = []
        self.calling: Sequence[Run] = ()
        """Those whose questions are being answered."""
        self.back: deque[tuple[Run, Tensor | BaseException | None]] = deque()
        """Those that have been outside, and those that have answers."""
        self.calls = self.sequences = 0
        """Calls of networks so far, and the sequences that they read."""
        self._most_tokens, self._wake, self._make_call, self._unwanted = most_tokens, wake, make_call, unwanted

    @property
    def ready(self) -> bool:
        """Whether there is a turn to take."""
        return bool(self.back or (self.asking and not self.calling))

    def begin(self, run: Run) -> None:
        """Let a run go up to its first question."""
        run.returning = self._returned
        self._resume(run)

    def end(self, run: Run, error: BaseException) -> None:
        """End a run that waits."""
        self.asking.remove(run)
        self._resume(run, error)

    def turn(self) -> None:
        """Those that can go on do; then one call of the network that was asked first, for all that ask the same."""
        self._go_on()
        if self.asking and not self.calling:
            together = self.calling = self._together()
            try:
                self._make_call(partial(self._call, together))
            except BaseException:
                self.calling = ()  # they still ask, and can be ended
                raise
            self.asking = [run for run in self.asking if run not in together]
            self._go_on()

    def _go_on(self) -> None:
        for _ in range(len(self.back)):  # one that only rests is back at once
            run, answer = self.back.popleft()
            self._resume(run, Ended() if self._unwanted(run) else answer)

    def _call(self, together: Sequence[Run]) -> None:
        answers = self._answers([_question(run) for run in together])
        self.back.extend(zip(together, answers, strict=True))
        self.calling = ()
        self._wake()

    def _returned(self, run: Run) -> None:
        self.back.append((run, None))
        self._wake()

    def _resume(self, run: Run, answer: Tensor | BaseException | None = None) -> None:
        run.resume(answer)
        if run.question is not None:
            self.asking.append(run)

    def _together(self) -> list[Run]:
        """The oldest question and those like it, up to `most_tokens`; at least the oldest."""
        first = _question(self.asking[0])
        length, found, tokens = first.x_t.shape[1], list[Run](), 0
        for run in self.asking:
            question = _question(run)
            if question.network is first.network and question.x_t.shape[1] == length:
                tokens += question.x_t.numel()
                if found and tokens > self._most_tokens:
                    break
                found.append(run)
        return found

    @torch.no_grad()
    def _answers(self, questions: list[Question]) -> Sequence[Tensor | BaseException]:
        sizes = [len(question.x_t) for question in questions]
        self.calls, self.sequences = self.calls + 1, self.sequences + sum(sizes)
        try:
            x_t, sigma = torch.cat([q.x_t for q in questions]), torch.cat([q.sigma for q in questions])
            return list(questions[0].network.features(x_t, sigma).split(sizes))
        except Exception as error:  # noqa: BLE001 - each run reports it
            return [error] * len(questions)


def _question(run: Run) -> Question:
    assert run.question is not None
    return run.question
