"""Windows over a text of more tokens than a model's context."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """Tokens start..stop-1, which score or fill the tokens `first`..`last`-1; the rest is context."""

    start: int
    stop: int
    first: int
    last: int


def windows(count: int, length: int) -> list[Window]:
    """Windows of `length` tokens that overlap by a quarter and together score every token once."""
    if count <= length:
        return [Window(0, count, 0, count)]
    context = length // 8
    stride = length - 2 * context
    starts = [*range(0, count - length, stride), count - length]
    made: list[Window] = []
    scored = 0
    for start in starts:
        last = count if start == count - length else start + length - context
        made.append(Window(start, start + length, scored, last))
        scored = last
    return made
