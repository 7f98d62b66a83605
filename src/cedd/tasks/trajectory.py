"""Recording a sampler's states, as text, as a self-contained page, or as an animated GIF.

Shapes: F frames, L positions.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cedd.data.tokenizers import MASK_CHARACTER, Tokenizer
from cedd.storage import atomic_file, atomic_write

Ids = NDArray[np.int64]
MOST_LINES, MOST_LINES_OF_ALL = 1_000, 12_000
"""Limits of the lines of one frame of a GIF, and of all frames, which are in memory together."""
COLUMNS = 64
"""Characters per line of a GIF."""
WIDTH, HEIGHT, MARGIN = 10, 22, 12
"""Width and height of a character's cell, and margin, in pixels."""
PAPER, INKS = "#14161a", {"mask": "#4b5563", "time": "#6b7280", "text": "#e5e7eb", "changed": "#fbbf24"}
SHADES = 256 // len(INKS)
"""Shades of each ink."""
Picture = NDArray[np.uint8]
"""Palette indices, [height, width]."""


@dataclass
class Trajectory:
    """Records the first sequence of a run; pass it to a sampler as its callback."""

    tokenizer: Tokenizer
    given: Mapping[int, str] = field(default_factory=dict[int, str])
    """Characters shown exactly as given, by position (`Template.characters`)."""
    frames: list[Ids] = field(default_factory=list[Ids])
    times: list[float] = field(default_factory=list[float])
    _over: bool = field(default=False, repr=False)

    def __call__(self, step: int, t: float, x: Tensor) -> None:
        if step == 0 and not self._over:
            self._over = len(self.frames) > 1  # a second batch, unless the first restarts with less memory
            if not self._over:
                self.frames.clear()
                self.times.clear()
        if self._over:
            return
        state = x[0].cpu().numpy().astype(np.int64)
        if step and self.frames and np.array_equal(state, self.frames[-1]):
            self.times[-1] = t  # no frame for a step that changed nothing
            return
        self.frames.append(state)
        self.times.append(t)

    def pieces(self, ids: Ids) -> list[str]:
        """The text of each token of a frame [L]; the mask is shown as a shade."""
        return [self.given.get(place, text) for place, text in enumerate(self._texts(ids))]

    def _texts(self, ids: Ids) -> list[str]:
        texts = {i: self.tokenizer.decode([i], mask=MASK_CHARACTER) for i in set(ids.tolist())}
        return [texts[i] for i in ids.tolist()]

    def changed(self, frame: int) -> NDArray[np.bool_]:
        """The positions that changed in the step that led to this frame."""
        if frame == 0:
            return np.zeros(len(self.frames[0]), dtype=np.bool_)
        return self.frames[frame] != self.frames[frame - 1]

    def thinned(self, most: int) -> Trajectory:
        """At most `most` frames, including the first and the last."""
        if len(self.frames) <= most:
            return self
        keep = np.unique(np.linspace(0, len(self.frames) - 1, most).round().astype(int))
        return replace(self, frames=[self.frames[i] for i in keep], times=[self.times[i] for i in keep])

    def page(self, title: str) -> str:
        """A self-contained page that plays the run, with slider, play button, and changed positions marked."""
        words: dict[str, int] = {}

        def number(pieces: list[str]) -> list[int]:
            return [words.setdefault(piece, len(words)) for piece in pieces]

        first = number(self.pieces(self.frames[0]))
        steps: list[list[tuple[int, int]]] = []
        for k in range(1, len(self.frames)):
            places = np.flatnonzero(self.changed(k))
            steps.append(list(zip(places.tolist(), number(self._texts(self.frames[k][places])), strict=True)))
        data = {"words": list(words), "first": first, "steps": steps, "times": self.times, "mask": MASK_CHARACTER}
        # Inside a script element only "<" could end it early.
        text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
        page = resources.files("cedd.tasks").joinpath("page.html").read_text("utf-8")
        page = page.replace("__MASK__", MASK_CHARACTER).replace("__TITLE__", html.escape(title))
        return page.replace("__DATA__", text)

    def save_html(self, path: str | Path, title: str) -> None:
        """Write the page."""
        atomic_write(Path(path), self.page(title).encode("utf-8", "replace"))

    def check_lines(self, ids: Ids, given: NDArray[np.bool_]) -> None:
        """Refuse a text [L] whose given part has too many lines for a GIF; the rest can only add to them."""
        _count_lines([piece for piece, stays in zip(self.pieces(ids), given, strict=True) if stays], COLUMNS)

    def save_gif(self, path: str | Path, most: int = 120, columns: int = COLUMNS) -> None:
        """Write an animated GIF of the run, in a fixed-width font."""
        from PIL import Image

        chosen, images, write = self.thinned(most), list[Image.Image](), _writer()
        lines = max(_count_lines(chosen.pieces(frame), columns) for frame in chosen.frames)
        chosen = chosen.thinned(MOST_LINES_OF_ALL // lines)
        for k, frame in enumerate(chosen.frames):
            picture = np.zeros((HEIGHT * (lines + 1) + 2 * MARGIN, WIDTH * columns + 2 * MARGIN), dtype=np.uint8)
            changed = chosen.changed(k)
            for row, line in enumerate(_lay_out(chosen.pieces(frame), columns)):
                for column, (character, token) in enumerate(line):
                    ink = "mask" if character == MASK_CHARACTER else "changed" if changed[token] else "text"
                    write(picture, row, column, character, ink)
            write(picture, lines, 0, f"t = {chosen.times[k]:.3f}", "time")
            images.append(Image.fromarray(picture))
            images[-1].putpalette(_palette())
        durations = [80] * (len(images) - 1) + [2500]
        with atomic_file(Path(path)) as file:
            images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=durations, loop=0)


