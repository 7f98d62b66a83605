"""The report of a run or model, or of several, as one self-contained page: a function of what `report` holds.

Nothing in it is loaded from anywhere: style (`page.html`), charts and scripts are inline, and the animation of a sample
is a page of its own inside a frame.
"""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from cedd.evaluation.baselines import Baseline
from cedd.report.charts import Curve, Level, line_chart
from cedd.report.records import ComparedRun, CorrectedText, RunComparison, RunReport
from cedd.storage import atomic_write, write_json
from cedd.tasks.infill import BLANK

PAGE_FILE, RECORD_FILE = "report.html", "report.json"
NO_CURVE = "This page is of a model and a text, not of a run of cedd train: it has no learning curve."

# ----------------------------------------------------------------------------------------------------------------
# Pieces of a page


def number(value: float, digits: int = 3) -> str:
    """A number as the page writes it."""
    shown = f"{value:.{digits}f}"
    return {"nan": "–", "inf": "∞", "-inf": "-∞"}.get(shown, shown)


def interval(low: float, high: float, digits: int = 3) -> str:
    """An interval as the page writes it."""
    return f"[{number(low, digits)}, {number(high, digits)}]"


def spans(pieces: Sequence[tuple[str, str]]) -> str:
    """Pieces of text, each in the class of what happened to it; neighbours of one class share an element."""
    made: list[str] = []
    for kind, alike in itertools.groupby(pieces, key=lambda piece: piece[1]):
        if text := html.escape("".join(piece for piece, _ in alike)):
            made.append(f'<span class="{kind}">{text}</span>' if kind else text)
    return "".join(made)


def _banded(label: str, values: Sequence[tuple[int, float, float]], colour: int, dots: bool = False) -> Curve:
    """A curve of (x, y, half-width)."""
    return Curve(label, [(x, y) for x, y, _ in values], [half for *_, half in values], dots=dots, colour=colour)


def _levels(baselines: Sequence[Baseline]) -> list[Level]:
    """Lines for the n-gram models; compressors have no error."""
    return [Level(b.name, b.bits_per_character) for b in baselines if b.stderr is not None]


def command_block(command: str | None) -> str:
    """A command to copy, whose lines are never broken inside an option."""
    if not command:
        return ""
    shown = re.sub(r"(?<!\S)--?[a-z][\w.-]*", r'<span class="option">\g<0></span>', html.escape(command))
    return f'<pre class="command"><code>{shown}</code></pre>'


def section(name: str, title: str, body: str, command: str | None = None) -> str:
    """A part of the page, and the command that does it again."""
    return f'<section id="{name}"><h2>{html.escape(title)}</h2>{body}{command_block(command)}</section>'


def correction_spans(text: CorrectedText) -> str:
    """The corrected text; where letters differ from the original or from what was given, marked by what happened."""
    pieces: list[tuple[str, str]] = []
    for right, given, now in zip(text.original, text.corrupted, text.corrected, strict=True):
        if given != right:
            kind = "fixed" if now == right else "missed" if now == given else "changed"
        else:
            kind = "broken" if now != given else ""
        pieces.append(("↵" if now == "\n" and kind else now, kind))
    return spans(pieces)


# ----------------------------------------------------------------------------------------------------------------
# The sections of a run's page


def _summary(report: RunReport) -> str:
    bound = report.bound
    word = "exactly" if bound.exact else "at most"
    facts = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in report.facts.items()
    )
    return f"""<header><p class="eyebrow">{html.escape(report.run)}</p>
<h1>{html.escape(report.method)} on {html.escape(report.process)}</h1>
<div class="hero"><div class="figure"><b id="bits">{number(bound.bits_per_character)}</b>
<span>bits per character, {word}<br>95% interval {interval(*bound.ci95)}</span></div>
<p>{_verdict(report)}</p></div>
<dl>{facts}</dl></header>"""


def _verdict(report: RunReport) -> str:
    """One sentence that places the number among the baselines."""
    bound = report.bound
    if not math.isfinite(bound.bits_per_character):
        return "The bound is infinite; cedd evaluate says why."
    low, high = bound.ci95
    beaten = [b.name for b in report.baselines if b.bits_per_character > high]
    ahead = [b.name for b in report.baselines if b.bits_per_character < low]
    level = [b.name for b in report.baselines if low <= b.bits_per_character <= high]
    parts = [("fewer than ", beaten), ("about as many as ", level), ("more than ", ahead)]
    said = [f"{word}{html.escape(_listed(names))}" for word, names in parts if names]
    text = f"On {bound.characters:,} characters that training never saw."
    if not report.held_out:
        text = f"On {bound.characters:,} characters of {html.escape(report.text)}, which its training may have seen."
    return f"{text} It needs {'; '.join(said)}." if said else text


