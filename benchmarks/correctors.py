"""English spelling correctors on real misspellings: the shares fixed and miscorrected, speed and start.

    python benchmarks/correctors.py --out correctors.json

Misspellings of the test part of the lists in CEDD_DATA/misspellings (--part dev: for choices) are placed in sentences
of the corpus that the lexicon was not counted on, one per sentence. The other sentences are error-free, or have two
words joined or one split. Tools that are not installed are skipped and named: pyspellchecker, symspellpy, autocorrect,
codespell and typos are on PyPI, aspell and hunspell in Debian. jamspell is on PyPI, is built with SWIG 3 (on PyPI:
swig==3.0.12), and needs the locale en_US.UTF-8; --jamspell names the file of its model, which is trained on 600,000
sentences of the corpus if the file does not exist. Intervals are by sentence, and the share that each tool fixes is
also compared with that of the first, by pairs. Speed is in characters per second of CPU time, including that of
programs that are started, on --speed sentences in which one word in fifty is wrong. The results of other tools that
--out has for the same sentences are kept.

    python benchmarks/correctors.py --unused

measures on errors and sentences of the test part that none of the runs in `MEASURED` has used. They stay unused as long
as nothing is chosen by their results.

    python benchmarks/correctors.py --unused --count 3000 --only "cedd correct" "cedd, without known words"

measures what the list of known words costs.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from english_words import corpus_texts, held_out_sentences
from helps import parser_of
from word_protocol import (
    LISTS,
    Difference,
    Misspelt,
    Pair,
    joined_and_split,
    measure,
    paired_difference,
    placed,
    read_pairs,
    sentences,
    shortened,
)

import cedd
from cedd.apps.correct.engine import correct_words, corrector_folder
from cedd.apps.correct.lexicon import LEXICON_FILE, load_lexicon
from cedd.apps.correct.reader import Reader
from cedd.apps.correct.words import like
from cedd.data.folders import data_folder
from cedd.models.locate import packaged
from cedd.spelling.shares import Share
from cedd.storage import read_json, write_json

Correct = Callable[[Sequence[str]], list[str]]
"""Corrected texts, in order."""
WORD = re.compile(r"[A-Za-z]+(?:['’][A-Za-z]+)*")
KNOWN = 40_000
"""The most frequent words of the lexicon: what is written and among them is a real word."""
HELD_OUT_MB = 5.0
"""Megabytes at the end of each text of the corpus that the lexicon was not counted on."""
TRAINED_ON = 600_000
"""Number of sentences to train JamSpell's model on, as used by its authors."""
MEASURED = ((60, 200, 40), (300, 500, 100))
"""Mistakes of each list, clean sentences, and joined or split words of the published runs on the test part."""
SHOWN = ("real", "replaced", "swapped", "extra", "missing", "several", "real word", "joined", "split")


class Absent(Exception):
    """A peer that is not installed."""


def need(module: str, package: str | None = None) -> None:
    """Refuse to go on without a module, which a package of this or another name has."""
    if importlib.util.find_spec(module) is None:
        raise Absent(f"pip install {package or module}")


def program(name: str) -> str:
    """The path of a program."""
    if (found := shutil.which(name)) is None:
        raise Absent(f"there is no program {name}")
    return found


def each_word(correct: Callable[[str], str | None]) -> Correct:
    """Texts corrected word by word, with the case of what was written."""

    def replaced(match: re.Match[str]) -> str:
        return like(match[0], correct(match[0].lower()) or match[0]) if len(match[0]) > 1 else match[0]

    return lambda texts: [WORD.sub(replaced, text) for text in texts]


# ----------------------------------------------------------------------------------------------------------------
# The correctors


def ours(engine: Literal["words", "letters"], **options: Any) -> Correct:
    """cedd."""
    model = cedd.load(corrector_folder(packaged("english-char"), engine), "cpu")
    return lambda texts: [str(model.correct(text, engine=engine, **options)) for text in texts]


def without_known_words() -> Correct:
    """cedd, with a lexicon that lacks the list of known words."""
    model = cedd.load("english", "cpu")
    reader = Reader(replace(load_lexicon(packaged("english") / LEXICON_FILE), known={}))
    return lambda texts: [str(correct_words(model, text, reader=reader)) for text in texts]


def pyspellchecker() -> Correct:
    """The most frequent word of those fewest edits away."""
    need("spellchecker", "pyspellchecker")
    from spellchecker import SpellChecker  # pyright: ignore[reportMissingImports]

    return each_word(SpellChecker().correction)


