"""`cedd correct`: put a text's mistakes right."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

from cedd.tasks import Corrected, load


@dataclass(frozen=True)
class Arguments:
    """example: cedd correct runs/first "teh cat sat on teh mat" --threshold 0.3

    Correct a text with a model on a process that shuffles (uniform, roulette). TEXT - reads standard input.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    text: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")]
    t: float = 0.05
    """How noisy the text is taken to be."""
    threshold: float = 1.0
    """A token the model gives at least this probability is never touched."""
    steps: int = 1
    """1: the likeliest token everywhere. More: sample the reverse process from t."""
    temperature: float = 0.0
    """Of several steps: 0 writes the likeliest token wherever it writes."""
    seed: int | None = None
    device: str = "auto"
    json: bool = False


def run(arguments: Arguments) -> int:
    """Print the corrected text; in colours on a terminal, with positions and confidences as JSON."""
    text = sys.stdin.read() if arguments.text == "-" else arguments.text
    model = load(arguments.model, arguments.device)
    corrected = model.correct(
        text,
        t=arguments.t,
        threshold=arguments.threshold,
        steps=arguments.steps,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    if arguments.json:
        changes = [asdict(change) for change in corrected.changes]
        print(json.dumps({"text": corrected.text, "original": text, "changes": changes}))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    if console.is_terminal:
        console.print(coloured(corrected))
    else:
        print(corrected.text)
    return 0


def coloured(corrected: Corrected) -> Text:
    """The text with what was taken out struck through in red and what was put in its place in green."""
    text, end = Text(), 0
    for change in corrected.changes:
        text.append(corrected.original[end : change.position])
        text.append(change.before, style="red strike")
        text.append(change.after, style="bold green")
        end = change.position + len(change.before)
    text.append(corrected.original[end:])
    return text
