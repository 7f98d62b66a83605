"""Connections that never become requests: they are closed and do not block others."""

import logging
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from cedd.apps.serve.registry import ModelRegistry
from tests.apps.serve.servers import LOCAL_CLIENT, connections, httpx, served, until

HALF = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Half: "
WHOLE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextmanager
def half_open(address: str, count: int, sent: bytes = HALF) -> Iterator[list[socket.socket]]:
    """Open this number of connections whose headers do not end."""
    parts = urlsplit(address)
    with ExitStack() as stack:
        made = [stack.enter_context(socket.create_connection((parts.hostname, parts.port), 5)) for _ in range(count)]
        for one in made:
            one.sendall(sent)
        yield made


def is_closed(one: socket.socket) -> bool:
    """Whether the other side has closed the connection; what it sent before is read."""
    one.settimeout(0.01)
    try:
        while one.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def test_server_stays_reachable_with_many_half_open_connections(registry: ModelRegistry):
    with served(registry, max_connections=8) as (address, _), half_open(address, 40) as made:
        for _ in range(3):
            assert httpx.get(f"{address}healthz", **LOCAL_CLIENT, timeout=5).status_code == 200
        until(lambda: sum(not is_closed(one) for one in made) <= 8, 5)


@pytest.mark.parametrize(
    "sent", [HALF, pytest.param(b"", marks=pytest.mark.slow), WHOLE], ids=["headers", "nothing", "a second request"]
)
def test_headers_have_time_limit(registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch, sent: bytes):
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    with served(registry) as (address, _), half_open(address, 1, sent) as (made,):
        if sent == WHOLE:
            assert made.recv(4096).startswith(b"HTTP/1.1 200")
            made.sendall(HALF)
        begun = time.monotonic()
        until(lambda: is_closed(made), 5)
        assert time.monotonic() - begun > 0.2


def test_idle_connection_can_be_reused_after_header_time_limit(
    registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.2)
    with served(registry) as (address, _), half_open(address, 1, WHOLE) as (made,):
        time.sleep(0.5)
        assert made.recv(4096).startswith(b"HTTP/1.1 200")
        made.sendall(WHOLE)
        assert made.recv(4096).startswith(b"HTTP/1.1 200")


def test_connection_beyond_limit_gets_503(registry: ModelRegistry):
    asked = {"model": "small", "prompt": "", "max_tokens": 28, "steps": 1000, "stream": True}
    with (
        served(registry, max_connections=1) as (address, _),
        httpx.Client(base_url=address, timeout=30, **LOCAL_CLIENT) as client,
        client.stream("POST", "/v1/completions", json=asked) as first,
    ):
        assert first.status_code == 200
        refused = httpx.get(f"{address}healthz", **LOCAL_CLIENT, timeout=5)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")


def test_open_file_limit_reduces_connections():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert connections.most_connections(1) == 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 200), hard))
    try:
        assert connections.most_connections(10**6) <= 200 - connections.ACCEPTED_AT_ONCE - connections.SPARE_DESCRIPTORS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_repeated_log_messages_are_rate_limited(monkeypatch: pytest.MonkeyPatch):
    now, limit = [100.0], connections.RateLimit(count=2, seconds=10)
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def passes(level: int, text: str) -> logging.LogRecord | None:
        record = logging.LogRecord("asyncio", level, "", 0, text, (), None)
        return record if limit.filter(record) else None

    assert [bool(passes(logging.ERROR, "out of files\nsocket: 1")) for _ in range(1000)] == [True] * 2 + [False] * 998
    assert passes(logging.ERROR, "another error")
    assert all(passes(logging.INFO, "POST /correct 200") for _ in range(10))
    now[0] += 11
    record = passes(logging.ERROR, "out of files")
    assert record is not None
    assert "998 more in the last 11 s" in record.getMessage()
