"""The paper's language tables at a small scale on one GPU: equal training for every row, bounds with intervals.

    python benchmarks/language.py --data DATA --cache TOKENS --workers 16
    python benchmarks/language.py --only cedd-star/absorb sedds/absorb@1024 --budget 560
    python benchmarks/language.py --only cedd-star/absorb/4 cedd-star/absorb/16 --minutes 8
    python benchmarks/language.py --only --judge smollm2 SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/language.py --table benchmarks/results/language.json --page docs/results/language.md
    python benchmarks/language.py --seed 1 --orders 64 --results seed1.json --out runs/seed1 --only cedd-star/absorb
    python benchmarks/language.py --table benchmarks/results/language.json seed1.json

A cell is METHOD/PROCESS[/BLOCK][@LENGTH][+RECIPE] (language_cells.py); cells.py schedules, resumes and records them.
All cells are trained on the same text with one recipe, for the same number of steps and tokens; the record of a cell
has its own settings. (With complementary masks a sequence is in its batch twice, so `ar`, which has no masks, reads
twice as much text.) `ar` comes first, because it judges the samples of the others.

cedd-star/absorb/16 is block diffusion with b = 16. Cells in blocks also have the exact likelihood for b <= 8, samples
with one network call per token, and the speed and memory of sampling. To train and judge all of them (repeat the
command until they are done):

    python benchmarks/language.py --minutes 8 --judge smollm2 SmolLM2-135M-Instruct.Q4_1.gguf --only \
        cedd-star/absorb/{4,16,1,128} bayes-star/roulette/16 cedd-star/absorb/16@1024
    python benchmarks/result_tables.py --print blocks   # prints the measured rows

A trained cell is measured once: the bounds `tight`, `j1` and `j2` on five test sets and on the held-out documents of
each file of the corpus, and samples at several numbers of steps. RESULTS/CELL.npz (RESULTS without .json) keeps the
bound of every sequence and the sampled tokens, so that rows can be compared and samples judged later. If a judge is
missing, its column is empty, and the same command with the judge fills it.

The results file records a protocol: corpus, tokenizer, test sets, recipe, steps, and the amounts measured. A file with
another protocol is refused. Rows may come from several machines; each records the version and commit of the code, but
no paths. A judgement by `ar` has the hash of its weights, since another `ar` is another judge.

Duration on an NVIDIA H200: 5,000 steps of 32,768 tokens (164 million) take `small` 262 s with cedd-star on absorb,
300 s where every position counts (roulette, uniform), 291 s with ar, and 338 to 355 s at 1,024 tokens. Bounds on up to
4,096 sequences of each of 7 texts, 4 draws, take 14 to 28 s (ar: 4 s), and samples 5 to 33 s (ar at 1,024 tokens:
62 s). Starting and compiling takes about 40 s and overlaps with the cell before. A cell that would not be finished
within --budget is not started.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cells import Benchmark, Results, Turn, main, make_writable
from language_cells import USUAL, Arguments, common_settings, configuration, read_cell
from language_measure import LanguageHooks, judge_rows, judge_texts
from language_seeds import check_orders, over_seeds
from language_tables import Rows, curves_figure, tables
from language_text import Texts

from cedd.data.training_data import TrainingData
from cedd.training.config import TrainConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPECTED_SECONDS = 420.0
"""Expected duration of a cell on an H200, before one has been timed."""


class Language(Benchmark):
    """The paper's language tables."""

    name = "language"
    script = Path(__file__).resolve()
    Arguments = Arguments
    arguments: Arguments

    @property
    def texts(self) -> Texts:
        return Texts(self.arguments)

    def named(self, cell: str) -> str:
        return read_cell(cell).name

    def configuration(self, cell: str) -> TrainConfig:
        return configuration(self.arguments, cell)

    def data(self, cell: str) -> TrainingData:
        config = self.configuration(cell)
        return self.texts.training(config.length, config.batch.size)

    def prepare(self, cells: Sequence[str]) -> None:
        for cell in cells:
            make_writable(self.arguments.extras(cell))
        for length in dict.fromkeys(self.configuration(cell).length for cell in cells):
            largest = max(config.batch.size for config in map(self.configuration, cells) if config.length == length)
            self.texts.training(length, largest)
            self.texts.held_out(length)
            self.texts.test_sets(length)

    def hooks(self, cell: str, turn: Turn, stop_at: float | None) -> LanguageHooks:
        return LanguageHooks(turn, stop_at, cell, self.arguments)

    @property
    def protocol(self) -> Mapping[str, Any] | None:
        if not self.arguments.only:
            return None
        names = ("size", "steps", "length", "tokens", "blocks", "draws", "sampled_tokens", "holdout")
        measured = {name: getattr(self.arguments, name) for name in names}
        steps = list(self.arguments.sampler_steps)
        return {**self.texts.protocol(), **measured, "sampler_steps": steps, "recipe": common_settings(self.arguments)}

    def as_now(self, protocol: Mapping[str, Any]) -> Mapping[str, Any]:
        added = {name: USUAL[name] for name in common_settings(self.arguments)}
        return {**protocol, "recipe": added | protocol.get("recipe", {})}

    def check_rows(self, content: Mapping[str, Any]) -> None:
        if self.arguments.orders:
            check_orders(Rows(content, self.arguments))

    def seconds(self, cell: str, content: Mapping[str, Any]) -> float:
        timed = any(record["finished"] for record in content["cells"].values())
        return super().seconds(cell, content) if timed else EXPECTED_SECONDS

    def complete(self, results: Results) -> None:
        for judge in (judge_rows, judge_texts):
            for _ in judge(self.arguments, results.content):
                results.save()

    def is_measured(self, record: Mapping[str, Any]) -> bool:
        return "final" in record

    def is_point(self, point: Mapping[str, Any]) -> bool:
        found = point["held_out"].values()
        return bool(found) and all("nats_per_token" in record for record in found)

    def is_whole(self, content: Mapping[str, Any]) -> bool:
        return bool(tables(content, self.arguments))

    def scores(self, event: Mapping[str, Any]) -> str:
        if "rows" in event:
            texts = {title: record["tight"] for title, record in event["rows"][""]["texts"].items()}
        else:
            texts = event.get("held_out", {})
        nats = {name: record["nats_per_token"] for name, record in texts.items()}
        return "  ".join(f"{name} {'infinite' if value is None else f'{value:.4f}'}" for name, value in nats.items())

    def tables(self, content: Mapping[str, Any]) -> Mapping[str, str]:
        return tables(content, self.arguments)

    def over_seeds(self, contents: Sequence[Mapping[str, Any]], paths: Sequence[Path]) -> str:
        now = [{**content, "protocol": self.as_now(content.get("protocol", {}))} for content in contents]
        files = zip(now, paths, strict=True)
        return over_seeds([Rows(content, replace(self.arguments, results=path)) for content, path in files])

    def curves(self, content: Mapping[str, Any]) -> Figure:
        return curves_figure(content)


if __name__ == "__main__":
    sys.exit(main(Language))
