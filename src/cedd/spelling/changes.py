"""What a correction changed, and where. No torch: a text of which no network is asked waits for none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

Watch = Callable[[float], None]
"""Called now and then with how much the network has read since the last call, in whole texts."""


@dataclass(frozen=True)
class Change:
    """One token, or one word or two, that was replaced."""

    position: int
    """Where it begins in the given text, in characters."""
    before: str
    after: str
    confidence: float
    """p(x_0 = the new token), given the text as it was (one step) or as it became (several)."""
    doubt: float
    """1 - p(x_0 = the old token)."""
    corrected_position: int = 0
    """Where the new one begins in the corrected text."""
    candidates: tuple[tuple[str, float], ...] = ()
    """Of words: what may have been meant, with probabilities, the likeliest first; the old text is among it."""

    def moved(self, offset: int) -> Change:
        """The same in a text that has so much more before it."""
        return replace(self, position=self.position + offset)

    @property
    def span(self) -> tuple[int, int]:
        """From where to where it was, in the given text."""
        return self.position, self.position + len(self.before)

    @property
    def corrected_span(self) -> tuple[int, int]:
        """From where to where it is now, in the corrected text."""
        return self.corrected_position, self.corrected_position + len(self.after)


class Corrected(str):
    """The corrected text, with what was changed, in order.

    Args:
        text: the corrected text.
        original: the text as it was given.
        changes: what was replaced; where it stands in the corrected text is found here.
        doubts: what was not replaced, though something else may have been meant: `after` is what it was.
    """

    original: str
    changes: tuple[Change, ...]
    doubts: tuple[Change, ...]

    def __new__(cls, text: str, original: str, changes: Sequence[Change], doubts: Sequence[Change] = ()) -> Corrected:
        made = super().__new__(cls, text)
        made.original = original
        both = list(_placed(sorted([*changes, *doubts], key=lambda change: change.position)))
        made.changes = tuple(change for change in both if change.before != change.after)
        made.doubts = tuple(change for change in both if change.before == change.after)
        return made

    @property
    def text(self) -> str:
        return str(self)


def _placed(changes: Iterable[Change]) -> Iterator[Change]:
    """The changes with their places in the corrected text; of a character's bytes several may change."""
    end = shift = 0
    for change in changes:
        start = max(end, change.position + shift)
        end, shift = start + len(change.after), shift + len(change.after) - len(change.before)
        yield replace(change, corrected_position=start)


def correction_record(corrected: Corrected, suggest: int | None = None) -> dict[str, Any]:
    """A correction as JSON; with suggestions, so many candidates for each change, and also the doubts."""

    def shown(change: Change) -> dict[str, Any]:
        record = {**asdict(change), "span": change.span, "corrected_span": change.corrected_span}
        candidates = [{"text": text, "probability": p} for text, p in record.pop("candidates")[:suggest]]
        return {**record, "candidates": candidates} if suggest else record

    result: dict[str, Any] = {"text": corrected.text, "original": corrected.original}
    result["changes"] = [shown(change) for change in corrected.changes]
    return {**result, "doubts": [shown(change) for change in corrected.doubts]} if suggest else result
