"""Responses: JSON, and streams of server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from starlette.responses import Response

from cedd.apps.serve.limits import RequestError
from cedd.storage import JSONObject

END = "data: [DONE]\n\n"
"""The last event of a stream, as OpenAI's clients expect it."""


def encoded(record: object) -> str:
    """ASCII JSON, since a text may hold lone surrogates that UTF-8 cannot encode."""
    return json.dumps(record, separators=(",", ":"), allow_nan=False)


def json_response(record: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A record as JSON."""
    return Response(encoded(record), status, headers, "application/json")


def error_response(error: RequestError) -> Response:
    """An error as JSON."""
    return json_response(error.record, error.status, error.headers)


def event(record: object) -> str:
    """A record as a server-sent event."""
    return f"data: {encoded(record)}\n\n"


async def event_stream(records: AsyncIterator[JSONObject | RequestError]) -> AsyncIterator[str]:
    """Records as server-sent events, and the end of the stream."""
    async for record in records:
        yield event(record.record if isinstance(record, RequestError) else record)
    yield END
