"""Steer sentiment with a small classifier: particles weighted by its log-odds, so that texts follow p(x) exp(r(x))."""

import re
from collections import Counter
from collections.abc import Sequence
from math import log

import cedd

GOOD = "a good day, happy and bright. a kind and lovely friend. we love this beautiful place. great joy and peace."
BAD = "a bad day, sad and dark. a cruel and ugly enemy. we hate this terrible place. great fear and pain."


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


def steered(model: cedd.LanguageModel, strength: float, seed: int, length: int = 12) -> list[str]:
    """Texts steered towards the good (or, with a negative strength, the bad)."""
    reward, how = NaiveBayes(GOOD, BAD), {"prompt": "It was a", "length": length, "count": 6}
    return [one.text for one in model.particles(reward=reward, strength=strength, seed=seed, **how)]


if __name__ == "__main__":
    model = cedd.load("english")
    for strength in (-4.0, 0.0, 4.0):
        print(strength, *steered(model, strength, seed=1), sep="\n    ")
