"""Limits on connections: a time limit for request headers, a maximum number of connections, and a rate-limited log.

A connection without a complete request costs a file descriptor and can otherwise stay open forever. `LimitedConnection`
closes a connection whose headers take longer than `HEADER_SECONDS`. When the server has `most_connections` open, a new
connection replaces the oldest one that has no request in progress.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any, cast

from uvicorn.protocols.http.auto import AutoHTTPProtocol

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None

LOG = logging.getLogger("cedd.apps.serve")
HEADER_SECONDS = 20.0
"""Time limit for the headers of a request, from the connection or from the first byte after the last response."""
ACCEPTED_AT_ONCE = 32
"""Connections that the event loop accepts before it handles the first of them."""
LISTEN_BACKLOG = 1024
"""Connections that the system queues until they are accepted."""
SPARE_DESCRIPTORS = 32
"""File descriptors kept for files and pipes."""
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\nConnection: close\r\nContent-Length: 21\r\n\r\n"
    b"too many connections\n"
)


def most_connections(wanted: int) -> int:
    """The number of connections to keep open: `wanted`, or fewer if the process may not open that many files."""
    if resource is None:
        return wanted
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, soft - _open_descriptors() - ACCEPTED_AT_ONCE - SPARE_DESCRIPTORS))


def _open_descriptors() -> int:
    try:
        return sum(1 for _ in Path("/dev/fd").iterdir())
    except OSError:
        return SPARE_DESCRIPTORS


Base = cast(Any, AutoHTTPProtocol)
"""uvicorn's protocol on top of h11 or httptools; both have `transport`, `connections` and `cycle`."""


class LimitedConnection(Base):
    """A connection of uvicorn with a time limit for headers and a limit on the number of connections."""

    most_connections: int
    """Set on the subclass that `limited_to` returns."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.since = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._start_timer()
        if len(self.connections) > self.most_connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        if self.is_idle:
            self._start_timer()
        super().data_received(data)
        if not self.is_idle:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        if self._timer is None:
            self.since = time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(HEADER_SECONDS, self._too_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        if self.is_idle:
            LOG.warning("closed a connection that sent no complete request headers in %g s", HEADER_SECONDS)
            self.transport.abort()

    def _make_room(self) -> None:
        """Close the oldest idle connection, preferably one without a response so far; if all are busy, close this
        one."""
        others = [one for one in self.connections if one is not self and one.is_idle and not one.transport.is_closing()]
        if not others:
            LOG.warning("refused a connection: %d requests are in progress", self.most_connections)
            self.transport.write(FULL)
            self.transport.close()
            return
        LOG.warning("closed an idle connection to accept another (at most %d)", self.most_connections)
        min(others, key=lambda one: (one.cycle is not None, one.since)).transport.abort()


def limited_to(most: int) -> type[asyncio.Protocol]:
    """The protocol class for at most `most` connections."""
    return type("LimitedConnection", (LimitedConnection,), {"most_connections": most})


class RateLimit(logging.Filter):
    """Drops warnings and errors that repeat: at most `count` with the same text every `seconds`.

    The first record after a pause says how many were dropped.

    Args:
        count: records with the same message template that pass in one period.
        seconds: the length of a period.
    """

    def __init__(self, count: int = 5, seconds: float = 10.0) -> None:
        super().__init__()
        self.count, self.seconds = count, seconds
        self._periods: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        key, now = (record.name, str(record.msg).partition("\n")[0]), time.monotonic()
        begun, seen = self._periods.get(key, (now, 0))
        if now - begun > self.seconds:
            if (dropped := seen - self.count) > 0:
                record.msg = f"{record.msg} ({dropped} more in the last {now - begun:.0f} s)"
            begun, seen = now, 0
        if len(self._periods) > 1000:
            self._periods.clear()
        self._periods[key] = begun, seen + 1
        return seen < self.count
