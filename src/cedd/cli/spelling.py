"""`cedd spelling`: how many mistakes a model puts right, by the paper's protocol and by the one users mean."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cedd.cli import UserError
from cedd.cli.evaluate import progress_bar
from cedd.data.corpora import open_corpus
from cedd.data.corruption import MISTAKES
from cedd.evaluation.perplexity import PLOT_SUFFIXES
from cedd.evaluation.spelling import Correction, Outcomes, Restoration, Share, outcomes, restore, save_plot
from cedd.storage import check_writable
from cedd.tasks import LanguageModel, load
from cedd.tasks.correct import CorrectionOptions, Readings, correction_options, corrections
from cedd.tasks.reading import read_text


@dataclass(frozen=True)
class Arguments:
    """example: cedd spelling english-char --data python-manual --blocks 4 --plot fixed.png

    Share of mistakes that a model puts right in a book, with 95% intervals. The paper's protocol: noise of the model's
    own process at t = 0.05, the likeliest token at each corrupted place. The user's: 5% of the letters replaced by
    other letters at unknown places (or neighbours exchanged, --mistakes swaps --rate 0.02); what is fixed, missed and
    broken, over the threshold of correction. The model that comes with cedd takes about two minutes on two cores; a
    whole book (--blocks 0), with thousands of blocks, hours.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run's folder, or a model by its name."""
    data: str
    """A text file, a folder of them, a .jsonl, hf:NAME, or python-manual."""
    protocol: Literal["paper", "user", "both"] = "both"
    """both: each that the model allows (user's: a character tokenizer, and a process that shuffles)."""
    blocks: int = 50
    """Test on so many consecutive blocks from the middle of the book; 0: all of it."""
    t: float = 0.05
    """Paper's: the time of the noise."""
    mistakes: Literal["letters", "swaps"] = "letters"
    """User's: letters replaced by other letters, or neighbouring letters of a word exchanged."""
    rate: float = 0.05
    """User's: the share of letters that are replaced, or of pairs of neighbours that are exchanged."""
    thresholds: tuple[float, ...] = (0.5, 0.2, 0.05)
    """User's: a letter is replaced if it weighs less than this, as in cedd correct; 0.5 leaves all to the argmax."""
    passes: tuple[int, ...] = (1, 3)
    """User's: how often the text is read, each a curve over the thresholds."""
    steps: tuple[int, ...] = ()
    """User's: also by so many steps of the reverse process, sampled for each threshold (8 take as long as 9 passes)."""
    times: tuple[float, ...] = ()
    """User's: the times that the text is taken to be at, in place of the model's own."""
    change: Literal["letters", "all"] | None = None
    """User's: what may be changed, as in cedd correct."""
    swaps: float | None = None
    """User's: the share of exchanged neighbours that correction expects, as in cedd correct; 0 looks for none."""
    plot: Path | None = None
    """User's: draw fixed over broken to this .png, .pdf or .svg."""
    batch: int = 32
    """Blocks shown to the network at once (paper's)."""
    seed: int = 0
    """Of the mistakes, and of sampling."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:1."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class Book:
    """The text that is tested on, and how it was cut."""

    name: str
    text: str
    length: int
    unknown: int
    """Characters that the tokenizer does not know; they are read as the most similar it does know."""


def run(arguments: Arguments) -> int:
    """Measure by one protocol or both."""
    check_writable(arguments.plot, PLOT_SUFFIXES)
    if arguments.batch < 1 or arguments.blocks < 0:
        raise UserError("--batch must be at least 1, and --blocks too, or 0 for the whole book")
    if not 0 < arguments.rate <= 1:
        raise UserError(f"--rate is a share between 0 and 1, of at least one mistake; got {arguments.rate:g}")
    started = time.perf_counter()
    model = load(arguments.model, arguments.device)
    book = read_book(model, arguments.data, arguments.blocks)
    asked = ("paper", "user") if arguments.protocol == "both" else (arguments.protocol,)
    whys = {"paper": why_not_papers(model, book), "user": why_not_users(model, book, arguments)}
    left_out = {name: whys[name] for name in asked if whys[name]}
    if len(left_out) == len(asked):
        raise UserError("; ".join(left_out.values()))
    measured = set(asked) - left_out.keys()
    restoration = paper_protocol(model, book, arguments) if "paper" in measured else None
    corrected = user_protocol(model, book, arguments) if "user" in measured else []
    if arguments.plot is not None:
        if not corrected:
            raise UserError("--plot draws the user's protocol, which was not measured; leave it out")
        save_plot(arguments.plot.expanduser(), corrected)
    note = " ".join(f"The {name}'s protocol was left out: {why}." for name, why in left_out.items()) or None
    if arguments.json:
        print(json.dumps(_record(arguments, model, book, restoration, corrected, note, time.perf_counter() - started)))
    else:
        _print(Console(), arguments, model, book, restoration, corrected, note)
    return 0


def why_not_papers(model: LanguageModel, book: Book) -> str:
    """Why the paper's protocol cannot be measured, or nothing if it can."""
    try:
        model.method.require_scores()
    except ValueError as error:
        return str(error)
    tokens = len(read_text(model.tokenizer, book.text).ids)
    return "" if tokens >= book.length else f"the text fills no block of {book.length} tokens: it has {tokens}"