def _palette() -> bytes:
    """One palette for all frames, since choosing one is slow: for every shade, starting with the background, the colour
    of each ink."""
    from PIL import ImageColor

    paper, *inks = (np.array(ImageColor.getrgb(colour)) for colour in (PAPER, *INKS.values()))
    shades = [paper + (np.array(inks) - paper) * share for share in np.linspace(0, 1, SHADES)]
    return np.concatenate(shades).round().astype(np.uint8).tobytes()


def _writer() -> Callable[[Picture, int, int, str, str], None]:
    """A function that writes a text into a picture at a row and a column, in an ink. The font is slow, so each text is
    drawn once. Parts of glyphs outside the text's cells are kept within a margin; where two texts overlap, the stronger
    pixel wins."""
    from matplotlib import font_manager
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans Mono"), 16)
    place = {ink: number for number, ink in enumerate(INKS)}

    @cache
    def drawn(text: str, ink: str) -> Picture:
        image = Image.new("L", (WIDTH * len(text) + 2 * MARGIN, HEIGHT + 2 * MARGIN))
        ImageDraw.Draw(image).text((MARGIN, MARGIN), text, 255, font)
        shade = (np.asarray(image) / 255 * (SHADES - 1)).round().astype(np.uint8)
        return np.where(shade > 0, shade * len(INKS) + place[ink], 0).astype(np.uint8)

    def write(picture: Picture, row: int, column: int, text: str, ink: str) -> None:
        new = drawn(text, ink)
        there = picture[HEIGHT * row :, WIDTH * column :][: new.shape[0], : new.shape[1]]
        np.maximum(there, new[:, : there.shape[1]], out=there)

    return write


def _count_lines(pieces: list[str], columns: int) -> int:
    """The lines of a frame; an error if a GIF cannot show that many."""
    lines = len(_lay_out(pieces, columns))
    if lines > MOST_LINES:
        raise ValueError(f"the text has {lines:,} lines; a picture shows at most {MOST_LINES:,}")
    return lines


def _lay_out(pieces: list[str], columns: int) -> list[list[tuple[str, int]]]:
    """Characters with the indices of their tokens, in lines of at most `columns`."""
    lines: list[list[tuple[str, int]]] = [[]]
    for token, piece in enumerate(pieces):
        for character in piece:
            if character == "\n" or len(lines[-1]) == columns:
                lines.append([])
            if character != "\n":
                lines[-1].append((character if character.isprintable() else " ", token))
    return lines
