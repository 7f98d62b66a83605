"""Streaming a completion: the prefix that no later step can change."""

from __future__ import annotations

from collections.abc import Sequence

from cedd.data.text import before_first


class TextStream:
    """Decides what to send of one text as it is generated.

    Args:
        prompt: the beginning of the text.
        echo: whether the prompt is sent too.
        stops: the text ends before the first of these. An end that may be the beginning of a stop is held back.
        monotone: whether tokens are final once they are revealed. If not, the whole text is sent at the end.
    """

    def __init__(self, prompt: str, echo: bool, stops: Sequence[str], monotone: bool) -> None:
        self._begin, self._head, self._stops, self._monotone = len(prompt), prompt * echo, stops, monotone
        self._pieces: list[str | None] = []
        self._final, self._text, self._sent = 0, "", 0

    def start(self, pieces: Sequence[str | None]) -> None:
        """Set the tokens before the first step; None is a mask."""
        self._pieces = list(pieces)

    def edit(self, place: int, piece: str | None) -> None:
        """Change a token."""
        self._pieces[place] = piece

    def advance(self) -> str:
        """Text that has become final since the last call."""
        if not self._monotone:
            return ""
        begin = self._final
        while self._final < len(self._pieces) and self._pieces[self._final] is not None:
            self._final += 1
        if self._final == len(self._pieces):
            return ""  # the rest is sent with the result, which follows
        self._text += "".join(piece or "" for piece in self._pieces[begin : self._final])
        text = self._text[self._begin :]
        kept = before_first(text, self._stops)
        kept = kept if kept != text else text[: len(text) - partial_stop_length(text, self._stops)]
        return self._send(self._head + kept)

    def rest(self, text: str) -> str:
        """The part of the whole text that was not sent before."""
        return self._send(text)

    def _send(self, text: str) -> str:
        new = text[self._sent :]
        self._sent += len(new)
        return new


def partial_stop_length(text: str, stops: Sequence[str]) -> int:
    """The length of the longest suffix of the text that is the beginning of a stop."""
    longest = max(map(len, stops), default=0) - 1
    ends = range(min(longest, len(text)), 0, -1)
    return next((size for size in ends if any(stop.startswith(text[-size:]) for stop in stops)), 0)
