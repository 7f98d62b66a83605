"""`cedd spelling`: how many mistakes a model fixes, by the paper's protocol and by the user's."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from cedd.cli import UserError
from cedd.cli.arguments import PLOT_SUFFIXES, Spelling
from cedd.cli.console import PlainConsole
from cedd.cli.progress import progress_bar
from cedd.cli.unused import refuse_unused
from cedd.spelling.book import Book, read_book
from cedd.spelling.corruption import MISTAKES
from cedd.spelling.paper_protocol import PaperProtocol, Restoration
from cedd.spelling.shares import Share
from cedd.spelling.user_protocol import CorrectionResult, UserProtocol, save_plot
from cedd.storage import JSONObject, check_writable
from cedd.tasks import LanguageModel, load


def run(arguments: Spelling) -> int:
    """Measure by one protocol or both."""
    paper, user = PaperProtocol(**vars(arguments.paper)), UserProtocol(**vars(arguments.user))
    seed = arguments.seed
    check_writable(arguments.plot, PLOT_SUFFIXES)
    others = {"paper": (arguments.user,), "user": (arguments.paper,), "both": ()}[arguments.protocol]
    for options in others:
        refuse_unused(options, vars(options), f"with --protocol {arguments.protocol}")
    if paper.batch < 1 or arguments.blocks < 0:
        raise UserError("--batch must be at least 1, and --blocks at least 1 or 0 for the whole book")
    if not 0 < user.rate <= 1:
        raise UserError(f"--rate must be above 0 and at most 1 (got {user.rate:g})")
    started = time.perf_counter()
    model = load(arguments.model, arguments.device)
    book = read_book(model, arguments.data, arguments.blocks)
    protocols = {"paper": paper, "user": user}
    asked = protocols if arguments.protocol == "both" else {arguments.protocol: protocols[arguments.protocol]}
    whys = {name: protocol.why_not(model, book, seed) for name, protocol in asked.items()}
    left_out = {name: why for name, why in whys.items() if why}
    if len(left_out) == len(asked):
        raise UserError("; ".join(left_out.values()))
    if arguments.plot is not None and "user" not in asked.keys() - left_out.keys():
        raise UserError("--plot needs the user's protocol, which this model does not support")
    results: JSONObject = {}
    for name in (name for name in asked if name not in left_out):
        with progress_bar(f"{name}'s protocol", not arguments.json) as progress:
            results[name] = asked[name].measure(model, book, seed, progress)
    note = " ".join(f"The {name}'s protocol was left out: {why}." for name, why in left_out.items()) or None
    measured = Measured(arguments, model, book, results.get("paper"), results.get("user", []), note)
    if arguments.json:
        print(json.dumps({**measured.record(), "seconds": round(time.perf_counter() - started, 3)}))
    else:
        measured.print(PlainConsole())
    if arguments.plot is not None:
        save_plot(arguments.plot, results["user"])
    return 0


# ----------------------------------------------------------------------------------------------------------------
# What is printed


@dataclass(frozen=True)
class Measured:
    """The results of each protocol."""

    arguments: Spelling
    model: LanguageModel
    book: Book
    restoration: Restoration | None
    corrections: list[CorrectionResult]
    note: str | None

    def record(self) -> JSONObject:
        """As JSON."""
        model, book, asked = self.model, self.book, self.arguments.user
        corrections = [correction.record() for correction in self.corrections]
        return {
            "run": self.arguments.model,
            "method": model.method.name,
            "process": model.process.config(),
            "tokenizer": model.tokenizer.name,
            "data": {"name": book.name, "characters": len(book.text), "unknown": book.unknown, "length": book.length},
            "seed": self.arguments.seed,
            "device": str(model.device),
            "paper": self.restoration and self.restoration.record(),
            "user": {"mistakes": asked.mistakes, "rate": asked.rate, "corrections": corrections}
            if corrections
            else None,
            "note": self.note,
        }

    def print(self, console: PlainConsole) -> None:
        """As tables."""
        book, name = self.book, self.model.name
        strange = f"; {book.unknown:,} unknown to the model, replaced by similar ones" if book.unknown else ""
        console.print(f"{book.name}: {len(book.text):,} characters in blocks of {book.length}{strange}")
        if self.restoration is not None:
            console.print(f"\nPaper's protocol: {name}, noise at t = {self.restoration.t:g}")
            console.print(_paper_table(self.restoration))
        if self.corrections:
            seen = self.corrections[0].outcomes
            console.print(
                f"\nUser's protocol: {name}, {seen.fixed.total:,} {MISTAKES[self.arguments.user.mistakes].counted}"
            )
            console.print(_user_table(self.corrections))
            console.print(
                "%, and 95% intervals. fixed, altered, missed: of the mistakes; broken: of the good letters; others: "
                f"of spaces, digits and punctuation; wrong: of all characters, {100 * seen.before.value:.2f} before"
            )
        if self.note is not None:
            console.print(self.note)


def _percent(share: Share, digits: int = 1) -> str:
    """A share in percent, and below it its 95% interval."""
    return "\n".join(filter(None, (_value(share, digits), _interval(share, digits))))


def _interval(share: Share, digits: int = 1) -> str:
    """The 95% interval of a share in percent, empty for a single block."""
    low, high = (f"{100 * end:.{digits}f}" for end in share.ci95)
    return "" if math.isnan(share.ci95[1]) else f"{low} to {high}"


def _small(share: Share) -> str:
    """The same, to a hundredth if it is below 10%."""
    return _percent(share, 1 if share.ci95[1] >= 0.1 else 2)


def _value(share: Share, digits: int = 1) -> str:
    """A share in percent, or none without data."""
    return f"{100 * share.value:.{digits}f}" if share.total else "none"


def _paper_table(restoration: Restoration) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in ("corrupted", "places", "restored, %", "95% interval"):
        table.add_column(head, justify="left" if head == "corrupted" else "right")
    kinds = {"all": restoration.all, "  masked": restoration.masked, "  shuffled": restoration.shuffled}
    for name, share in kinds.items():
        table.add_row(name, f"{share.total:,}", _value(share, 2), _interval(share, 2))
    return table


def _user_table(corrections: list[CorrectionResult]) -> Table:
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
