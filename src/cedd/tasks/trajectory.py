"""Watching: the states a sampler goes through, as text, as a self-contained page, or as a picture that moves.

Shapes: F frames, L positions.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cedd.data.tokenizers import MASK_CHARACTER, Tokenizer
from cedd.storage import atomic_write

Ids = NDArray[np.int64]


@dataclass
class Trajectory:
    """Records the first sequence of a run; give it to a sampler as its callback."""

    tokenizer: Tokenizer
    given: Mapping[int, str] = field(default_factory=dict[int, str])
    """Characters that are shown as the user gave them, by position (`Template.characters`)."""
    frames: list[Ids] = field(default_factory=list[Ids])
    times: list[float] = field(default_factory=list[float])

    def __call__(self, step: int, t: float, x: Tensor) -> None:
        if step == 0 and self.frames:
            return  # a second batch has begun
        state = x[0].cpu().numpy().astype(np.int64)
        if step and self.frames and np.array_equal(state, self.frames[-1]):
            self.times[-1] = t  # steps in which nothing jumps are not worth a frame
            return
        self.frames.append(state)
        self.times.append(t)

    def pieces(self, ids: Ids) -> list[str]:
        """The text of each token of a frame [L]; the mask is shown as a shade."""
        return [self.given.get(place, text) for place, text in enumerate(self._texts(ids))]

    def _texts(self, ids: Ids) -> list[str]:
        return [self.tokenizer.decode([int(i)], mask=MASK_CHARACTER) for i in ids]

    def changed(self, frame: int) -> NDArray[np.bool_]:
        """Which positions changed in the step that led to this frame."""
        if frame == 0:
            return np.zeros(len(self.frames[0]), dtype=np.bool_)
        return self.frames[frame] != self.frames[frame - 1]

    def thinned(self, most: int) -> Trajectory:
        """At most so many frames, the first and the last among them."""
        if len(self.frames) <= most:
            return self
        keep = np.unique(np.linspace(0, len(self.frames) - 1, most).round().astype(int))
        return replace(self, frames=[self.frames[i] for i in keep], times=[self.times[i] for i in keep])

    def page(self, title: str) -> str:
        """A page that plays the run: slider, play button, changed positions marked. Nothing is loaded from outside."""
        words: dict[str, int] = {}

        def number(pieces: list[str]) -> list[int]:
            return [words.setdefault(piece, len(words)) for piece in pieces]

        first = number(self.pieces(self.frames[0]))
        steps: list[list[list[int]]] = []
        for k in range(1, len(self.frames)):
            places = np.flatnonzero(self.changed(k))
            steps.append(
                [[int(i), n] for i, n in zip(places, number(self._texts(self.frames[k][places])), strict=True)]
            )
        data = {"words": list(words), "first": first, "steps": steps, "times": self.times, "mask": MASK_CHARACTER}
        # Inside a script element only "<" could end it early.
        text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
        page = _PAGE.replace("__MASK__", MASK_CHARACTER).replace("__TITLE__", html.escape(title))
        return page.replace("__DATA__", text)

    def save_html(self, path: str | Path, title: str) -> None:
        """Write the page."""
        atomic_write(Path(path), self.page(title).encode("utf-8", "replace"))

    def save_gif(self, path: str | Path, most: int = 120, columns: int = 64) -> None:
        """Write a picture that plays the run, in a fixed-width font."""
        from io import BytesIO

        from matplotlib import font_manager
        from PIL import Image, ImageDraw, ImageFont

        font = ImageFont.truetype(font_manager.findfont("DejaVu Sans Mono"), 16)
        chosen, images = self.thinned(most), list[Image.Image]()
        width, height = 10, 22
        lines = max(len(_lay_out(chosen.pieces(frame), columns)) for frame in chosen.frames)
        for k, frame in enumerate(chosen.frames):
            image = Image.new("RGB", (width * columns + 24, height * (lines + 1) + 24), "#14161a")
            pen = ImageDraw.Draw(image)
            changed = chosen.changed(k)
            for row, line in enumerate(_lay_out(chosen.pieces(frame), columns)):
                for column, (character, token) in enumerate(line):
                    colour = "#4b5563" if character == MASK_CHARACTER else "#fbbf24" if changed[token] else "#e5e7eb"
                    pen.text((12 + width * column, 12 + height * row), character, colour, font)
            pen.text((12, 12 + height * lines), f"t = {chosen.times[k]:.3f}", "#6b7280", font)
            images.append(image)
        durations = [80] * (len(images) - 1) + [2500]
        buffer = BytesIO()
        images[0].save(buffer, "GIF", save_all=True, append_images=images[1:], duration=durations, loop=0)
        atomic_write(Path(path), buffer.getvalue())


def _lay_out(pieces: list[str], columns: int) -> list[list[tuple[str, int]]]:
    """Characters with their tokens' numbers, in lines of at most `columns`."""
    lines: list[list[tuple[str, int]]] = [[]]
    for token, piece in enumerate(pieces):
        for character in piece:
            if character == "\n" or len(lines[-1]) == columns:
                lines.append([])
            if character != "\n":
                lines[-1].append((character if character.isprintable() else " ", token))
    return lines


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>__TITLE__</title>
<style>
:root { --ground: #14161a; --card: #1b1e24; --line: #2e333d; --ink: #e5e7eb; --quiet: #9ca3af; --mask: #4b5563;
        --new: #fbbf24; --on-new: #14161a; }
@media (prefers-color-scheme: light) {
  :root { --ground: #f6f5f1; --card: #fff; --line: #ddd8cd; --ink: #1f2328; --quiet: #6b6f76; --mask: #c3c6cc;
          --new: #d97706; --on-new: #fff; } }
body { background: var(--ground); color: var(--ink); font: 17px/1.65 ui-monospace, Menlo, Consolas, monospace;
       max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1rem; font-weight: 600; margin: 0 0 .8rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1rem 1.2rem; }
#text { white-space: pre-wrap; overflow-wrap: anywhere; }
.mask { color: var(--mask); } .late { color: var(--new); }
.new { color: var(--on-new); background: var(--new); border-radius: 3px; }
#bar { display: flex; flex-wrap: wrap; gap: 1rem; align-items: center; margin: 0 0 1rem; }
#bar { color: var(--quiet); font-size: .85rem; }
#where { min-width: 17rem; text-align: right; }
input { flex: 1; accent-color: var(--new); }
button { background: var(--card); color: var(--ink); border: 1px solid var(--line); border-radius: 6px;
         padding: .3rem 0; width: 5rem; font: inherit; cursor: pointer; }
canvas { display: block; width: 100%; height: 9rem; cursor: crosshair; }
small { display: block; color: var(--quiet); font-size: .78rem; margin: .5rem 0 0; }
#map { margin-top: 1rem; }
</style></head><body>
<h1>__TITLE__</h1>
<div id="bar"><button id="play">play</button><input id="step" type="range" min="0" value="0" aria-label="change">
<span id="where"></span></div>
<div class="card"><div id="text"></div><small><span class="mask">__MASK__</span> masked
&nbsp; <span class="new">new</span> changed just now &nbsp; <span class="late">late</span> changed lately
</small></div>
<div class="card" id="map"><canvas id="changes"></canvas>
<small>when each position changed: time to the right, positions downwards; click to go there,
arrow keys to step</small></div>
<script type="application/json" id="data">__DATA__</script>
<script>
const data = JSON.parse(document.getElementById("data").textContent), count = data.steps.length, LATELY = 8;
const [text, slider, play, where, canvas] = ["text", "step", "play", "where", "changes"].map(
  name => document.getElementById(name));
const spans = data.first.map(() => text.appendChild(document.createElement("span")));
let timer = null;
slider.max = count;
function draw(k) {
  const wide = canvas.width = canvas.clientWidth * 2, high = canvas.height = canvas.clientHeight * 2;
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const x = wide / Math.max(1, count), y = high / spans.length;
  data.steps.forEach((changes, i) => {
    pen.fillStyle = style.getPropertyValue(i < k ? "--new" : "--mask");
    for (const [place] of changes) pen.fillRect(i * x, place * y, Math.max(4, x), Math.max(4, y));
  });
  pen.fillStyle = style.getPropertyValue("--quiet");
  pen.fillRect(Math.min(k * x, wide - 2), 0, 2, high);
}
function show(k) {
  const state = data.first.slice(), age = {};
  for (let i = 0; i < k; i++) for (const [place, word] of data.steps[i]) { state[place] = word; age[place] = k - i; }
  let masks = 0;
  spans.forEach((span, i) => {
    const word = data.words[state[i]], masked = word === data.mask;
    masks += masked;
    span.textContent = age[i] === 1 && word === "\\n" ? "\\u21b5\\n" : word;
    span.className = masked ? "mask" : age[i] === 1 ? "new" : age[i] <= LATELY ? "late" : "";
  });
  slider.value = k;
  where.textContent = "change " + k + " of " + count + ", t = " + data.times[k].toFixed(3)
    + (data.first.some(i => data.words[i] === data.mask) ? ", " + masks + " masked" : "");
  draw(k);
}
function stop() { clearInterval(timer); timer = null; play.textContent = "play"; }
function go(k) { stop(); show(Math.max(0, Math.min(count, k))); }
function start() {
  if (+slider.value === count) show(0);
  play.textContent = "pause";
  timer = setInterval(() => +slider.value >= count ? stop() : show(+slider.value + 1),
    Math.max(15, Math.min(150, 12000 / Math.max(1, count))));
}
slider.oninput = () => go(+slider.value);
play.onclick = () => timer ? stop() : start();
canvas.onclick = event => go(Math.round(event.offsetX / canvas.clientWidth * count));
onresize = () => draw(+slider.value);
onkeydown = event => {
  const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (move) { event.preventDefault(); go(+slider.value + move); }
};
// page.html#40 opens at the 40th change; otherwise the run is played once.
if (/^#\\d+$/.test(location.hash)) go(+location.hash.slice(1)); else { show(0); start(); }
</script></body></html>
"""
