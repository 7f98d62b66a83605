"""Labels and texts by their probabilities under a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cedd.data.text import check_text
from cedd.evaluation.likelihood import LogLikelihood, TextLikelihoods

TEXT, LABEL = "{text}", "{label}"


class LogProbability(float):
    """A log-likelihood in nats with its error."""

    stderr: float
    """Monte Carlo standard error; 0 if the value is exact."""
    exact: bool
    """Whether the value is exact; otherwise it is a lower bound."""
    tokens: int

    def __new__(cls, value: float, stderr: float, exact: bool, tokens: int) -> LogProbability:
        made = super().__new__(cls, value)
        made.stderr, made.exact, made.tokens = stderr, exact, tokens
        return made

    @classmethod
    def of(cls, found: LogLikelihood) -> LogProbability:
        """The log-likelihood of an answer."""
        return cls(found.value, found.stderr, found.exact, found.tokens)


@dataclass(frozen=True)
class Classification:
    """The labels of a text."""

    label: str
    """The most probable label."""
    probabilities: dict[str, float]
    """The probability of each label given that it is one of them, the most probable first."""
    log_likelihoods: dict[str, LogProbability]
    """log p(label and the text after it | the text before it), for each label."""


class RankedText(NamedTuple):
    """A text and its log-likelihood."""

    text: str
    log_likelihood: LogProbability


def classify(likelihoods: TextLikelihoods, text: str, labels: Sequence[str], template: str) -> Classification:
    """The labels of a text, by the likelihood of the template with each of them.

    The template is cut before the label. By Bayes' rule, p(label | rest) is proportional to p(label and the text after
    it | the text before it).
    """
    if isinstance(labels, str) or len(set(labels)) != len(labels) or len(labels) < 2:
        raise ValueError(f"labels must be at least two different texts (got {labels!r})")
    for one in (text, template, *labels):
        check_text(one, "what is classified")
    if template.count(TEXT) != 1 or template.count(LABEL) != 1:
        raise ValueError(f"the template must have {TEXT} and {LABEL} once each (got {template!r})")
    before, after = template.split(LABEL)
    context = before.replace(TEXT, text)
    answers = [label + after.replace(TEXT, text) for label in labels]
    found = [LogProbability.of(one) for one in likelihoods.answers(context, answers)]
    by_label = dict(sorted(zip(labels, found, strict=True), key=lambda pair: -pair[1]))
    best = max(found)
    total = math.fsum(math.exp(one - best) for one in found)
    shares = {label: math.exp(one - best) / total for label, one in by_label.items()}
    return Classification(next(iter(shares)), shares, by_label)


def rank(likelihoods: TextLikelihoods, texts: Sequence[str], *, per_token: bool) -> list[RankedText]:
    """Texts with their log-likelihoods, the most probable first."""
    if isinstance(texts, str) or not texts:
        raise ValueError("texts must be a list of at least one text")
    for text in texts:
        check_text(text, "what is ranked")
    found = [LogProbability.of(one) for one in likelihoods.answers("", texts)]

    def worth(one: RankedText) -> float:
        return -one.log_likelihood / (one.log_likelihood.tokens if per_token else 1)

    return sorted((RankedText(*pair) for pair in zip(texts, found, strict=True)), key=worth)
