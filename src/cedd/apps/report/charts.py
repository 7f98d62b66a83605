"""Line charts as inline SVG: curves with bands and horizontal levels, in the colours of the page that holds them."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

WIDTH, HEIGHT = 760, 300
LEFT, TOP, BOTTOM = 56, 14, 42
LETTER, LONGEST = 9, 34  # the width of a letter on a narrow screen; the length of the longest name that is not cut
SPACING = 17  # line height of names at the right edge on a narrow screen, where the page enlarges them

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """Points in order of x, with the half-widths of their band where there is one."""

    label: str
    points: Sequence[Point]
    band: Sequence[float] = ()
    dots: bool = False
    faint: bool = False
    colour: int = 0
    """Index of the page's curve colours, --curve-0 and so on."""

    def triples(self) -> list[tuple[float, float, float]]:
        """(x, y, half-width); the half-width is 0 without a band."""
        band = self.band or [0.0] * len(self.points)
        return [(x, y, half) for (x, y), half in zip(self.points, band, strict=True)]


@dataclass(frozen=True)
class Level:
    """A horizontal line with a name."""

    label: str
    y: float


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) within [low, high]."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


class _Frame:
    """The mapping from data to the picture, with space for names at the right edge."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], names: Sequence[str]) -> None:
        self.right = WIDTH - 16 - LETTER * min(LONGEST, max(13, *map(len, names)))
        self.x0, self.x1 = min(xs), max(xs)
        low, high = min(ys), max(ys)
        margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        self.y0, self.y1 = low - margin, high + margin

    def x(self, value: float) -> float:
        share = (value - self.x0) / (self.x1 - self.x0) if self.x1 > self.x0 else 0.5
        return round(LEFT + share * (self.right - LEFT), 2)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM), 2)

    def points(self, path: Sequence[Point]) -> str:
        return " ".join(f"{self.x(x)},{self.y(y)}" for x, y in path)


def line_chart(curves: Sequence[Curve], x_label: str, y_label: str, levels: Sequence[Level] = ()) -> str:
    """One chart. Values that are not finite are omitted; without any values the result is a sentence."""
    shown = [curve for curve in map(_finite, curves) if curve.points]
    levels = [level for level in levels if math.isfinite(level.y)]
    if not shown:
        return '<p class="note">There is nothing to draw.</p>'
    xs = [x for curve in shown for x, _ in curve.points]
    ys = [edge for curve in shown for _, y, half in curve.triples() for edge in (y - half, y + half)]
    names = [part.label for part in (*levels, *(curve for curve in shown if not curve.faint))]
    frame = _Frame(xs, ys + [level.y for level in levels], names)
    parts = [_axes(frame, x_label, y_label)]
    parts += [_across(frame, "level", frame.y(level.y)) for level in levels]
    parts += [_curve(frame, curve) for curve in shown]
    parts.append(_labels(frame, shown, levels))
    title = html.escape(f"{y_label} over {x_label}: {', '.join(curve.label for curve in shown)}")
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{"".join(parts)}</svg>'


def _finite(curve: Curve) -> Curve:
    kept = [(x, y, half if math.isfinite(half) else 0.0) for x, y, half in curve.triples() if math.isfinite(y)]
    return replace(curve, points=[(x, y) for x, y, _ in kept], band=[half for *_, half in kept] if curve.band else ())


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _axes(frame: _Frame, x_label: str, y_label: str) -> str:
    bottom = HEIGHT - BOTTOM
    parts: list[str] = []
    for value in ticks(frame.y0, frame.y1):
        y = frame.y(value)
        parts.append(_across(frame, "grid", y))
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{_number(value)}</text>')
    parts += [
        f'<text class="tick" x="{frame.x(value)}" y="{bottom + 18}" text-anchor="middle">{_number(value)}</text>'
        for value in ticks(frame.x0, frame.x1, 6)
    ]
    middle = (LEFT + frame.right) / 2
    parts.append(_across(frame, "axis", bottom))
    parts.append(f'<text class="name" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(x_label)}</text>')
    parts.append(
        f'<text class="name" transform="rotate(-90 14 {HEIGHT / 2 - 14})" x="14" y="{HEIGHT / 2 - 14}" '
        f'text-anchor="middle">{html.escape(y_label)}</text>'
    )
    return "".join(parts)


def _across(frame: _Frame, kind: str, y: float) -> str:
    """A horizontal line from edge to edge."""
    return f'<line class="{kind}" x1="{LEFT}" x2="{frame.right}" y1="{y}" y2="{y}"/>'


def _curve(frame: _Frame, curve: Curve) -> str:
    parts: list[str] = []
    triples, colour = curve.triples(), f"curve-{curve.colour}"
    if curve.band:
        around = [(x, y + half) for x, y, half in triples] + [(x, y - half) for x, y, half in reversed(triples)]
        parts.append(f'<polygon class="band {colour}" points="{frame.points(around)}"/>')
    kind = "line faint" if curve.faint else "line"
    parts.append(f'<polyline class="{kind} {colour}" points="{frame.points(curve.points)}"/>')
    for x, y, half in triples if curve.dots else ():
        note = html.escape(f"{_number(x)}: {y:.4f}" + (f" ± {half:.4f}" if half else ""))
        place = f'cx="{frame.x(x)}" cy="{frame.y(y)}"'
        parts.append(f'<circle class="dot {colour}" {place} r="3.5"><title>{note}</title></circle>')
    return "".join(parts)


def _labels(frame: _Frame, curves: Sequence[Curve], levels: Sequence[Level]) -> str:
    """Names at the right edge, moved apart if they would overlap."""
    wanted = [(frame.y(level.y), level.label, "name") for level in levels]
    wanted += [(frame.y(c.points[-1][1]), c.label, f"label curve-{c.colour}") for c in curves if not c.faint]
    last = -math.inf
    placed: list[tuple[float, str, str]] = []
    for y, label, kind in sorted(wanted):
        last = max(y, last + SPACING)
        placed.append((last, label, kind))
    over = max(0.0, last - (HEIGHT - BOTTOM))
    return "".join(
        f'<text class="{kind}" x="{frame.right + 8}" y="{y - over + 4:.1f}">{html.escape(_cut(label))}'
        f"<title>{html.escape(label)}</title></text>"
        for y, label, kind in placed
    )


def _cut(label: str) -> str:
    """A name that fits the right edge; a long one is cut to its end, which distinguishes runs."""
    return label if len(label) <= LONGEST else f"…{label[1 - LONGEST :]}"
