"""What the server takes at most, and what it says of what it does not take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What the server takes at most."""

    queue: int = 256
    """Requests waiting or under way; further ones are answered 503, with Retry-After."""
    together: int = 32
    """Runs under way at once; requests beyond them wait. Completions that are drawn as one batch are one."""
    deadline: float = 120.0
    """Seconds that a request may take, waiting included."""
    most_texts: int = 16
    """Texts of a request."""
    most_steps: int = 1024
    """Steps of a sampler."""
    most_blank: int = 4_096
    """Tokens in the blanks of a text."""
    most_characters: int = 16_384
    """Characters of a text."""
    most_bytes: int = 131_072
    """Bytes of a request."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0; got {value}")


KINDS = {
    400: "invalid_request_error",
    503: "server_busy",
    504: "deadline_exceeded",
}


class Refused(Exception):
    """What is not done: a status of HTTP, a sentence that says why, and headers."""

    def __init__(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.headers = status, sentence, headers or {}

    @property
    def record(self) -> dict[str, object]:
        """As JSON, in OpenAI's form."""
        kind = KINDS.get(self.status, KINDS[400])
        return {"error": {"message": self.sentence, "type": kind, "code": self.status}}


def busy(sentence: str, seconds: int = 2) -> Refused:
    """Not now."""
    return Refused(503, sentence, {"Retry-After": str(seconds)})