def symspell() -> Correct:
    """The first suggestion for each word."""
    need("symspellpy")
    from importlib.resources import files

    from symspellpy import SymSpell, Verbosity  # pyright: ignore[reportMissingImports]

    tool = SymSpell()
    tool.load_dictionary(str(files("symspellpy") / "frequency_dictionary_en_82_765.txt"), 0, 1)

    def correct(word: str) -> str | None:
        found = tool.lookup(word, Verbosity.TOP, max_edit_distance=2)
        return found[0].term if found else None

    return each_word(correct)


def autocorrect() -> Correct:
    """autocorrect with its default settings."""
    need("autocorrect")
    from autocorrect import Speller  # pyright: ignore[reportMissingImports]

    tool = Speller("en")
    return lambda texts: [tool(text) for text in texts]


def jamspell(file: Path | None, corpus: Path) -> Correct:
    """JamSpell with the model in a file, which is trained if it does not exist."""
    need("jamspell")
    import jamspell as package  # pyright: ignore[reportMissingImports]

    if file is None:
        raise Absent("name the file of its model with --jamspell")
    if not file.exists():
        with tempfile.TemporaryDirectory() as folder:
            text, alphabet = Path(folder) / "text", Path(folder) / "alphabet"
            text.write_text("\n".join(training_sentences(corpus, TRAINED_ON)) + "\n", encoding="utf-8")
            alphabet.write_text(string.ascii_lowercase + "'", encoding="utf-8")
            package.TSpellCorrector().TrainLangModel(str(text), str(alphabet), str(file))
    tool = package.TSpellCorrector()  # one that has just been trained crashes
    if not tool.LoadLangModel(str(file)):
        raise Absent(f"{file} is not a model of JamSpell")
    return lambda texts: [tool.FixFragment(text) for text in texts]


