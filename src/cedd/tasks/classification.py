"""Labels and texts by their probabilities under a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cedd.bounds.estimate import Interval
from cedd.data.text import check_text
from cedd.evaluation.likelihood import LogLikelihood, TextLikelihoods

TEXT, LABEL = "{text}", "{label}"


class LogProbability(float):
    """A log-likelihood in nats with its error."""

    stderr: float
    """Monte Carlo standard error; 0 if the value is exact."""
    exact: bool
    """Whether the value is exact; otherwise it is an estimate of a lower bound."""
    ci95: tuple[float, float]
    """The 95% interval of the estimate, from its Monte Carlo error; a point if the value is exact."""
    tokens: int

    def __new__(cls, value: float, stderr: float, exact: bool, tokens: int, ci95: Interval) -> LogProbability:
        made = super().__new__(cls, value)
        made.stderr, made.exact, made.tokens, made.ci95 = stderr, exact, tokens, ci95
        return made

    @classmethod
    def of(cls, found: LogLikelihood) -> LogProbability:
        """The log-likelihood of an answer."""
        return cls(found.value, found.stderr, found.exact, found.tokens, found.ci95)


@dataclass(frozen=True)
class Classification:
    """The labels of a text."""

    label: str
    """The most probable label."""
    probabilities: dict[str, float]
    """The probability of each label given that it is one of them, the most probable first."""
    intervals: dict[str, tuple[float, float]]
    """The 95% interval of each probability; a point if it is exact. It treats the errors of the labels as independent;
    they share their noise, so it is wider than necessary."""
    log_likelihoods: dict[str, LogProbability]
    """log p(label and the text after it | the text before it), for each label."""


class RankedText(NamedTuple):
    """A text and its log-likelihood."""

    text: str
    log_likelihood: LogProbability


def listed_texts(texts: Sequence[str], what: str) -> list[str]:
    """Texts as a list; an error if there are none, or if one is empty.

    Args:
        texts: the texts.
        what: their name in messages.
    """
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{what} must be a list of at least one text (got {texts!r})")
    for number, text in enumerate(texts):
        check_text(text, f"each of the {what}")
        if not text:
            raise ValueError(f"{what} must not be empty texts (got '' at index {number})")
    return list(texts)


def classify(likelihoods: TextLikelihoods, text: str, labels: Sequence[str], template: str) -> Classification:
    """The probabilities of the labels of a text, by the likelihood of the template with each of them.

    The template is cut before the label. By Bayes' rule, p(label | rest) is proportional to p(label and the text after
    it | the text before it).
    """
    labels = listed_texts(labels, "labels")
    if len(set(labels)) != len(labels) or len(labels) < 2:
        raise ValueError(f"labels must be at least two different texts (got {labels!r})")
    check_text(text, "the text to classify")
    check_text(template, "template")
    if template.count(TEXT) != 1 or template.count(LABEL) != 1:
        raise ValueError(f"the template must have {TEXT} and {LABEL} once each (got {template!r})")
    before, after = template.split(LABEL)
    context = before.replace(TEXT, text)
    answers = [label + after.replace(TEXT, text) for label in labels]
    written: dict[bytes, str] = {}
    for label, answer in zip(labels, answers, strict=True):
        other = written.setdefault(likelihoods.encoded(context, answer)[1].tobytes(), label)
        if other != label:
            raise ValueError(f"the labels {other!r} and {label!r} have the same tokens in this model")
    found = [LogProbability.of(one) for one in likelihoods.answers(context, answers)]
    by_label = dict(sorted(zip(labels, found, strict=True), key=lambda pair: -pair[1]))
    best = max(found)
    total = math.fsum(math.exp(one - best) for one in found)
    shares = {label: math.exp(one - best) / total for label, one in by_label.items()}
    intervals = {label: _interval(label, by_label, shares) for label in shares}
    return Classification(next(iter(shares)), shares, intervals, by_label)


def _interval(label: str, found: Mapping[str, LogProbability], shares: Mapping[str, float]) -> Interval:
    """The interval of the probability p of a label: log p / (1 - p) is the label's log-likelihood minus a log-sum-exp
    over the other labels, and the half-widths of these terms are added in quadrature."""
    share = shares[label]
    if all(one.exact for one in found.values()):
        return share, share
    others = math.fsum(one for name, one in shares.items() if name != label)
    weights = {name: 1.0 if name == label else one / others if others > 0 else 0.0 for name, one in shares.items()}
    half = math.hypot(*((one.ci95[1] - one) * weights[name] for name, one in found.items()))
    return _moved(share, others, -half), _moved(share, others, half)


def _moved(share: float, others: float, by: float) -> float:
    """A probability after adding `by` to its log-odds."""
    return share / (share + others * math.exp(min(-by, 700.0)))


def rank(likelihoods: TextLikelihoods, texts: Sequence[str], *, per_token: bool) -> list[RankedText]:
    """Texts with their log-likelihoods, the most probable first."""
    texts = listed_texts(texts, "texts")
    found = [LogProbability.of(one) for one in likelihoods.answers("", texts)]

    def score(one: RankedText) -> float:
        return one.log_likelihood / (one.log_likelihood.tokens if per_token else 1)

    return sorted((RankedText(*pair) for pair in zip(texts, found, strict=True)), key=score, reverse=True)
