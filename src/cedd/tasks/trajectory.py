"""Watching: the states a sampler goes through, as text, as a self-contained page, or as a picture that moves.

Shapes: F frames, L positions.
"""

from __future__ import annotations

import html
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cedd.data.storage import atomic_write
from cedd.data.tokenizers import MASK_CHARACTER, Tokenizer

Ids = NDArray[np.int64]


@dataclass
class Trajectory:
    """Records the first sequence of a run; give it to a sampler as its callback."""

    tokenizer: Tokenizer
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
        """The text of each token; the mask is shown as a shade."""
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
        return Trajectory(self.tokenizer, [self.frames[i] for i in keep], [self.times[i] for i in keep])

    def page(self, title: str) -> str:
        """A page that plays the run: slider, play button, changed positions marked. Nothing is loaded from outside."""
        words: dict[str, int] = {}

        def number(ids: Ids) -> list[int]:
            return [words.setdefault(piece, len(words)) for piece in self.pieces(ids)]

        first = number(self.frames[0])
        steps: list[list[list[int]]] = []
        for k in range(1, len(self.frames)):
            places = np.flatnonzero(self.changed(k))
            steps.append([[int(i), n] for i, n in zip(places, number(self.frames[k][places]), strict=True)])
        data = {"words": list(words), "first": first, "steps": steps, "times": self.times, "mask": MASK_CHARACTER}
        # Inside a script element only "<" could end it early.
        text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
        return _PAGE.replace("__TITLE__", html.escape(title)).replace("__DATA__", text)

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
body { background: #14161a; color: #e5e7eb; font: 17px/1.6 ui-monospace, Menlo, Consolas, monospace;
       max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1rem; font-weight: 600; color: #9ca3af; }
#text { white-space: pre-wrap; overflow-wrap: anywhere; min-height: 14rem; }
.mask { color: #4b5563; } .new { color: #14161a; background: #fbbf24; border-radius: 3px; }
#bar { display: flex; gap: 1rem; align-items: center; margin: 1rem 0; color: #9ca3af; font-size: .9rem; }
input { flex: 1; accent-color: #fbbf24; }
button { background: #1f2937; color: inherit; border: 1px solid #374151; border-radius: 6px; padding: .3rem .9rem;
         font: inherit; cursor: pointer; }
</style></head><body>
<h1>__TITLE__</h1>
<div id="bar"><button id="play">play</button><input id="step" type="range" min="0" value="0" aria-label="step">
<span id="where"></span></div>
<div id="text"></div>
<script type="application/json" id="data">__DATA__</script>
<script>
const data = JSON.parse(document.getElementById("data").textContent);
const text = document.getElementById("text"), slider = document.getElementById("step");
const play = document.getElementById("play"), where = document.getElementById("where");
slider.max = data.steps.length;
const spans = data.first.map(() => text.appendChild(document.createElement("span")));
let timer = null;
function show(k) {
  const state = data.first.slice();
  for (let i = 0; i < k; i++) for (const [place, word] of data.steps[i]) state[place] = word;
  const fresh = new Set(k ? data.steps[k - 1].map(change => change[0]) : []);
  spans.forEach((span, i) => {
    const word = data.words[state[i]];
    span.textContent = word;
    span.className = word === data.mask ? "mask" : fresh.has(i) ? "new" : "";
  });
  where.textContent = "step " + k + " of " + data.steps.length + ", t = " + data.times[k].toFixed(3);
}
function stop() { clearInterval(timer); timer = null; play.textContent = "play"; }
slider.oninput = () => { stop(); show(+slider.value); };
play.onclick = () => {
  if (timer) return stop();
  if (+slider.value === data.steps.length) slider.value = 0;
  play.textContent = "pause";
  timer = setInterval(() => {
    if (+slider.value >= data.steps.length) return stop();
    slider.value = +slider.value + 1;
    show(+slider.value);
  }, Math.max(15, Math.min(150, 12000 / Math.max(1, data.steps.length))));
};
show(0);
</script></body></html>
"""
