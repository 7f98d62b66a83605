"""Limits of the server, and the error of a request that is refused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of the server."""

    max_queue: int = 256
    """Requests waiting or running. Further requests get 503 with Retry-After."""
    max_concurrent: int = 32
    """Requests running at once; others wait. Completions in one batch count as one."""
    timeout: float = 120.0
    """Seconds per request, including waiting."""
    max_connections: int = 512
    """Open connections, or fewer if the limit on open files is lower. A new connection replaces the oldest idle one."""
    max_texts: int = 16
    """Texts per request."""
    max_steps: int = 1024
    """Sampling steps per request."""
    max_blank_tokens: int = 4_096
    """Tokens in all blanks of a text, or written by a model that writes blocks."""
    max_characters: int = 16_384
    """Characters per text."""
    max_body_bytes: int = 131_072
    """Bytes per request."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0 (got {value})")


KINDS = {
    400: "invalid_request_error",
    503: "server_busy",
    504: "deadline_exceeded",
}


class RequestError(Exception):
    """A refused request: HTTP status, message, headers, and error code (by default the status)."""

    def __init__(
        self, status: int, message: str, headers: dict[str, str] | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.headers, self.code = status, message, headers or {}, code or status

    @property
    def record(self) -> dict[str, object]:
        """The error as JSON, in OpenAI's format."""
        kind = KINDS.get(self.status, KINDS[400])
        return {"error": {"message": self.message, "type": kind, "code": self.code}}


def server_busy(message: str, seconds: int = 2) -> RequestError:
    """A 503 error; the client may retry after `seconds`."""
    return RequestError(503, message, {"Retry-After": str(seconds)})
