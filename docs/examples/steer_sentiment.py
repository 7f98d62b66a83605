"""Steer sentiment with a small classifier: particles weighted by its log-odds r, so that texts follow p(x) exp(s r(x)).

Prints the mean log-odds for each strength s with its standard error, and the texts.
"""

import re
from collections import Counter
from collections.abc import Sequence
from math import log
from statistics import mean, stdev

import cedd

GOOD = "good great happy bright kind lovely beautiful fine warm glad pleasant gentle love joy peace cheerful friendly"
BAD = "bad sad dark cruel ugly cold awful terrible angry dreadful poor wicked hate fear pain gloomy miserable"
TEXT = "It was a ____{2} day, and the people were ____{2}."


class NaiveBayes:
    """Log-odds of two classes by the words of a text, learned from one text of each."""

    def __init__(self, good: str, bad: str) -> None:
        self.good, self.bad = (Counter(re.findall(r"[a-z]+", text)) for text in (good, bad))

    def __call__(self, texts: Sequence[str]) -> list[float]:
        """One number per text."""
        return [sum(map(self.log_odds, re.findall(r"[a-z]+", text.lower()))) for text in texts]

    def log_odds(self, word: str) -> float:
        """log p(word | good) / p(word | bad), with one count more for each."""
        return log((self.good[word] + 1) / (self.bad[word] + 1))


if __name__ == "__main__":
    model, reward = cedd.load("english"), NaiveBayes(GOOD, BAD)
    for strength in (-3.0, 0.0, 3.0):
        texts = model.infill(TEXT, n=4, reward=reward, strength=strength, particles=12, seed=1)
        scores = reward(texts)
        print(f"{strength:+.0f}: {mean(scores):+.2f} ± {stdev(scores) / 2:.2f}", *texts, sep="\n    ")