def _listed(names: Sequence[str]) -> str:
    """a, b and c."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _curves(report: RunReport) -> str:
    if not report.held_out:
        return f'<p class="note">{NO_CURVE}</p>'
    loss = [Curve("each step", report.losses, faint=True), Curve("training loss", smoothed(report.losses))]
    curve = _banded("held-out bound", report.bounds, 1, dots=True)
    levels = _levels(report.baselines) if report.bounds else ()
    return (
        "<p>The loss of each step, and its running mean. It is a weighted cross entropy: its size depends on the "
        "method's weights, its slope shows progress.</p>"
        + line_chart(loss, "step", "loss")
        + _curve_of_bounds(report)
        + line_chart([curve], "step", "bits per character", levels)
    )


def _curve_of_bounds(report: RunReport) -> str:
    """What the curve is, and how its last point and the figure at the head of the page belong together."""
    said = (
        f"The bound while training, on {report.bound_sequences:,} held-out sequences evenly spaced over the text, with "
        "its 95% band, between the simple models that the table below explains."
    )
    if report.bounds:
        _, bits, half = report.bounds[-1]
        said += (
            f" The last point is {number(bits)} {interval(bits - half, bits + half)}; the figure above, "
            f"{number(report.bound.bits_per_character)} {interval(*report.bound.ci95)}, is of "
            f"{report.bound.sequences:,} sequences of the same text, and the one to quote."
        )
    return f"<p>{said}</p>"


def smoothed(points: Sequence[tuple[int, float]], share: float = 0.06) -> list[tuple[int, float]]:
    """An exponential running mean over a share of the points, without the bias of its start."""
    keep = 1 - 1 / max(1.0, share * len(points))
    mean = weight = 0.0
    made: list[tuple[int, float]] = []
    for step, value in points:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        made.append((step, mean / weight))
    return made


def _bound(report: RunReport) -> str:
    bound = report.bound
    what = "The exact likelihood" if bound.exact else "The <i>tight</i> bound, a true upper bound on the code length,"
    noisy = "" if bound.exact else f", each shown to the network at {bound.draws} levels of noise"
    return (
        f"<p>{what} of {bound.sequences:,} sequences of {html.escape(report.text)}{noisy}: "
        f"<b>{number(bound.bits_per_character)}</b> bits per character, 95% interval {interval(*bound.ci95)}, "
        f"a perplexity of {number(bound.perplexity, 2)} per token. The band is how far the estimate could still be "
        "from that of endlessly many such sequences, after the first 2, 3, … of them.</p>"
        + _note(report, "bound")
        + line_chart([_banded("estimate", bound.running, 1)], "sequences", "bits per character")
    )


def _baselines(report: RunReport) -> str:
    if not report.baselines:
        return _note(report, "baselines")
    rows = [(b.name, b.bits_per_character, b.stderr, b.detail, "") for b in report.baselines]
    detail = "exact likelihood" if report.bound.exact else "tight bound: the truth is lower or equal"
    rows.append(("this model", report.bound.bits_per_character, report.bound.stderr, detail, "ours"))
    rows.sort(key=lambda row: row[1], reverse=True)
    most = max(row[1] for row in rows if math.isfinite(row[1]))
    body = "".join(
        f'<tr class="{kind}"><td>{html.escape(name)}</td><td class="value">{number(bits)}</td>'
        f'<td class="value dim">{"± " + number(1.96 * error) if error is not None else ""}</td>'
        f'<td class="bar"><i style="width:{100 * min(bits, most) / most:.1f}%"></i></td>'
        f'<td class="dim detail">{html.escape(text)}</td></tr>'
        for name, bits, error, text, kind in rows
    )
    return (
        "<p>The same text in the same unit, fewer is better. n-gram models read the same sequences one by "
        "one; compressors read them as one text.</p>"
        '<table class="bars"><thead><tr><th>model</th><th>bits per character</th><th>95%</th><th></th><th></th></tr>'
        f"</thead><tbody>{body}</tbody></table>"
    )


def _noise(report: RunReport) -> str:
    columns = "".join(
        f"<h3>{html.escape(drawing.process)}</h3><div class='scroll'><table class='noise'>"
        + "".join(f'<tr><th>t = {t:.1f}</th><td class="text">{spans(row)}</td></tr>' for t, row in drawing.rows)
        + "</table></div>"
        for drawing in report.noise
    )
    return (
        f"<p>The same sentence of {html.escape(report.text)} on its way to noise. Training shows the network such "
        'texts and asks what they were; sampling walks back up from t = 1. <span class="key masked">▒ masked</span> '
        '<span class="key shuffled">shuffled</span></p>' + columns
    )


def _samples(report: RunReport) -> str:
    frame = ""
    if report.animation:
        frame = f'<iframe title="a sample being denoised" srcdoc="{html.escape(report.animation)}"></iframe>'
    texts = "".join(f'<div class="text card">{html.escape(text)}</div>' for text in report.samples)
    return _note(report, "samples") + frame + f'<div class="cards">{texts}</div>'


def _infilling(report: RunReport) -> str:
    if report.infilling is None:
        return _note(report, "infilling")
    filling = report.infilling
    given = BLANK.split(filling.template)[::2]
    names = ["the text", *(f"{i}." for i in range(1, len(filling.fills) + 1))]
    rows = "".join(
        f'<tr><th>{name}</th><td class="text">{_filled(given, text)}</td></tr>'
        for name, text in zip(names, [filling.original, *filling.fills], strict=True)
    )
    return (
        f"<p>Words of {html.escape(report.text)} taken out, and written anew by the model, which sees what comes "
        f'before and after. The first line is what stood there.</p><table class="plain">{rows}</table>'
    )


def _filled(given: Sequence[str], text: str) -> str:
    """The text with what stands between the given parts marked."""
    pattern = "(.*?)".join(re.escape(part) for part in given)
    found = re.fullmatch(pattern, text, re.DOTALL)
    if found is None:
        return html.escape(text)
    pieces = [(given[0], "")]
    for fill, part in zip(found.groups(), given[1:], strict=True):
        pieces += [(fill.replace("\n", "↵"), "filled"), (part, "")]
    return spans(pieces)


def _correction(report: RunReport) -> str:
    if report.correction is None:
        return _note(report, "correction")
    done = report.correction
    examples = "".join(f'<div class="text card">{correction_spans(text)}</div>' for text in done.examples)
    share = f"{done.fixed / done.wrong:.0%}" if done.wrong else "–"
    hurt = f"{done.broken / done.right:.2%}" if done.right else "–"
    return (
        f"<p>Letters of {html.escape(report.text)} replaced by others at places the model is not told, and its "
        f"corrections (told that {done.rate:.0%} are wrong; threshold {done.threshold:g}, chosen on "
        f"{'training text' if report.held_out else 'another part of the text'}). "
        f"Of {done.wrong:,} wrong letters <b>{done.fixed:,}</b> were put right ({share}); of {done.right:,} right "
        f"characters <b>{done.broken:,}</b> were broken ({hurt}).</p>"
        '<p class="keys"><span class="key fixed">put right</span> <span class="key missed">left wrong</span> '
        '<span class="key changed">wrong in another way</span> <span class="key broken">broken</span></p>'
        f'<div class="cards">{examples}</div>'
    )


def _note(report: RunReport, name: str) -> str:
    return f'<p class="note">{html.escape(report.notes[name])}</p>' if name in report.notes else ""


def _again(report: RunReport) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{command_block(command)}</td></tr>"
        for name, command in report.commands.items()
    )
    return f'<p>Every step of this page as a command.</p><table class="plain">{rows}</table>'


def run_page(report: RunReport) -> str:
    """The page of one run."""
    commands = report.commands
    body = "".join(
        [
            _summary(report),
            section("curves", "Training", _curves(report)),
            section("bound", "The bound", _bound(report), commands.get("evaluate")),
            section("baselines", "What the number means", _baselines(report)),
            section("noise", "The noise", _noise(report)),
            section("samples", "Writing", _samples(report), commands.get("sample")),
            section("infilling", "Filling in", _infilling(report), commands.get("infill")),
            section("correction", "Correcting", _correction(report), commands.get("correct")),
            section("again", "Do it again", _again(report)),
        ]
    )
    return whole_page(f"{report.method} on {report.process}", body)


def comparison_page(compared: RunComparison, command: str) -> str:
    """The page of several runs."""
    runs, baselines = compared.runs, compared.baselines
    names = short_names([run.run for run in runs])
    curves = [_banded(names[i], run.bounds, i % 6, dots=True) for i, run in enumerate(runs)]
    levels = _levels(baselines)
    chart = _curve_notes(curves, levels) + line_chart(curves, "step", "bits per character", levels)
    if not compared.held_out:
        simple = "; ".join(f"{level.label} {number(level.y, 4)}" for level in levels)
        also = f" Simple models of the same text, in bits per character: {simple}." if simple else ""
        chart = f'<p class="note">{html.escape(NO_CURVE + also)}</p>'
    title = f"{len(runs)} {'runs' if compared.held_out else 'models'}"
    header = f'<header><p class="eyebrow">comparison</p><h1>{title}</h1></header>'
    body = header + section("table", "The bounds", _compared_table(runs, compared.text))
    body += section("curves", "While training", chart) + section("again", "Do it again", command_block(command))
    return whole_page(title, body)


def _curve_notes(curves: Sequence[Curve], levels: Sequence[Level]) -> str:
    """What the curves of a comparison are, and what is not among them."""
    notes = ["On held-out sequences evenly spaced over the text, while training, with 95% bands."]
    if levels:
        notes.append("The level lines are simple models of the same text.")
    else:
        notes.append(
            "The runs' held-out sequences are not the same; simple models of one's would mislead about others."
        )
    if without := [curve.label for curve in curves if not curve.points]:
        notes.append(f"No bound was measured while {_listed(without)} trained.")
    return f"<p>{html.escape(' '.join(notes))}</p>"


def _compared_table(runs: Sequence[ComparedRun], text: str) -> str:
    rows: list[str] = []
    for i, run in enumerate(runs):
        if i == 0:
            difference = '<td class="dim">the reference</td>'
        elif run.difference is None:
            difference = '<td class="dim">other sequences</td>'
        else:
            mean, low, high = run.difference
            kind = "better" if high < 0 else "worse" if low > 0 else ""
            difference = f'<td class="value {kind}">{mean:+.4f} <span class="dim">[{low:+.4f}, {high:+.4f}]</span></td>'
        rows.append(
            f'<tr><td><i class="swatch curve-{i % 6}"></i>{html.escape(run.run)}</td>'
            f"<td class='value'><b>{number(run.bound.bits_per_character, 4)}</b> "
            f"<span class='dim'>{interval(*run.bound.ci95, digits=4)}</span></td>{difference}"
            f"<td>{html.escape(run.method)}</td><td>{html.escape(run.process)}</td>"
            f"<td class='value'>{run.parameters:,}</td>"
            f"<td class='value'>{'–' if run.step is None else f'{run.step:,}'}</td></tr>"
        )
    heads = ("run", "bits per character", "difference", "method", "process", "parameters", "steps")
    return (
        f"<p>Bits per character of {html.escape(text)}, at most (exactly, for an autoregressive model), with 95% "
        "intervals. Differences are to the first run, sequence by sequence on the same noise levels, which is why "
        "their intervals are narrower than those of the two figures.</p>"
        f'<div class="scroll"><table><thead><tr>{"".join(f"<th>{head}</th>" for head in heads)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def short_names(paths: Sequence[str]) -> list[str]:
    """The last parts of paths, as many as tell them apart."""
    parts = [path.rstrip("/").split("/") for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(set(paths)):
            return names
    return list(paths)


def whole_page(title: str, body: str) -> str:
    """The document around a body."""
    template = resources.files("cedd.report").joinpath("page.html").read_text("utf-8")
    return template.replace("__TITLE__", html.escape(title)).replace("__BODY__", body)


def write_page(page: str, path: Path) -> None:
    """Write a page as a file."""
    atomic_write(path, page.encode("utf-8", "replace"))


def write_report(report: RunReport, path: Path) -> None:
    """The page, and beside a report.html its figures: beside another name, the .json of that name may be the user's."""
    write_page(run_page(report), path)
    if path.name == PAGE_FILE:
        write_json(path.with_name(RECORD_FILE), report.record())
