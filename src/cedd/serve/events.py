"""Answers: JSON, and streams of server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response

from cedd.serve.limits import Refused

END = "data: [DONE]\n\n"
"""The last event of a stream, as OpenAI's clients expect it."""


def encoded(record: Any) -> str:
    """JSON in ASCII: a text may hold what UTF-8 cannot write."""
    return json.dumps(record, separators=(",", ":"), allow_nan=False)


def answer(record: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A record as JSON."""
    return Response(encoded(record), status, headers, "application/json")


def refused(refusal: Refused) -> Response:
    """A refusal as JSON."""
    return answer(refusal.record, refusal.status, refusal.headers)


def event(record: Any) -> str:
    """A record as an event of a stream."""
    return f"data: {encoded(record)}\n\n"


async def stream(records: AsyncIterator[dict[str, Any] | Refused]) -> AsyncIterator[str]:
    """Events of records, and the end."""
    async for record in records:
        yield event(record.record if isinstance(record, Refused) else record)
    yield END
