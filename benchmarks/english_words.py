"""Make the lexicon of the packaged model `english` (`words.safetensors`) from books, Wikipedia and misspellings.

    python benchmarks/english_words.py --out src/cedd/pretrained/english

Words and word sequences are counted in CEDD_DATA/corpus (books.txt.xz, wikipedia.txt.xz), without the last --held-out
megabytes, whose sentences are used for fitting. The model of misspellings is learned from the training part of the
lists in CEDD_DATA/misspellings. The weights of decisions are fitted on this part too, in sentences from the first half
of the held-out text: the weights without the network on all suspicious words, those with it on --asked undecided ones.
This takes seven minutes on one core. --weights-only fits the weights of an existing lexicon.

    python benchmarks/english_words.py --out src/cedd/pretrained/english --lexicon-only

makes the lexicon and keeps the existing weights. The packaged weights were fitted with fewer suspicious words; fitting
them again gives the same trade-off (dev/lab-notes.md).
"""

from __future__ import annotations

import lzma
import re
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from helps import parser_of
from numpy.typing import NDArray
from word_protocol import LISTS, Misspelt, Pair, bare_words, joined_and_split, number, placed, read_pairs, sentences

from cedd import load
from cedd.apps.correct.candidates import Neighbours
from cedd.apps.correct.channel import Channel, learn_edits
from cedd.apps.correct.decisions import network_options, with_network_scores
from cedd.apps.correct.lexicon import (
    DISCOUNT,
    LEXICON_FILE,
    Lexicon,
    gram_table,
    hashes,
    load_lexicon,
    save_lexicon,
    save_weights,
)
from cedd.apps.correct.likelihood import likelihoods
from cedd.apps.correct.reader import Reader
from cedd.apps.correct.suspects import FEATURES, Suspect, keep_ratio, weight_vector
from cedd.apps.correct.words import Token, key_of, tokens_of
from cedd.data.folders import data_folder
from cedd.spelling.options import correction_options

TOKEN = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*|\d+|[.!?;:,]|\n\n")
LEAST = {1: 4, 2: 3, 3: 6}
"""Words and sequences of two and three that are counted less often are left out."""
BUCKETS = 395_000
OF_LISTS = {"birkbeck": 0.3}
"""Weights of pairs: this list is large, and of other mistakes than most."""
HELD_OUT = {"train": (0.0, 0.5), "dev": (0.5, 0.75), "test": (0.75, 1.0)}
"""The parts of the text that was left out."""
GIVEN = {"kept repeated": 1.5, "kept rare remembered": -2.0, "frequency opening": 0.4, "split derived": -3.0}
GIVEN |= {"kept dictionary": 3.0, "kept large dictionary": 1.5, "kept technical": 6.0, "kept uncommon opening": 4.0}
GIVEN |= {"kept contraction": -6.0}
"""Weights that cannot be fitted on the examples. A repeated word is intended (each example is one sentence). A known
misspelling is a misspelling again (all of the examples' were seen). A rare word that opens a sentence is a misspelt
common word rather than a name (lists have a misspelling of "the" once, texts often). A compound of content words
(whitespace) is not split, known words (`english_known_words.py`) are kept, and an uncommon word may open a sentence
("Bake for twenty minutes"): the examples are from books and encyclopedias, which have few imperatives."""
OPEN_TO_FIT = (0.02, 0.98)
"""Limits of p_keep / (p_keep + p_best) for words on which the weights with the network are fitted; wider than in
use."""


def corpus_texts(folder: Path, held_out: float) -> list[tuple[str, str]]:
    """The training part of each text of the corpus, and its held-out end, cut between paragraphs."""
    texts: list[tuple[str, str]] = []
    for path in sorted(folder.glob("*.txt.xz")):
        with lzma.open(path, "rt", encoding="utf-8") as file:
            text = file.read()
        cut = text.rfind("\n\n", 0, len(text) - int(held_out * 1e6))
        texts.append((text[:cut], text[cut:]))
    return texts


def held_out_sentences(texts: Sequence[str], part: str) -> list[str]:
    """The sentences of one part of what was left out, in a fixed order without meaning."""
    first, last = HELD_OUT[part]
    found = [s for text in texts for s in sentences(text[int(first * len(text)) : int(last * len(text))])]
    return sorted(found, key=lambda sentence: number("s", sentence))


# ----------------------------------------------------------------------------------------------------------------
# Counts


class Counted(NamedTuple):
    """Words by falling count, how often they are written without capitals, and the corpus as their numbers."""

    words: list[str]
    counts: NDArray[np.int64]
    lower: NDArray[np.int64]
    numbers: NDArray[np.int64]


