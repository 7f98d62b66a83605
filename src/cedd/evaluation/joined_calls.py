"""Several computations on one network at a time, whose calls of the network are joined into larger batches.

Each computation has a thread, which runs until it calls the network. When all of them wait, calls of equal shape are
made as one. Only one thread runs at any time, and computations do not share random numbers, so a result does not depend
on the other computations, except for the rounding of larger matrix products.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from cedd.bounds.importance import tokens_at_once
from cedd.device import model_device
from cedd.models.backbone import Backbone
from cedd.network import AttentionPattern, Capabilities, evaluating

Result = TypeVar("Result")

_JOINED = 64
"""Computations that run at a time."""


@dataclass(eq=False)
class _Call:
    """A call of the network."""

    x_t: Tensor
    sigma: Tensor | None
    options: dict[str, Any]
    result: Tensor | BaseException | None = None
    is_done: threading.Event = field(default_factory=threading.Event)

    @property
    def key(self) -> Hashable:
        """Calls with equal keys can be joined."""
        sigma, kinds = None if self.sigma is None else self.sigma.shape[1:], list[Hashable]()
        for name, value in sorted(self.options.items()):
            if name == "where":
                continue
            is_pattern = isinstance(value, AttentionPattern)
            kinds.append((name, value.visible.shape, value.visible.cpu().numpy().tobytes()) if is_pattern else name)
        return self.x_t.shape[1:], sigma, tuple(kinds)

    def wait(self) -> Tensor:
        """The result, when the call has been made."""
        self.is_done.wait()
        if isinstance(self.result, BaseException):
            raise self.result
        return cast(Tensor, self.result)


class JoinedCalls(Backbone):
    """A network that is called by the computations that `run` is given."""

    def __init__(self, model: Backbone) -> None:
        super().__init__()
        self.model, self.head, self.device = model, model.head, model_device(model)
        self.vocab_size, self.has_mask = model.vocab_size, model.has_mask
        self.tokens = tokens_at_once(self.device)
        self._messages: SimpleQueue[_Call | None] = SimpleQueue()  # None: a computation has ended

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Those of the network, for separate calls."""
        return replace(self.model.capabilities, cache=False, recorder=False, cuda_graphs=False)

    def features(self, x_t: Tensor, sigma: Tensor | None = None, **options: Any) -> Tensor:
        call = _Call(x_t, sigma, {name: value for name, value in options.items() if value is not None})
        self._messages.put(call)
        return call.wait()

    def rows(self, features: Tensor, places: Tensor) -> Tensor:
        return self.model.rows(features, places)

    def run(self, computations: Sequence[Callable[[], Result]]) -> list[Result]:
        """The results of functions that call this network. The first error ends all of them."""
        results, errors, waiting = dict[int, Result](), list[BaseException](), list[_Call]()
        kind, rest = self.device.type, iter(enumerate(computations))
        mixed = {"dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}

        def compute(number: int, computation: Callable[[], Result]) -> None:
            try:
                if kind == "cuda":
                    torch.cuda.set_device(self.device)  # which every thread has its own
                with torch.autocast(kind, **mixed):
                    results[number] = computation()
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)
            finally:
                self._messages.put(None)

        def let_one_run() -> None:
            if (call := self._messages.get()) is not None:
                waiting.append(call)

        try:
            with evaluating(self.model):
                while not errors:
                    while len(waiting) < _JOINED and not errors and (first := next(rest, None)) is not None:
                        threading.Thread(target=compute, args=first, daemon=True).start()
                        let_one_run()
                    if errors or not waiting:
                        break
                    together = self._together(waiting)
                    self._make(together)
                    for call in together:
                        waiting.remove(call)
                        call.is_done.set()
                        let_one_run()
        finally:
            for call in waiting:
                call.result = RuntimeError("another computation failed")
                call.is_done.set()
        if errors:
            raise errors[0]
        return [results[number] for number in range(len(computations))]

    def _together(self, waiting: Sequence[_Call]) -> list[_Call]:
        """The first call, and others that can be joined with it."""
        key, chosen, tokens = waiting[0].key, list[_Call](), 0
        for call in waiting:
            if call.key == key and (not chosen or tokens + call.x_t.numel() <= self.tokens):
                chosen.append(call)
                tokens += call.x_t.numel()
        return chosen

    def _make(self, calls: Sequence[_Call]) -> None:
        """Make the calls as one."""
        x_t, options = torch.cat([call.x_t for call in calls]), {**calls[0].options}
        options.pop("where", None)
        sigma = None if calls[0].sigma is None else torch.cat([cast(Tensor, call.sigma) for call in calls])
        for name, value in options.items():
            if not isinstance(value, AttentionPattern):
                options[name] = torch.cat([call.options[name] for call in calls])
        if all("where" in call.options for call in calls):
            before = torch.tensor([0] + [call.x_t.numel() for call in calls[:-1]]).cumsum(0).tolist()
            options["where"] = torch.cat(
                [call.options["where"] + start for call, start in zip(calls, before, strict=True)]
            )
        try:
            parts = self.model.features(x_t, sigma, **options).split([len(call.x_t) for call in calls])
        except BaseException as error:  # noqa: BLE001 - raised in the computations
            parts = [error] * len(calls)
        for call, part in zip(calls, parts, strict=True):
            call.result = part
