"""The report of a run or model, or of several runs, as one self-contained page, computed from a `RunReport` or
`RunComparison`. The page loads nothing: style (`page.html`), charts and scripts are inline, and the animation of a
sample is a separate page inside a frame.
"""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from cedd.apps.report.charts import Curve, Level, line_chart
from cedd.apps.report.records import ComparedRun, CorrectedText, RunComparison, RunReport
from cedd.evaluation.baselines import Baseline
from cedd.evaluation.tokens import TokenCosts
from cedd.storage import atomic_write, write_json
from cedd.tasks.infill import BLANK

PAGE_FILE, RECORD_FILE = "report.html", "report.json"
NO_CURVE = "There is no learning curve: the page describes a model on a text, not a run of cedd train."

# ----------------------------------------------------------------------------------------------------------------
# Pieces of a page


def number(value: float, digits: int = 3) -> str:
    """A number in the format of the page."""
    shown = f"{value:.{digits}f}"
    return {"nan": "–", "inf": "∞", "-inf": "-∞"}.get(shown, shown)


def interval(low: float, high: float, digits: int = 3) -> str:
    """An interval in the format of the page."""
    return f"[{number(low, digits)}, {number(high, digits)}]"


def spans(pieces: Sequence[tuple[str, str]]) -> str:
    """Pieces of text with the class of their state; neighbours of one class share an element."""
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
    """A part of the page with the command that reproduces it; empty if there is nothing to show."""
    if not body:
        return ""
    return f'<section id="{name}"><h2>{html.escape(title)}</h2>{body}{command_block(command)}</section>'


def correction_spans(text: CorrectedText) -> str:
    """The corrected text; letters that differ from the original or the corrupted text are marked by their outcome."""
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
    """The text of the bound, and the comparison with the baselines."""
    bound = report.bound
    if not math.isfinite(bound.bits_per_character):
        return "The bound is infinite; cedd evaluate shows why."
    low, high = bound.ci95
    beaten = [b.name for b in report.baselines if b.bits_per_character > high]
    ahead = [b.name for b in report.baselines if b.bits_per_character < low]
    level = [b.name for b in report.baselines if low <= b.bits_per_character <= high]
    parts = [("lower than that of ", beaten), ("about the same as that of ", level), ("higher than that of ", ahead)]
    said = [f"{word}{html.escape(_listed(names))}" for word, names in parts if names]
    text = f"Measured on {bound.characters:,} held-out characters."
    if not report.held_out:
        text = (
            f"Measured on {bound.characters:,} characters of {html.escape(report.text)}, which may have been part of "
            "the training data."
        )
    meaning = "This is the average number of bits to encode a character of the text with the model; lower is better."
    return f"{meaning} {text}{f' The value is {_listed(said)}.' if said else ''}"


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
        "<p>The loss of each training step and its running mean. The loss is weighted over noise levels in a way that "
        "depends on the method, so losses of different methods cannot be compared.</p>"
        + line_chart(loss, "step", "loss")
        + _curve_of_bounds(report)
        + line_chart([curve], "step", "bits per character", levels)
    )


def _curve_of_bounds(report: RunReport) -> str:
    """Explains the curve, and how its last point differs from the figure at the top of the page."""
    said = (
        f"The bound on {report.bound_sequences:,} evenly spaced held-out sequences during training, with a 95% "
        "confidence band. The horizontal lines are baselines from the table below."
    )
    if report.bounds:
        _, bits, half = report.bounds[-1]
        said += (
            f" Its last point is {number(bits)} {interval(bits - half, bits + half)}. The value at the top of the "
            f"page, {number(report.bound.bits_per_character)} {interval(*report.bound.ci95)}, is from "
            f"{report.bound.sequences:,} sequences of the same text; report that one."
        )
    return f"<p>{said}</p>"


def smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """An exponential running mean over 6% of the points, without the bias of its start."""
    keep = 1 - 1 / max(1.0, 0.06 * len(points))
    mean = weight = 0.0
    made: list[tuple[int, float]] = []
    for step, value in points:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        made.append((step, mean / weight))
    return made