def why_not_users(model: LanguageModel, book: Book, arguments: Arguments) -> str:
    """Why the user's protocol cannot be measured, or nothing if it can."""
    if getattr(model.tokenizer, "characters", None) is None:
        return f"the user's protocol compares letters: it needs a character tokenizer, not {model.tokenizer.name}"
    try:
        correction_options(model.setting, {})
    except ValueError as error:
        return str(error)
    made = MISTAKES[arguments.mistakes]
    if not len(made.make(book.text, arguments.rate, arguments.seed).positions):
        return f"the text has too few letters: at a rate of {arguments.rate:g} there are no {made.counted}"
    return ""


def read_book(model: LanguageModel, data: str, blocks: int) -> Book:
    """The middle `blocks` blocks of the data's text, or all of it."""
    corpus = open_corpus(data)
    text = "\n\n".join(corpus.documents())
    wanted = blocks * model.length or len(text)
    start = max(0, (len(text) - wanted) // 2)
    text = text[start : start + wanted]
    return Book(corpus.name, text, model.length, int(read_text(model.tokenizer, text).protected.sum()))


# ----------------------------------------------------------------------------------------------------------------
# The two protocols


def paper_protocol(model: LanguageModel, book: Book, arguments: Arguments) -> Restoration:
    """Blocks of the model's length in order, what fills none left out."""
    ids = read_text(model.tokenizer, book.text).ids
    blocks = torch.from_numpy(ids[: len(ids) // book.length * book.length].reshape(-1, book.length))
    with progress_bar("paper's protocol", not arguments.json) as progress:
        return restore(
            model.setting.folder.model,
            model.process,
            model.method,
            blocks,
            t=arguments.t,
            seed=arguments.seed,
            batch=arguments.batch,
            progress=progress,
        )


def user_protocol(model: LanguageModel, book: Book, arguments: Arguments) -> list[Correction]:
    """Mistakes made, and corrected in every way that is asked for; the model's own way first."""
    mistake = MISTAKES[arguments.mistakes]
    corruption = mistake.make(book.text, arguments.rate, arguments.seed)
    ways = planned_ways(model, arguments)
    unique = list(dict.fromkeys(options for _, options in ways))
    seen: dict[CorrectionOptions, Outcomes] = {}
    with progress_bar("user's protocol", not arguments.json) as progress:
        counter = Readings(unique, progress)
        texts = corrections(model.setting, corruption.text, unique, arguments.seed, counter.read)
        for options, text in zip(unique, texts, strict=True):
            seen[options] = outcomes(corruption.original, corruption.text, text, model.length, mistake.span)
            counter.finish()
    return [Correction(way, asdict(options), seen[options]) for way, options in ways]


def planned_ways(model: LanguageModel, arguments: Arguments) -> list[tuple[str, CorrectionOptions]]:
    """The model's own way, and each that is asked for at every threshold, all of them checked."""
    asked = {"change": arguments.change, "swaps": arguments.swaps}
    planned = [("its own", correction_options(model.setting, asked))]
    for way, given in ways_to_correct(arguments).items():
        options = correction_options(model.setting, asked | given)
        planned += [(way, replace(options, threshold=threshold)) for threshold in arguments.thresholds]
    for _, options in planned:
        options.check()
    return planned


def ways_to_correct(arguments: Arguments) -> dict[str, dict[str, Any]]:
    """The options of each way that is asked for, but for its threshold, by its name."""
    numbers = {f"{n} pass{'es' * (n != 1)}": {"steps": 1, "passes": n} for n in arguments.passes}
    numbers |= {f"{n} step{'s' * (n != 1)}": {"steps": n, "passes": 1} for n in arguments.steps}
    times = {f", t = {t:g}": {"t": t} for t in arguments.times} or {"": {}}
    return {name + at: options | time for name, options in numbers.items() for at, time in times.items()}


# ----------------------------------------------------------------------------------------------------------------
# What is printed


def _record(
    arguments: Arguments,
    model: LanguageModel,
    book: Book,
    restoration: Restoration | None,
    corrections: list[Correction],
    note: str | None,
    seconds: float,
) -> dict[str, Any]:
    return {
        "run": arguments.model,
        "method": model.method.name,
        "process": model.process.config(),
        "tokenizer": model.tokenizer.name,
        "data": {"name": book.name, "characters": len(book.text), "unknown": book.unknown, "length": book.length},
        "seed": arguments.seed,
        "device": str(model.setting.device),
        "paper": None if restoration is None else restoration.record(),
        "user": _user_record(arguments, corrections) if corrections else None,
        "note": note,
        "seconds": round(seconds, 3),
    }


def _user_record(arguments: Arguments, corrections: list[Correction]) -> dict[str, Any]:
    made = {"mistakes": arguments.mistakes, "rate": arguments.rate}
    return made | {"corrections": [correction.record() for correction in corrections]}


def _print(
    console: Console,
    arguments: Arguments,
    model: LanguageModel,
    book: Book,
    restoration: Restoration | None,
    corrections: list[Correction],
    note: str | None,
) -> None:
    strange = f"; {book.unknown:,} that the model does not know, read as similar ones" if book.unknown else ""
    console.print(
        escape(f"{book.name}: {len(book.text):,} characters in blocks of {book.length}{strange}"), highlight=False
    )
    if restoration is not None:
        console.print(escape(f"\nPaper's protocol: {model.name}, noise at t = {restoration.t:g}"), highlight=False)
        console.print(_paper_table(restoration))
    if corrections:
        made = MISTAKES[arguments.mistakes].counted
        mistakes = corrections[0].outcomes.fixed.total
        console.print(escape(f"\nUser's protocol: {model.name}, {mistakes:,} {made}"), highlight=False)
        console.print(_user_table(corrections))
        console.print(
            "%, and 95% intervals. fixed, altered, missed: of the mistakes; broken: of the good letters; others: of "
            "spaces, digits and punctuation; "
            f"wrong: of all characters, {100 * corrections[0].outcomes.before.value:.2f} before",
            highlight=False,
        )
    if note is not None:
        console.print(escape(note), highlight=False)


def _percent(share: Share, digits: int = 1) -> str:
    """A share in percent, and below it its 95% interval."""
    return "\n".join(filter(None, (_value(share, digits), _interval(share, digits))))


def _interval(share: Share, digits: int = 1) -> str:
    """The 95% interval of a share in percent, which a single block has not."""
    low, high = (f"{100 * end:.{digits}f}" for end in share.ci95)
    return "" if math.isnan(share.ci95[1]) else f"{low} to {high}"


def _small(share: Share) -> str:
    """The same, to a hundredth if it is below 10%."""
    return _percent(share, 1 if share.ci95[1] >= 0.1 else 2)


def _value(share: Share, digits: int = 1) -> str:
    """A share in percent, if there was anything to count."""
    return f"{100 * share.value:.{digits}f}" if share.total else "none"


def _paper_table(restoration: Restoration) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in ("corrupted", "places", "restored, %", "95% interval"):
        table.add_column(head, justify="left" if head == "corrupted" else "right")
    kinds: Mapping[str, Share] = {
        "all": restoration.all,
        "  masked": restoration.masked,
        "  shuffled": restoration.shuffled,
    }
    for name, share in kinds.items():
        table.add_row(name, f"{share.total:,}", _value(share, 2), _interval(share, 2))
    return table


def _user_table(corrections: list[Correction]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0), show_edge=False)
    columns = ("way", "threshold", "fixed", "altered", "missed", "broken", "others", "wrong")
    for head in columns:
        table.add_column(head, justify="left" if head == "way" else "right", no_wrap=head != "way")
    for correction in corrections:
        seen = correction.outcomes
        table.add_row(
            correction.way,
            f"{correction.threshold:g}",
            _percent(seen.fixed),
            _value(seen.altered),
            _value(seen.missed),
            _small(seen.broken),
            _value(seen.broken_others, 2),
            _small(seen.after),
        )
    return table
