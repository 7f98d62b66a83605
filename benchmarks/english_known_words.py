"""Make the list of known words of the package: `known_words.txt.gz` of english, from lists with permissive licences.

    apt-get download scowl && dpkg-deb -x scowl_*.deb scowl
    for name in software-terms git docker data-science; do npm pack @cspell/dict-$name; done
    for file in cspell-dict-*.tgz; do mkdir -p cspell/$file && tar xzf $file -C cspell/$file; done
    curl -O https://deb.debian.org/debian/dists/bookworm/main/i18n/Translation-en.xz
    python benchmarks/english_known_words.py --scowl scowl --cspell cspell --debian Translation-en.xz \\
        --out src/cedd/pretrained/english

Only words that the lexicon in --out has rarely or not at all are listed, and none that its list of misspellings has.
Dictionary words are SCOWL's up to size 60, large-dictionary words those of size 70, except for those one edit away from
a frequent word (lovey, wiling, thees): these are more often misspellings of it. Those of size 35 (welling, shinning)
are left out if that word is very frequent, and otherwise listed as large-dictionary words. Technical words come from
cspell's lists, from the descriptions of Debian's packages and, for recent everyday words, from
benchmarks/texts/modern-words.txt. A word of the descriptions is taken if --least paragraphs or more have it in lower
case and no word one edit away is far more frequent, or if it is part of a package's name and --least paragraphs have
it, or two if no word one edit away is very frequent.
"""

from __future__ import annotations

import gzip
import lzma
import re
import string
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

from helps import parser_of

from cedd.apps.correct.candidates import CONFUSED
from cedd.apps.correct.known_words import DICTIONARY, KNOWN_WORDS_FILE, LARGE, TECHNICAL, save_known_words
from cedd.apps.correct.lexicon import LEXICON_FILE, Lexicon, load_lexicon
from cedd.apps.correct.reader import RARE
from cedd.apps.correct.words import LONGEST

DIALECTS = ("english", "american", "british", "british_z", "canadian", "australian")
CATEGORIES = ("words", "upper", "contractions", "abbreviations")
SIZES = {DICTIONARY: (0, 60), LARGE: (61, 70)}
"""Ranges of SCOWL's sizes. Sizes 80 and 95 contain many misspellings of common words (abought, ceratin, positon)."""
LISTS = ("softwareTerms.txt.gz", "software-tools.txt", "networkingTerms.txt", "coding-compound-terms.txt")
LISTS += ("computing-acronyms.txt", "webServices.txt", "git-terms.txt", "docker-words.txt.gz", "data-science.txt")
LISTS += ("data-science-tools.txt", "data-science-models.txt")
MODERN = Path(__file__).parent / "texts" / "modern-words.txt"
MISSPELT = frozenset(
    [
        "aks",
        "alot",
        "datas",
        "equipments",
        "flor",
        "klick",
        "operatate",
        "passt",
        "plugable",
        "publically",
        "reliabily",
        "reregisteration",
        "sematic",
        "targetting",
        "unexpect",
    ]
)
"""Misspellings in those lists."""
MORE_FREQUENT = 30
"""A word of Debian's descriptions is taken for a misspelling if a word of the lexicon that is one edit away is in this
many times as many paragraphs."""
FREQUENT, VERY_FREQUENT = 7.0, 9.0
"""Logarithms of counts. A word of a dictionary is left out if one of these is one edit away: a frequent one, or a very
frequent one for words of SCOWL's size 35, which are in the large dictionary next to a frequent one. Smaller sizes have
common words (bake), which are never left out. Chosen on the train and dev parts of the misspellings."""
COMMON, USUAL = 20, 35
ALWAYS = frozenset(["hi", "id", "ids", "io", "db", "vs", "pr", "qa", "ux", "ui", "ip", "tv", "pc", "ai", "eg", "ie"])
ALWAYS |= {"ok", "wip", "git", "append", "bool", "dedent", "dep", "iff", "inline"}
ALWAYS |= {"char", "cron", "dir", "grep", "int", "log", "stack", "stats"}
"""Listed although they are short or frequent, or are misspellings of other words in the lists: books have them rarely,
so that "id" became "it"."""
SHORTEST = 3
NAMED = 2
"""Paragraphs with a word that is part of a package name."""
PART = re.compile(r"[a-z]{4,}")
WORD = re.compile(r"(?<![\w@/.\\-])[a-z]+(?![\w@/\\'’]|\.\w)")


def is_word(text: str) -> bool:
    """Whether this is one word of plain letters, of a length that is corrected."""
    return text.isascii() and text.isalpha() and SHORTEST <= len(text) <= LONGEST


def scowl(folder: Path, least: int, most: int) -> set[str]:
    """The words of SCOWL of these sizes."""
    found: set[str] = set()
    for path in sorted((folder / "usr/share/dict/scowl").iterdir()):
        dialect, _, rest = path.name.partition("-")
        category, _, size = rest.partition(".")
        if dialect in DIALECTS and category in CATEGORIES and least <= int(size) <= most:
            found |= {word.lower() for word in path.read_text("latin-1").split()}
    return set(filter(is_word, found))