def _bound(report: RunReport) -> str:
    bound = report.bound
    what = "negative log-likelihood" if bound.exact else "<i>tight</i> bound, the negative ELBO,"
    noisy = "" if bound.exact else f" with {bound.draws} noise levels each"
    return (
        f"<p>The {what} of {html.escape(report.text)} is <b>{number(bound.bits_per_character)}</b> bits per character, "
        f"95% interval {interval(*bound.ci95)}, from {bound.sequences:,} sequences{noisy}. This is a perplexity of "
        f"{'' if bound.exact else 'at most '}{number(bound.perplexity, 2)} per token: the model is as uncertain as in "
        "a choice between this number of equally probable tokens. The chart shows the estimate and its 95% confidence "
        "band after the first 2, 3, … sequences.</p>"
        + _note(report, "bound")
        + line_chart([_banded("estimate", bound.running, 1)], "sequences", "bits per character")
    )


def _baselines(report: RunReport) -> str:
    if not report.baselines:
        return _note(report, "baselines")
    rows = [(b.name, b.bits_per_character, b.stderr, b.detail, "") for b in report.baselines]
    detail = "exact likelihood" if report.bound.exact else "upper bound (tight)"
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
        "<p>Simple models and compressors on the same text, with half the width of the 95% interval; lower is better. "
        "The n-gram models score each sequence separately; the compressors read all of them as one text.</p>"
        '<table class="bars"><thead><tr><th>model</th><th>bits per character</th><th>± 95%</th><th></th><th></th></tr>'
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
        f"<p>One line of {html.escape(report.text)}, noised by the forward process: t = 0 is clean text and t = 1 is "
        "pure noise. The network is trained to recover the text from such inputs, and sampling runs from t = 1 to "
        't = 0. <span class="key masked">▒ masked</span> <span class="key shuffled">replaced at random</span></p>'
        + columns
    )


def _samples(report: RunReport) -> str:
    frame = ""
    if report.animation:
        frame = f'<iframe title="a sample being denoised" srcdoc="{html.escape(report.animation)}"></iframe>'
    texts = "".join(f'<div class="text card">{html.escape(text)}</div>' for text in report.samples)
    said = "<p>Texts generated by the command below; none was left out.</p>" if report.samples else ""
    return _note(report, "samples") + said + frame + f'<div class="cards">{texts}</div>'


def _infilling(report: RunReport) -> str:
    if report.infilling is None:
        return ""
    filling = report.infilling
    given = BLANK.split(filling.template)[::2]
    names = ["original", *(f"{i}." for i in range(1, len(filling.fills) + 1))]
    rows = "".join(
        f'<tr><th>{name}</th><td class="text">{_filled(given, text)}</td></tr>'
        for name, text in zip(names, [filling.original, *filling.fills], strict=True)
    )
    return (
        f"<p>The longest words of a line of {html.escape(report.text)} are replaced by blanks, which the model fills "
        f'given the text on both sides. The first row is the original.</p><table class="plain">{rows}</table>'
    )


def _filled(given: Sequence[str], text: str) -> str:
    """The text, with what lies between the given parts marked."""
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
        return ""
    done = report.correction
    examples = "".join(f'<div class="text card">{correction_spans(text)}</div>' for text in done.examples)
    share = f"{done.fixed / done.wrong:.0%}" if done.wrong else "–"
    hurt = f"{done.broken / done.right:.2%}" if done.right else "–"
    return (
        f"<p>{done.rate:.0%} of the letters of {html.escape(report.text)} are replaced at random, and the model "
        f"corrects the text without being given their positions (threshold {done.threshold:g}, chosen on "
        f"{'training text' if report.held_out else 'another part of the text'}). It restores <b>{done.fixed:,}</b> of "
        f"{done.wrong:,} wrong letters ({share}) and changes <b>{done.broken:,}</b> of {done.right:,} correct "
        f"characters ({hurt}).</p>"
        '<p class="keys">Letters: <span class="key fixed">wrong, restored</span> '
        '<span class="key missed">wrong, unchanged</span> <span class="key changed">wrong, changed to another wrong '
        'one</span> <span class="key broken">correct, changed</span></p>'
        f'<div class="cards">{examples}</div>'
    )


def _tokens(report: RunReport) -> str:
    if not report.tokens:
        return ""
    texts = "".join(f'<div class="text card">{token_spans(costs)}</div>' for costs in report.tokens)
    scale = "".join(
        f'<span class="token" style="--cost:{token_shade(nats):.2f}">{nats}</span> ' for nats in (0, 2, 4, 6, 8, 10)
    )
    return (
        "<p>The darker a token, the less probable it is under the model. Its cost is -log p in nats, given a random "
        "part of the other tokens and averaged over random orders (for an autoregressive model, given those before "
        f'it). Hover over a token for its cost.</p><p class="keys">nats: {scale}</p><div class="cards">{texts}</div>'
    )


