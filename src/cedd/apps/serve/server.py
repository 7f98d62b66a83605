"""Running the server: its socket, its signals, its shutdown."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Generator
from types import FrameType

import uvicorn
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp

from cedd.apps.serve.connections import ACCEPTED_AT_ONCE, LISTEN_BACKLOG, limited_to, most_connections
from cedd.apps.serve.scheduler import Scheduler

GRACE_SECONDS = 5.0
"""Seconds for running requests to finish after a signal."""
KEEP_ALIVE_SECONDS = 75
"""Seconds that a connection may be idle. If it were closed just when its client sends a request, that would be lost."""


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket bound to this address; a ValueError if the address is invalid or in use."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise ValueError(f"address not found on this machine: {host!r}") from None
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except (OSError, OverflowError) as error:
        made.close()
        raise ValueError(f"cannot listen on {host}:{port} ({error}); --port 0 picks a free port") from None
    return made


def url_of(made: socket.socket) -> str:
    """The URL of a socket, for a browser on this machine."""
    host, port = made.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/"


class Server(uvicorn.Server):
    """Shuts down on SIGINT and SIGTERM: accepts no more requests, gives running ones `GRACE_SECONDS`, then ends them
    with 503. A second SIGINT ends them at once.

    Args:
        app: the application.
        scheduler: runs its jobs.
        started: called when the server accepts requests.
    """

    def __init__(self, app: ASGIApp, scheduler: Scheduler, started: Callable[[], None]) -> None:
        settings = uvicorn.Config(
            app,
            http=limited_to(most_connections(scheduler.limits.max_connections)),
            backlog=ACCEPTED_AT_ONCE,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(GRACE_SECONDS + 5),
        )
        super().__init__(settings)
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        self.scheduler, self.on_started = scheduler, started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(LISTEN_BACKLOG)  # the event loop has set it to ACCEPTED_AT_ONCE
        if self.started:
            self.on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await run_in_threadpool(self.scheduler.close, GRACE_SECONDS)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """As uvicorn does it, but a signal that ended the server well is not raised again."""
        if threading.current_thread() is not threading.main_thread():  # which alone receives signals
            yield
            return

        def end(number: int, frame: FrameType | None) -> None:
            del frame
            if self.should_exit and number == signal.SIGINT:  # again: at once
                self.force_exit = True
                self.scheduler.shorten_deadlines(0.0)
            self.should_exit = True

        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