def cspell(folder: Path) -> set[str]:
    """The words of cspell's technical lists, in which # starts a comment and ! forbids a word."""
    found: set[str] = set()
    for name in LISTS:
        (path,) = folder.rglob(name)
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for line in content.decode().split("\n"):
            words = line.partition("#")[0].split()
            found |= {word.strip("+*~").lower() for word in words if not word.startswith("!")}
    return set(filter(is_word, found)) - MISSPELT


def debian_counts(path: Path) -> tuple[Counter[str], set[str]]:
    """In how many different paragraphs of the descriptions each word is written in lower case, and the parts of the
    packages' names."""
    counts, seen, names = Counter[str](), set[str](), set[str]()
    with lzma.open(path, "rt", encoding="utf-8") as file:
        blocks = file.read().split("\n\n")
    for block in blocks:
        head, _, description = block.partition("Description-en:")
        names.update(PART.findall(head.partition("\n")[0].removeprefix("Package: ")))
        for paragraph in description.split("\n .\n"):
            if (text := paragraph.strip()) not in seen:
                seen.add(text)
                counts.update(set(WORD.findall(text)))
    return counts, names


def one_edit_away(word: str) -> Iterator[str]:
    """All strings with a letter more, fewer or another, or two swapped."""
    for at in range(len(word) + 1):
        before, after = word[:at], word[at:]
        yield from (before + letter + after for letter in string.ascii_lowercase)
        if after:
            yield before + after[1:]
            yield from (before + letter + after[1:] for letter in string.ascii_lowercase)
        if len(after) > 1:
            yield before + after[1] + after[0] + after[2:]


def debian(path: Path, lexicon: Lexicon, least: int) -> set[str]:
    """The words of Debian's descriptions that are no misspellings of more frequent ones."""
    counts, names = debian_counts(path)

    def misspelt(word: str) -> bool:
        most = MORE_FREQUENT * counts[word]
        others = set(one_edit_away(word)) - {word, word + "s", word.removesuffix("s")}
        return any(counts[other] > most and other in lexicon.index for other in others if other in counts)

    found = {word for word, count in counts.items() if count >= least and is_word(word) and not misspelt(word)}
    named = {word for word in names if counts[word] >= NAMED and is_word(word)}
    found |= {word for word in named if counts[word] >= least or not resembles(word, lexicon, VERY_FREQUENT)}
    return found - MISSPELT


def resembles(word: str, lexicon: Lexicon, least: float) -> bool:
    """Whether a word is one edit away from one with this log count or more that is not its plural or singular."""
    others = set(one_edit_away(word)) - {word, word + "s", word.removesuffix("s")}
    numbers = (lexicon.index.get(other) for other in others)
    return any(number is not None and lexicon.log_counts[number] >= least for number in numbers)


def missing(words: Collection[str], lexicon: Lexicon, most: float) -> set[str]:
    """The words that are rarer in the lexicon than this (a logarithm) and are not known misspellings."""
    rare = (lexicon.index.get(word) for word in words)
    return {
        word
        for word, number in zip(words, rare, strict=True)
        if word not in lexicon.memory and (number is None or lexicon.log_counts[number] < most)
    }


def main() -> int:
    """Read the lists, write the file."""
    parser = parser_of(__doc__)
    parser.add_argument("--scowl", type=Path, required=True, help="folder of the unpacked Debian package scowl")
    parser.add_argument("--cspell", type=Path, required=True, help="folder of the unpacked packages of cspell")
    parser.add_argument("--debian", type=Path, required=True, help="Translation-en.xz of a Debian release")
    parser.add_argument("--least", type=int, default=5, help="paragraphs of Debian's descriptions that have a word")
    parser.add_argument("--out", type=Path, required=True, help="the model's folder, with its lexicon")
    arguments = parser.parse_args()
    lexicon = load_lexicon(arguments.out / LEXICON_FILE)
    usual = float(lexicon.log_counts[CONFUSED])
    technical = cspell(arguments.cspell) | debian(arguments.debian, lexicon, arguments.least)
    technical = missing(technical | set(MODERN.read_text("utf-8").split()), lexicon, usual) | ALWAYS
    small, middle = scowl(arguments.scowl, 0, COMMON), scowl(arguments.scowl, COMMON + 1, USUAL)
    words, listed = dict[str, set[str]](), set(technical)
    for kind, sizes in SIZES.items():
        found = missing(scowl(arguments.scowl, *sizes), lexicon, RARE) - listed
        listed |= found
        words[kind] = found & small | {
            word
            for word in found - small
            if not resembles(word, lexicon, VERY_FREQUENT if word in middle else FREQUENT)
        }
    near = {word for word in words[DICTIONARY] & middle - small if resembles(word, lexicon, FREQUENT)}
    words |= {TECHNICAL: technical, DICTIONARY: words[DICTIONARY] - near, LARGE: words[LARGE] | near}
    path = arguments.out / KNOWN_WORDS_FILE
    save_known_words(path, words)
    said = ", ".join(f"{len(words[kind]):,} {kind}" for kind in words)
    print(f"{path}: {said} words, {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
