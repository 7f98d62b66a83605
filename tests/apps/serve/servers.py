"""A server for the tests: in this process, called through its application, or in a thread, with its own port."""

import contextlib
import json
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cedd.apps.serve.limits import Limits
from cedd.apps.serve.registry import ModelRegistry
from cedd.apps.serve.scheduler import Scheduler

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install 'cedd[serve]'")
httpx = pytest.importorskip("httpx", reason="httpx is not installed: pip install httpx")

from cedd.apps.serve import connections  # noqa: E402
from cedd.apps.serve.app import Handlers, make_app  # noqa: E402
from cedd.apps.serve.security import Headers, SecurityMiddleware, host_name, page_policy  # noqa: E402
from cedd.apps.serve.server import Server, bind_socket, url_of  # noqa: E402

__all__ = ["LOCAL_CLIENT", "Handlers", "Headers", "SecurityMiddleware", "Server", "apply_edits", "at_once"]
__all__ += ["bind_socket", "connected", "connections", "events", "free_port", "host_name", "httpx", "make_app"]
__all__ += ["page_policy", "served", "site", "until"]

LOCAL_CLIENT: dict[str, Any] = {"trust_env": False, "verify": False}
"""Options of a client for a server on this machine: no proxy and no TLS verification, since loading the machine's
certificates takes longer than most requests."""


def site(registry: ModelRegistry, seed: int | None = None, **limits: Any) -> Handlers:
    return Handlers(registry, Scheduler(Limits(**limits)), "test", seed=seed)


@contextlib.contextmanager
def served(registry: ModelRegistry, seed: int | None = None, **limits: Any) -> Iterator[tuple[str, Scheduler]]:
    """Run a server; yields its address and its scheduler. It is stopped as by a signal."""
    made, begun = site(registry, seed, **limits), threading.Event()
    with bind_socket("127.0.0.1", 0) as bound:
        server = Server(make_app(made), made.scheduler, begun.set)
        thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
        thread.start()
        assert begun.wait(10)
        try:
            yield url_of(bound), made.scheduler
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive(), stacks()


@contextlib.contextmanager
def connected(registry: ModelRegistry, seed: int | None = None, **limits: Any) -> Iterator[tuple[Any, Scheduler]]:
    """A client of a server, and the server's scheduler."""
    with (
        served(registry, seed, **limits) as (address, scheduler),
        httpx.Client(base_url=address, timeout=60, **LOCAL_CLIENT) as client,
    ):
        yield client, scheduler


def at_once(ask: Callable[[int], None], count: int) -> None:
    """Call ask(0), ask(1), ... in threads of their own, and wait for them."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(ask, range(count)))


def apply_edits(texts: list[list[Any]], step: dict[str, Any]) -> None:
    """Apply the edits of a step to the displayed texts."""
    for i, place, piece, *_ in step["edits"]:
        assert texts[i][place] != piece  # an edit changes something
        texts[i][place] = piece


def stacks() -> str:
    """The stack of every thread, to find out which one does not end."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = sys._current_frames().items()
    return "\n".join(f"{names.get(ident)}:\n{''.join(traceback.format_stack(frame)[-6:])}" for ident, frame in found)


def events(reply: Any) -> Iterator[dict[str, Any]]:
    """The records of an event stream, which must end with [DONE]."""
    parts = reply.read().decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    for part in parts[:-2]:
        assert part.startswith("data: ")
        yield json.loads(part.removeprefix("data: "))


def until(condition: Any, seconds: float = 10.0) -> None:
    """Wait until the condition is true; fail if it takes too long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]