def training_sentences(corpus: Path, count: int) -> list[str]:
    """About `count` sentences of the corpus, the same number of each text, without the part that tests use."""
    texts = [text for text, _ in corpus_texts(corpus, HELD_OUT_MB)]
    found = (sentences(text) for text in texts)
    return [one for of_text in found for one in of_text[:: max(1, len(of_text) * len(texts) // count)]]


def in_a_file(command: Callable[[Path], Sequence[str]]) -> Correct:
    """A program that corrects a file in place, a text a line."""

    def correct(texts: Sequence[str]) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "text.txt"
            path.write_text("\n".join(texts) + "\n", encoding="utf-8")
            subprocess.run([*command(path)], capture_output=True, check=False)
            return path.read_text(encoding="utf-8").split("\n")[: len(texts)]

    return correct


def codespell() -> Correct:
    """codespell's list of misspellings."""
    need("codespell_lib", "codespell")
    return in_a_file(lambda path: [sys.executable, "-m", "codespell_lib", "-w", str(path)])


def typos() -> Correct:
    """The list of misspellings of typos."""
    name = program("typos")
    return in_a_file(lambda path: [name, "--write-changes", str(path)])


def ispell(name: str, *more: str) -> Correct:
    """A program that speaks ispell's protocol: the first suggestion for each unknown word."""
    command = [program(name), "-a", *more]

    def correct(texts: Sequence[str]) -> list[str]:
        given = "".join(f"^{text}\n" for text in texts)
        said = subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout
        answers = said.split("\n", 1)[1].split("\n\n")
        return [with_suggestions(text, answer) for text, answer in zip(texts, answers, strict=False)]

    return correct


def with_suggestions(text: str, answer: str) -> str:
    """A text with the first suggestion of each line "& word count offset: first, second" in the word's place."""
    found: list[str] = []
    end = 0
    for line in answer.splitlines():
        if line.startswith("& "):
            head, _, listed = line.partition(": ")
            word = head.split()[1]
            if (start := text.find(word, end)) >= 0:
                found += [text[end:start], listed.split(", ")[0]]
                end = start + len(word)
    return "".join([*found, text[end:]])


CORRECTORS: Mapping[str, Callable[[argparse.Namespace], Correct]] = {
    "cedd correct": lambda _: ours("words"),
    "cedd, letters only": lambda _: ours("letters"),
    "cedd, without known words": lambda _: without_known_words(),
    "pyspellchecker": lambda _: pyspellchecker(),
    "symspellpy": lambda _: symspell(),
    "autocorrect": lambda _: autocorrect(),
    "jamspell": lambda options: jamspell(options.jamspell, data_folder("corpus", options.corpus)),
    "codespell": lambda _: codespell(),
    "typos": lambda _: typos(),
    "aspell": lambda _: ispell("aspell", "--lang=en_US"),
    "hunspell": lambda _: ispell("hunspell", "-d", "en_US"),
}
"""Functions that make the correctors, given the options of the command."""


# ----------------------------------------------------------------------------------------------------------------
# The test


def test_set(corpus: Path, lists: Path, part: str, counts: tuple[int, int, int], unused: bool) -> list[Misspelt]:
    """Sentences of one part: errors of each list, error-free sentences, and joined or split words."""
    found = held_out_sentences([end for _, end in corpus_texts(corpus, HELD_OUT_MB)], part)
    pairs = {name: read_pairs(lists / f"{name}.tsv", part) for name in LISTS}
    if unused:
        seen = [one for before in MEASURED for one in chosen(pairs, found, *before)]
        texts = {one.meant for one in seen}
        used = {tuple(map(str.lower, one.pair)) for one in seen if one.pair is not None}
        found = [text for text in found if text not in texts]
        pairs = {name: [pair for pair in of_list if pair not in used] for name, of_list in pairs.items()}
    return chosen(pairs, found, *counts)


def chosen(
    pairs: Mapping[str, Sequence[Pair]], texts: Sequence[str], count: int, clean: int, spaces: int
) -> list[Misspelt]:
    """The sentences of a run."""
    return [
        *(Misspelt(text, text) for text in texts[:clean]),
        *placed(pairs, texts[clean:], count),
        *joined_and_split(texts[:clean], spaces),
    ]


def mostly_right(given: Sequence[Misspelt], size: int, rate: float = 0.02) -> list[str]:
    """About `size` sentences in which this share of the words is wrong, as paragraphs of ten."""
    wrong = [s.written for s in given if s.pair is not None]
    clean = [s.written for s in given if s.pair is None]
    found, words, mistakes = list[str](), 0, 0
    while len(found) < size and wrong and clean:
        sentence = (wrong if mistakes <= rate * words else clean).pop()
        mistakes += mistakes <= rate * words
        words += len(sentence.split())
        found.append(sentence)
    return [" ".join(found[start : start + 10]) for start in range(0, len(found), 10)]


def every_nth_wrong(given: Sequence[Misspelt], size: int, n: int) -> list[str]:
    """`size` error-free sentences as paragraphs of ten, in which misspellings of other words replace each nth word; for
    n = 0, no word."""
    errors = [s.pair.written for s in given if s.pair is not None and s.source in LISTS]
    words = [s.written.split() for s in given if s.pair is None][:size]
    places = [(sentence, i) for sentence in words for i in range(len(sentence))]
    for turn, (sentence, i) in enumerate(places[n - 1 :: n] if n and errors else ()):
        sentence[i] = errors[turn % len(errors)]
    return [" ".join(" ".join(one) for one in words[start : start + 10]) for start in range(0, len(words), 10)]


def cpu_seconds() -> float:
    """CPU seconds of this process and of the child processes that have ended."""
    return sum(os.times()[:4])


def tested(
    make: Callable[[], Correct], given: Sequence[Misspelt], known: set[str], paragraphs: Sequence[str]
) -> dict[str, Any]:
    """One corrector: what it fixes and breaks, and how fast it is."""
    begin = time.perf_counter()
    correct = make()
    correct([given[0].written])
    start = time.perf_counter() - begin
    texts = [sentence.written for sentence in given]
    answers = dict(zip(texts, correct(texts), strict=True))
    begin = cpu_seconds()
    correct(paragraphs)
    seconds = cpu_seconds() - begin
    shares = measure(answers.__getitem__, given, known)
    return {
        "groups": {name: outcome.record() for name, outcome in shares.items()},
        "start_s": round(start, 2),
        "characters_per_cpu_s": round(sum(map(len, paragraphs)) / max(seconds, 0.01)),
        "shares": shares,
    }


def percent(share: Share) -> str:
    """A share with its interval."""
    low, high = share.ci95
    return f"{100 * share.value:.1f} ({100 * low:.1f}–{100 * high:.1f})"


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The results as a Markdown table."""
    names = ("fixed, %", "altered, %", "clean words broken, %", *SHOWN[1:], "characters/CPU s", "start, s")
    lines = ["| tool | " + " | ".join(names) + " |", "|---|" + "--:|" * len(names)]
    for tool, result in results.items():
        shares = result["shares"]
        kinds = [f"{100 * shares[kind].fixed.value:.1f}" if kind in shares else "" for kind in SHOWN[1:]]
        real, clean = shares["real"], shares["clean"].broken
        cells = [percent(real.fixed), percent(real.altered), f"{100 * clean.value:.2f}", *kinds]
        lines.append(f"| {tool} | {' | '.join(cells)} | {result['characters_per_cpu_s']:,} | {result['start_s']} |")
    return "\n".join(lines)


def differences(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The differences in fixed errors between the first tool and each other one, one per line."""
    (first, _), *others = results.items()
    lines = [""] * bool(others)
    for tool, result in others:
        found = Difference(**result["first_minus_this"])
        value, low, high = (f"{100 * one:.2f}" for one in found[:3])
        lines.append(
            f"fixed by {first} minus {tool}: {value} points [{low}, {high}]; "
            f"{found.gained} errors only by the former, {found.lost} only by the latter"
        )
    return "\n".join(lines)


def save_results(path: Path, about: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the figures to a file; those of other tools on the same sentences stay."""
    tools = dict[str, Any]()
    if path.is_file():
        before = read_json(path)
        if all(before.get(name) == about[name] for name in about if name != "bytes"):
            tools = before["tools"]
    tools |= {name: {k: v for k, v in result.items() if k != "shares"} for name, result in results.items()}
    ordered = {name: tools[name] for name in CORRECTORS if name in tools}
    write_json(path, {**about, "tools": ordered})


def main() -> int:
    """Test the tools that are installed."""
    parser = parser_of(__doc__)
    parser.add_argument("--corpus", type=Path, help="folder of the texts (default: CEDD_DATA/corpus)")
    parser.add_argument("--lists", type=Path, help="folder of the misspellings (default: CEDD_DATA/misspellings)")
    parser.add_argument("--jamspell", type=Path, metavar="FILE", help="JamSpell's model; trained if there is none")
    parser.add_argument("--part", choices=("dev", "test"), default="test", help="part of the lists of misspellings")
    parser.add_argument("--unused", action="store_true", help="only what no published run has used")
    parser.add_argument("--count", type=int, default=300, help="mistakes of each list")
    parser.add_argument("--clean", type=int, default=500, help="sentences without mistakes")
    parser.add_argument("--spaces", type=int, default=100, help="joined words, and as many split ones")
    parser.add_argument("--words", type=int, metavar="N", help="only N words of each sentence, with its error")
    parser.add_argument("--speed", type=int, default=400, help="sentences of the text that speed is measured on")
    parser.add_argument(
        "--rate", type=float, default=0.02, help="share of its words that are wrong; 1: one per sentence"
    )
    parser.add_argument("--every", type=int, metavar="N", help="measure speed with each Nth word wrong (0: none)")
    parser.add_argument(
        "--only", nargs="*", choices=list(CORRECTORS), default=list(CORRECTORS), help="these correctors"
    )
    parser.add_argument("--out", type=Path, help="write all figures to this .json")
    arguments = parser.parse_args()
    counts = (arguments.count, arguments.clean, arguments.spaces)
    try:
        corpus, lists = data_folder("corpus", arguments.corpus), data_folder("misspellings", arguments.lists)
        given = test_set(corpus, lists, arguments.part, counts, arguments.unused)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if arguments.words is not None:
        given = [short for one in given if (short := shortened(one, arguments.words)) is not None]
    if not given:
        parser.error(f"there are no sentences in the texts of {corpus}")
    folder = packaged("english")
    known = set(load_lexicon(folder / LEXICON_FILE).words[:KNOWN])
    if arguments.every is None:
        paragraphs = mostly_right(given, arguments.speed, arguments.rate)
    else:
        paragraphs = every_nth_wrong(given, arguments.speed, arguments.every)
    results: dict[str, dict[str, Any]] = {}
    size = sum(path.stat().st_size for path in folder.iterdir())
    about = {
        "part": arguments.part,
        "unused": arguments.unused,
        "words": arguments.words,
        "sentences": len(given),
        "bytes": size,
    }
    for name in arguments.only:
        try:
            results[name] = tested(partial(CORRECTORS[name], arguments), given, known, paragraphs)
        except Absent as why:
            print(f"{name} is skipped: {why}", file=sys.stderr)
            continue
        first = next(iter(results.values()))
        if results[name] is not first:
            difference = paired_difference(first["shares"]["real"].fixed, results[name]["shares"]["real"].fixed)
            results[name]["first_minus_this"] = difference._asdict()
        if arguments.out is not None:
            save_results(arguments.out, about, results)
    print(table(results))
    print(differences(results))
    print(
        f"\n{len(given)} sentences, part {arguments.part}. The model of cedd with its lexicon has {size / 1e6:.1f} MB."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