def count_words(texts: Sequence[str]) -> Counted:
    """All tokens of the texts, as the lexicon has them."""
    types: dict[str, int] = {}
    found = array("I")
    for text in texts:
        start = 0
        while start < len(text):
            end = text.find("\n\n", start + 4_000_000)
            end = len(text) if end < 0 else end
            found.extend([types.setdefault(token, len(types)) for token in TOKEN.findall(text, start, end)])
            start = end
    written = np.frombuffer(found, np.uint32)
    folded: dict[str, int] = {}
    fold = np.array([folded.setdefault(key_of(token), len(folded)) for token in types])
    counts = np.bincount(written, minlength=len(types))
    plain = np.array([token == token.lower() for token in types])
    total = np.bincount(fold, weights=counts).astype(np.int64)
    lower = np.bincount(fold, weights=counts * plain).astype(np.int64)
    order = np.argsort(-total, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    names = list(folded)
    return Counted([names[i] for i in order.tolist()], total[order], lower[order], rank[fold][written])


def count_grams(numbers: NDArray[np.int64], size: int, V: int, least: int) -> tuple[NDArray[np.int64], Any]:
    """Sequences of `size` words below V that stand in the text `least` times, and how often."""
    parts = [numbers[i : len(numbers) - size + 1 + i] for i in range(size)]
    inside = np.logical_and.reduce([part < V for part in parts])
    keys = np.zeros(int(inside.sum()), np.int64)
    for part in parts:
        keys = keys << 20 | part[inside]
    keys.sort()
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    counts = np.diff(np.append(first, len(keys)))
    keys, counts = keys[first][counts >= least], counts[counts >= least]
    return np.stack([keys >> 20 * (size - 1 - i) & 0xFFFFF for i in range(size)], -1), counts


def make_lexicon(texts: Sequence[str], lists: Path) -> Lexicon:
    """Words, sequences and the noise of people; no weights yet."""
    counted = count_words(texts)
    V = int((counted.counts >= LEAST[1]).sum())
    counts = counted.counts[:V]
    pairs, pair_counts = count_grams(counted.numbers, 2, V, LEAST[2])
    triples, triple_counts = count_grams(counted.numbers, 3, V, LEAST[3])
    table = gram_table(
        np.concatenate([hashes(pairs), hashes(triples)]), np.concatenate([pair_counts, triple_counts]), BUCKETS
    )
    learnt = [
        (name, pair)
        for name in LISTS
        for pair in read_pairs(lists / f"{name}.tsv", "train")
        if " " not in pair.written + pair.meant
    ]
    weighted = [(pair.written, pair.meant, OF_LISTS.get(name, 1.0)) for name, pair in learnt]
    named = counted.lower[:V] < 0.3 * counts
    lexicon = Lexicon(
        counted.words[:V],
        np.log(counts),
        named,
        np.ones(V),
        table,
        Channel(learn_edits(weighted)),
        {},
        memory_of([pair for _, pair in learnt], set(counted.words[:V])),
    )
    stored = np.maximum(lexicon.gram_counts(pairs) - DISCOUNT, 0)
    left = np.clip(1 - np.bincount(pairs[:, 0], weights=stored, minlength=V) / counts, 0.01, 1)
    return replace(lexicon, left=left)


def memory_of(pairs: Sequence[Pair], known: set[str]) -> dict[str, tuple[str, ...]]:
    """The intended words of each misspelling, if they are known."""
    found: dict[str, list[str]] = {}
    for pair in dict.fromkeys(pairs):
        if pair.meant in known:
            found.setdefault(pair.written, []).append(pair.meant)
    return {written: tuple(found[written]) for written in sorted(found)}


# ----------------------------------------------------------------------------------------------------------------
# Weights


class Example(NamedTuple):
    """A suspicious word and its correct option; the first option (no change) if the intended word is not among them."""

    sentence: Misspelt
    tokens: list[Token]
    suspect: Suspect
    right: int


def training_sentences(texts: Sequence[str], lists: Path, mistakes: int, clean: int) -> list[Misspelt]:
    """Sentences with mistakes of the training part, and without."""
    found = held_out_sentences(texts, "train")
    pairs = {name: read_pairs(lists / f"{name}.tsv", "train") for name in LISTS}
    spaces = joined_and_split(found[:clean], clean // 5)
    return [*(Misspelt(s, s) for s in found[:clean]), *placed(pairs, found[clean:], mistakes), *spaces]


def examples(reader: Reader, given: Sequence[Misspelt]) -> list[Example]:
    """All suspicious words in the sentences."""
    made: list[Example] = []
    for sentence in given:
        tokens, meant, text = tokens_of(sentence.written), bare_words(sentence.meant), sentence.written
        for suspect in reader.suspects(text, tokens):
            rights = [
                place
                for place, o in enumerate(suspect.options)
                if place
                and bare_words(text[: tokens[o.first].start] + o.text + text[tokens[o.last - 1].stop :]) == meant
            ]
            wrong = sentence.pair is not None and bool(rights)
            made.append(Example(sentence, tokens, suspect, rights[0] if wrong else 0))
    return made


def fit(given: Sequence[Example], without: Sequence[str] = (), penalty: float = 2e-5) -> dict[str, float]:
    """The weights that make the right options most probable, beside those that are `GIVEN` and 0 for features that are
    left out: softmax regression with a quadratic penalty."""
    most = max(len(example.suspect.options) for example in given)
    features = torch.zeros(len(given), most, len(FEATURES))
    absent = torch.full((len(given), most), -1e9)
    for row, example in enumerate(given):
        size = len(example.suspect.options)
        features[row, :size], absent[row, :size] = torch.from_numpy(example.suspect.features).float(), 0.0
    right = torch.tensor([example.right for example in given])
    used = torch.tensor([float(name not in (*without, *GIVEN)) for name in FEATURES])
    fixed = torch.from_numpy(weight_vector(GIVEN)).float()
    weights = torch.zeros(len(FEATURES), requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        fitted = torch.nn.functional.cross_entropy(features @ (weights * used + fixed) + absent, right)
        value = fitted + penalty * weights.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    found = (weights * used + fixed).detach().double().numpy().round(4).tolist()
    named = dict(zip(FEATURES, found, strict=True))
    print(f"{len(given)} suspicious words, {loss().item():.4f} nats: {named}", flush=True)
    return named


def open_examples(given: Sequence[Example], weights: Mapping[str, float], model: Path, count: int) -> list[Example]:
    """Words that the weights leave undecided, with the network's scores of their most probable options."""
    loaded, alone, made = load(model, "cpu"), weight_vector(weights), list[Example]()
    scores = likelihoods(loaded, correction_options(loaded, {}).t if loaded.process.can_shuffle else None)
    for example in sorted(given, key=lambda e: number("open", e.sentence.written, e.suspect.place)):
        p = example.suspect.probabilities(alone)
        if not OPEN_TO_FIT[0] < keep_ratio(p) < OPEN_TO_FIT[1]:
            continue
        kept = network_options(p)
        asked = example.suspect.only(kept)
        (suspect,) = with_network_scores(example.sentence.written, example.tokens, [asked], scores)
        made.append(example._replace(suspect=suspect, right=kept.index(example.right) if example.right in kept else 0))
        if len(made) == count:
            break
    return made


def fitted(lexicon: Lexicon, given: Sequence[Misspelt], model: Path, asked: int) -> dict[str, dict[str, float]]:
    """The weights without a network, and those with the network in a folder, fitted on `asked` undecided words."""
    unseen = replace(lexicon, memory={}, confused=None)  # memory and confused words have the misspellings of `given`
    found = examples(Reader(unseen), given)
    alone = fit(found, without=("network", "network tokens"))
    some = open_examples(found, alone, model, asked)
    return {"alone": alone, "network": fit(some, penalty=2e-4) if some else alone}


def main() -> int:
    """Count, learn, fit, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--corpus", type=Path, help="folder of the texts (default: CEDD_DATA/corpus)")
    parser.add_argument("--lists", type=Path, help="folder of the misspellings (default: CEDD_DATA/misspellings)")
    parser.add_argument("--out", type=Path, required=True, help="the model's folder")
    parser.add_argument("--held-out", type=float, default=5.0, help="megabytes at the end of each text")
    parser.add_argument("--mistakes", type=int, default=1500, help="misspellings per list to fit the weights on")
    parser.add_argument("--clean", type=int, default=4000, help="sentences without mistakes, for the same")
    parser.add_argument(
        "--asked", type=int, default=2000, help="undecided words that the network scores, for the same purpose"
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--weights-only", action="store_true", help="the lexicon is there; fit its weights anew")
    part.add_argument("--lexicon-only", action="store_true", help="both are there; make the lexicon anew")
    arguments = parser.parse_args()
    try:
        corpus, lists = data_folder("corpus", arguments.corpus), data_folder("misspellings", arguments.lists)
    except ValueError as error:
        parser.error(str(error))
    texts, file = corpus_texts(corpus, arguments.held_out), arguments.out / LEXICON_FILE
    lexicon = load_lexicon(file) if arguments.weights_only else make_lexicon([text for text, _ in texts], lists)
    if arguments.lexicon_only:
        weights = load_lexicon(file).weights
    else:
        given = training_sentences([end for _, end in texts], lists, arguments.mistakes, arguments.clean)
        weights = fitted(lexicon, given, arguments.out, arguments.asked)
    if arguments.weights_only:
        save_weights(file, weights)
    else:
        save_lexicon(file, replace(lexicon, weights=weights, confused=Neighbours(lexicon).confused_pairs()))
    print(f"{file}: {len(lexicon.words)} words, {file.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