def token_shade(nats: float) -> float:
    """The opacity of a token of this cost, from 0 to 1."""
    return min(1.0, max(0.0, nats / 10))


def token_spans(costs: TokenCosts) -> str:
    """Tokens, each in an element whose shade and title show its cost."""
    return "".join(
        f'<span class="token" style="--cost:{token_shade(nats):.2f}" title="{number(nats, 2)} nats">'
        f"{html.escape(text)}</span>"
        for text, nats in costs
    )


def _note(report: RunReport, name: str) -> str:
    return f'<p class="note">{html.escape(report.notes[name])}</p>' if name in report.notes else ""


def _again(report: RunReport) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{command_block(command)}</td></tr>"
        for name, command in report.commands.items()
    )
    return f'<p>The commands that produced the parts of this page.</p><table class="plain">{rows}</table>'


def run_page(report: RunReport) -> str:
    """The page of one run."""
    commands = report.commands
    body = "".join(
        [
            _summary(report),
            section("curves", "Training", _curves(report)),
            section("bound", "Bound", _bound(report), commands.get("evaluate")),
            section("baselines", "Baselines", _baselines(report)),
            section("tokens", "Cost of each token", _tokens(report)),
            section("noise", "Forward process", _noise(report)),
            section("samples", "Samples", _samples(report), commands.get("sample")),
            section("infilling", "Infilling", _infilling(report), commands.get("infill")),
            section("correction", "Correction", _correction(report), commands.get("correct")),
            section("again", "Reproduce this page", _again(report)),
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
        also = f" Baselines on the same text, in bits per character: {simple}." if simple else ""
        chart = f'<p class="note">{html.escape(NO_CURVE + also)}</p>'
    title = f"{len(runs)} {'runs' if compared.held_out else 'models'}"
    header = f'<header><p class="eyebrow">comparison</p><h1>{title}</h1></header>'
    body = header + section("table", "Bounds", _compared_table(runs, compared.text))
    body += section("curves", "Training", chart) + section("again", "Reproduce this page", command_block(command))
    return whole_page(title, body)


def _curve_notes(curves: Sequence[Curve], levels: Sequence[Level]) -> str:
    """Explains the curves of a comparison and names the runs without one."""
    notes = ["The bound on evenly spaced held-out sequences during training, with 95% confidence bands."]
    if levels:
        notes.append("The horizontal lines are baselines on the same text.")
    else:
        notes.append("Baselines are not shown because the runs have different held-out sequences.")
    if without := [curve.label for curve in curves if not curve.points]:
        notes.append(f"No bound was measured during the training of {_listed(without)}.")
    return f"<p>{html.escape(' '.join(notes))}</p>"


def _compared_table(runs: Sequence[ComparedRun], text: str) -> str:
    rows: list[str] = []
    for i, run in enumerate(runs):
        if i == 0:
            difference = '<td class="dim">reference</td>'
        elif run.difference is None:
            difference = '<td class="dim">different sequences</td>'
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
        "<p>Upper bounds on the average number of bits to encode a character of "
        f"{html.escape(text)} with each model (exact for autoregressive models), with 95% intervals; lower is better. "
        "Differences from the first row are paired by sequence and noise level, so their intervals are narrower than "
        "those of the bounds; a positive difference is worse.</p>"
        f'<div class="scroll"><table><thead><tr>{"".join(f"<th>{head}</th>" for head in heads)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def short_names(paths: Sequence[str]) -> list[str]:
    """The shortest ends of paths that are distinct."""
    parts = [path.rstrip("/").split("/") for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(set(paths)):
            return names
    return list(paths)


def whole_page(title: str, body: str) -> str:
    """The document around a body."""
    template = resources.files("cedd.apps.report").joinpath("page.html").read_text("utf-8")
    return template.replace("__TITLE__", html.escape(title)).replace("__BODY__", body)


def write_page(page: str, path: Path) -> None:
    """Write a page as a file."""
    atomic_write(path, page.encode("utf-8", "replace"))


def write_report(report: RunReport, path: Path) -> None:
    """The page and, next to a report.html, its figures. Next to another name, a .json may be the user's."""
    write_page(run_page(report), path)
    if path.name == PAGE_FILE:
        write_json(path.with_name(RECORD_FILE), report.record())
