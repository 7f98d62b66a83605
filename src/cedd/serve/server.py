"""Running the server: a socket, its end by a signal, and what it prints."""

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

from cedd.serve.desk import Desk

GRACE = 5.0
"""Seconds that requests under way have to end, after a signal."""
KEEP_ALIVE = 75
"""Seconds that a connection may be idle: one that is closed just when a busy client asks again is a request lost."""


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket on this address; a port that is taken is an error that says so."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise ValueError(f"there is no address {host!r} on this machine") from None
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except (OSError, OverflowError) as error:
        made.close()
        raise ValueError(f"{host}:{port} cannot be used ({error}); --port 0 takes one that is free") from None
    return made


def address_of(made: socket.socket) -> str:
    """The address of a socket, for a browser on this machine."""
    host, port = made.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/"


class Server(uvicorn.Server):
    """Ends on SIGINT and SIGTERM: takes no more requests, answers those under way or ends them with 503; on a second
    SIGINT it does not wait for them.

    Args:
        app: what is served.
        desk: which works for it.
        started: called when requests are taken.
    """

    def __init__(self, app: ASGIApp, desk: Desk, started: Callable[[], None]) -> None:
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=int(GRACE + 5),
        )
        super().__init__(settings)
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        self.desk, self.on_started = desk, started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await run_in_threadpool(self.desk.close, GRACE)
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
                self.desk.hurry(0.0)
            self.should_exit = True

        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
