"""The result of a correction: what was changed, and where. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from cedd.storage import JSONObject

Watch = Callable[[float], None]
"""Called regularly with the share of the text that the network has read since the last call."""


@dataclass(frozen=True)
class Change:
    """A replaced token, or word, or pair of words."""

    position: int
    """Where it begins in the original text, in characters."""
    before: str
    after: str
    confidence: float
    """p(x_0 = the new token), given the original text (one step) or the text at that time (several)."""
    error_probability: float
    """1 - p(x_0 = the old token)."""
    corrected_position: int = 0
    """Where the replacement begins in the corrected text."""
    candidates: tuple[tuple[str, float], ...] = ()
    """For words: candidates with their probabilities, the likeliest first, including the original."""

    def moved(self, offset: int) -> Change:
        """The same change, `offset` characters further on."""
        return replace(self, position=self.position + offset)

    @property
    def span(self) -> tuple[int, int]:
        """Start and end in the original text."""
        return self.position, self.position + len(self.before)

    @property
    def corrected_span(self) -> tuple[int, int]:
        """Start and end in the corrected text."""
        return self.corrected_position, self.corrected_position + len(self.after)


class Corrected(str):
    """The corrected text, with its changes in order.

    Args:
        text: the corrected text.
        original: the original text.
        changes: the replacements; their positions in the corrected text are computed here.
        suspicious: what was not replaced but may be wrong; `after` equals `before`.
    """

    original: str
    changes: tuple[Change, ...]
    suspicious: tuple[Change, ...]

    def __new__(
        cls, text: str, original: str, changes: Sequence[Change], suspicious: Sequence[Change] = ()
    ) -> Corrected:
        made = super().__new__(cls, text)
        made.original = original
        both = list(_placed(sorted([*changes, *suspicious], key=lambda change: change.position)))
        made.changes = tuple(change for change in both if change.before != change.after)
        made.suspicious = tuple(change for change in both if change.before == change.after)
        return made

    @property
    def text(self) -> str:
        return str(self)


def _placed(changes: Iterable[Change]) -> Iterator[Change]:
    """The changes with their positions in the corrected text. Several bytes of one character may change."""
    end = shift = 0
    for change in changes:
        start = max(end, change.position + shift)
        end, shift = start + len(change.after), shift + len(change.after) - len(change.before)
        yield replace(change, corrected_position=start)


def correction_record(corrected: Corrected, suggest: int | None = None) -> JSONObject:
    """A correction as JSON; with `suggest`, that number of candidates for each change, and also the suspicious
    words."""

    def shown(change: Change) -> JSONObject:
        record = {**asdict(change), "span": change.span, "corrected_span": change.corrected_span}
        candidates = [{"text": text, "probability": p} for text, p in record.pop("candidates")[:suggest]]
        return {**record, "candidates": candidates} if suggest else record

    result: JSONObject = {"text": corrected.text, "original": corrected.original}
    result["changes"] = [shown(change) for change in corrected.changes]
    return {**result, "suspicious": [shown(change) for change in corrected.suspicious]} if suggest else result
