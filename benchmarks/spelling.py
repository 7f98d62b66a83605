"""The paper's spelling tables, measured: train on War and Peace, test on two other novels.

    python benchmarks/spelling.py --data novels --out runs/spelling --results runs/spelling.json
    python benchmarks/spelling.py --only bayes-star/roulette cedd-star/uniform --minutes 9 ...
    python benchmarks/spelling.py --table runs/spelling.json --plot curves.png --page docs/results/spelling.md
    python benchmarks/spelling.py --table runs/spelling.json runs/seed1.json runs/seed2.json

A cell is METHOD/PROCESS, with /TIME to train at times up to TIME only (the test is at 0.05), and +RECIPE for a set of
settings (RECIPES) that override those of the command line. Each is trained by the package's trainer, without its
evaluations and with a checkpoint every 30,000 steps only, and tested by the paper's protocol (`cedd spelling --protocol
paper`) on the two test books every --every steps. cells.py schedules, resumes and records them. The learning rate is
constant after its warm-up (unless --schedule or a recipe changes it), so the curve of a run of 50,000 steps also has
the result after 25,000.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cells import Benchmark, Turn, main
from spelling_books import SpellingHooks, prepare
from spelling_recipes import TEST_BOOKS, Arguments, configuration, named, settings
from spelling_tables import curves_figure, over_seeds, tables

from cedd.training.config import TrainConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Spelling(Benchmark):
    """The paper's spelling tables, and ours."""

    name = "spelling"
    script = Path(__file__).resolve()
    Arguments = Arguments
    arguments: Arguments

    def named(self, cell: str) -> str:
        return named(cell)

    def configuration(self, cell: str) -> TrainConfig:
        return configuration(self.arguments, cell)

    def prepare(self, cells: Sequence[str]) -> None:
        asked = [settings(self.arguments, cell) for cell in cells]
        for given in {(one.form, one.vocabulary, one.length): one for one in asked}.values():
            prepare(given)

    def hooks(self, cell: str, turn: Turn, stop_at: float | None) -> SpellingHooks:
        return SpellingHooks(turn, stop_at, settings(self.arguments, cell))

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"blocks": self.arguments.blocks}

    def is_point(self, point: Mapping[str, Any]) -> bool:
        return point["books"].keys() >= TEST_BOOKS.keys()

    def is_whole(self, content: Mapping[str, Any]) -> bool:
        return bool(tables(content))

    def scores(self, event: Mapping[str, Any]) -> str:
        books = event.get("books", {})
        return "  ".join(f"{name} {100 * record['all']['share']:.2f}" for name, record in books.items())

    def tables(self, content: Mapping[str, Any]) -> Mapping[str, str]:
        return tables(content)

    def over_seeds(self, contents: Sequence[Mapping[str, Any]], paths: Sequence[Path]) -> str:
        return over_seeds(contents)

    def curves(self, content: Mapping[str, Any]) -> Figure:
        return curves_figure(content)


if __name__ == "__main__":
    sys.exit(main(Spelling))
